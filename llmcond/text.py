"""The entrance of a user's strings: valid characters, and one normal form for conditions.

Texts, conditions, labels, names of columns, filters and options all pass ``check_characters``:
through ``cell_text`` for cells of tables, and through ``check_string`` for everything else. Texts
are not changed.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from llmcond.errors import UserError, shortened_repr

_INVALID = re.compile("[\0\ud800-\udfff]")


def check_characters(text: str) -> None:
    """Check that a text can be written to files, and that the encoder can read it.

    Raises:
        ValueError: the text contains half of a surrogate pair, or NUL; the message is a predicate.
    """
    match = _INVALID.search(text)
    if match is None:
        return
    if match[0] == "\0":
        raise ValueError("contains a NUL character; if it is from a file, that may be UTF-16")
    raise ValueError("contains half of a surrogate pair, which is not a valid character")


def check_string(value: str, name: str) -> str:
    """Return a string of a user if its characters are valid.

    Args:
        value: the string: an option, a label, the name of a column, a filter.
        name: name of the string in the message.

    Raises:
        UserError: as ``check_characters``.
    """
    try:
        check_characters(value)
    except ValueError as error:
        raise UserError(f"{name} is {shortened_repr(value)}, which {error}. Correct it.") from None
    return value


class EmptyTextError(ValueError):
    """A cell that must have a text is empty; the message is a predicate."""


def cell_text(value: object) -> str:
    """Return the text of a cell of a table.

    Raises:
        EmptyTextError: the cell is blank, None or NaN.
        ValueError: the cell is not a text, or as ``check_characters``; the message is a predicate.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise EmptyTextError(f"is empty ({value})")
    if not isinstance(value, str):
        raise ValueError(f"is {shortened_repr(value)}, not a text")
    if not value.strip():
        raise EmptyTextError("is empty")
    check_characters(value)
    return str(value)


def check_text(value: object, name: str, advice: str = "") -> str:
    """Return a text that a user gave if it is one, as a cell of a table.

    Args:
        value: the text.
        name: name of the text in the message.
        advice: sentence at the end of the message.

    Raises:
        UserError: as ``cell_text``.
    """
    try:
        return cell_text(value)
    except ValueError as error:
        raise UserError(f"{name} {error}. {advice}".rstrip()) from None


def check_cell(value: Any) -> Any:
    """Return a cell unchanged if the characters of its texts are valid.

    Raises:
        ValueError: as ``check_characters``.
    """
    if isinstance(value, str):
        check_characters(value)
    elif isinstance(value, Mapping):
        for item in value.items():
            check_cell(item)
    elif isinstance(value, list | tuple):
        for item in value:
            check_cell(item)
    return value


def normalise_condition(text: str) -> str:
    """Return the form in which a condition is encoded, stored and compared.

    The form is NFC without surrounding white space, and each run of white space, such as a no-break
    space or a line break, is a single space.
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def condition_cell(value: object) -> str:
    """Return the condition in a cell of a table, in its normal form.

    Raises:
        ValueError: as ``cell_text``.
    """
    return normalise_condition(cell_text(value))


def condition_key(text: str) -> str:
    """Return a key that two conditions share if they differ in form, white space or case only.

    Compatible characters count as the same, such as full-width and half-width letters, and
    invisible format characters do not count.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return normalise_condition("".join(c for c in folded if unicodedata.category(c) != "Cf"))


def shorten(text: str, max_length: int = 80) -> str:
    """Return a text on one line, cut to about ``max_length`` characters.

    A letter is not separated from its combining marks, nor a part from its emoji.
    """
    # A long text is cut before it is split, because the rest does not matter.
    line = " ".join(text[: 2 * max_length].split())
    if len(line) <= max_length and len(text) <= 2 * max_length:
        return line
    end = min(max_length, len(line))
    while end > 1 and end < len(line) and _continues(line[end - 1], line[end]):
        end -= 1
    return f"{line[:end].rstrip()}…"


def _continues(before: str, character: str) -> bool:
    """Return whether a character belongs to the one before it."""
    return "\u200d" in (before, character) or unicodedata.category(character)[0] == "M"
