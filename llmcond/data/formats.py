"""Formats of files with texts: TXT, CSV, TSV, JSON, JSONL, Parquet and Excel.

The rows of a file are the rows that are read, in the same order:

- In a ``.tsv`` file every line is a row. A field that is quoted as a whole is unquoted, as pandas
  and Excel write it; other quotation marks are text.
- In a ``.csv`` file a quoted field may contain delimiters and line breaks.
- A blank line is a row without texts, unless only blank lines follow it.
"""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
import zipfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import IO, Any

from llmcond.base.errors import (
    UserError,
    did_you_mean,
    first_line,
    format_list,
    install_command,
    shortened_repr,
)
from llmcond.base.output import log
from llmcond.base.text import open_text

#: Default names of the column of texts, in order of precedence.
TEXT_COLUMNS = ("text", "sentence")
#: Suffixes of files with one text per line.
TEXT_SUFFIXES = (".txt", "")
#: The most characters of a field or a line: a small compressed file may expand to gigabytes.
MAX_TEXT_CHARACTERS = 2**24
#: The most bytes, once decompressed, of a file that is read at once.
MAX_FILE_BYTES = 2**29
#: Delimiters of .csv files; the first whose header has the required columns is used.
DELIMITERS = (",", ";", "\t", "|")
#: Suffixes of files whose fields a delimiter separates, or could separate.
DELIMITED = (".csv", ".tsv", ".txt")
#: The lines by which the delimiter is recognised.
HEAD_LINES = 20


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The user's options about how texts are read.

    Attributes:
        encoding: encoding of text files; None: UTF-8, or the one of the byte order mark.
        delimiter: separator of columns; None: a tab in .tsv files, and detected in others.
        skip_empty: whether to leave out rows with an empty text.
        strip_html: whether to remove HTML from texts.
    """

    encoding: str | None = None
    delimiter: str | None = None
    skip_empty: bool = False
    strip_html: bool = False


def suffix_of(path: str) -> str:
    """Return the suffix of a file's format, in lower case: ``.csv`` for ``Rows.CSV.gz``."""
    return PurePosixPath(path.lower().removesuffix(".gz")).suffix


class MissingColumnError(UserError):
    """A file lacks a column.

    Attributes:
        finding: the sentence about the missing column, without advice.
        column: the first column that is missing.
    """

    def __init__(self, finding: str, advice: str, column: str) -> None:
        super().__init__(f"{finding} {advice}")
        self.finding, self.column = finding, column


@dataclass(frozen=True, slots=True)
class InputFile:
    """An open file: its content, its name in messages, its format, and how it is read."""

    stream: IO[bytes]
    name: str
    suffix: str
    read: ReadOptions | None

    @property
    def options(self) -> ReadOptions:
        """How the file is read."""
        return self.read or ReadOptions()

    def text(self, newline: str | None = None) -> io.TextIOWrapper:
        """Return the decoded content."""
        encoding, has_flag = self.options.encoding, self.read is not None
        return open_text(self.stream, self.name, encoding, newline, has_flag)

    def lines(self, newline: str | None = None) -> Iterator[str]:
        """Yield the decoded lines with their line breaks."""
        return split_lines(self.text(newline), self.name)


def split_lines(text: IO[str], name: str) -> Iterator[str]:
    """Yield lines with their line breaks.

    Raises:
        UserError: a line is longer than ``MAX_TEXT_CHARACTERS``.
    """
    number = 0
    while line := text.readline(MAX_TEXT_CHARACTERS + 1):
        number += 1
        if len(line) > MAX_TEXT_CHARACTERS:
            raise _too_long_error(f"{name} line {number}")
        yield line.removeprefix("\ufeff")  # files that were concatenated have marks within


def _too_long_error(where: str) -> UserError:
    return UserError(
        f"{where} is longer than {MAX_TEXT_CHARACTERS:,} characters, the maximum length of a text. "
        "Divide it into several rows."
    )


def _read_bytes(stream: IO[bytes], name: str) -> io.BytesIO:
    """Read a file at once.

    Raises:
        UserError: it is larger than ``MAX_FILE_BYTES``.
    """
    content = io.BytesIO()
    while block := stream.read(2**20):
        content.write(block)
        if content.tell() > MAX_FILE_BYTES:
            raise too_large_error(name)
    content.seek(0)
    return content


