"""Tables on disk or on the hub, as records: CSV, TSV, JSON, JSONL, Parquet and Excel.

Text is UTF-8, or UTF-16 with a byte order mark, and may be gzipped.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO, Any

from llmcond.errors import (
    LlmcondError,
    UserError,
    brief,
    did_you_mean,
    first_line,
    install_command,
    listed,
)

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx")


def files_of(suffixes: Sequence[str]) -> str:
    """Return what can be read, for help and messages."""
    return f"a {', '.join(suffixes[:-1])} or {suffixes[-1]} file, text also as .gz"


def source_of(suffixes: Sequence[str]) -> str:
    """Return what can be named as data, for help and messages."""
    places = "a folder with train, dev and test files, or hf://datasets/OWNER/NAME"
    return f"{files_of(suffixes)}, {places}"


#: Columns that hold texts where none is named: the first of them that is there.
TEXT_COLUMNS = ("text", "sentence")
#: What files of embeddings end in.
EMBEDDING_SUFFIXES = (".parquet", ".csv", ".npy")
FILES, SOURCE = files_of(SUFFIXES), source_of(SUFFIXES)
#: Names of files that hold one text a line end in one of these.
TEXT_SUFFIXES = (".txt", "")
TEXT_FILES = f"{FILES}, or a .txt file, one text a line"
#: Characters of a field or a line at most: a small file that is unpacked may hold one of gigabytes.
MOST_CHARACTERS = 2**24
#: Bytes of what is read as a whole, once it is unpacked.
MOST_BYTES = 2**29
#: Of .csv files; the first that gives a header with the columns needed.
_DELIMITERS = (",", ";", "\t", "|")
_SPLIT_NAMES = {"train": "train", "test": "test"}
_SPLIT_NAMES |= dict.fromkeys(("dev", "validation", "valid", "val"), "dev")
_SPLIT_TOKEN = re.compile(rf"(?:^|[-_.])({'|'.join(_SPLIT_NAMES)})(?=[-_.])", re.IGNORECASE)
_SHARD = re.compile(r"-\d+-of-(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or a folder with a file (or several shards) for each split.

    Attributes:
        name: as the user gave it.
        filesystem: of fsspec, which opens the files.
        splits: files by split for a folder; None for a single file.
        tables: rows in memory, as mappings or as an Arrow table, by what takes the place of a
            file's name.
    """

    name: str
    filesystem: Any
    files: Sequence[str]
    splits: Mapping[str, Sequence[str]] | None
    tables: Mapping[str, Any] = field(default_factory=dict)


#: What records call the bundled sample of a task, where other data has its path.
SAMPLE = "sample"


def source_name(given: Any, name: str) -> str:
    """Return what records call data: by default its name, and :data:`SAMPLE` where none was given.

    A folder of the user's that is called so itself keeps another name.
    """
    return SAMPLE if given is None else f"./{name}" if name == SAMPLE else name


def described_source(recorded: str) -> str:
    """Return what messages call data, from what records call it."""
    return "the bundled sample" if recorded == SAMPLE else recorded


#: What messages call rows that came from no file.
IN_MEMORY = "rows in memory"


def _open_tables(given: Any) -> Source:
    """Return rows in memory as a source: a table, or one for each split by its name."""
    by_split = isinstance(given, Mapping) and given and set(given) <= set(_SPLIT_NAMES)
    named = {_SPLIT_NAMES[name]: given[name] for name in given} if by_split else {IN_MEMORY: given}
    tables = {name: _records(table) for name, table in named.items()}
    splits = {name: [name] for name in tables} if by_split else None
    return Source(IN_MEMORY, None, list(tables), splits, tables)


def _records(table: Any) -> Any:
    """Return the rows of a pandas table, of columns by name, or of a sequence; an Arrow table."""
    if hasattr(table, "to_pylist"):  # Arrow, of which only columns that are needed are converted
        return table
    if hasattr(table, "to_dict"):  # pandas
        # Its values for what is missing are of several types, and not equal to themselves.
        rows: Any = table.astype(object).where(table.notna(), None).to_dict("records")
    elif isinstance(table, Mapping):
        lengths = {len(column) for column in table.values()}
        if len(lengths) > 1:
            raise UserError(f"columns in memory have {sorted(lengths)} rows; they must be as many.")
        rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    else:
        rows = table
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(
            f"data is {type(table).__name__}; expected a path, a pandas or Arrow table, columns by "
            "name, or a list of dictionaries."
        )
    return rows


