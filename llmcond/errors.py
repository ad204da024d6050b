"""Errors that are meant for people: what was got, what was expected, what to do."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class LlmcondError(Exception):
    """Something failed that is not the user's input. The command line exits with 1."""

    exit_code = 1


class UserError(LlmcondError):
    """The user's input was wrong. The message is one line; the command line exits with 2."""

    exit_code = 2


class DiskFullError(UserError):
    """The disk has no room for what was to be written; nothing already stored is lost."""


#: What pip installs llmcond from: a clone, in whose folder pip runs, as no index has the package.
_DISTRIBUTION = "."


def install_command(extra: str) -> str:
    """Return what installs the libraries of an extra, for messages."""
    return f"pip install '{_DISTRIBUTION}[{extra}]' in the repository's folder"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question naming the known spellings nearest to ``name``; empty if none is near."""
    matches = get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(map(repr, matches))}?" if matches else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence naming the known spellings nearest to ``name``, or all that are known."""
    names = sorted(known)
    return did_you_mean(name, names) or f"Known: {', '.join(names) or 'none'}."


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def is_disk_full(error: BaseException) -> bool:
    """Return whether ``error`` says that the disk is full.

    Lance reports the operating system's error inside a message of its own, so the text is
    looked at where there is no ``errno``.
    """
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return True
    return any(f"(os error {code})" in str(error) for code in _NO_ROOM)


def disk_full_error() -> OSError:
    """Return the OSError of a full disk."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raise_disk_error(error: BaseException, path: object, remaining: str) -> None:
    """Raise a DiskFullError or UserError if a disk is full or not writable; otherwise return.

    ``remaining`` ends the message of a full disk: what at ``path`` stays usable.
    """
    if is_disk_full(error):
        raise DiskFullError(
            f"the disk is full: {path} cannot grow. Free some space and run the same command "
            f"again; {remaining}."
        ) from error
    if isinstance(error, PermissionError):
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


def printable(text: str) -> str:
    """Return ``text`` with control characters written out, so that it steers no terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def brief(value: object, most: int = 80) -> str:
    """Return how a value is written in Python, cut to so many characters."""
    # What is cut off need not be written first.
    text = repr(value[: most + 1] if isinstance(value, str) else value)
    return text if len(text) <= most else f"{text[:most]}…"


def listed(values: Sequence[object], most: int = 20) -> str:
    """Return values for a message, so many of them at most, each one cut."""
    told = ", ".join(map(brief, values[:most])) or "none"
    return told if len(values) <= most else f"{told} and {len(values) - most:,} more"


def escaped_json(value: object) -> str:
    """Return JSON on one line, in which what could steer a terminal is escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def plural(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 text`` and ``2,000 texts``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its kind if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