def too_large_error(name: str) -> UserError:
    """Return the error about a file that is too large to be read at once."""
    return UserError(
        f"{name} contains more than {MAX_FILE_BYTES // 2**20} MiB, the maximum for files of this "
        "format, which are read at once. Save it as .csv, .jsonl or .parquet, which are read row "
        "by row."
    )


#: Advice about a missing column of rated pairs.
_COLUMNS_ADVICE = (
    "Say which columns to read: --columns sentence1=YOURS (also sentence2=, condition=, label=)."
)


def check_columns(
    name: str, present: Sequence[str], columns: Sequence[str] | None, advice: str = _COLUMNS_ADVICE
) -> list[str]:
    """Check that each column exists exactly once, and return the distinct ones.

    Args:
        name: name of the file in messages.
        present: the names of the file's columns.
        columns: the required columns; None: all that have a name.
        advice: the end of the message about a missing column.

    Raises:
        MissingColumnError: a column is missing.
        UserError: a column exists twice.
    """
    columns = list(dict.fromkeys(filter(None, present) if columns is None else columns))
    repeated = [column for column in columns if list(present).count(column) > 1]
    if repeated:
        raise UserError(
            f"{name} has the column {shortened_repr(repeated[0])} twice; keep only one of them."
        )
    missing = [column for column in columns if not column or column not in present]
    if missing:
        # The header may in fact be a row of long texts.
        names = [column for column in present if column is not None and len(column) < 100]
        hint = did_you_mean(missing[0], names)
        raise MissingColumnError(
            f"{name} has no column {shortened_repr(missing[0])}; it has {format_list(present)}. "
            f"{hint}".rstrip(),
            advice,
            missing[0],
        )
    return columns


#: The rows of a file; None stands for a blank line.
_Records = Iterator[dict[str, Any] | None]


def _read_txt(file: InputFile, columns: Sequence[str] | None) -> _Records:
    """Yield one text per line, without surrounding white space, as the value of each column."""
    names = columns or TEXT_COLUMNS[:1]
    for number, line in enumerate(file.lines(), 1):
        text = line.strip()
        if number == 1 and text.lower() in (*TEXT_COLUMNS, *names):
            log.info(
                f"{file.name}: the first line, {text!r}, is read as a text; if it is a header, "
                "save the file as .csv"
            )
        yield dict.fromkeys(names, text) if text else None


def _read_csv(file: InputFile, columns: Sequence[str] | None) -> _Records:
    """Yield the rows of a .csv or .tsv file, or of another file with delimiters."""
    csv.field_size_limit(MAX_TEXT_CHARACTERS)
    lines = file.lines(newline="")
    head = list(islice(lines, HEAD_LINES))
    n_skipped = 0  # lines before the header: blank ones, and Excel's sep=;
    while n_skipped < len(head) and not head[n_skipped].strip():
        n_skipped += 1
    delimiter = file.options.delimiter or ("\t" if file.suffix == ".tsv" else None)
    separator = re.match(r'"?sep=(.)"?\s*$', head[n_skipped]) if n_skipped < len(head) else None
    if separator:
        delimiter, n_skipped = file.options.delimiter or separator[1], n_skipped + 1
    if n_skipped == len(head):
        return
    head = head[n_skipped:]
    if delimiter is None:
        delimiter = _detect_delimiter(head, file, columns)
    rows = _iterate_tsv if file.suffix == ".tsv" and delimiter == "\t" else _iterate_csv
    numbered = rows(enumerate(chain(head, lines), n_skipped + 1), file.name, delimiter)
    _, header = next(numbered)
    header = name_columns(header, columns)
    check_columns(file.name, header, columns)
    for number, row in numbered:
        if not row or (len(header) > 1 and len(row) == 1 and not row[0].strip()):
            yield None
            continue
        if len(row) != len(header):
            noun = "field" if len(row) == 1 else "fields"
            advice = "Quote fields that contain the delimiter or a quotation mark."
            if rows is _iterate_tsv:
                advice = (
                    "In a .tsv every line is a row; save texts with tabs or line breaks as .csv or "
                    ".jsonl."
                )
            elif len(header) == 1:
                advice = f"{advice} If it has one text per line, name it .txt."
            raise UserError(
                f"{file.name} line {number} has {len(row)} {noun}, but its header has "
                f"{len(header)}. {advice}"
            )
        record = dict(zip(header, row, strict=True))
        record.pop("", None)  # a column without a name, such as the index that pandas writes
        yield record


