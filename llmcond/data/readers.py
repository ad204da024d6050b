"""Readers of tables, on disk or on the hub: CSV, TSV, JSON, JSONL, Parquet and Excel.

Text is UTF-8, or UTF-16 with a byte order mark, and may be compressed with gzip.
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
    did_you_mean,
    first_line,
    format_list,
    install_command,
    shortened_repr,
)

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx")


def describe_files(suffixes: Sequence[str]) -> str:
    """Describe the files that can be read, for help texts and messages."""
    return f"a {', '.join(suffixes[:-1])} or {suffixes[-1]} file, text also as .gz"


def describe_sources(suffixes: Sequence[str]) -> str:
    """Describe the sources of data that users can name, for help texts and messages."""
    others = "a folder with train, dev and test files, or hf://datasets/OWNER/NAME"
    return f"{describe_files(suffixes)}, {others}"


#: Default names of the column of texts, in order of precedence.
TEXT_COLUMNS = ("text", "sentence")
#: Suffixes of files of embeddings.
EMBEDDING_SUFFIXES = (".parquet", ".csv", ".npy")
FILES, SOURCE = describe_files(SUFFIXES), describe_sources(SUFFIXES)
#: Suffixes of files with one text per line.
TEXT_SUFFIXES = (".txt", "")
TEXT_FILES = f"{FILES}, or a .txt file with one text per line"
#: The most characters of a field or a line: a small compressed file may expand to gigabytes.
MAX_TEXT_CHARACTERS = 2**24
#: The most bytes, once decompressed, of a file that is read at once.
MAX_FILE_BYTES = 2**29
#: Delimiters of .csv files; the first whose header has the required columns is used.
_DELIMITERS = (",", ";", "\t", "|")
_SPLIT_NAMES = {"train": "train", "test": "test"}
_SPLIT_NAMES |= dict.fromkeys(("dev", "validation", "valid", "val"), "dev")
_SPLIT_TOKEN = re.compile(rf"(?:^|[-_.])({'|'.join(_SPLIT_NAMES)})(?=[-_.])", re.IGNORECASE)
_SHARD = re.compile(r"-\d+-of-(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or a folder with a file (or several shards) for each split.

    Attributes:
        name: the name that the user gave.
        filesystem: the fsspec file system that opens the files.
        files: paths of the files.
        splits: for a folder, the files of each split; None for a single file.
        tables: rows in memory, as mappings or as an Arrow table, by a name that serves as the
            path of a file.
    """

    name: str
    filesystem: Any
    files: Sequence[str]
    splits: Mapping[str, Sequence[str]] | None
    tables: Mapping[str, Any] = field(default_factory=dict)


#: Name of a task's bundled sample in records, which contain the path of other data.
SAMPLE = "sample"


def source_name(data: Any, name: str) -> str:
    """Return the name of data in records: its path or, for the bundled sample, ``SAMPLE``.

    A user's folder that has this name is recorded as ``./sample``.
    """
    return SAMPLE if data is None else f"./{name}" if name == SAMPLE else name


def describe_source(recorded: str) -> str:
    """Return the name of data in messages, from its name in records."""
    return "the bundled sample" if recorded == SAMPLE else recorded


#: Name in messages of rows that do not come from a file.
IN_MEMORY = "rows in memory"


def _open_tables(data: Any) -> Source:
    """Return rows in memory as a source: a table, or a mapping from split to table."""
    by_split = isinstance(data, Mapping) and data and set(data) <= set(_SPLIT_NAMES)
    tables_by_name = (
        {_SPLIT_NAMES[name]: data[name] for name in data} if by_split else {IN_MEMORY: data}
    )
    tables = {name: _to_records(table) for name, table in tables_by_name.items()}
    splits = {name: [name] for name in tables} if by_split else None
    return Source(IN_MEMORY, None, list(tables), splits, tables)


def _to_records(table: Any) -> Any:
    """Convert a pandas table or columns by name to rows; rows and Arrow tables are unchanged."""
    if hasattr(table, "to_pylist"):  # an Arrow table: only the required columns are converted later
        return table
    if hasattr(table, "to_dict"):  # pandas
        # pandas has several values for missing cells, which are not equal to themselves.
        rows: Any = table.astype(object).where(table.notna(), None).to_dict("records")
    elif isinstance(table, Mapping):
        lengths = {len(column) for column in table.values()}
        if len(lengths) > 1:
            raise UserError(
                f"the columns in memory have different lengths: {sorted(lengths)} rows."
            )
        rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    else:
        rows = table
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(
            f"data is {type(table).__name__}; expected a path, a pandas or Arrow table, columns by "
            "name, or a list of dictionaries."
        )
    return rows


