"""A command is one frozen dataclass: its fields are its flags.

``execute`` does the work and ``show`` prints it. The same class is the Python function of that
name: see :func:`verb`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from llmcond import plugins
from llmcond.errors import LlmcondError, UserError, did_you_mean, escaped_json, nearest
from llmcond.options import Option, option, option_of, public_function
from llmcond.system import local_rank

FORMATS = ("table", "markdown", "latex")

#: What is true of a command that was interrupted; see :attr:`Command.if_interrupted`.
STARTS_AGAIN = "the same command starts from the beginning"
RESUMES = "what was stored is kept, and the same command resumes"
REUSES_VECTORS = "vectors that the run has stored are reused by the same command"

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """What all commands have in common. The first line of a docstring is the command's summary.

    Attributes:
        example: one line, for ``--help``.
        formats: whether it prints a table, and has ``--format``.
        if_interrupted: what the same command does after Ctrl-C or SIGTERM, for the last message.
    """

    example: ClassVar[str]
    formats: ClassVar[bool] = False
    if_interrupted: ClassVar[str] = STARTS_AGAIN

    def __post_init__(self) -> None:
        """Convert text to what fields hold; a UserError for a value that is not legal."""
        for name, hint, spec in options_of(type(self)):
            value = getattr(self, name)
            if spec.parse is None:
                value = _coerced(value, hint, _flag(name))
            elif isinstance(value, str):
                value = spec.parse(value)
            object.__setattr__(self, name, value)

    def execute(self) -> Any:
        """Do it, and return a typed result."""
        raise NotImplementedError

    def show(self, result: Any, form: str) -> None:
        """Print the result for people; nothing where messages have said it all."""

    def failed(self, result: Any) -> LlmcondError | None:
        """Return what makes the command fail once its result is printed; None if nothing does."""
        return None

    def call(self, work: Callable[..., R], **others: Any) -> R:
        """Call a workflow with the options that its parameters are named after, and others."""
        own = [name for name in inspect.signature(work).parameters if name not in others]
        return work(**{name: getattr(self, name) for name in own}, **others)

    def part(self, cls: type[T]) -> T:
        """Return those of its options that a dataclass has, as an instance of it."""
        return cls(**{f.name: getattr(self, f.name) for f in dataclasses.fields(cls) if f.init})  # type: ignore[arg-type]


class _Executes(Protocol[R_co]):
    """Something with a verb and its result."""

    def execute(self) -> R_co:
        """Do it."""
        ...


def verb(command: Callable[P, _Executes[R]]) -> Callable[P, R]:
    """Return a command as a function, whose keyword arguments are named as the flags are."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return command(*args, **kwargs).execute()

    described: Any = command
    options = options_of(described)
    given = [f"    {name}: {spec.help}" for name, _, spec in options]
    words = "".join(f"_{c.lower()}" if c.isupper() else c for c in described.__name__)
    doc = "\n".join([inspect.cleandoc(described.__doc__), "", "Args:", *given])
    known = inspect.signature(described).parameters
    signature = inspect.Signature(
        [known[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, _, _ in options],
        return_annotation=described.execute.__annotations__["return"],
    )
    return public_function(call, words.lstrip("_"), described.__module__, doc, signature)


# -- fields as flags ---------------------------------------------------------------------------


def options_of(cls: type[Any]) -> list[tuple[str, Any, Option]]:
    """Return the name, the type and the description of each option of a dataclass.

    Required ones come first, then its own, then those of the classes it is made of, in their order.
    """
    hints = get_type_hints(cls)
    order = [name for base in cls.__mro__ for name in vars(base).get("__annotations__", ())]
    described = ((field, option_of(field)) for field in dataclasses.fields(cls))
    found = [(field, spec) for field, spec in described if spec is not None]
    found.sort(key=lambda f: (f[0].default is not dataclasses.MISSING, order.index(f[0].name)))
    return [(field.name, hints[field.name], spec) for field, spec in found]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _plain(hint: Any) -> Any:
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
    kind = _plain(hint)
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
        pairs = value if isinstance(value, Mapping) else key_values(value, flag)
        return {str(key): _text(one) for key, one in pairs.items()}
    if origin is Sequence and isinstance(value, Iterable):
        return tuple(_coerced(one, get_args(kind)[0], flag) for one in value)
    return value


def _text(value: Any) -> Any:
    """Return a setting as the command line writes it; several values stay several."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, (list, tuple)) else str(value)


def add_arguments(parser: argparse.ArgumentParser, cls: type[Command]) -> None:
    """Give a parser the flags of a command."""
    groups: dict[str, Any] = {"": parser}
    usage = [parser.prog]
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for name, hint, spec in options_of(cls):
        if spec.group not in groups:
            groups[spec.group] = parser.add_argument_group(spec.group)
        default = defaults[name]
        keywords = _argument(hint, spec, default)
        required = default is dataclasses.MISSING
        flag = spec.flag or _flag(name)
        metavar = keywords.get("metavar", name.upper())
        if required:
            usage.append(metavar if spec.flag == "" else f"{flag} {metavar}")
        elif spec.flag == "":
            usage.append(f"[{metavar}]")
        if spec.flag == "":
            keywords |= {} if required else {"nargs": "?", "default": argparse.SUPPRESS}
            groups[spec.group].add_argument(name, **keywords)
        else:
            keywords |= {"required": True} if required else {"default": argparse.SUPPRESS}
            groups[spec.group].add_argument(flag, dest=name, **keywords)
    parser.usage = " ".join([*usage, "[options]"])
    parser.add_argument(
        "--plugin",
        nargs="+",
        action="extend",
        metavar="FILE.py:NAME",
        help="code of your own that records name: a head, objective, metric, pooling or task",
    )
    # Not False: a command within a command would take back what was said before its name.
    parser.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print one JSON object on standard output",
    )
    if cls.formats:
        parser.add_argument(
            "--format",
            choices=FORMATS,
            default=argparse.SUPPRESS,
            help="of the table: for a terminal, a Markdown page or a paper (default: table)",
        )


def _argument(hint: Any, spec: Option, default: Any) -> dict[str, Any]:
    """Return how argparse reads a value of a type."""
    kind = _plain(hint)
    inner = get_args(kind)
    text = spec.help
    if "default:" not in text and default not in (dataclasses.MISSING, None, (), "", False, True):
        text += f" (default: {' '.join(default) if isinstance(default, tuple) else default})"
    keywords: dict[str, Any] = {"help": text.replace("%", "%%")}
    if spec.metavar is not None:
        keywords["metavar"] = spec.metavar
    if kind is bool:
        return {**keywords, "action": argparse.BooleanOptionalAction}
    several = {"nargs": "+", "action": "extend"}
    if get_origin(kind) is Mapping:
        return {**keywords, **several}
    if get_origin(kind) is tuple and inner[-1] is not Ellipsis:
        return {**keywords, "nargs": len(inner), "type": inner[0]}
    if get_origin(kind) in (Sequence, tuple):
        keywords |= {"action": "append"} if spec.repeat else several
        kind = _plain(inner[0])
    if get_origin(kind) is Literal:
        return {**keywords, "choices": get_args(kind)}
    # What the option parses itself is text here; see `_coerced`.
    return {**keywords, "type": kind if kind in (int, float, Path) and not spec.parse else str}


def command_of(cls: type[Command], given: Mapping[str, Any]) -> Command:
    """Return a command with what was parsed; it checks that itself."""
    names = [name for name, _, _ in options_of(cls)]
    return cls(**{name: given[name] for name in names if name in given})


def key_values(texts: Sequence[str], flag: str) -> dict[str, str]:
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


# -- running -----------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest legal names."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse; a UserError for what this command does not know, before it is for what is missing.

        argparse would blame a misspelt flag on the required one that it was meant to be, and
        report others in the name of the whole program.
        """
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for word in self._own_words(sys.argv[1:] if args is None else args):
            flag = word.partition("=")[0]
            if flag.startswith("--") and " " not in flag and flag not in known:
                self.error(f"there is no {flag}. {did_you_mean(flag, known)}")
        namespace, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return namespace, []

    def _own_words(self, args: Iterable[str]) -> Iterator[str]:
        """Yield arguments up to the name of a command within this one, or the end of all flags."""
        actions = self._subparsers._group_actions if self._subparsers else ()
        names = {name for action in actions for name in action.choices or ()}
        return takewhile(lambda word: word != "--" and word not in names, args)

    def error(self, message: str) -> NoReturn:
        """Raise a UserError."""
        text = message.rstrip()
        raise UserError(f"{text}{'' if text[-1] in '.?' else '.'} See `{self.prog} --help`.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            legal = [str(choice) for choice in action.choices]
            command = action.dest in ("command", "subcommand")
            name = "command" if command else (action.option_strings or [action.dest])[0]
            raise UserError(
                f"{name} is {value!r}. {nearest(str(value), legal)} Legal: {', '.join(legal)}."
            )


def run_command(cls: type[Command], given: Mapping[str, Any]) -> None:
    """Run a command with what was parsed, and print its result, or raise what went wrong."""
    for name in given.get("plugin") or ():
        plugins.load(name)
    command = command_of(cls, given)
    result = command.execute()
    if given.get("json"):
        value = result if isinstance(result, Mapping) else result.to_json()
        if not local_rank():  # once, of processes that were launched together
            sys.stdout.write(f"{escaped_json(value)}\n")
    else:
        command.show(result, given.get("format", "table"))
    problem = command.failed(result)
    if problem is not None:
        raise problem
