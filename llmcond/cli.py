"""The command line: finds commands by their modules, sets exit codes, prints errors in one line."""

from __future__ import annotations

import argparse
import ast
import codecs
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path

from llmcond import commands
from llmcond.base.errors import (
    DiskFullError,
    LlmcondError,
    UserError,
    escape_control_characters,
    first_line,
    is_disk_full,
)
from llmcond.base.output import log_to_terminal
from llmcond.base.package import __version__
from llmcond.commands import COMMANDS
from llmcond.commands.base import Command, Parser, run_command


class _Interrupted(KeyboardInterrupt):
    """Raised by Ctrl-C, and by SIGTERM, which schedulers and containers send.

    If Python's own KeyboardInterrupt passed through exec, Python would end the process by the
    signal instead of with our exit code.
    """


@contextmanager
def _raise_on_signals() -> Iterator[list[int]]:
    """Raise ``_Interrupted`` on SIGINT and SIGTERM, unless the caller handles them itself.

    Yields the list of received signals, because Ray's C++ code replaces our exception.
    """
    received: list[int] = []
    default_handlers = (signal.default_int_handler, signal.SIG_DFL)
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handled = [number for number, handler in previous.items() if handler in default_handlers]
    if threading.current_thread() is not threading.main_thread():
        handled = []

    def interrupt(number: int, _: object) -> None:
        received.append(number)
        raise _Interrupted

    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number in handled:
            signal.signal(number, previous[number])


def run(arguments: Sequence[str]) -> int:
    """Run one command, and return its exit code.

    Args:
        arguments: arguments of the command line, without the program's name.

    Returns:
        0 for success, 2 for invalid input, 130 after Ctrl-C, 143 after SIGTERM, and 1 for any other
        error.
    """
    with _raise_on_signals() as received:
        try:
            code = _run(arguments, received)
            # A command that shows what it has was terminated nevertheless.
            return 143 if signal.SIGTERM in received and not code else code
        except SystemExit as error:
            if isinstance(error.__context__, BrokenPipeError):  # Rich has discarded the rest.
                return 0
            raise


def _escape_unencodable_characters() -> None:
    """Let standard output and standard error escape characters that their encoding lacks.

    An error would lose the work of a command after it is done. The escapes are those of JSON, so
    that the output of ``--json`` remains valid.
    """
    codecs.register_error("llmcond", _escape_as_json)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="llmcond")


