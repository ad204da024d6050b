"""Tables on disk or on the hub, as records: CSV, TSV, JSONL and Parquet, all strictly UTF-8."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import PurePosixPath
from typing import IO, Any

from llmcond.errors import LlmcondError, UserError, nearest

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
_SPLIT_NAMES = {
    "train": "train",
    "dev": "dev",
    "validation": "dev",
    "valid": "dev",
    "val": "dev",
    "test": "test",
}
_SPLIT_TOKEN = re.compile(rf"(?:^|[-_.])({'|'.join(_SPLIT_NAMES)})(?=[-_.])", re.IGNORECASE)
_SHARD = re.compile(r"-\d+-of-(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or a folder with a file (or several shards) for each split.

    Attributes:
        name: as the user gave it.
        filesystem: of fsspec, which opens the files.
        splits: files by split for a folder; None for a single file.
        tables: rows in memory, by what takes the place of a file's name.
    """

    name: str
    filesystem: Any
    files: Sequence[str]
    splits: Mapping[str, Sequence[str]] | None
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


#: What messages call rows that came from no file.
IN_MEMORY = "rows in memory"


def _open_tables(given: Any) -> Source:
    """Return rows in memory as a source: a table, or one for each split by its name."""
    by_split = isinstance(given, Mapping) and given and set(given) <= set(_SPLIT_NAMES)
    named = {_SPLIT_NAMES[name]: given[name] for name in given} if by_split else {IN_MEMORY: given}
    tables = {name: _records(table) for name, table in named.items()}
    splits = {name: [name] for name in tables} if by_split else None
    return Source(IN_MEMORY, None, list(tables), splits, tables)


def _records(table: Any) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a pandas or Arrow table, of columns by name, or of a sequence."""
    if hasattr(table, "to_pylist"):  # Arrow
        rows: Any = table.to_pylist()
    elif hasattr(table, "to_dict"):  # pandas
        rows = table.to_dict("records")
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


def open_source(given: Any) -> Source:
    """Open a path, ``hf://datasets/OWNER/NAME[@REVISION][/PATH]``, or rows in memory.

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
        if info["type"] == "file":
            if _suffix(path) not in SUFFIXES:
                raise UserError(f"{name} is not one of {', '.join(SUFFIXES)}.")
            return Source(name, filesystem, [path], None)
        listed = sorted(str(found) for found in filesystem.find(path, maxdepth=2))
    except FileNotFoundError as error:
        raise UserError(
            f"{name} does not exist. Expected a .csv, .tsv, .jsonl or .parquet file, a folder "
            "with train, dev and test files, or hf://datasets/OWNER/NAME."
        ) from error
    except (ValueError, ImportError) as error:
        raise UserError(f"{name} cannot be opened: {error}") from error
    except OSError as error:
        raise LlmcondError(f"{name} cannot be read: {error}") from error
    except Exception as error:
        # The hub's client raises errors of its HTTP library, which is not ours to import.
        if not name.startswith("hf://"):
            raise
        raise _unreachable(name, error) from error
    return Source(name, filesystem, listed, _splits(name, listed))


def _unreachable(name: str, error: Exception) -> LlmcondError:
    return LlmcondError(
        f"{name}: the Hugging Face hub cannot be reached ({error}). Check the connection, or "
        "download the files and name their folder."
    )


def without_shard(name: str) -> str:
    """Return a file's name without the part that says which shard it is."""
    return _SHARD.sub("", name)


def has_column(source: Source, file: str, column: str) -> bool:
    """Return whether the first row of a file has a column."""
    return any(column in record for record in islice(read_records(source, file, []), 1))


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()


def _splits(name: str, paths: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        match = _SPLIT_TOKEN.search(PurePosixPath(path).name)
        if match is not None and _suffix(path) in SUFFIXES:
            found.setdefault(_SPLIT_NAMES[match[1].lower()], []).append(path)
    if not found:
        raise UserError(
            f"{name} is a folder without train, dev (or validation) or test files that end in "
            f"{', '.join(SUFFIXES)}."
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


def read_records(source: Source, file: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a file's rows as dictionaries that hold ``columns`` at least.

    Raises:
        UserError: an empty file, a missing column, text that is not UTF-8, a malformed row.
    """
    if file in source.tables:
        if not source.tables[file]:
            raise UserError(f"{IN_MEMORY}: there are no rows.")
        for row in source.tables[file]:
            _check_columns(IN_MEMORY, list(row), columns)
            yield dict(row)
        return
    name, empty = PurePosixPath(file).name, True
    reader = {".jsonl": _read_jsonl, ".parquet": _read_parquet}.get(_suffix(file), _read_csv)
    try:
        with source.filesystem.open(file, "rb") as stream:
            for record in reader(stream, name, columns):
                empty = False
                yield record
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8: byte 0x{error.object[error.start]:02x} cannot be read. Convert "
            f"it first, for example: iconv -f ISO-8859-1 -t UTF-8 {name}"
        ) from error
    except OSError as error:
        raise LlmcondError(f"{name} cannot be read: {error}") from error
    except Exception as error:
        if isinstance(error, LlmcondError) or not source.name.startswith("hf://"):
            raise
        raise _unreachable(name, error) from error
    if empty:
        raise UserError(f"{name} is empty: it has no rows.")


def _check_columns(name: str, got: Sequence[str], columns: Sequence[str]) -> None:
    double = [column for column in columns if list(got).count(column) > 1]
    if double:
        raise UserError(f"{name} has the column {double[0]!r} twice; keep one.")
    missing = [column for column in columns if column not in got]
    if missing:
        raise UserError(
            f"{name} has no column {missing[0]!r}; it has {', '.join(map(repr, got)) or 'none'}. "
            f"{nearest(missing[0], got)} Say which columns to read: "
            "--columns sentence1=YOURS (also sentence2=, condition=, label=), or for embed "
            "--sentence and --condition."
        )


def _read_csv(stream: IO[bytes], name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(
        text, delimiter="\t" if name.lower().endswith(".tsv") else ",", strict=True
    )
    try:
        header = reader.fieldnames
        if not header:
            return
        _check_columns(name, header, columns)
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
        line = reader.reader.line_num
        raise UserError(f"{name} line {line} is malformed: {error}.") from error


def _read_jsonl(stream: IO[bytes], name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(io.TextIOWrapper(stream, encoding="utf-8-sig"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name} line {number} is not JSON: {error}.") from error
        if not isinstance(record, dict):
            raise UserError(f"{name} line {number} holds a {type(record).__name__}, not an object.")
        _check_columns(f"{name} line {number}", list(record), columns)
        yield record


def _read_parquet(stream: IO[bytes], name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(stream)
    except pa.ArrowInvalid as error:
        raise UserError(f"{name} is not a Parquet file: {error}") from error
    _check_columns(name, file.schema_arrow.names, columns)
    try:
        for batch in file.iter_batches():
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{name} is a damaged Parquet file: {error}") from error
