"""Text files of users: their encoding, and advice where it is not the expected one.

A file is UTF-8, or UTF-16 or UTF-32 with a byte order mark, unless the user names its encoding.
"""

from __future__ import annotations

import codecs
import io
import shlex
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import IO

from llmcond.errors import UserError
from llmcond.log import log

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


def check_encoding(encoding: str, flag: str = "--encoding") -> str:
    """Return the name of an encoding if Python can decode text from it.

    Raises:
        UserError: there is no such encoding, or it is not one of texts.
    """
    try:
        b"a".decode(encoding, "ignore")
    except (LookupError, ValueError):
        raise UserError(
            f"{flag} is {encoding!r}, which is not an encoding of texts. Name one, such as cp1252 "
            "(Windows), latin-1, utf-16, gb18030 or shift_jis."
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
    plausible: dict[str, str] = {}
    for encoding in _UNMARKED:
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(
                start, final=len(start) < _START_BYTES
            )
        except UnicodeError:
            continue
        if all(c in "\t\n\r" or unicodedata.category(c) not in ("Cc", "Cn", "Co") for c in text):
            plausible[encoding] = text
    count_ascii: Callable[[str], int] = lambda e: sum(map(str.isascii, plausible[e]))  # noqa: E731
    best = max(plausible, key=count_ascii, default=None)
    # Stray NULs in another encoding do not make its line feeds two bytes long.
    is_split = best is not None and 2 * plausible[best].count("\n") >= start.count(b"\n")
    return best if is_split else None
