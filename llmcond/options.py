"""Options told once: a dataclass's field is a keyword argument, a flag and its help at once."""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from llmcond.errors import UserError, brief, did_you_mean, nearest

try:
    from annotated_types import Ge, Lt
except ModuleNotFoundError:  # where encoders are used alone, as pydantic is missing there too
    Ge = namedtuple("Ge", "ge")  # type: ignore[no-redef]
    Lt = namedtuple("Lt", "lt")  # type: ignore[no-redef]

_KEY = "option"
#: The limits of :mod:`annotated_types` by their names, and how messages say them.
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

#: How a right answer ranks among candidates of the same score: in the middle, first or last.
Ties = Literal["realistic", "optimistic", "pessimistic"]
#: A seed that every library takes which draws random numbers.
Seed = Annotated[int, Ge(0), Lt(2**32)]
Positive = Annotated[int, Ge(1)]
#: A price, or another amount that is finite.
Amount = Annotated[float, Ge(0), Lt(math.inf)]


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
        source: what is expected of a path, which must exist; empty: it need not.
        needs: another option, as it is given (``--scale ray``), without which this one has no use.
    """

    help: str
    metavar: str | tuple[str, ...] | None = None
    flag: str | None = None
    parse: Callable[[str], Any] | None = None
    group: str = ""
    repeat: bool = False
    source: str = ""
    needs: str = ""


def option(default: Any = dataclasses.MISSING, kind: type[Option] = Option, **spec: Any) -> Any:
    """Return a dataclass field that is also a flag of the command line.

    The field's annotation decides how the flag reads: ``Literal`` gives its choices, ``bool`` gives
    ``--x`` and ``--no-x``, a sequence takes several values, ``Path`` and numbers are parsed. Limits
    such as ``Annotated[int, Ge(1)]`` are checked where an instance of :class:`Options` is made.
    Other arguments are those of ``kind``; without a default the flag is required.
    """
    return dataclasses.field(default=default, metadata={_KEY: kind(**spec)})


def option_of(field: dataclasses.Field[Any]) -> Option | None:
    """Return what :func:`option` said of a field; None for fields that are no options."""
    found: Option | None = field.metadata.get(_KEY)
    return found


@dataclass(frozen=True, kw_only=True)
class Options:
    """A dataclass of options, which are converted and checked when an instance is made."""

    def __post_init__(self) -> None:
        """Convert text to what fields hold.

        Raises:
            UserError: a value is not legal, or a file does not exist.
        """
        limits, options = limits_of(type(self)), options_of(type(self))
        for name, hint, spec in options:
            value, flag = getattr(self, name), spec.flag or flag_of(name)
            if spec.parse is None:
                value = _coerced(value, hint, flag)
            elif isinstance(value, str):
                value = spec.parse(value)
            if value is not None and limits[name]:
                whole = plain_type(hint) is int
                _check_limits(flag, value, limits[name], whole)
                value = int(value) if whole else float(value)  # not NumPy's, so that JSON takes it
            if spec.source:
                check_source(value, spec.source)
            object.__setattr__(self, name, value)
        names = {spec.flag or flag_of(name): name for name, _, spec in options}
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, _, spec in options:
            needed = names.get(spec.needs.partition(" ")[0])
            if needed and not getattr(self, needed) and getattr(self, name) != defaults[name]:
                flag = spec.flag or flag_of(name)
                raise UserError(f"{flag} is for {spec.needs}. Add that, or leave {flag} out.")

    def part(self, cls: type[T]) -> T:
        """Return those of its options that a dataclass has, as an instance of it."""
        return cls(**{f.name: getattr(self, f.name) for f in dataclasses.fields(cls) if f.init})  # type: ignore[arg-type]


def options_of(cls: type[Any]) -> Sequence[tuple[str, Any, Option]]:
    """Return the name, the type and the description of each option of a dataclass.

    Required ones come first, then its own, then those of the classes it is made of, in their order.
    """
    hints = get_type_hints(cls)
    order = [name for base in cls.__mro__ for name in vars(base).get("__annotations__", ())]
    described = ((field, option_of(field)) for field in dataclasses.fields(cls))
    found = [(field, spec) for field, spec in described if spec is not None]
    found.sort(key=lambda f: (f[0].default is not dataclasses.MISSING, order.index(f[0].name)))
    return [(field.name, hints[field.name], spec) for field, spec in found]


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"


def plain_type(hint: Any) -> Any:
    """Return a type without None."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        if all(get_origin(kind) is Literal for kind in kinds):
            return Literal[tuple(value for kind in kinds for value in get_args(kind))]
        if Path in kinds:  # a caller may give it as text
            return Path
        return kinds[0] if len(kinds) == 1 else next((k for k in kinds if k is not Any), Any)
    return hint