_NumberedLines = Iterator[tuple[int, str]]
_NumberedRows = Iterator[tuple[int, list[str]]]


def _iterate_csv(lines: _NumberedLines, name: str, delimiter: str) -> _NumberedRows:
    """Yield the fields of each row with the number of its last line.

    Raises:
        UserError: a row is malformed.
    """
    row_lines: list[str] = []
    number = 0

    def record_lines() -> Iterator[str]:
        nonlocal number
        for line_number, line in lines:
            number = line_number
            row_lines.append(line)
            yield line

    reader = csv.reader(record_lines(), delimiter=delimiter, strict=True)
    n_columns, swallowed = 0, list[tuple[int, int]]()
    while True:
        row_lines.clear()
        try:
            row = next(reader, None)
        except csv.Error as error:
            first = number - len(row_lines) + 1
            if "field limit" in str(error):
                raise _too_long_error(f"a field of {name} line {first}") from error
            if "end of data" in str(error):
                raise UserError(
                    f"{name} line {first} is malformed: a quotation mark opens a field there, and "
                    "the file ends before it is closed (unexpected end of data). Write a quotation "
                    'mark within a quoted field twice ("").'
                ) from error
            raise UserError(
                f"{name} line {number} is malformed: {error}. Write a quotation mark within a "
                'quoted field twice ("").'
            ) from error
        if row is None:
            break
        n_columns = n_columns or len(row)
        # A legal field may look like this as well, so that this is not an error.
        if (len(row_lines) - 1) * (n_columns - 1) > 1 and all(
            len(split_header([line], delimiter)) == n_columns for line in row_lines[1:]
        ):
            swallowed.append((number - len(row_lines) + 1, number))
        yield number, row
    if swallowed:
        first, last = swallowed[0]
        more = f", and {len(swallowed) - 1:,} more such rows" if len(swallowed) > 1 else ""
        log.warning(
            f"{name} lines {first} to {last}: a quoted field spans lines that look like "
            f"rows{more}. If a quotation mark is unpaired there, rows are missing: write it twice, "
            "in a quoted field"
        )


#: A field of a .tsv file that is quoted completely.
_QUOTED = re.compile(r'"((?:[^"]|"")*)"')


def _iterate_tsv(lines: _NumberedLines, name: str, delimiter: str) -> _NumberedRows:
    """Yield the fields of each line with its number."""
    n_columns = opened = closed = 0
    for number, line in lines:
        content = line.rstrip("\r\n")
        if not content:
            yield number, []
            continue
        fields = content.split(delimiter)
        if n_columns and len(fields) != n_columns and '"' in content:
            fields = _split_quoted(content, delimiter, n_columns) or fields
        n_columns = n_columns or len(fields)
        for i, field in enumerate(fields):
            if match := _QUOTED.fullmatch(field):
                fields[i] = match[1].replace('""', '"')
            elif field.count('"') % 2 and not closed:
                if field[0] == '"' and not opened:
                    opened = number
                elif field[-1] == '"' and opened:
                    closed = number
        yield number, fields
    if closed:
        log.info(
            f"{name} lines {opened} to {closed}: a quotation mark opens in one line and closes in "
            "another, but in a .tsv every line is a row; if a text has line breaks, save the file "
            "as .csv or .jsonl"
        )


def _split_quoted(line: str, delimiter: str, n_columns: int) -> list[str] | None:
    """Return the fields of a line of which some are quoted with delimiters, if they are as many."""
    try:
        (row,) = csv.reader([line], delimiter=delimiter, strict=True)
    except (csv.Error, ValueError):
        return None
    # The fields are unquoted again by the caller.
    return (
        [f'"{field.replace(chr(34), 2 * chr(34))}"' for field in row]
        if len(row) == n_columns
        else None
    )


