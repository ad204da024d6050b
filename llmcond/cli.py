"""The command line: the commands by their modules, exit codes, and errors in one line."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from llmcond import commands
from llmcond.commands.base import Command, Parser, add_arguments, run_command
from llmcond.errors import (
    DiskFullError,
    LlmcondError,
    UserError,
    first_line,
    is_disk_full,
    printable,
)
from llmcond.log import log_to_terminal
from llmcond.version import __version__

_MODULES = {module.name for module in iter_modules(commands.__path__)} - {"base"}
#: Names of all commands, from those of their modules; ``prompts_show`` is within ``prompts``.
COMMANDS = frozenset(
    name.replace("_", " " if name.rpartition("_")[0] in _MODULES else "-") for name in _MODULES
)


class _Interrupted(KeyboardInterrupt):
    """Raised by Ctrl-C, and by SIGTERM, as schedulers and containers send it.

    Python ends by the signal where its own exception passed through exec.
    """


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Let signals that end the process raise; those that somebody else handles stay as they are.

    Yield those that came: Ray's C++ raises an interrupt of its own in the place of ours.
    """
    came: list[int] = []
    usual = (signal.default_int_handler, signal.SIG_DFL)
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    mine = [one for one, handler in before.items() if handler in usual]
    if threading.current_thread() is not threading.main_thread():
        mine = []

    def end(number: int, _: object) -> None:
        came.append(number)
        raise _Interrupted

    for one in mine:
        signal.signal(one, end)
    try:
        yield came
    finally:
        for one in mine:
            signal.signal(one, before[one])


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code.

    0: done, 2: wrong input, 130: interrupted by Ctrl-C, 143: ended by SIGTERM, 1: anything else.
    """
    with _signals() as came:
        return _run(arguments, came)


def _run(arguments: Sequence[str], signals: Sequence[int]) -> int:
    log_to_terminal()
    command: type[Command] = Command
    try:
        given = vars(_parser().parse_args(arguments))
        command = _command(given.get("subcommand") or given["command"])
        try:
            run_command(command, given)
        except Exception as error:
            if signals:  # libraries answer a signal by errors of their own
                raise _Interrupted from error
            raise
        sys.stdout.flush()
    except LlmcondError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        # 128 and the signal's number, as shells have it.
        reason, code = ("terminated", 143) if signal.SIGTERM in signals else ("interrupted", 130)
        return _complain(f"{reason}; {command.if_interrupted}.", code)
    except BrokenPipeError:
        # The reader of a pipe left (`| head`); nothing more can be said on standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MemoryError, OSError) as error:
        return _complain(*_of_the_machine(error))
    return 0


def _of_the_machine(error: MemoryError | OSError) -> tuple[str, int]:
    """Return what is said of too little memory, room or rights, and the exit code."""
    if isinstance(error, MemoryError):
        reason = f" ({first_line(error)})" if str(error) else ""
        said = f"there is not enough memory{reason}. Free some, or split what is read"
        code = LlmcondError.exit_code
    elif is_disk_full(error):
        said, code = f"the disk is full: {error}", DiskFullError.exit_code
    else:
        wrong = isinstance(error, PermissionError)
        said, code = str(error), (UserError if wrong else LlmcondError).exit_code
    return f"{said}. What was stored is kept.", code


def _complain(text: str, code: int) -> int:
    sys.stderr.write(f"llmcond: error: {printable(' '.join(text.split()))}\n")
    return code


def _command(name: str) -> type[Command]:
    """Return the class of a command: the only one that its module defines."""
    module = import_module(f"llmcond.commands.{re.sub('[ -]', '_', name)}")
    (found,) = (
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, Command) and one.__module__ == module.__name__
    )
    return found


@cache  # commands and their options are the same for every run of a process
def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="llmcond",
        allow_abbrev=False,
        description="Condition-aware text embeddings: small heads on frozen LLM encoders.",
        epilog="First steps: `llmcond extract --model minilm`, `llmcond fit-head --head mlp`, "
        "`llmcond evaluate`. Exit codes: 0 done, 2 wrong input, 130 interrupted, "
        "143 terminated, 1 anything else.",
    )
    parser.add_argument("--version", action="version", version=f"llmcond {__version__}")
    places = {
        "": parser.add_subparsers(
            dest="command", metavar="COMMAND", required=True, parser_class=Parser
        )
    }
    for name in sorted(COMMANDS, key=lambda name: _command(name).position):
        parent, _, last = name.rpartition(" ")
        if parent not in places:
            places[parent] = (
                places[""]
                .choices[parent]
                .add_subparsers(dest="subcommand", metavar="ACTION", prog=f"llmcond {parent}")
            )
        cls = _command(name)
        summary = inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
        added = places[parent].add_parser(
            last,
            allow_abbrev=False,
            help=summary.replace("%", "%%"),
            description=inspect.cleandoc(cls.__doc__ or ""),
            epilog=f"Example: {cls.example}",
        )
        if parent:
            added.set_defaults(subcommand=name)
        add_arguments(added, cls)
    return parser
