"""Options declared once: a dataclass field is a keyword argument, a flag and a help text."""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from llmcond.base.errors import UserError, did_you_mean, list_legal_values, shortened_repr
from llmcond.base.files import expand_home
from llmcond.base.text import check_string

try:
    from annotated_types import Ge, Gt, Lt
except ModuleNotFoundError:  # encoders can be used without it
    Ge = namedtuple("Ge", "ge")  # type: ignore[no-redef]
    Gt = namedtuple("Gt", "gt")  # type: ignore[no-redef]
    Lt = namedtuple("Lt", "lt")  # type: ignore[no-redef]

_KEY = "option"
#: The limits of ``annotated_types`` by their names, with their wording in messages.
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}

#: The words for a truth value in the text of a setting.
_BOOLS = {"true": True, "false": False}

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

#: Rank of the right answer among candidates with the same score: in the middle, first or last.
Ties = Literal["realistic", "optimistic", "pessimistic"]
#: Number type of embeddings, by sentence-transformers' names: ``int8`` and ``uint8`` have 256 steps
#: for each dimension; ``binary`` and ``ubinary`` have a bit, in signed and unsigned bytes.
Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
#: Number type of the vectors of an index, which are compared in at most half precision.
IndexPrecision = Literal["float16", "int8", "uint8", "binary", "ubinary"]
#: What the encoder reads for a text with an answer: the answer, or both the text and the answer.
AnswersAs = Literal["answer", "both"]
#: A random seed in the range that all libraries accept.
Seed = Annotated[int, Ge(0), Lt(2**32)]
Positive = Annotated[int, Ge(1)]
#: A finite number above 0, since options reject infinity.
PositiveNumber = Annotated[float, Gt(0)]
#: A number of tokens; fewer than 8 would leave no room for a text and its special tokens.
Length = Annotated[int, Ge(8)]
#: A price or another finite amount.
Amount = Annotated[float, Ge(0), Lt(math.inf)]


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of a field as a flag of the command line.

    Attributes:
        help: help text without a full stop. It names the default only if ``help_with`` cannot.
        metavar: name of the value in help texts; None: see ``add_arguments``.
        flag: name of the flag if it differs from the field's; ``""`` for a positional argument.
        parse: function that converts the text of the command line; None: convert by the type.
        group: heading of the flag in help texts.
        repeat: whether the flag of a sequence takes one value and may be repeated.
        source: description of the file or folder that the value names and that must exist; empty:
            it need not exist.
        check: function that raises a UserError for an illegal value; it gets no None.
        writes: function that checks, before any work, the file or folder that is written: it takes
            its path and the inputs of the command, and returns all files that are written if there
            are others; None: the option names no output.
        needs: another option that this one requires, as the user gives it: ``--plan``,
            ``--teacher RUN`` with any value, ``--scale ray`` with this value, or ``TEXTS``, the
            metavar of a positional argument. Of several, joined by `` or ``, one is enough.
        conflicts: options that exclude this one, in the same form, joined by `` or ``.
    """

    help: str
    metavar: str | tuple[str, ...] | None = None
    flag: str | None = None
    parse: Callable[[str], Any] | None = None
    group: str = ""
    repeat: bool = False
    source: str = ""
    check: Callable[[Any], object] | None = None
    writes: Callable[[Path, Sequence[Any]], Sequence[Path] | None] | None = None
    needs: str = ""
    conflicts: str = ""

    def help_with(self, default: Any) -> str:
        """Return the help text with the default, unless it names one or the default is empty."""
        if "default:" in self.help or default in (dataclasses.MISSING, None, (), ""):
            return self.help
        if isinstance(default, bool):
            default = "yes" if default else "no"
        elif isinstance(default, tuple):
            default = " ".join(default)
        return f"{self.help} (default: {default})"


def option(default: Any = dataclasses.MISSING, kind: type[Option] = Option, **spec: Any) -> Any:
    """Return a dataclass field that is also a flag of the command line.

    The field's annotation decides how the flag is parsed: ``Literal`` gives its choices, ``bool``
    gives ``--x`` and ``--no-x``, a sequence takes several values, ``Path`` and numbers are
    converted. ``Options`` checks limits such as ``Annotated[int, Ge(1)]`` when it is created.

    Args:
        default: default of the field; without one, the flag is required.
        kind: class of the declaration.
        spec: attributes of the declaration.
    """
    return dataclasses.field(default=default, metadata={_KEY: kind(**spec)})


def declaration_of(field: dataclasses.Field[Any]) -> Option | None:
    """Return the declaration of a field; None if the field is not an option."""
    declaration: Option | None = field.metadata.get(_KEY)
    return declaration


@dataclass(frozen=True, kw_only=True)
class Options:
    """A base of dataclasses whose options are converted and checked when they are created."""

    def __post_init__(self) -> None:
        """Convert texts to the types of the fields, and check the values.

        Raises:
            UserError: a value is invalid, a file does not exist, or a required option is missing.
        """
        limits, options = _read_declarations(cast("Any", type(self)))
        for name, hint, spec in options:
            value, flag = getattr(self, name), spec.flag or flag_of(name)
            if Path in get_args(hint) and value == "":
                raise UserError(f"{flag} is empty; expected a path.")
            if spec.parse is not None and isinstance(value, str):
                value = spec.parse(check_string(value, flag))
            else:
                value = _coerce(value, hint, flag)
            if value is not None and limits[name]:
                _check_limits(flag, value, limits[name])
            if spec.source:
                check_source(value, spec.source)
            object.__setattr__(self, name, value)
        self._check_outputs(options)
        self._check_combinations(options)
        for name, _, spec in options:
            if spec.check is not None and getattr(self, name) is not None:
                spec.check(getattr(self, name))

    def _check_combinations(self, options: Sequence[tuple[str, Any, Option]]) -> None:
        names = {
            spec.flag or (spec.metavar if spec.flag == "" else flag_of(name)): name
            for name, _, spec in options
        }
        defaults = {field.name: field.default for field in dataclasses.fields(self)}

        def is_set(name: str) -> bool:
            value, default = getattr(self, name), defaults[name]  # a value may be a table
            return value is not default and not (type(value) is type(default) and value == default)

        def is_given(other: str) -> bool:
            flag, _, value = other.partition(" ")
            current = getattr(self, names[flag])
            matches = not (value.islower() and isinstance(current, str)) or current == value
            return is_set(names[flag]) and matches

        for name, _, spec in options:
            if not (spec.needs or spec.conflicts) or not is_set(name):
                continue
            flag = spec.flag or flag_of(name)
            needed, excluded = (
                [other for other in others.split(" or ") if other.partition(" ")[0] in names]
                for others in (spec.needs, spec.conflicts)
            )
            if needed and not any(map(is_given, needed)):
                other = " or ".join(needed)
                raise UserError(f"{flag} needs {other}. Add it, or leave out {flag}.")
            for other in filter(is_given, excluded):
                raise UserError(f"{flag} cannot be given with {other}. Leave one of them out.")

    def _check_outputs(self, options: Sequence[tuple[str, Any, Option]]) -> None:
        inputs = [getattr(self, name) for name, _, spec in options if spec.source]
        outputs: dict[Path, str] = {}
        for name, _, spec in options:
            value, flag = getattr(self, name), spec.flag or flag_of(name)
            if spec.writes is None or value is None:
                continue
            files = spec.writes(Path(value), inputs) or (Path(value),)
            if Path(value).is_symlink():  # Its target is written, and the link stays.
                object.__setattr__(self, name, Path(value).resolve())
            for file in files:
                same = outputs.setdefault(file.absolute(), flag)
                if same != flag:
                    raise UserError(
                        f"{same} and {flag} both write {file}. Give one of them another name."
                    )

    def select(self, cls: type[T]) -> T:
        """Return an instance of another dataclass with the options that both have."""
        return cls(**{f.name: getattr(self, f.name) for f in dataclasses.fields(cls) if f.init})  # type: ignore[arg-type]


@cache  # Options of encoders are created many times.
def _read_declarations(cls: Any) -> tuple[Mapping[str, Any], Sequence[tuple[str, Any, Option]]]:
    return limits_of(cls), options_of(cls)


def options_of(cls: type[Any]) -> Sequence[tuple[str, Any, Option]]:
    """Return the name, type and declaration of each option of a dataclass.

    Required options come first, positional ones before flags; then those that the class declares
    itself, then inherited ones. The class variables ``option_group`` and ``option_needs`` of a
    dataclass are ``group`` and ``needs`` of the options that this dataclass declares without them.
    """
    hints, order, options = get_type_hints(cls), [], []
    owners: dict[str, Any] = {}
    for base in cls.__mro__:
        order += vars(base).get("__annotations__", ())
        owners |= dict.fromkeys(vars(base).get("__annotations__", {}).keys() - owners, base)
    for field in dataclasses.fields(cls):
        if (spec := declaration_of(field)) is not None:
            owner = vars(owners[field.name])
            needs = spec.needs or owner.get("option_needs", "")
            if needs.partition(" ")[0] == (spec.flag or flag_of(field.name)):
                needs = ""
            group = spec.group or owner.get("option_group", "")
            options.append((field, dataclasses.replace(spec, group=group, needs=needs)))

    def rank(option: tuple[dataclasses.Field[Any], Option]) -> tuple[bool, bool, int]:
        field, spec = option
        is_required = field.default is dataclasses.MISSING
        return not is_required, is_required and spec.flag != "", order.index(field.name)

    options.sort(key=rank)
    return tuple((field.name, hints[field.name], spec) for field, spec in options)


def flag_of(name: str) -> str:
    """Return the default name of a field's flag."""
    return f"--{name.replace('_', '-')}"


