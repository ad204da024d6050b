"""Errors for users, and helpers for their messages.

A message says what was given, what was expected, and what to do.
"""

from __future__ import annotations

import errno
import json
import os
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches


class LlmcondError(Exception):
    """An operation failed although the input is valid; the base class of all errors of llmcond.

    The command line prints the message in one line and exits with code 1.

    Examples:
        >>> import llmcond
        >>> try:
        ...     llmcond.Condition("the cuisine", values=[1])
        ... except llmcond.LlmcondError as error:
        ...     error.exit_code
        2
    """

    exit_code = 1


class UserError(LlmcondError):
    """The user's input is invalid.

    The command line prints the message in one line and exits with code 2.

    Examples:
        >>> import llmcond
        >>> try:
        ...     llmcond.Condition("the cuisine", values=[1])
        ... except llmcond.UserError as error:
        ...     print(error)
        the example value 1 is not a string; expected strings.
    """

    exit_code = 2


class DiskFullError(UserError):
    """The disk is full. Everything that was stored before is intact."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra, for messages.

    pip finds that llmcond is installed, wherever it came from, and adds the extra's libraries.
    """
    return f"pip install 'llmcond[{extra}]'"


def did_you_mean(
    name: str,
    known: Iterable[str],
    key: Callable[[str], str] = lambda name: name,
    cutoff: float = 0.5,
) -> str:
    """Return a question that suggests the known names nearest to ``name``; empty without any.

    ``key`` returns the part of a name that is compared, and ``cutoff`` is the smallest similarity.
    """
    compared = {key(known_name): known_name for known_name in sorted(known)}
    matches = get_close_matches(key(name), compared, n=3, cutoff=cutoff)
    names = " or ".join(repr(compared[match]) for match in matches)
    return f"Did you mean {names}?" if matches else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the known names nearest to ``name``, or lists all of them."""
    names = sorted(known)
    return did_you_mean(name, names) or f"Known: {', '.join(names) or 'none'}."


def list_legal_values(name: str, known: Iterable[str], legal: Iterable[str] | None = None) -> str:
    """Return a sentence that lists the legal values, after a suggestion if one of them is near.

    Args:
        name: the invalid value.
        known: names that may be suggested.
        legal: the values as they are listed; None: ``known``.
    """
    known = list(known)
    listed = f"Legal: {', '.join(known if legal is None else legal)}."
    return f"{did_you_mean(name, known)} {listed}".lstrip()


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def is_disk_full(error: BaseException) -> bool:
    """Return whether ``error`` reports a full disk.

    Lance reports the operating system's error within its own message, so an error without ``errno``
    is recognised by its text.
    """
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return True
    return any(f"(os error {code})" in str(error) for code in _NO_ROOM)


def disk_full_error() -> OSError:
    """Return an OSError that reports a full disk."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raise_disk_error(error: BaseException, path: object, remaining: str) -> None:
    """Raise an error for users if a disk is full or not writable; otherwise return.

    Args:
        error: the original error.
        path: file or folder that was written.
        remaining: end of the message about a full disk: what at ``path`` is still usable.

    Raises:
        DiskFullError: the disk is full.
        UserError: ``path`` may not be written.
    """
    if is_disk_full(error):
        raise DiskFullError(
            f"the disk is full: {path} cannot grow. Free some space and run the same command "
            f"again; {remaining}."
        ) from error
    if isinstance(error, PermissionError):
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


def escape_control_characters(text: str) -> str:
    """Escape the control characters of a text, so that it cannot control a terminal.

    The joiners U+200C and U+200D only choose the forms of letters and emoji, and stay, as do all
    kinds of spaces.
    """

    def is_harmless(c: str) -> bool:
        return c.isprintable() or c in "\n\u200c\u200d" or unicodedata.category(c) == "Zs"

    return "".join(c if is_harmless(c) else repr(c)[1:-1] for c in text)


def shortened_repr(value: object, max_length: int = 80) -> str:
    """Return the ``repr`` of a value on one line, cut to ``max_length`` characters."""
    # A long string is cut before its repr is computed. Arrays and tables have several lines.
    text = repr(value[: max_length + 1] if isinstance(value, str) else value).replace("\n", " ")
    return text if len(text) <= max_length else f"{text[:max_length]}…"


def format_list(values: Sequence[object], most: int = 20) -> str:
    """Return a list of values for a message, of at most ``most`` values, each cut."""
    shown = ", ".join(map(shortened_repr, values[:most])) or "none"
    return shown if len(values) <= most else f"{shown} and {len(values) - most:,} more"


def escaped_json(value: object) -> str:
    """Return a value as JSON on one line, with control characters escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 text`` and ``2,000 texts``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return str(error).strip().partition("\n")[0].strip() or type(error).__name__