def hub_dataset(source: str) -> str | None:
    """Return the name of a dataset on the hub, ``OWNER/NAME``; None for any other source."""
    match = re.match(r"hf://datasets/([^/@]+/[^/@]+)", source)
    return match and match[1]


def open_source(data: Any, suffixes: Sequence[str] = SUFFIXES) -> Source:
    """Open a path, ``hf://datasets/OWNER/NAME[@REVISION][/PATH]``, or rows in memory.

    Args:
        data: the path, the URI or the rows.
        suffixes: suffixes of files that can be read.

    Raises:
        UserError: the path does not exist, is a file of another format, or is a folder without
            files of splits.
        LlmcondError: the hub cannot be reached.
    """
    import fsspec

    if not isinstance(data, (str, os.PathLike)):
        return _open_tables(data)
    name = os.fspath(data)
    try:
        if "://" in name:
            filesystem, path = fsspec.core.url_to_fs(name)
        else:  # fsspec takes a double colon within a name for a chain of URIs.
            filesystem = fsspec.filesystem("file")
            path = filesystem._strip_protocol(name)
        info = filesystem.info(path)
        if info["type"] != "directory":
            if suffix_of(path) not in suffixes:
                raise UserError(f"{name} is not {describe_files(suffixes)}.")
            return Source(name, filesystem, [path], None)
        paths = sorted(str(file) for file in filesystem.find(path, maxdepth=2))
    except FileNotFoundError as error:
        raise UserError(f"{name} does not exist. Expected {describe_sources(suffixes)}.") from error
    except (ValueError, ImportError) as error:
        raise UserError(f"{name} cannot be opened: {error}") from error
    except OSError as error:
        raise LlmcondError(f"{name} cannot be read: {error}") from error
    except Exception as error:
        # The hub's client raises errors of its HTTP library, on which llmcond does not depend.
        if not name.startswith("hf://"):
            raise
        raise _unreachable_error(name, error) from error
    return Source(name, filesystem, paths, _find_splits(name, paths, suffixes))


def _unreachable_error(name: str, error: Exception) -> LlmcondError:
    return LlmcondError(
        f"{name}: the Hugging Face hub cannot be reached ({error}). Check the connection, or "
        "download the files and name their folder."
    )


def without_shard(name: str) -> str:
    """Return a file's name without the part that says which shard it is."""
    return _SHARD.sub("", name)


class MissingColumnError(UserError):
    """A file lacks a column.

    Attributes:
        finding: the sentence about the missing column, without advice.
        column: the first column that is missing.
    """

    def __init__(self, finding: str, advice: str, column: str) -> None:
        super().__init__(f"{finding} {advice}")
        self.finding, self.column = finding, column


def suffix_of(path: str) -> str:
    """Return the suffix of a file's format, in lower case: ``.csv`` for ``Rows.CSV.gz``."""
    return PurePosixPath(path.lower().removesuffix(".gz")).suffix


def _find_splits(name: str, paths: Sequence[str], suffixes: Sequence[str]) -> dict[str, list[str]]:
    splits: dict[str, list[str]] = {}
    for path in paths:
        match = _SPLIT_TOKEN.search(PurePosixPath(path).name)
        if match is not None and suffix_of(path) in suffixes:
            splits.setdefault(_SPLIT_NAMES[match[1].lower()], []).append(path)
    if not splits:
        raise UserError(
            f"{name} is a folder without train, dev (or validation) or test files that end in "
            f"{', '.join(suffixes)}."
        )
    for split, files in splits.items():
        if len({without_shard(file) for file in files}) > 1:
            names = ", ".join(PurePosixPath(file).name for file in files)
            raise UserError(
                f"{name} has several files for {split}: {names}. Keep only one of them, or name a "
                "file instead of the folder."
            )
        shard = _SHARD.search(files[0])
        if shard is not None and int(shard[1]) != len(files):
            raise UserError(
                f"{name} has only {len(files)} of {int(shard[1])} shards of {split}. Add the "
                "missing shards."
            )
    return splits