def _escape_as_json(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _run(arguments: Sequence[str], signals: Sequence[int]) -> int:
    _escape_unencodable_characters()
    log_to_terminal()
    command: type[Command] = Command
    try:
        if sorted(arguments) == ["--verbose", "--version"]:
            from llmcond.base.system import describe_installation

            for name, value in describe_installation().items():
                sys.stdout.write(f"{name}: {value}\n")
            return 0
        options = vars(_lazy_parser().parse_args(arguments))
        command = _command(options.get("subcommand") or options["command"])
        try:
            run_command(command, options)
        except Exception as error:
            if signals:  # Libraries turn our exception into errors of their own.
                raise _Interrupted from error
            raise
        sys.stdout.flush()
    except LlmcondError as error:
        return _print_error(str(error), error.exit_code)
    except KeyboardInterrupt:
        # Shells report 128 plus the signal's number.
        reason, code = ("terminated", 143) if signal.SIGTERM in signals else ("interrupted", 130)
        return _print_error(f"{reason}; {command.if_interrupted}.", code)
    except BrokenPipeError:
        # The reader of the pipe has closed it (`| head`), so the rest of the output is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BaseException as error:
        if not (isinstance(error, OSError) or _lacks_memory(error)):
            raise
        return _print_error(*_describe_system_error(error))
    return 0


def _lacks_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, in Python or in a library in Rust, such as safetensors.

    The class of a panic in Rust cannot be imported. Other panics are faults of a library.
    """
    is_panic = type(error).__name__ == "PanicException"
    return isinstance(error, MemoryError) or (is_panic and "pointer is null" in str(error))


def _describe_system_error(error: BaseException) -> tuple[str, int]:
    """Return the message and the exit code for a lack of memory, disk space or permissions."""
    if _lacks_memory(error):
        reason = f" ({first_line(error)})" if str(error) else ""
        message = f"there is not enough memory{reason}. Free some, or split the input"
        code = LlmcondError.exit_code
    elif is_disk_full(error):
        message, code = f"the disk is full: {error}", DiskFullError.exit_code
    else:
        forbidden = isinstance(error, PermissionError)
        message, code = str(error), (UserError if forbidden else LlmcondError).exit_code
    return f"{message}. Stored results are kept.", code


def _print_error(text: str, code: int) -> int:
    sys.stderr.write(f"llmcond: error: {escape_control_characters(' '.join(text.split()))}\n")
    return code


def _command(name: str) -> type[Command]:
    """Import the class of a command."""
    module, _, cls = COMMANDS[name].partition(":")
    command: type[Command] = getattr(import_module(f"llmcond.commands.{module}"), cls)
    return command


def _summaries() -> dict[str, str]:
    """Return the first line of the docstring of each command, without importing its options."""
    summaries = {}
    for module in {path.partition(":")[0] for path in COMMANDS.values()}:
        source = Path(commands.__path__[0], f"{module}.py").read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                docstring = ast.get_docstring(node) or ""
                summaries[f"{module}:{node.name}"] = docstring.partition("\n")[0]
    return {name: summaries[path] for name, path in COMMANDS.items()}


class _OnlyWithVersion(argparse.Action):
    """An action for ``--verbose``, which ``_run`` accepts together with ``--version``."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error("only the version has a verbose form, and without a command")


class _PrintCompletion(argparse.Action):
    """An action that prints the completion script of a shell, and ends the program."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: object, values: object, *__: object
    ) -> None:
        import shtab

        described = _parser()
        for command in described.commands.values():
            for action in command._actions:
                if not action.choices and action.nargs != 0:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
        sys.stdout.write(f"{shtab.complete(described, str(values))}\n")
        parser.exit()


def _parser() -> Parser:
    """Return the parser of the command line, with the options of all commands."""
    parser = _lazy_parser()
    for command_parser in parser.commands.values():
        command_parser.add_options()
    return parser


@cache  # Commands and their options do not change within a process.
def _lazy_parser() -> Parser:
    """Return the parser of the command line, in which a command gets its options on first use."""
    parser = Parser(
        prog="llmcond",
        allow_abbrev=False,
        description="Text embeddings under a condition: one vector for each text and aspect.",
        epilog="First steps: `llmcond extract --model minilm`, `llmcond fit-head --head mlp`, "
        "`llmcond evaluate`. Exit codes: 0 success, 2 invalid input, 130 interrupted, "
        "143 terminated, 1 any other error.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"llmcond {__version__}",
        help="print the version; with --verbose also those of libraries, the device and the extras",
    )
    parser.add_argument("--verbose", action=_OnlyWithVersion, nargs=0, help=argparse.SUPPRESS)
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print a script that completes commands and flags in this shell",
    )
    subparsers = {
        "": parser.add_subparsers(
            dest="command", metavar="COMMAND", required=True, parser_class=Parser
        )
    }
    parsers: dict[str, Parser] = {}
    for name, summary in _summaries().items():
        parent, _, last = name.rpartition(" ")
        if parent not in subparsers:
            subparsers[parent] = (
                subparsers[""]
                .choices[parent]
                .add_subparsers(dest="subcommand", metavar="ACTION", prog=f"llmcond {parent}")
            )
        command_parser = subparsers[parent].add_parser(
            last, allow_abbrev=False, help=summary.replace("%", "%%")
        )
        if parent:
            command_parser.set_defaults(subcommand=name)
        command_parser.load = partial(_command, name)
        parsers[name] = command_parser
        command_parser.commands = parsers
    parser.commands = parsers
    return parser