def plain_type(hint: Any) -> Any:
    """Return a type without None, and a union as the single type that flags are parsed to."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        if all(get_origin(kind) is Literal for kind in kinds):
            return Literal[tuple(value for kind in kinds for value in get_args(kind))]
        if Path in kinds:  # Callers may also pass a path as text.
            return Path
        return kinds[0] if len(kinds) == 1 else next((k for k in kinds if k is not Any), Any)
    return hint


#: The types of single values: their words in messages, and what Python callers may pass.
_SINGLE: Mapping[Any, tuple[str, Any]] = {
    bool: ("True or False", object),
    int: ("a whole number", Integral),
    float: ("a number", Real),
    str: ("a text", (str, PurePath)),
    Path: ("a path", (str, PurePath)),
}


def _coerce(value: Any, hint: Any, flag: str) -> Any:
    """Convert a value to the type of its field, as the command line would.

    Raises:
        UserError: the value is of another type, is not one of the choices, or as ``check_string``.
    """
    kind = plain_type(hint)
    if isinstance(value, str | PurePath):
        check_string(str(value), flag)
    if kind is Any or (value is None and NoneType in get_args(hint)):
        return value
    if callable(value) and any(get_origin(one) is Callable for one in get_args(hint)):
        return value
    if get_origin(kind) in (Sequence, tuple, Mapping):
        return _coerce_several(value, kind, flag)
    if get_origin(kind) is Literal:
        if isinstance(value, str) and value in get_args(kind):
            return value
        legal = list_legal_values(str(value), [str(choice) for choice in get_args(kind)])
        raise UserError(f"{flag} is {shortened_repr(value)}. {legal}")
    expected, accepted = _SINGLE[kind]
    if kind is float and isinstance(value, Real) and not math.isfinite(value):
        expected, accepted = "a finite number", ()
    if int in get_args(hint) and isinstance(value, Integral) and not _is_bool(value):
        return kind(value)  # The text of a number, in a union of both.
    if not isinstance(value, accepted) or _is_bool(value) != (kind is bool):
        raise UserError(f"{flag} is {shortened_repr(value)}; expected {expected}.")
    # Shells leave the ~ of --out=~/file as it is.
    convert = expand_home if kind is Path else kind
    # A `Condition` is a text with attributes, and JSON cannot encode NumPy's numbers.
    return value if kind is str and isinstance(value, str) else convert(value)


def _coerce_several(value: Any, kind: Any, flag: str) -> Any:
    """Convert a value to a type of several values; a single one is a list of one."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(value, str | PurePath):
        value = (value,)
    if origin is Mapping:
        lists = inner[1] is not str
        pairs = value
        if not isinstance(value, Mapping):
            pairs = _split_pairs(_as_list(value, flag, "a dictionary"), flag)
        return {_coerce(key, str, flag): _as_text(item, flag, lists) for key, item in pairs.items()}
    values = tuple(_coerce(item, inner[0], flag) for item in _as_list(value, flag))
    if origin is tuple and inner[-1] is not Ellipsis and len(values) != len(inner):
        raise UserError(f"{flag} has {len(values)} values; expected {len(inner)}.")
    return values


