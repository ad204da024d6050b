"""Options told once: a dataclass's field is a keyword argument, a flag and its help at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from llmcond.errors import UserError

_KEY = "option"

#: How a right answer ranks among candidates of the same score: in the middle, first or last.
Ties = Literal["realistic", "optimistic", "pessimistic"]


@dataclass(frozen=True, slots=True)
class Option:
    """What the command line says of a field.

    Attributes:
        help: one line; the default is added where it says something.
        metavar: stands for the value in help texts; None: made from the type.
        flag: the flag's name where it is not the field's; ``""`` for a positional argument.
        parse: from the text of the command line to the value; None: by the type.
        group: heading that the flag stands under in help texts.
        repeat: whether a sequence's flag takes one value and may be repeated.
    """

    help: str
    metavar: str | tuple[str, ...] | None = None
    flag: str | None = None
    parse: Callable[[str], Any] | None = None
    group: str = ""
    repeat: bool = False


def option(default: Any = dataclasses.MISSING, **spec: Any) -> Any:
    """Return a dataclass field that is also a flag of the command line.

    The field's annotation decides how the flag reads: ``Literal`` gives its choices, ``bool`` gives
    ``--x`` and ``--no-x``, a sequence takes several values, ``Path`` and numbers are parsed.
    Arguments are those of :class:`Option`; without a default the flag is required.
    """
    return dataclasses.field(default=default, metadata={_KEY: Option(**spec)})


def option_of(field: dataclasses.Field[Any]) -> Option | None:
    """Return what :func:`option` said of a field; None for fields that are no options."""
    found: Option | None = field.metadata.get(_KEY)
    return found


def check_seed(seed: int) -> None:
    """Raise a UserError unless every library which draws random numbers takes a seed."""
    if not 0 <= seed < 2**32:
        raise UserError(f"the seed is {seed}; it must be at least 0 and below 2^32.")