def open_source(given: Any, suffixes: Sequence[str] = SUFFIXES) -> Source:
    """Open a path, ``hf://datasets/OWNER/NAME[@REVISION][/PATH]``, or rows in memory.

    Args:
        given: it.
        suffixes: what names of files may end in.

    Raises:
        UserError: nothing there, a file of another kind, or a folder without split files.
        LlmcondError: the hub cannot be reached.
    """
    import fsspec

    if not isinstance(given, (str, os.PathLike)):
        return _open_tables(given)
    name = os.fspath(given)
    try:
        filesystem, path = fsspec.core.url_to_fs(name)
        info = filesystem.info(path)
        if info["type"] != "directory":
            if suffix_of(path) not in suffixes:
                raise UserError(f"{name} is not {files_of(suffixes)}.")
            return Source(name, filesystem, [path], None)
        listed = sorted(str(found) for found in filesystem.find(path, maxdepth=2))
    except FileNotFoundError as error:
        raise UserError(f"{name} does not exist. Expected {source_of(suffixes)}.") from error
    except (ValueError, ImportError) as error:
        raise UserError(f"{name} cannot be opened: {error}") from error
    except OSError as error:
        raise LlmcondError(f"{name} cannot be read: {error}") from error
    except Exception as error:
        # The hub's client raises errors of its HTTP library, which is not ours to import.
        if not name.startswith("hf://"):
            raise
        raise _unreachable(name, error) from error
    return Source(name, filesystem, listed, _splits(name, listed, suffixes))


def _unreachable(name: str, error: Exception) -> LlmcondError:
    return LlmcondError(
        f"{name}: the Hugging Face hub cannot be reached ({error}). Check the connection, or "
        "download the files and name their folder."
    )


def without_shard(name: str) -> str:
    """Return a file's name without the part that says which shard it is."""
    return _SHARD.sub("", name)


class MissingColumnError(UserError):
    """A file has no column of that name.

    Attributes:
        found: the sentence that says so, without what to do.
    """

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(f"{found} {advice}")
        self.found = found


def suffix_of(path: str) -> str:
    """Return what says a file's format, in lower case: ``.csv`` of ``Rows.CSV.gz``."""
    return PurePosixPath(path.lower().removesuffix(".gz")).suffix


def _splits(name: str, paths: Sequence[str], suffixes: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        match = _SPLIT_TOKEN.search(PurePosixPath(path).name)
        if match is not None and suffix_of(path) in suffixes:
            found.setdefault(_SPLIT_NAMES[match[1].lower()], []).append(path)
    if not found:
        raise UserError(
            f"{name} is a folder without train, dev (or validation) or test files that end in "
            f"{', '.join(suffixes)}."
        )
    for split, files in found.items():
        if len({without_shard(file) for file in files}) > 1:
            names = ", ".join(PurePosixPath(file).name for file in files)
            raise UserError(
                f"{name} has several files for {split}: {names}. Keep one, or name a file itself."
            )
        shard = _SHARD.search(files[0])
        if shard is not None and int(shard[1]) != len(files):
            raise UserError(
                f"{name} has {len(files)} of {int(shard[1])} shards of {split}; get the others."
            )
    return found


def read_records(
    source: Source, file: str, columns: Sequence[str]
) -> Generator[dict[str, Any], None, None]:
    """Yield a file's rows as dictionaries that hold ``columns`` at least.

    Raises:
        UserError: an empty file, a missing column, text that is not UTF-8, a malformed row.
    """
    if file in source.tables:
        yield from _read_memory(source.tables[file], columns)
        return
    name, empty = PurePosixPath(file).name, True
    reader = _READERS.get(suffix_of(file), _read_csv)
    with _reading(source, file) as stream:
        for record in reader(stream, name, columns):
            empty = False
            yield record
    if empty:
        raise UserError(f"{name} is empty: it has no rows.")


def read_lines(source: Source, file: str) -> Iterator[str]:
    """Yield the lines of a text file, without their ends; errors as of :func:`read_records`."""
    empty = True
    with _reading(source, file) as stream:
        for line in _lines(_text(stream), PurePosixPath(file).name):
            empty = False
            yield line.rstrip("\n")
    if empty:
        raise UserError(f"{PurePosixPath(file).name} is empty: it has no lines.")


@contextmanager
def _reading(source: Source, file: str) -> Iterator[Any]:
    """Open a file of a source; what fails while it is read is told as our own errors."""
    name = PurePosixPath(file).name
    try:
        if "file" in source.filesystem.protocol and not source.filesystem.isfile(file):
            # /dev/random, to which a link may lead, has no end.
            raise UserError(f"{file} is no regular file.")
        compression = "gzip" if file.lower().endswith(".gz") else None
        with source.filesystem.open(file, "rb", compression=compression) as stream:
            yield stream
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8: byte 0x{error.object[error.start]:02x} cannot be read. Convert "
            f"it first, for example: iconv -f ISO-8859-1 -t UTF-8 {name}"
        ) from error
    except (EOFError, OSError, zlib.error) as error:
        raise LlmcondError(f"{name} cannot be read: {error}") from error
    except Exception as error:
        if isinstance(error, LlmcondError) or not source.name.startswith("hf://"):
            raise
        raise _unreachable(name, error) from error