def read_records(
    source: Source, file: str, columns: Sequence[str]
) -> Generator[dict[str, Any], None, None]:
    """Yield a file's rows as dictionaries that contain at least ``columns``.

    Raises:
        UserError: the file is empty, lacks a column, is not UTF-8, or has a malformed row.
    """
    if file in source.tables:
        yield from _read_memory(source.tables[file], columns)
        return
    name, empty = PurePosixPath(file).name, True
    reader = _READERS.get(suffix_of(file), _read_csv)
    with _open_file(source, file) as stream:
        for record in reader(stream, name, columns):
            empty = False
            yield record
    if empty:
        raise UserError(f"{name} is empty: it has no rows.")


def read_lines(source: Source, file: str) -> Iterator[str]:
    """Yield the lines of a text file, without line breaks; raises as ``read_records``."""
    empty = True
    with _open_file(source, file) as stream:
        for line in _split_lines(_decode(stream), PurePosixPath(file).name):
            empty = False
            yield line.rstrip("\n")
    if empty:
        raise UserError(f"{PurePosixPath(file).name} is empty: it has no lines.")


@contextmanager
def _open_file(source: Source, file: str) -> Iterator[Any]:
    """Open a file of a source, and convert errors of reading it to a ``LlmcondError``."""
    name = PurePosixPath(file).name
    try:
        if "file" in source.filesystem.protocol and not source.filesystem.isfile(file):
            # A link may lead to /dev/random, which never ends.
            raise UserError(f"{file} is not a regular file.")
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
        raise _unreachable_error(name, error) from error


def _decode(stream: IO[bytes], newline: str | None = None) -> IO[str]:
    start = stream.read(2)
    stream.seek(0)
    utf_16 = start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return io.TextIOWrapper(stream, "utf-16" if utf_16 else "utf-8-sig", newline=newline)


def _split_lines(text: IO[str], name: str) -> Iterator[str]:
    """Yield lines with their line breaks.

    Raises:
        UserError: a line is longer than ``MAX_TEXT_CHARACTERS``.
    """
    number = 0
    while line := text.readline(MAX_TEXT_CHARACTERS + 1):
        number += 1
        if len(line) > MAX_TEXT_CHARACTERS:
            raise _too_long_error(f"{name} line {number}")
        yield line


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
            raise _too_large_error(name)
    content.seek(0)
    return content


def _too_large_error(name: str) -> UserError:
    return UserError(
        f"{name} contains more than {MAX_FILE_BYTES // 2**20} MiB, the maximum for files of this "
        "format, which are read at once. Save it as .csv, .jsonl or .parquet, which are read row "
        "by row."
    )