def _coerced(value: Any, hint: Any, flag: str) -> Any:
    kind = plain_type(hint)
    origin = get_origin(kind)
    if value is None:
        return None
    if kind is Path and isinstance(value, str):
        return Path(value)
    if origin is Literal and value not in get_args(kind):
        legal = [str(choice) for choice in get_args(kind)]
        raise UserError(
            f"{flag} is {value!r}. {nearest(str(value), legal)} Legal: {', '.join(legal)}."
        )
    if origin in (Sequence, tuple, Mapping) and isinstance(value, (str, Path)):
        value = (value,)
    if origin is Mapping:
        pairs = value if isinstance(value, Mapping) else _key_values(value, flag)
        return {str(key): _text(one) for key, one in pairs.items()}
    if origin is Sequence and isinstance(value, Iterable):
        return tuple(_coerced(one, get_args(kind)[0], flag) for one in value)
    return value


def _text(value: Any) -> Any:
    """Return a setting as the command line writes it; several values stay several."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, (list, tuple)) else str(value)


def _key_values(texts: Sequence[str], flag: str) -> dict[str, str]:
    """Return NAME=VALUE texts as a dictionary; a UserError for a text of another form."""
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (equals and key and value):
            raise UserError(f"{flag} is {text!r}; expected NAME=VALUE.")
        if key in pairs and flag == "--vary":
            raise UserError(f"{flag} names {key} twice. Give all its values once.")
        pairs[key] = value
    return pairs


def limits_of(cls: type[Any]) -> Mapping[str, Sequence[tuple[str, float]]]:
    """Return the limits of each field of a dataclass, as keys of :data:`LIMITS` and bounds."""

    def limits(hint: Any) -> Iterable[tuple[str, float]]:
        for part in getattr(hint, "__metadata__", ()):
            yield from ((key, getattr(part, key)) for key in LIMITS if hasattr(part, key))
        for part in get_args(hint):
            yield from limits(part)

    hints = get_type_hints(cls, include_extras=True)
    return {name: tuple(limits(hint)) for name, hint in hints.items()}


def _check_limits(flag: str, value: Any, limits: Sequence[tuple[str, float]], whole: bool) -> None:
    if not isinstance(value, Integral if whole else Real):
        raise UserError(f"{flag} is {brief(value)}; expected a {'whole ' * whole}number.")
    if not all(getattr(operator, key)(value, bound) for key, bound in limits):
        words = " and ".join(
            "finite" if bound == math.inf else f"{LIMITS[key]} {bound:,}" for key, bound in limits
        )
        shown = f"{value:g}" if isinstance(value, float) else value
        raise UserError(f"{flag} is {shown}; it must be {words}.")


def check_source(source: Any, expected: str) -> None:
    """Raise a UserError for a file or folder that is not there, before anything heavy is imported.

    What is no path, or an address, is left to what reads it. ``expected`` says what is read.
    """
    if not isinstance(source, str | Path) or re.match(r"\w{2,}:", str(source)):
        return
    try:
        found = Path(source).expanduser().exists()
    except (OSError, RuntimeError):  # a name that is too long; ~ of nobody
        found = False
    if not found:
        raise UserError(f"{source} does not exist. Expected {expected}.")


def optional(cls: type[T]) -> type[T]:
    """Return a dataclass with the options of another, all of them None unless they are given.

    For settings whose defaults depend on others; help texts name the usual ones.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    made = []
    for name, hint, spec in options_of(cls):
        usual = defaults[name]
        text = spec.help if "default:" in spec.help else f"{spec.help} (default: {usual})"
        metadata = option(None, **{**dataclasses.asdict(spec), "help": text})
        made.append((name, hint | None, metadata))
    return dataclasses.make_dataclass(f"Optional{cls.__name__}", made, frozen=True, kw_only=True)


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
