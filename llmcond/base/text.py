"""The entrance of a user's strings: encodings, valid characters, and one form of conditions.

Texts, conditions, labels, names of columns, filters and options all pass ``check_characters``:
through ``cell_text`` for cells of tables, and through ``check_string`` for everything else. Texts
are not changed.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import IO, Any, NoReturn, Self, TypeVar, cast

from llmcond.base.errors import UserError, format_list, shortened_repr
from llmcond.base.output import log

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
    while 1 < end < len(line) and (
        "\u200d" in line[end - 1 : end + 1] or unicodedata.category(line[end])[0] == "M"
    ):
        end -= 1
    return f"{line[:end].rstrip()}…"


#: Largest number of example values per condition; the encoder would cut longer lists.
MAX_VALUES = 64
#: The most wordings of a condition. Each one costs as much as a text.
MAX_WORDINGS = 64


class Condition(str):
    """A condition with example values, several wordings, or conditions to ignore.

    It can be used like any condition that is a string. As a string it is what it is known by, such
    as ``the cuisine, such as Italian, Thai`` or ``the fault | what is wrong, ignoring the
    product``. Two conditions with the same text are equal, so that they share stored vectors. All
    parts are in a normal form: composed characters (NFC), single spaces, and none around a text.
    Tables and reports show ``text`` only. A condition cannot be changed.

    Args:
        text: the condition, such as ``the cuisine``. Several wordings are separated by ``|``: the
            embedding is the mean of the embeddings under each.
        values: at most 64 example values: a list, or a text such as ``Italian, Thai``, in which
            double quotes surround a value that contains a comma, as in CSV. Spaces around a value,
            empty values and repetitions, which may differ in case, are removed.
        ignore: the conditions to ignore, for example ``["the product"]``. What they are is found
            from a collection of texts, see ``llmcond.Embedder.ignoring``.

    Raises:
        UserError: the text is not a string or is a ``Condition``, the text of values is empty, a
            value is not a string, or there are too many values or wordings.

    Attributes:
        text: the condition without its values.
        values: the example values; empty if there are none.
        ignore: the conditions to ignore; empty if there are none.

    Examples:
        >>> import llmcond
        >>> condition = llmcond.Condition("the cuisine", values=["Italian", "Thai"])
        >>> print(condition)
        the cuisine, such as Italian, Thai
        >>> condition.values
        ('Italian', 'Thai')
        >>> print(llmcond.Condition("the fault | what is wrong", ignore=["the product"]))
        the fault | what is wrong, ignoring the product
    """

    __slots__ = ("ignore", "text", "values")

    text: str
    values: tuple[str, ...]
    ignore: tuple[str, ...]

    def __new__(
        cls, text: str, values: str | Iterable[str] = (), ignore: str | Iterable[str] = ()
    ) -> Self:
        """Create a condition; see the class."""
        if not isinstance(text, str) or isinstance(text, Condition):
            expected = "its text and all values" if isinstance(text, str) else "a string"
            raise UserError(
                f"the condition is the {type(text).__name__} {shortened_repr(text)}; expected "
                f"{expected}."
            )
        text = normalise_condition(check_string(text, "the condition"))
        cleaned = example_values(values)
        if "|" in text and not text.replace("|", "").strip():
            raise UserError(f"{text!r} names no condition. Separate its wordings by |: a | b.")
        if text.count("|") >= MAX_WORDINGS:
            raise UserError(
                f"one condition has {text.count('|') + 1:,} wordings; give at most {MAX_WORDINGS}."
            )
        if cleaned and not text:
            raise UserError(
                f"the values {', '.join(cleaned)} belong to an empty condition. Name the condition."
            )
        others = [ignore] if isinstance(ignore, str) else ignore
        ignored = distinct_conditions(as_condition(one, "a condition to ignore") for one in others)
        rendered = f"{text}, such as {', '.join(cleaned)}" if cleaned else text
        if ignored:
            rendered += f", ignoring {', '.join(ignored)}"
        condition = super().__new__(cls, rendered)
        str.__setattr__(condition, "text", text)
        str.__setattr__(condition, "values", cleaned)
        str.__setattr__(condition, "ignore", tuple(ignored))
        return condition

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"a Condition cannot be changed; create a new Condition with another {name}"
        )

    def __reduce__(self) -> tuple[type[Self], tuple[str, tuple[str, ...], tuple[str, ...]]]:
        """Copy and pickle a condition by its parts."""
        return type(self), (self.text, self.values, self.ignore)


#: A condition, or None where there is none.
_C = TypeVar("_C", bound="str | None")


def ignored_by(condition: str | None) -> tuple[str, ...]:
    """Return the conditions that a condition ignores."""
    return condition.ignore if isinstance(condition, Condition) else ()


def ignoring(condition: str, others: Iterable[str]) -> str:
    """Return a condition that also ignores others; itself if there are none.

    Raises:
        UserError: as ``Condition``, or the condition is among the others.
    """
    others = list(others)
    text = condition_text(condition)
    if condition_key(text) in map(condition_key, others):
        raise UserError(f"{shortened_repr(text)} cannot ignore itself. Ignore something else.")
    if not others:
        return condition
    return Condition(text, getattr(condition, "values", ()), [*ignored_by(condition), *others])


def without_ignored(condition: _C) -> _C:
    """Return a condition that ignores nothing, and is otherwise the same."""
    if isinstance(condition, Condition) and condition.ignore:
        text, values = condition.text, condition.values
        return cast("_C", Condition(text, values) if values else as_condition(text))
    return condition


def wordings(condition: _C) -> tuple[_C, ...]:
    """Return the conditions that the encoder reads for a condition, one for each wording."""
    if not isinstance(condition, Condition):
        return (condition,)
    texts = dict.fromkeys(filter(None, map(normalise_condition, condition.text.split("|"))))
    values: Any = condition.values
    return tuple(Condition(text, values) if values else text for text in texts) or ("",)  # type: ignore[misc, return-value]


def example_values(values: str | Iterable[object]) -> tuple[str, ...]:
    """Return example values in their normal form, without empty values and repetitions.

    ``Condition`` describes the argument and the errors.
    """
    unique: dict[str, str] = {}
    if hasattr(values, "to_pylist"):  # An Arrow array yields Arrow scalars.
        values = values.to_pylist()
    if not isinstance(values, Iterable) or isinstance(values, bytes | Mapping):
        raise UserError(
            f"the example values are {shortened_repr(values)}; expected a list, or a text such as "
            "'Italian, Thai'."
        )
    for value in read_values(values) if isinstance(values, str) else values:
        if not isinstance(value, str):
            raise UserError(
                f"the example value {shortened_repr(value)} is not a string; expected strings."
            )
        check_string(value, "the example value")
        unique.setdefault(condition_key(value), normalise_condition(value))
    unique.pop("", None)
    if len(unique) > MAX_VALUES:
        raise UserError(
            f"one condition has {len(unique):,} example values; give at most {MAX_VALUES}."
        )
    return tuple(unique.values())


def read_values(text: str) -> list[str]:
    """Parse a text such as ``a, b, "c, d"`` as CSV, and return its values.

    Raises:
        UserError: a quote is not closed, or is within a value.
    """
    # The csv module does not allow spaces after a closing quote.
    tidy = re.sub(r'"[ \t]+(?=,|$)', '"', text)
    rows = csv.reader(io.StringIO(tidy), skipinitialspace=True, strict=True)
    try:
        return list(chain.from_iterable(rows))
    except csv.Error as error:
        raise UserError(
            f"the values {shortened_repr(text)} cannot be read: {error}. Separate values by "
            "commas, and put "
            'double quotes around a value that contains a comma: Rome, "Paris, Texas".'
        ) from error


def write_values(values: Sequence[str]) -> str:
    """Return the text that ``read_values`` reads as these values."""
    return ", ".join(
        '"{}"'.format(value.replace('"', '""')) if set(',"') & set(value) else value
        for value in values
    )


def as_condition(condition: object, name: str = "the condition") -> str:
    """Return a condition in the form in which it is encoded, stored and compared.

    All conditions of users pass this function or ``Condition``. Equal conditions in another Unicode
    form or with other white space become equal texts.

    Args:
        condition: a text, or a ``Condition``, which is returned unchanged. A text with several
            wordings, ``the fault | what is wrong``, becomes a ``Condition``.
        name: name of the condition in messages.

    Raises:
        UserError: it is empty or not a text, or contains an invalid character.
    """
    text = check_text(condition, name, "Give a text, such as 'the topic'.")
    if isinstance(condition, Condition):
        return condition
    return Condition(text) if "|" in text else normalise_condition(text)


def distinct_conditions(conditions: Iterable[str]) -> list[str]:
    """Return conditions without those that differ from an earlier one in form or case only."""
    unique: dict[str, str] = {}
    for condition in conditions:
        unique.setdefault(condition_key(condition), condition)
    return list(unique.values())


def condition_flags(condition: str) -> str:
    """Return the command-line options that stand for a condition."""
    if not isinstance(condition, Condition):
        return f"--condition {shortened_repr(condition)}"
    flags = [f"--condition {shortened_repr(condition.text)}"]
    if condition.values:
        flags.append(f"--values {write_values(condition.values)!r}")
    return " ".join([*flags, *(f"--ignore {shortened_repr(one)}" for one in condition.ignore)])


def combine_values(conditions: Sequence[str], values: Sequence[str]) -> list[str]:
    """Combine the arguments of ``--condition`` and ``--values``, in their order.

    Without ``--values``, the conditions are texts in their normal form. An empty text gives its
    condition no values. A single condition gets the values of every ``--values``. A condition that
    differs from an earlier one in form or case only is left out, with a line in the log.

    Raises:
        UserError: a condition is empty, the numbers of conditions and values differ, or
            ``Condition`` raises it.
    """
    texts = [as_condition(text, "--condition") for text in conditions]
    combined = texts
    if len(texts) == 1 and values:
        combined = [
            Condition(conditions[0], [value for text in values for value in read_values(text)])
        ]
    elif values and len(values) != len(texts):
        raise UserError(
            f"there are {len(values)} --values and {len(texts)} --condition. Give --values once "
            "for each --condition, in the same order, with all values of the condition in one "
            "text: --values 'Italian, Thai' ('' for a condition without values)."
        )
    elif values:
        combined = [Condition(*pair) for pair in zip(conditions, values, strict=True)]
    distinct = distinct_conditions(combined)
    if len(distinct) < len(combined):
        counts = Counter(map(condition_key, combined))
        repeated = [condition_text(text) for text in distinct if counts[condition_key(text)] > 1]
        log.info(
            f"--condition {format_list(repeated, 5)} is given more than once and counts once; case "
            "and spacing make no difference"
        )
    return distinct


def condition_text(condition: str) -> str:
    """Return a condition without its values, as tables and reports show it."""
    return condition.text if isinstance(condition, Condition) else condition


def condition_titles(conditions: Sequence[str]) -> list[str]:
    """Return a distinct title for each condition: its text, with values if texts are repeated."""
    texts = list(map(condition_text, conditions))
    return texts if len(set(texts)) == len(texts) else list(map(str, conditions))


def condition_json(condition: str | None) -> dict[str, Any]:
    """Return a condition as JSON: its text, and its values and what it ignores, if anything."""
    if not isinstance(condition, Condition):
        return {"condition": condition}
    parts = {name: list(getattr(condition, name)) for name in ("values", "ignore")}
    return {"condition": condition.text} | {name: part for name, part in parts.items() if part}


def add_values(conditions: Sequence[str], values: str | Sequence[str] | None) -> list[str]:
    """Return conditions in their normal form, each with the same values if there are any."""
    combined = {
        condition: as_condition(condition) if values is None else Condition(condition, values)
        for condition in dict.fromkeys(conditions)
    }
    return [combined[condition] for condition in conditions]


#: The bytes at the beginning of a file by which its encoding or format is recognised.
_START_BYTES = 2**16
#: Byte order marks, the longer ones first, with the encodings that skip them.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
#: Encodings that users give files without a byte order mark.
_UNMARKED = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
#: First bytes of files that are not text, with what they are and what to do.
_BINARY = (
    (b"\x1f\x8b", "is compressed with gzip. Give it a name that ends in .gz, or decompress it"),
    (b"PK\x03\x04", "is a ZIP archive or an Excel workbook. Name it .xlsx, or save it as .csv"),
    (b"\xd0\xcf\x11\xe0", "is an old Excel or Word file. Save it as .xlsx or .csv"),
    (b"PAR1", "is a Parquet file. Give it a name that ends in .parquet"),
    (b"ARROW1", "is an Arrow (Feather) file. Save it as .parquet or .csv"),
    (b"SQLite format 3\0", "is an SQLite database. Export a table as .csv"),
    (b"%PDF-", "is a PDF. Extract its text first"),
    (b"BZh", "is compressed with bzip2. Decompress it first"),
    (b"\xfd7zXZ\0", "is compressed with xz. Decompress it first"),
    (b"\x28\xb5\x2f\xfd", "is compressed with Zstandard. Decompress it first"),
)


def check_encoding(encoding: str) -> str:
    """Return the name of an encoding if Python can decode text from it.

    Raises:
        UserError: there is no such encoding, or it is not one of texts.
    """
    try:
        b"a".decode(encoding, "ignore")
    except (LookupError, ValueError):
        raise UserError(
            f"--encoding is {encoding!r}, which is not an encoding of texts. Name one, such as "
            "cp1252 (Windows), latin-1, utf-16, gb18030 or shift_jis."
        ) from None
    return encoding


def open_text(
    stream: IO[bytes],
    name: str,
    encoding: str | None = None,
    newline: str | None = None,
    flag: bool = False,
) -> io.TextIOWrapper:
    """Return the text of a file.

    Args:
        stream: a file, which can be rewound.
        name: name of the file in messages.
        encoding: its encoding; None: UTF-8, or the one of its byte order mark.
        newline: as for ``io.TextIOWrapper``.
        flag: whether the command has the option ``--encoding``.

    Raises:
        UserError: the file is not text, has another encoding than the named one, or is UTF-16 or
            UTF-32 without a mark.
    """
    start = stream.read(_START_BYTES)
    stream.seek(0)
    for magic, problem in _BINARY:
        if start.startswith(magic) and (b"\0" in start or not _is_utf_8(start)):
            raise UserError(f"{name} is not text: it {problem}.")
    marked = next((codec for mark, codec in _MARKS if start.startswith(mark)), None)
    if encoding is None:
        guess = None if marked else _guess_unmarked(start)
        if guess is not None:
            advice = f"add --encoding {guess}" if flag else _convert_command(guess, name)
            raise UserError(
                f"{name} seems to be {guess.upper()[:6]} without a byte order mark: {advice}."
            )
        return io.TextIOWrapper(stream, marked or "utf-8", newline=newline)
    codec = codecs.lookup(encoding).name
    if marked:
        if not marked.startswith(codec.removesuffix("-le").removesuffix("-be")):
            raise UserError(
                f"{name} begins with the byte order mark of {marked.removesuffix('-sig').upper()}, "
                f"so it is not {encoding}. Leave out --encoding."
            )
        codec = marked
    elif not codec.startswith("utf") and not start.isascii() and _is_utf_8(start):
        _warn_utf_8(name, encoding)
    return io.TextIOWrapper(stream, codec, newline=newline)


def read_text_file(path: Path) -> str:
    """Return the text of a small file, with line feeds only.

    Raises:
        UserError: the file is not text, or as ``undecodable_error``.
        OSError: the file cannot be read.
    """
    content = path.read_bytes()
    try:
        return open_text(io.BytesIO(content), str(path)).read()
    except UnicodeError as error:
        raise undecodable_error(error, str(path), io.BytesIO(content)) from error


def undecodable_error(
    error: UnicodeError,
    name: str,
    lines: Iterable[bytes],
    encoding: str | None = None,
    flag: bool = False,
) -> UserError:
    """Return the error for users about a file that cannot be decoded.

    Args:
        error: the original error.
        name: name of the file.
        lines: the lines of the file, from its beginning.
        encoding: encoding that the user named; None: none.
        flag: whether the command has the option ``--encoding``.
    """
    codec = getattr(error, "encoding", "utf-8")
    if encoding is not None or not codec.startswith("utf-8"):
        byte = _byte_text(error)
        expected = encoding or f"{codec.upper()[:6]}, as its byte order mark says"
        advice = "Name another --encoding" if encoding else "It is damaged or cut off"
        return UserError(f"{name} is not {expected}: {byte} cannot be read. {advice}.")
    number, line, has_utf_8 = 0, b"", False
    for number, line in enumerate(lines, 1):  # noqa: B007 - the last ones are used below
        if not _decodes(line, "utf-8"):
            break
        has_utf_8 = has_utf_8 or not line.isascii()
    where = f"{name} is not UTF-8: {_byte_text(error)} in line {number} cannot be read."
    if has_utf_8:
        return UserError(f"{where} Earlier lines are UTF-8; correct this line.")
    # Most letters of Western languages are ASCII.
    western = _decodes(line, "cp1252") and 2 * sum(byte > 127 for byte in line) <= len(line)
    if flag:
        advice = "add --encoding cp1252" if western else "name it with --encoding"
    else:
        advice = _convert_command("WINDOWS-1252" if western else "ENCODING", name)
    guess = "Windows-1252" if western else "the Windows encoding of its language, such as gb18030"
    return UserError(f"{where} If it is from Windows, it is probably {guess}: {advice}.")


def _convert_command(encoding: str, name: str) -> str:
    return f"convert it: iconv -f {encoding.upper()} -t UTF-8 {shlex.quote(name)}"


def _byte_text(error: UnicodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte 0x{error.object[error.start]:02x}"
    return "a part of it"


def _decodes(content: bytes, encoding: str) -> bool:
    try:
        content.decode(encoding)
    except UnicodeError:
        return False
    return True


def _is_utf_8(start: bytes) -> bool:
    """Return whether the beginning of a file is UTF-8; its last line may be cut."""
    return _decodes(start.rpartition(b"\n")[0] if len(start) == _START_BYTES else start, "utf-8")


@cache
def _warn_utf_8(name: str, encoding: str) -> None:
    log.warning(
        f"{name} is read as {encoding}, as --encoding says, but it is valid UTF-8; if letters such "
        "as é look wrong, leave out --encoding"
    )


def _guess_unmarked(start: bytes) -> str | None:
    """Return the encoding of UTF-16 or UTF-32 without a mark, or None for other content.

    Their text has NUL in its ASCII characters, and other control characters in Cyrillic and Arabic
    letters; a text in UTF-8 may contain a few by mistake.
    """
    n_controls = sum(start.count(byte) for byte in range(32) if byte not in b"\t\n\r")
    if b"\0" not in start or (4 * n_controls < len(start) and _is_utf_8(start)):
        return None
    is_complete, plausible = len(start) < _START_BYTES, list[tuple[int, str, str]]()
    for encoding in _UNMARKED:
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(start, final=is_complete)
        except UnicodeError:
            continue
        if all(c in "\t\n\r" or unicodedata.category(c) not in ("Cc", "Cn", "Co") for c in text):
            plausible.append((sum(map(str.isascii, text)), encoding, text))
    _, best, text = max(plausible, key=lambda each: each[0], default=(0, None, ""))
    # Stray NULs in another encoding do not make its line feeds two bytes long.
    return best if 2 * text.count("\n") >= start.count(b"\n") else None
