"""Find flags in an error message that the command does not have."""

import re
from collections.abc import Sequence

from llmcond.cli import _parser
from llmcond.commands import COMMANDS

_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
#: Complete commands within a message: those of llmcond, and those of other programs.
_NAMED = re.compile(rf"\bllmcond ({'|'.join(sorted(COMMANDS, reverse=True))})\b([^`;,)]*)")
_OTHERS = re.compile(r"\b(?:pip install|ray start|hf download|hf upload|iconv)\b[^`;,)]*")


def unknown_flags(arguments: Sequence[str], error: str) -> list[str]:
    """Return the flags in an error message that the command does not have.

    A message may repeat what the user entered. Flags of a complete command in the message are
    compared with those of that command.
    """
    rest = _OTHERS.sub("", error)
    entered = {argument.partition("=")[0] for argument in arguments}
    words = [argument for argument in arguments if not argument.startswith("-")]
    names = (name for name in (" ".join(words[:2]), *words[:1]) if name in COMMANDS)
    unknown = _missing(_NAMED.sub("", rest), next(names, ""), entered)
    for name, text in _NAMED.findall(rest):
        unknown += _missing(text, name, set())
    return unknown


def _missing(text: str, command: str, entered: set[str]) -> list[str]:
    parser = _parser()
    known = {*parser.commands.get(command, parser).flags, *entered}
    return [flag for flag in _FLAG.findall(text) if flag not in known]


def change_flags(words: Sequence[object], *changes: object) -> list[object]:
    """Return the words of a command with some flags changed or added.

    No flag may be given twice, so that each flag in ``changes`` replaces that of the command.
    """
    flags = {_plain(word) for word in changes}
    rest, is_changed = [], False
    for word in words:
        if str(word).startswith("--"):
            is_changed = _plain(word) in flags
        if not is_changed:
            rest.append(word)
    return [*rest, *changes]


def _plain(word: object) -> str:
    """Return the name of a flag without ``no-``, and other words as they are."""
    return str(word).replace("--no-", "--")
