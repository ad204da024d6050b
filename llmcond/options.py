"""Options told once: a dataclass's field is a keyword argument, a flag and its help at once."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

from llmcond.errors import UserError, did_you_mean

_KEY = "option"

P = ParamSpec("P")
R = TypeVar("R")

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


def option(default: Any = dataclasses.MISSING, kind: type[Option] = Option, **spec: Any) -> Any:
    """Return a dataclass field that is also a flag of the command line.

    The field's annotation decides how the flag reads: ``Literal`` gives its choices, ``bool`` gives
    ``--x`` and ``--no-x``, a sequence takes several values, ``Path`` and numbers are parsed.
    Other arguments are those of ``kind``; without a default the flag is required.
    """
    return dataclasses.field(default=default, metadata={_KEY: kind(**spec)})


def option_of(field: dataclasses.Field[Any]) -> Option | None:
    """Return what :func:`option` said of a field; None for fields that are no options."""
    found: Option | None = field.metadata.get(_KEY)
    return found


def public_function(
    call: Callable[P, R], name: str, module: str, doc: str, signature: inspect.Signature
) -> Callable[P, R]:
    """Return a callable as a function of a module, as its errors, pickles and references have it.

    Arguments that the signature lacks are a TypeError, which suggests the nearest names.
    """

    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        _check_arguments(name, signature, args, kwargs)
        return call(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = module, doc
    function.__annotations__ = {}  # those of the parameters are in the signature
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _check_arguments(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    parameters = signature.parameters
    positional = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    required = [p.name for p in parameters.values() if p.default is p.empty]
    if len(args) > len(positional):
        usage = ", ".join(p if p in positional else f"{p}=..." for p in required)
        after = f" after {positional[-1]}" if positional else ""
        raise TypeError(f"{name}() takes its arguments by name{after}: {name}({usage or '...'})")
    for keyword in kwargs:
        if keyword not in parameters:
            hint = did_you_mean(keyword, parameters)
            known = f"it takes {', '.join(parameters)}"
            raise TypeError(
                f"{name}() got an unexpected argument {keyword!r}; "
                f"{hint[0].lower() + hint[1:] if hint else known}"
            )
    missing = [p for p in required if p not in kwargs and p not in positional[: len(args)]]
    if missing:
        raise TypeError(f"{name}() needs {' and '.join(f'{p}=...' for p in missing)}")


def check_seed(seed: int) -> None:
    """Raise a UserError unless every library which draws random numbers takes a seed."""
    if not 0 <= seed < 2**32:
        raise UserError(f"the seed is {seed}; it must be at least 0 and below 2^32.")
