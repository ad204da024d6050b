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

from llmcond import plugins
from llmcond.errors import LlmcondError, UserError, did_you_mean, escaped_json, nearest
from llmcond.options import (
    Option,
    Options,
    flag_of,
    limits_of,
    options_of,
    plain_type,
    public_function,
)
from llmcond.system import local_rank

FORMATS = ("table", "markdown", "latex")

#: What is true of a command that was interrupted; see :attr:`Command.if_interrupted`.
STARTS_AGAIN = "the same command starts from the beginning"
RESUMES = "what was stored is kept, and the same command resumes"
REUSES_VECTORS = "vectors that the run has stored are reused by the same command"

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
C = TypeVar("C", bound="Command")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(Options):
    """What all commands have in common. The first line of a docstring is the command's summary.

    Attributes:
        position: its place in ``llmcond --help``; commands are listed by rising numbers.
        example: one line, for ``--help``.
        formats: whether it prints a table, and has ``--format``.
        if_interrupted: what the same command does after Ctrl-C or SIGTERM, for the last message.
    """

    position: ClassVar[int]
    example: ClassVar[str]
    formats: ClassVar[bool] = False
    if_interrupted: ClassVar[str] = STARTS_AGAIN

    def execute(self) -> Any:
        """Do it, and return a typed result."""
        raise NotImplementedError

    def show(self, result: Any, form: str) -> None:
        """Print the result for people; nothing where messages have said it all."""

    def failed(self, result: Any) -> LlmcondError | None:
        """Return what makes the command fail once its result is printed; None if nothing does."""
        return None


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
    return public_function(call, words.lstrip("_"), described.__module__, doc, signature)


# -- fields as flags ---------------------------------------------------------------------------


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
        flag = spec.flag or flag_of(name)
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
    kind = plain_type(hint)
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
        kind = plain_type(inner[0])
    if get_origin(kind) is Literal:
        return {**keywords, "choices": get_args(kind)}
    # What the option parses itself is text here; see `Options`.
    return {**keywords, "type": kind if kind in (int, float, Path) and not spec.parse else str}


def command_of(cls: type[C], given: Mapping[str, Any]) -> C:
    """Return a command with what was parsed; it checks that itself."""
    names = [name for name, _, _ in options_of(cls)]
    return cls(**{name: given[name] for name in names if name in given})


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