def name_columns(header: Sequence[Any], columns: Sequence[str] | None) -> list[str]:
    """Return the names of columns without surrounding spaces, unless they are requested with them.

    Args:
        header: the cells of the header.
        columns: the requested columns; None: all.
    """
    names = ["" if cell is None else str(cell) for cell in header]
    return [name if name in (columns or ()) else name.strip() for name in names]


def split_header(
    lines: Sequence[str], delimiter: str, columns: Sequence[str] | None = None
) -> list[str]:
    """Return the names of the columns in the first line; see ``name_columns``."""
    csv.field_size_limit(MAX_TEXT_CHARACTERS)
    return name_columns(next(csv.reader(lines[:1], delimiter=delimiter), []), columns)


def _detect_delimiter(head: Sequence[str], file: InputFile, columns: Sequence[str] | None) -> str:
    """Return the delimiter of a file from its first lines.

    It is the first with which the header contains the columns, otherwise the one that divides the
    header and the first rows into the most equal numbers of fields; by default, a comma.

    Raises:
        UserError: a column is a whole line that another delimiter divides.
    """
    widths = {delimiter: _common_width(head, delimiter) for delimiter in DELIMITERS}
    widest = max(widths, key=widths.__getitem__)
    for delimiter in DELIMITERS if columns else ():
        fields = split_header(head, delimiter, columns)
        if set(columns or ()) <= set(fields):
            if len(fields) == 1 and widths[widest] > 1:
                # With an empty first name, "\ttext" is also one field, whose name is stripped.
                if set(columns or ()) <= set(split_header(head, widest, columns)):
                    return widest
                shown = "a tab" if widest == "\t" else repr(widest)
                name = "tab" if widest == "\t" else f"'{widest}'"
                names = format_list(split_header(head, widest), 5)
                raise UserError(
                    f"{file.name} seems to be separated by {shown}, so that {fields[0]!r} is its "
                    f"whole header. Name one of its columns, {names}, or --delimiter {name}."
                )
            return delimiter
    return widest


def _common_width(head: Sequence[str], delimiter: str) -> int:
    """Return the number of fields of the first rows if they have as many as the header, else 0."""
    try:
        rows = [row for row in csv.reader(head, delimiter=delimiter) if row]
    except csv.Error:
        return 0
    # The last row may be incomplete.
    widths = {len(row) for row in (rows[:-1] if len(head) == HEAD_LINES else rows)}
    return widths.pop() if len(widths) == 1 else 0


def _read_json(file: InputFile, columns: Sequence[str] | None) -> _Records:
    """Yield the objects of an array, or one object per line; the suffix does not matter."""
    text = file.text()
    start = text.read(1024)
    while start and not start.strip():
        start = text.read(1024)
    text.detach()
    if start.lstrip().startswith("["):
        file.stream.seek(0)
        content = InputFile(_read_bytes(file.stream, file.name), file.name, file.suffix, file.read)
        items = _parse_json(content.text().read(), file.name)
        records = [
            _check_record(item, f"{file.name} item {number}")
            for number, item in enumerate(items, 1)
        ]
        return _complete_rows(file.name, lambda: (record for record in records), columns)
    return _complete_rows(file.name, lambda: _iterate_json_lines(file), columns)


def _complete_rows(
    name: str,
    iterate: Callable[[], Generator[dict[str, Any] | None]],
    columns: Sequence[str] | None,
) -> _Records:
    """Yield rows in which missing columns are None; None as ``columns`` gives all of them.

    The rows are iterated twice, up to the one with the last column, so that they need not be in
    memory.

    Raises:
        MissingColumnError: no row has a column.
    """
    missing, names = set(columns or ()), dict[str, None]()
    has_rows = False
    with closing(iterate()) as records:
        for record in filter(None, records):
            has_rows = True
            names |= dict.fromkeys(record)
            missing -= record.keys()
            if columns is not None and not missing:
                break
    if missing and has_rows:  # a file without rows is reported as empty
        check_columns(name, list(names), columns)
    empty = dict.fromkeys(names if columns is None else columns)
    for row in iterate():
        yield None if row is None else empty | row


