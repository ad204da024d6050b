"""The base class of commands: a frozen dataclass whose fields are the command's flags.

``execute`` does the work, and ``show`` prints the result. ``as_function`` turns the same class into
the Python function of that name.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import (
    Any,
    ClassVar,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
)

from llmcond.base import package as plugins
from llmcond.base.errors import (
    LlmcondError,
    UserError,
    did_you_mean,
    escaped_json,
    list_legal_values,
)
from llmcond.base.options import (
    Option,
    Options,
    flag_of,
    limits_of,
    options_of,
    plain_type,
    public_function,
)
from llmcond.base.system import local_rank

FORMATS = ("table", "markdown", "latex")

#: Values of ``Command.if_interrupted``: what happens if an interrupted command is run again.
STARTS_AGAIN = "the same command starts from the beginning"
RESUMES = "stored results are kept, and the same command resumes"
REUSES_VECTORS = (
    "the same command reuses the vectors that a run of your own has stored; those of a bundled "
    "model, or one from the hub, are not stored"
)

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
C = TypeVar("C", bound="Command")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(Options):
    """The base class of all commands.

    ``--help`` shows the docstring of a subclass, and ``llmcond --help`` its first line. The
    function that ``as_function`` makes has this docstring too, followed by the sections of the
    docstring of ``execute``, such as ``Returns:``.

    Attributes:
        example: a command line, shown by ``--help``.
        formats: whether the command prints a table and has the flag ``--format``.
        if_interrupted: what the same command does after Ctrl-C or SIGTERM, for the last message.
    """

    example: ClassVar[str]
    formats: ClassVar[bool] = False
    if_interrupted: ClassVar[str] = STARTS_AGAIN

    def execute(self) -> Any:
        """Run the command, and return its result."""
        raise NotImplementedError

    def show(self, result: Any, form: str) -> None:
        """Print the result for people; by default nothing, as messages have reported it.

        Args:
            result: return value of ``execute``.
            form: format of tables, one of ``FORMATS``.
        """

    def failed(self, result: Any) -> LlmcondError | None:
        """Return the error that the command ends with after its result is printed, or None."""
        return None


class _Executes(Protocol[R_co]):
    """An object whose ``execute`` method returns a result."""

    def execute(self) -> R_co:
        """Run the command, and return its result."""
        ...


def as_function(command: Callable[P, _Executes[R]]) -> Callable[P, R]:
    """Return a function that runs a command; its keyword arguments have the names of the flags.

    The function's docstring consists of the docstring of the command's class, the help texts of its
    options, and the sections of the docstring of its ``execute`` method.

    Args:
        command: class of the command.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return command(*args, **kwargs).execute()

    described: Any = command
    options = options_of(described)
    arguments = [f"    {name}: {spec.help}" for name, _, spec in options]
    words = "".join(f"_{c.lower()}" if c.isupper() else c for c in described.__name__)
    _, _, sections = inspect.cleandoc(described.execute.__doc__ or "").partition("\n\n")
    doc = "\n".join([inspect.cleandoc(described.__doc__), "", "Args:", *arguments, "", sections])
    known, limits = inspect.signature(described).parameters, limits_of(described)
    types = {
        name: plain_type(hint).__name__ + " | None" * (plain_type(hint) is not hint)
        for name, hint, _ in options
        if limits[name]
    }
    signature = inspect.Signature(
        [
            known[name].replace(
                kind=inspect.Parameter.KEYWORD_ONLY,
                annotation=types.get(name, known[name].annotation),
            )
            for name, _, _ in options
        ],
        return_annotation=described.execute.__annotations__["return"],
    )
    return public_function(call, words.lstrip("_"), described.__module__, doc.rstrip(), signature)


# -- fields as flags ---------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser, cls: type[Command]) -> None:
    """Add the flags of a command to a parser.

    Values are called by the type of the option if it has no ``metavar``, such as N for numbers.
    """
    groups: dict[str, Any] = {"": parser}
    usage = [parser.prog]
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for name, hint, spec in options_of(cls):
        if spec.group not in groups:
            groups[spec.group] = parser.add_argument_group(spec.group)
        default = defaults[name]
        keywords = _argparse_keywords(hint, spec, default)
        required = default is dataclasses.MISSING
        flag = spec.flag or flag_of(name)
        metavar = keywords.get("metavar", name.upper())
        if required:
            usage.append(metavar if spec.flag == "" else f"{flag} {metavar}")
        elif spec.flag == "":
            usage.append(f"[{metavar}]")
        if spec.flag == "":
            keywords |= {} if required else {"nargs": "?"}
            groups[spec.group].add_argument(name, default=argparse.SUPPRESS, **keywords)
        else:
            keywords |= {"required": required, "default": argparse.SUPPRESS}
            groups[spec.group].add_argument(flag, dest=name, **keywords)
    parser.usage = " ".join([*usage, "[options]"])
    parser.add_argument(
        "--plugin",
        nargs="+",
        action="extend",
        metavar="FILE.py:NAME",
        help="custom code that a run or head needs: a head, objective, metric, pooling or task",
    )
    # A default of False would let a subcommand reset a flag that was given before its name.
    parser.add_argument(
        "--json",
        action=_StoreOnce,
        nargs=0,
        const=True,
        default=argparse.SUPPRESS,
        help="print one JSON object on standard output",
    )
    if cls.formats:
        parser.add_argument(
            "--format",
            action=_StoreOnce,
            choices=FORMATS,
            default=argparse.SUPPRESS,
            help="format of the table: for a terminal (table), a Markdown page or a paper "
            "(default: table)",
        )