def _read_memory(table: Any, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    if not len(table):
        raise UserError(f"{IN_MEMORY}: there are no rows.")
    if hasattr(table, "to_batches"):
        yield from _convert_batches(
            table.schema, lambda needed: table.select(needed).to_batches(), IN_MEMORY, columns
        )
        return
    for row in table:
        check_columns(IN_MEMORY, list(row), columns)
        yield dict(row)


#: Advice about a missing column of rated pairs.
_COLUMNS_ADVICE = (
    "Say which columns to read: --columns sentence1=YOURS (also sentence2=, condition=, label=)."
)


def check_columns(
    name: str, present: Sequence[str], columns: Sequence[str], advice: str = _COLUMNS_ADVICE
) -> None:
    """Check that each column exists exactly once.

    Args:
        name: name of the file in messages.
        present: the names of the file's columns.
        columns: the required columns.
        advice: the end of the message about a missing column.

    Raises:
        MissingColumnError: a column is missing.
        UserError: a column exists twice.
    """
    repeated = [column for column in columns if list(present).count(column) > 1]
    if repeated:
        raise UserError(
            f"{name} has the column {shortened_repr(repeated[0])} twice; keep only one of them."
        )
    missing = [column for column in columns if column not in present]
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


def _read_csv(stream: IO[bytes], name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(MAX_TEXT_CHARACTERS)
    text, reader = _decode(stream, newline=""), None
    try:
        delimiter = "\t" if suffix_of(name) == ".tsv" else _detect_delimiter(text, name, columns)
        reader = csv.DictReader(_split_lines(text, name), delimiter=delimiter, strict=True)
        header = reader.fieldnames
        if not header:
            return
        check_columns(name, header, columns)
        for record in reader:
            if None in record or None in record.values():
                n_values = len(record) if None not in record else len(header) + len(record[None])
                n_missing = sum(value is None for value in record.values())
                raise UserError(
                    f"{name} line {reader.line_num} has {n_values - n_missing} fields, but its "
                    f"header has {len(header)}. Quote fields that contain the separator."
                )
            yield record
    except csv.Error as error:
        # The underlying reader counts the line that failed, which DictReader does not.
        line = reader.reader.line_num if reader else 1
        if "field limit" in str(error):
            raise _too_long_error(f"a field of {name} line {line}") from error
        raise UserError(f"{name} line {line} is malformed: {error}.") from error


def _detect_delimiter(text: IO[str], name: str, columns: Sequence[str]) -> str:
    """Return the delimiter with which the header contains the columns; by default, a comma."""
    header = next(_split_lines(text, name), "")
    text.seek(0)
    for delimiter in _DELIMITERS:
        if set(columns) <= set(next(csv.reader([header], delimiter=delimiter), ())):
            return delimiter
    return _DELIMITERS[0]


def _read_json(stream: IO[bytes], name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        records = json.load(_decode(_read_bytes(stream, name)))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise UserError(f"{name} is not valid JSON: {error}.") from error
    if not isinstance(records, list):
        raise UserError(f"{name} contains a {type(records).__name__}; expected a list of objects.")
    for number, record in enumerate(records, 1):
        yield _check_record(record, f"{name} item {number}", columns)


def _check_record(record: Any, where: str, columns: Sequence[str]) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise UserError(f"{where} contains a {type(record).__name__}; expected an object.")
    check_columns(where, list(record), columns)
    return record


def _read_jsonl(stream: IO[bytes], name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_split_lines(_decode(stream), name), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name} line {number} is not valid JSON: {error}.") from error
        yield _check_record(record, f"{name} line {number}", columns)


def _read_parquet(stream: IO[bytes], name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(stream)
        schema = file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{name} is not a Parquet file: {first_line(error)}") from error
    yield from _convert_batches(
        schema, lambda needed: file.iter_batches(columns=needed), name, columns
    )


def _convert_batches(
    schema: Any, batches: Callable[[list[str]], Iterable[Any]], name: str, columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of Arrow batches, with the required columns only, as others may be large."""
    import pyarrow as pa

    check_columns(name, schema.names, columns)
    for column in columns:
        kind = schema.field(column).type
        if pa.types.is_temporal(kind):
            raise UserError(
                f"{name} has the column {shortened_repr(column)} of the type {kind}; expected "
                "texts, or "
                "numbers for ratings. Name another column, or save it as text."
            )
    try:
        for batch in batches(list(dict.fromkeys(columns))):
            yield from batch.to_pylist()
    except MemoryError:  # Arrow raises a subclass of it that is also an ArrowException
        raise
    except (pa.ArrowException, OSError, OverflowError, ValueError) as error:
        raise UserError(
            f"{name} is damaged, or contains values that cannot be read: {first_line(error)}"
        ) from error


#: The last row that the format allows; damaged row numbers may be far larger.
_LAST_ROW = 2**20


def _read_xlsx(stream: IO[bytes], name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    # The file is fetched outside of the try block, as errors of that are not about its content.
    content = _read_bytes(stream, name)
    try:
        import openpyxl
        from openpyxl.utils.escape import unescape
    except ImportError as error:
        raise UserError(f"{name} needs openpyxl: {install_command('excel')}.") from error
    try:
        with zipfile.ZipFile(content) as archive:
            if sum(part.file_size for part in archive.infolist()) > MAX_FILE_BYTES:
                raise _too_large_error(name)
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
    where, header = f"{name} (sheet {shortened_repr(sheet.title)})", None
    for row in rows:
        if all(value in (None, "") for value in row):
            continue
        if header is None:
            header = ["" if value is None else str(value) for value in row]
            check_columns(where, header, columns)
        else:
            # Carriage returns are escaped as _x000D_.
            values = (unescape(value) if isinstance(value, str) else value for value in row)
            yield dict.fromkeys(header) | dict(zip(header, values, strict=False))


_READERS = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".xlsx": _read_xlsx,
}