def _iterate_json_lines(file: InputFile) -> Generator[dict[str, Any] | None]:
    """Yield the object of each line from the beginning of the file, which stays open."""
    file.stream.seek(0)
    text = file.text()
    try:
        for number, line in enumerate(split_lines(text, file.name), 1):
            where, advice = f"{file.name} line {number}", ""
            if line.strip() == "{":
                advice = " Write a list of objects, [{...}, {...}], or each object in one line."
            yield _check_record(_parse_json(line, where, advice), where) if line.strip() else None
    finally:
        text.detach()


def _parse_json(text: str, where: str, advice: str = "") -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON: {error}.{advice}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {shortened_repr(twice)} occurs twice in an object")
    return values


def _check_record(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise UserError(f"{where} contains {shortened_repr(record)}; expected an object.")
    return record


def _read_parquet(file: InputFile, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file.stream)
        schema = parquet.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file.name} is not a Parquet file: {first_line(error)}") from error
    required = check_columns(file.name, schema.names, columns)
    try:
        # Only the required columns are converted, as others may be large.
        for batch in parquet.iter_batches(columns=required):
            values = [to_python(batch.column(name)) for name in required]
            yield from (dict(zip(required, row, strict=True)) for row in zip(*values, strict=True))
    except MemoryError:  # Arrow raises a subclass of it that is also an ArrowException
        raise
    except (pa.ArrowException, OSError, OverflowError, ValueError) as error:
        raise UserError(
            f"{file.name} is damaged, or contains values that cannot be read: {first_line(error)}"
        ) from error


def to_python(column: Any) -> list[Any]:
    """Return the values of an Arrow array as Python objects.

    Nanoseconds are cut to microseconds, which is all that Python's objects can hold.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if getattr(kind, "unit", None) == "ns":
        target = (
            pa.timestamp("us", kind.tz)
            if pa.types.is_timestamp(kind)
            else pa.duration("us")
            if pa.types.is_duration(kind)
            else pa.time64("us")
        )
        column = pc.cast(column, target, safe=False)
    return list(column.to_pylist())


#: The last row that the format allows; damaged row numbers may be far larger.
_LAST_ROW = 2**20


def _read_xlsx(file: InputFile, columns: Sequence[str] | None) -> _Records:
    # The file is fetched outside of the try block, as errors of that are not about its content.
    name = file.name
    content = _read_bytes(file.stream, name)
    try:
        import openpyxl
        from openpyxl.utils.escape import unescape
    except ImportError as error:
        raise UserError(f"{name} needs openpyxl: {install_command('excel')}.") from error
    try:
        with zipfile.ZipFile(content) as archive:
            if sum(part.file_size for part in archive.infolist()) > MAX_FILE_BYTES:
                raise too_large_error(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about styles and the like
            book = openpyxl.load_workbook(content, read_only=True, data_only=True)
            sheet = book.worksheets[0]
            # The size that a sheet states may be wrong.
            sheet.reset_dimensions()
            rows = list(sheet.iter_rows(max_row=_LAST_ROW, values_only=True))
    except UserError:
        raise
    except Exception as error:
        # A damaged archive can make openpyxl raise any error.
        raise UserError(
            f"{name} is damaged, has a password, or is not an .xlsx file: {first_line(error)}."
        ) from error
    blank = [all(value in (None, "") for value in row) for row in rows]
    start = blank.index(False) if False in blank else len(rows)
    if start == len(rows):
        return
    header = name_columns(rows[start], columns)
    where = f"{name} (sheet {shortened_repr(sheet.title)})"
    check_columns(where, header, columns)
    for row, is_blank in zip(rows[start + 1 :], blank[start + 1 :], strict=True):
        if is_blank:
            yield None
            continue
        # Carriage returns are escaped as _x000D_.
        values = (unescape(value) if isinstance(value, str) else value for value in row)
        record = dict.fromkeys(header) | dict(zip(header, values, strict=False))
        record.pop("", None)  # columns without a name
        yield record


#: The function that reads a format, by its suffix.
READERS = {
    ".txt": _read_txt,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
    ".xlsx": _read_xlsx,
}