def _text(stream: IO[bytes], newline: str | None = None) -> IO[str]:
    start = stream.read(2)
    stream.seek(0)
    utf_16 = start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return io.TextIOWrapper(stream, "utf-16" if utf_16 else "utf-8-sig", newline=newline)


def _lines(text: IO[str], name: str) -> Iterator[str]:
    """Yield lines with their ends.

    Raises:
        UserError: a line is longer than any text.
    """
    number = 0
    while line := text.readline(MOST_CHARACTERS + 1):
        number += 1
        if len(line) > MOST_CHARACTERS:
            raise _too_long(f"{name} line {number}")
        yield line


def _too_long(where: str) -> UserError:
    return UserError(
        f"{where} is longer than {MOST_CHARACTERS:,} characters, the most that a text may have. "
        "Cut it into several rows."
    )


def _whole(stream: IO[bytes], name: str) -> io.BytesIO:
    """Return all that a file holds.

    Raises:
        UserError: it is too large for that.
    """
    content = io.BytesIO()
    while block := stream.read(2**20):
        content.write(block)
        if content.tell() > MOST_BYTES:
            raise _too_large(name)
    content.seek(0)
    return content


def _too_large(name: str) -> UserError:
    return UserError(
        f"{name} holds more than {MOST_BYTES // 2**20} MiB, the most of a file that is read as a "
        "whole. Write it as .csv, .jsonl or .parquet, which are read row by row."
    )


