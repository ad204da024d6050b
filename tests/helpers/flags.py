"""Which flags an error names, and whether the command that told it has them."""

import argparse
import re
from collections.abc import Iterator, Sequence

from llmcond.cli import COMMANDS, _parser

_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
#: Commands that are named in full, up to where they end: of llmcond and of other programs.
_NAMED = re.compile(rf"\bllmcond ({'|'.join(sorted(COMMANDS, reverse=True))})\b([^`;,)]*)")
_OTHERS = re.compile(r"\b(?:pip install|ray start|hf download|hf upload|iconv)\b[^`;,)]*")


def unknown_flags(arguments: Sequence[str], error: str) -> list[str]:
    """Return the flags that an error names and the command does not take.

    What the user gave may be repeated, and a command that is named in full has flags of its own.
    """
    rest = _OTHERS.sub("", error)
    given = {argument.partition("=")[0] for argument in arguments}
    unknown = list(_missing(_NAMED.sub("", rest), _name(arguments), given))
    for name, words in _NAMED.findall(rest):
        unknown += _missing(words, name, set())
    return unknown


def _name(arguments: Sequence[str]) -> str:
    """Return the command that arguments begin with."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    return next((name for name in (" ".join(words[:2]), *words[:1]) if name in COMMANDS), "")


def _missing(text: str, command: str, given: set[str]) -> Iterator[str]:
    known = set(_flags(command))
    yield from (flag for flag in _FLAG.findall(text) if flag not in known | given)


def _flags(command: str) -> Iterator[str]:
    parser = _parser()
    for word in command.split():
        subcommands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = subcommands.choices[word]
    yield from parser._option_string_actions