def _as_list(value: Any, flag: str, expected: str = "a list") -> list[Any]:
    with suppress(TypeError):  # It cannot be iterated, or is an array without dimensions.
        if not isinstance(value, Mapping | bytes):
            return list(value)
    raise UserError(f"{flag} is {shortened_repr(value)}; expected {expected}.")


def _is_bool(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_")  # without an import of NumPy for its type


def _as_text(value: Any, flag: str, lists: bool = False, separator: str = ",") -> Any:
    """Return the value of a setting as the command line writes it.

    Args:
        value: a text, a number, a truth value, or a list of them.
        flag: name of the option in messages.
        lists: whether a list becomes a tuple of texts, instead of one text.
        separator: what joins the items of a list to one text; that of lists in a list is ``+``.

    Raises:
        UserError: the value is of another type, or as ``check_string``.
    """
    if _is_bool(value):
        return str(bool(value)).lower()
    if isinstance(value, str | Real | PurePath):
        return check_string(str(value), flag)
    if isinstance(value, Iterable) and not isinstance(value, Mapping | bytes):
        texts = tuple(_as_text(item, flag, separator="+") for item in value)
        return texts if lists else separator.join(texts)
    raise UserError(
        f"{flag} has the value {shortened_repr(value)}; expected a text, a number, a truth value "
        "or a list of them."
    )


def _split_pairs(texts: Iterable[Any], flag: str) -> dict[str, str]:
    """Return NAME=VALUE texts as a dictionary.

    Raises:
        UserError: a text has another form, or a name is repeated.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = str(text).partition("=")
        if not (equals and key and value):
            raise UserError(f"{flag} is {shortened_repr(text)}; expected NAME=VALUE.")
        if key in pairs:
            raise UserError(f"{flag} repeats {key}. Give all of its values together.")
        pairs[key] = value
    return pairs


def limits_of(cls: type[Any]) -> Mapping[str, Sequence[tuple[str, float]]]:
    """Return the limits of each field of a dataclass, as keys of ``LIMITS`` and bounds."""

    def limits(hint: Any) -> Iterable[tuple[str, float]]:
        for part in getattr(hint, "__metadata__", ()):
            yield from ((key, getattr(part, key)) for key in LIMITS if hasattr(part, key))
        for part in get_args(hint):
            yield from limits(part)

    hints = get_type_hints(cls, include_extras=True)
    return {name: tuple(limits(hint)) for name, hint in hints.items()}


def _check_limits(flag: str, value: float, limits: Sequence[tuple[str, float]]) -> None:
    if not all(getattr(operator, key)(value, bound) for key, bound in limits):
        words = " and ".join(
            "finite" if bound == math.inf else f"{LIMITS[key]} {bound:,}" for key, bound in limits
        )
        shown = f"{value:g}" if isinstance(value, float) else value
        raise UserError(f"{flag} is {shown}; it must be {words}.")


def parse_value(cls: type[Any], name: str, text: str) -> Any:
    """Convert the text of a value to the type of an option, as the command line would.

    The values of a sequence are joined by ``+``.

    Raises:
        UserError: the text is not of that type.
    """
    hint, spec = next((hint, spec) for option, hint, spec in options_of(cls) if option == name)
    kind = plain_type(hint)
    if spec.parse is not None:
        return spec.parse(text)
    if get_origin(kind) in (Sequence, tuple):
        return tuple(text.split("+"))
    if kind is bool:
        if text not in _BOOLS:
            raise UserError(f"{name} is {text!r}; expected true or false.")
        return _BOOLS[text]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            raise UserError(f"{name} is {text!r}; expected {expected}.") from None
    return text


def check_argument(name: str, value: object, types: Sequence[type | None], expected: str) -> None:
    """Check the type of an argument of a public function; a truth value is not a number.

    Args:
        name: name of the argument.
        value: the argument.
        types: legal types; None: the argument may be missing.
        expected: description of a legal value, for the message.

    Raises:
        UserError: the argument has another type.
    """
    classes = tuple(type(None) if kind is None else kind for kind in types)
    if not isinstance(value, classes) or (isinstance(value, bool) and bool not in classes):
        raise UserError(f"{name} is {shortened_repr(value)}; expected {expected}.")


def check_run(value: object) -> None:
    """Check the argument ``run`` of a public function: the path or name of a run, or None.

    Raises:
        UserError: it is neither, or has an invalid character.
    """
    check_argument("run", value, (str, Path, None), "a path")
    check_string(str(value), "run")


def check_folder(name: str, value: object) -> None:
    """Check that an argument of a public function can be the path of a folder.

    Raises:
        UserError: it is not a path, has an invalid character, or is too long.
    """
    check_argument(name, value, (str, Path), "a path")
    check_string(str(value), name)
    try:
        Path(str(value)).exists()
    except OSError as error:
        raise UserError(f"{name} is {shortened_repr(str(value))}: {error.strerror}.") from None


def check_source(source: Any, expected: str) -> None:
    """Check that a file or folder exists, before anything heavy is imported.

    Objects that are not paths, URIs and ``-`` are not checked.

    Args:
        source: the path or object to read.
        expected: description of legal sources, for the message.

    Raises:
        UserError: the file or folder does not exist.
    """
    # A hyphen is standard input.
    if not isinstance(source, str | Path) or str(source) == "-" or "://" in str(source):
        return
    try:
        exists = Path(source).expanduser().exists()
    except (OSError, RuntimeError):  # The name is too long, or ~ has no home folder.
        exists = False
    if not exists:
        raise UserError(f"{source} does not exist. Expected {expected}.")


def all_optional(cls: type[T]) -> type[T]:
    """Return a dataclass with the options of another, where the default of each option is None.

    This is for settings whose defaults depend on other sources; help texts name the defaults of
    ``cls``.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    fields = []
    for name, hint, spec in options_of(cls):
        metadata = option(
            None, **{**dataclasses.asdict(spec), "help": spec.help_with(defaults[name])}
        )
        fields.append((name, hint | None, metadata))
    return dataclasses.make_dataclass(f"Optional{cls.__name__}", fields, frozen=True, kw_only=True)


def public_function(
    call: Callable[P, R],
    name: str,
    module: str,
    doc: str,
    signature: inspect.Signature,
) -> Callable[P, R]:
    """Return a callable as a public function of a module, with that name in errors and pickles.

    Args:
        call: callable to wrap.
        name: name of the function.
        module: module that the function belongs to.
        doc: docstring of the function.
        signature: signature of the function. Arguments that it lacks raise a TypeError that
            suggests the nearest names.
    """

    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        _check_arguments(name, signature, args, kwargs)
        return call(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = module, doc
    function.__annotations__ = {}  # The signature has the annotations of the parameters.
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