def _read_memory(table: Any, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    if not len(table):
        raise UserError(f"{IN_MEMORY}: there are no rows.")
    if hasattr(table, "to_batches"):
        yield from _converted(
            table.schema, lambda needed: table.select(needed).to_batches(), IN_MEMORY, columns
        )
        return
    for row in table:
        check_columns(IN_MEMORY, list(row), columns)
        yield dict(row)


#: What to do where a column of rated pairs is not there.
_NAME_COLUMNS = (
    "Say which columns to read: --columns sentence1=YOURS (also sentence2=, condition=, label=)."
)


def check_columns(
    name: str, got: Sequence[str], columns: Sequence[str], advice: str = _NAME_COLUMNS
) -> None:
    """Raise a UserError, a MissingColumnError with ``advice``, unless each column is there once."""
    double = [column for column in columns if list(got).count(column) > 1]
    if double:
        raise UserError(f"{name} has the column {brief(double[0])} twice; keep one.")
    missing = [column for column in columns if column not in got]
    if missing:
        # A row of long texts may have been taken for the header.
        names = [column for column in got if column is not None and len(column) < 100]
        near = did_you_mean(missing[0], names)
        raise MissingColumnError(
            f"{name} has no column {brief(missing[0])}; it has {listed(got)}. {near}".rstrip(),
            advice,
        )


def _read_csv(stream: IO[bytes], name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(MOST_CHARACTERS)
    text, reader = _text(stream, newline=""), None
    try:
        delimiter = "\t" if suffix_of(name) == ".tsv" else _delimiter(text, name, columns)
        reader = csv.DictReader(_lines(text, name), delimiter=delimiter, strict=True)
        header = reader.fieldnames
        if not header:
            return
        check_columns(name, header, columns)
        for record in reader:
            if None in record or None in record.values():
                got = len(record) if None not in record else len(header) + len(record[None])
                short = sum(value is None for value in record.values())
                raise UserError(
                    f"{name} line {reader.line_num} has {got - short} fields, not "
                    f"{len(header)} as its header. Quote fields that hold the separator."
                )
            yield record
    except csv.Error as error:
        # The reader itself counts further than DictReader does when it fails.
        line = reader.reader.line_num if reader else 1
        if "field limit" in str(error):
            raise _too_long(f"a field of {name} line {line}") from error
        raise UserError(f"{name} line {line} is malformed: {error}.") from error


def _delimiter(text: IO[str], name: str, columns: Sequence[str]) -> str:
    """Return what stands between the fields of a header with the columns; a comma if nothing."""
    header = next(_lines(text, name), "")
    text.seek(0)
    for delimiter in _DELIMITERS:
        if set(columns) <= set(next(csv.reader([header], delimiter=delimiter), ())):
            return delimiter
    return _DELIMITERS[0]


def _read_json(stream: IO[bytes], name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        records = json.load(_text(_whole(stream, name)))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise UserError(f"{name} is not JSON: {error}.") from error
    if not isinstance(records, list):
        raise UserError(f"{name} holds a {type(records).__name__}, not a list of objects.")
    for number, record in enumerate(records, 1):
        yield _checked(record, f"{name} item {number}", columns)


def _checked(record: Any, where: str, columns: Sequence[str]) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise UserError(f"{where} holds a {type(record).__name__}, not an object.")
    check_columns(where, list(record), columns)
    return record


def _read_jsonl(stream: IO[bytes], name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_lines(_text(stream), name), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name} line {number} is not JSON: {error}.") from error
        yield _checked(record, f"{name} line {number}", columns)


def _read_parquet(stream: IO[bytes], name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(stream)
        schema = file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{name} is not a Parquet file: {first_line(error)}") from error
    yield from _converted(schema, lambda needed: file.iter_batches(columns=needed), name, columns)


def _converted(
    schema: Any, batches: Callable[[list[str]], Iterable[Any]], name: str, columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of Arrow's batches, of the columns that are needed: others may be large."""
    import pyarrow as pa

    check_columns(name, schema.names, columns)
    for column in columns:
        kind = schema.field(column).type
        if pa.types.is_temporal(kind):
            raise UserError(
                f"{name} has the column {brief(column)} of the type {kind}; expected texts, or "
                "numbers for ratings. Name another column, or write it as text."
            )
    try:
        for batch in batches(list(dict.fromkeys(columns))):
            yield from batch.to_pylist()
    except MemoryError:  # one of Arrow's own errors, where Arrow raises it
        raise
    except (pa.ArrowException, OSError, OverflowError, ValueError) as error:
        raise UserError(
            f"{name} is damaged, or holds what cannot be read: {first_line(error)}"
        ) from error


#: The last row of a sheet, by the format; a damaged number of a row may be far beyond.
_LAST_ROW = 2**20


def _read_xlsx(stream: IO[bytes], name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    # What fails while the file is fetched is no fault of its content.
    content = _whole(stream, name)
    try:
        import openpyxl
        from openpyxl.utils.escape import unescape
    except ImportError as error:
        raise UserError(f"{name} needs openpyxl: {install_command('excel')}.") from error
    try:
        with zipfile.ZipFile(content) as archive:
            if sum(part.file_size for part in archive.infolist()) > MOST_BYTES:
                raise _too_large(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about styles and the like
            book = openpyxl.load_workbook(content, read_only=True, data_only=True)
            sheet = book.worksheets[0]
            # The size that a sheet states need not be its own.
            sheet.reset_dimensions()
            rows = list(sheet.iter_rows(max_row=_LAST_ROW, values_only=True))
    except UserError:
        raise
    except Exception as error:
        # Whatever the parts of a damaged archive lead openpyxl into.
        raise UserError(
            f"{name} is damaged, has a password, or is no .xlsx file: {first_line(error)}."
        ) from error
    where, header = f"{name} (sheet {brief(sheet.title)})", None
    for row in rows:
        if all(value in (None, "") for value in row):
            continue
        if header is None:
            header = ["" if value is None else str(value) for value in row]
            check_columns(where, header, columns)
        else:
            # Carriage returns stand as _x000D_.
            values = (unescape(value) if isinstance(value, str) else value for value in row)
            yield dict.fromkeys(header) | dict(zip(header, values, strict=False))


_READERS = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".xlsx": _read_xlsx,
}