#: Names of values in help texts, by the type of an option.
_METAVARS = {int: "N", str: "NAME", Path: "FILE", Mapping: "KEY=VALUE", Any: "SRC"}


def _argparse_keywords(hint: Any, spec: Option, default: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``add_argument`` for an option of a type."""
    kind = plain_type(hint)
    inner = get_args(kind)
    keywords: dict[str, Any] = {"help": spec.help_with(default).replace("%", "%%")}
    if kind is bool:
        return {**keywords, "action": _StoreBooleanOnce}
    single = plain_type(inner[0]) if get_origin(kind) in (Sequence, tuple) else kind
    metavar = spec.metavar or _METAVARS.get(get_origin(single) or single)
    if metavar is not None:
        keywords["metavar"] = metavar
    several = {"nargs": "+", "action": "extend"}
    if get_origin(kind) is Mapping:
        return {**keywords, **several}
    if get_origin(kind) is tuple and inner[-1] is not Ellipsis:
        return {**keywords, "action": _StoreOnce, "nargs": len(inner), "type": inner[0]}
    if get_origin(kind) in (Sequence, tuple):
        keywords |= {"action": "append"} if spec.repeat else several
        kind = plain_type(inner[0])
    else:
        keywords["action"] = _StoreOnce
    if get_origin(kind) is Literal:
        return {**keywords, "choices": get_args(kind)}
    # An option that parses its own values gets them as text; see `Options`.
    return {**keywords, "type": kind if kind in (int, float) and not spec.parse else str}


class _StoreOnce(argparse.Action):
    """Stores the value of an option that may be given once, or ``const`` for a plain flag.

    argparse would keep the last of several values. An option has a value other than its default in
    the namespace only if it was given.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        default = parser.get_default(self.dest)
        if getattr(namespace, self.dest, default) is not default:
            parser.error(f"{option_string} is given twice, but it takes one value. Give it once.")
        if isinstance(self, argparse.BooleanOptionalAction):
            values = not str(option_string).startswith("--no-")
        elif self.nargs == 0:
            values = self.const
        setattr(namespace, self.dest, values)


class _StoreBooleanOnce(_StoreOnce, argparse.BooleanOptionalAction):
    """Stores True for ``--x`` and False for ``--no-x``, of which one may be given once."""


def create_command(cls: type[C], arguments: Mapping[str, Any]) -> C:
    """Create a command from parsed arguments.

    Raises:
        UserError: an argument is invalid.
    """
    names = [name for name, _, _ in options_of(cls)]
    return cls(**{name: arguments[name] for name in names if name in arguments})


# -- running -----------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line that suggests the nearest legal names.

    Attributes:
        commands: parsers of all commands by name, whose flags errors may point to.
        load: function that imports the command whose options the parser gets when it is first used;
            None: it has its options.
    """

    commands: Mapping[str, Parser] = MappingProxyType({})
    load: Callable[[], type[Command]] | None = None

    def add_options(self) -> Parser:
        """Add the description and the flags of the parser's command, and return the parser."""
        if self.load is not None:
            cls, self.load = self.load(), None
            self.description = inspect.cleandoc(cls.__doc__ or "")
            self.epilog = f"Example: {cls.example}"
            add_arguments(self, cls)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments, and report unknown flags before missing arguments.

        For a misspelt required flag, argparse would report that the flag is missing. Other unknown
        arguments it would report in the name of the whole program.

        Raises:
            UserError: an argument is unknown, missing or invalid.
        """
        self.add_options()
        known_flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for argument in self._leading_arguments(sys.argv[1:] if args is None else args):
            flag = argument.partition("=")[0]
            if flag.startswith("--") and " " not in flag and flag not in known_flags:
                parsers = {name: p.add_options() for name, p in self.commands.items()}
                owners = [name for name, p in parsers.items() if flag in p.flags]
                elsewhere = f" It is an option of {', '.join(owners)}." if owners else ""
                self.error(f"there is no {flag}. {did_you_mean(flag, known_flags)}{elsewhere}")
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._describe_unknown(sys.argv[1:] if args is None else args, unknown))
        return namespace, []

    @property
    def flags(self) -> Mapping[str, argparse.Action]:
        """The actions of all flags by name."""
        return self._option_string_actions

    def _describe_unknown(self, args: Sequence[str], unknown: Sequence[str]) -> str:
        """Return the message about unknown arguments, which may be further values of a flag."""
        before = args[: args.index(unknown[0])]
        flag = next((word for word in before[-2:-1] if word in self.flags), None)
        if flag is None:
            return f"unrecognized arguments: {' '.join(unknown)}"
        values = " ".join([before[-1], *unknown])
        meaning = (self.flags[flag].help or "").replace("%%", "%")
        return f"{flag} takes one value, not {values}: {meaning}"

    def _leading_arguments(self, args: Iterable[str]) -> Iterator[str]:
        """Yield the arguments before the name of a subcommand, or before ``--``."""
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
            raise UserError(f"{name} is {value!r}. {list_legal_values(str(value), legal)}")


def run_command(cls: type[Command], arguments: Mapping[str, Any]) -> None:
    """Run a command with parsed arguments, and print its result.

    Raises:
        LlmcondError: the command failed, or its result is one that makes it fail.
    """
    for name in arguments.get("plugin") or ():
        plugins.load(name)
    command = create_command(cls, arguments)
    result = command.execute()
    if arguments.get("json"):
        value = result if isinstance(result, Mapping) else result.to_json()
        if not local_rank():  # Of processes that were launched together, one prints.
            sys.stdout.write(f"{escaped_json(value)}\n")
    else:
        command.show(result, arguments.get("format", "table"))
    problem = command.failed(result)
    if problem is not None:
        raise problem
