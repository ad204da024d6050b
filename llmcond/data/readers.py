"""Sources of texts and tables: files, standard input, datasets of the hub, objects in memory.

``open_table`` is the one entrance of all objects in memory: lists, NumPy, pandas, polars, Arrow and
Hugging Face objects. Whatever implements Arrow's PyCapsule protocol is read through pyarrow. pandas
is not, because its columns may have values of several types.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from llmcond.base.errors import LlmcondError, UserError, first_line, format_list, shortened_repr
from llmcond.base.files import SPLIT_NAMES, SPLIT_TOKEN
from llmcond.base.output import log
from llmcond.base.text import undecodable_error
from llmcond.data.formats import (
    DELIMITED,
    DELIMITERS,
    MAX_FILE_BYTES,
    READERS,
    TEXT_COLUMNS,
    TEXT_SUFFIXES,
    InputFile,
    MissingColumnError,
    ReadOptions,
    check_columns,
    split_header,
    suffix_of,
    to_python,
    too_large_error,
)

#: Name in messages of rows that do not come from a file.
IN_MEMORY = "rows in memory"
#: Description of the objects that can be read, for help texts and messages.
OBJECTS = (
    "a list of texts, a table or column of pandas, polars, Arrow or Hugging Face datasets, columns "
    "by name, or a list of dicts"
)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTable:
    """A table in memory, whose columns are converted when they are read.

    Attributes:
        names: names of the columns, which may repeat; None: a list of texts without a name.
        length: number of rows.
        values: function that returns the values of a column, by its position; missing ones are
            None or NaN.
    """

    names: Sequence[str] | None
    length: int
    values: Callable[[int], Sequence[Any]]

    def __len__(self) -> int:
        return self.length


def open_table(data: Any) -> MemoryTable:
    """Return texts or a table in memory, of any kind.

    Raises:
        UserError: the object is of another kind, or cannot be read.
    """
    if isinstance(data, MemoryTable):
        return data
    if isinstance(data, Mapping):
        return _open_mapping(data)
    if hasattr(data, "collect") and hasattr(data, "collect_schema"):  # polars' LazyFrame
        data = data.collect()
    if hasattr(data, "with_format"):  # Hugging Face datasets, whose rows may be a selection
        is_sized = hasattr(data, "__len__")
        data = data.with_format("arrow")[:] if is_sized else list(data.with_format(None))
    if hasattr(data, "isna") and hasattr(data, "columns"):  # pandas
        if data.columns.nlevels > 1:
            raise UserError(
                "the table has columns on several levels (MultiIndex). Give each column one name, "
                'such as: table.columns = ["_".join(map(str, names)) for names in table.columns]'
            )
        names = list(map(str, data.columns))
        return MemoryTable(names, len(data), lambda i: column_values(data.iloc[:, i]))
    table: Any = _import_arrow(data) if _is_arrow(data) else None
    if hasattr(table, "column_names"):
        names = list(table.column_names)
        return MemoryTable(names, len(table), lambda i: _arrow_values(table.column(i)))
    values = column_values(data) if table is None else _arrow_values(table)
    if values and isinstance(values[0], Mapping):
        return _open_rows(values)
    return MemoryTable(None, len(values), lambda _: values)


def splits_of(data: Any) -> Mapping[Any, Any] | None:
    """Return data if it is a mapping from the names of splits to tables; None otherwise."""
    is_split = isinstance(data, Mapping) and any(
        hasattr(table, "columns") or hasattr(table, "column_names") for table in data.values()
    )
    return data if is_split else None


def list_texts(values: Any) -> list[Any]:
    """Return the items of a list or a column, or the texts of a table's column text or sentence.

    Args:
        values: the items, in any form that ``open_table`` reads.

    Raises:
        UserError: as ``open_table``, or a table has neither column.
    """
    if isinstance(values, str):
        raise UserError("texts is a single string; give a list of texts.")
    table = open_table(values)
    if table.names is None:
        return list(table.values(0))
    for column in TEXT_COLUMNS:
        if table.names.count(column) == 1:
            return list(table.values(list(table.names).index(column)))
    raise UserError(
        f"a whole {type(values).__name__} was given as texts, without a column text. Give one of "
        f"its columns: {format_list(list(table.names), 5)}."
    )


def column_values(column: Any) -> list[Any]:
    """Return the values of a list, column or array; missing ones are None or NaN.

    Raises:
        UserError: the object has no order or several dimensions, or is a single value.
    """
    if isinstance(column, set | frozenset):
        raise UserError("data is a set, which has no order; give a list.")
    is_single = isinstance(column, str | bytes | bytearray | Mapping)
    if is_single or not (isinstance(column, Iterable) or hasattr(column, "__getitem__")):
        raise UserError(f"data is {_describe(column)}; expected a path, {OBJECTS}.")
    if getattr(column, "ndim", 1) != 1:
        raise UserError(
            f"data is an array of the shape {tuple(column.shape)}; expected one dimension."
        )
    # NumPy would return nanoseconds as whole numbers, and pandas objects of its own.
    if getattr(getattr(column, "dtype", None), "kind", "O") in "mM":
        import pyarrow as pa

        return _arrow_values(pa.array(column))
    if hasattr(column, "isna"):  # pandas, which has several values for missing cells
        cells: Any = zip(column.astype(object), column.isna(), strict=True)
        return [None if is_missing else value for value, is_missing in cells]
    if _is_arrow(column):
        return _arrow_values(_import_arrow(column))
    if hasattr(column, "dtype") and hasattr(column, "tolist"):  # NumPy
        return list(column.tolist())
    return list(column)


def _open_mapping(data: Mapping[Any, Any]) -> MemoryTable:
    splits = splits_of(data)
    if splits is not None and len(splits) == 1:
        return open_table(next(iter(splits.values())))
    if splits is not None:
        first = next(iter(splits))
        raise UserError(
            f"data has the splits {format_list(list(splits))}; give one of them, such as "
            f"data[{first!r}]."
        )
    names, columns = list(map(str, data)), list(map(column_values, data.values()))
    lengths = sorted(set(map(len, columns)))
    if len(lengths) > 1:
        raise UserError(f"the columns in memory have different lengths: {lengths} rows.")
    return MemoryTable(names, lengths[0] if lengths else 0, columns.__getitem__)


def _open_rows(rows: Sequence[Any]) -> MemoryTable:
    names: dict[str, Any] = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise UserError(
                f"row {number} of {IN_MEMORY} is {_describe(row)}; expected a dict, as row 1."
            )
        for name in row:
            names.setdefault(str(name), name)
    keys = list(names.values())
    return MemoryTable(list(names), len(rows), lambda i: [row.get(keys[i]) for row in rows])


def _is_arrow(data: Any) -> bool:
    has_protocol = hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__")
    return has_protocol and not hasattr(data, "isna")  # pandas


def _import_arrow(data: Any) -> Any:
    """Return a table or a chunked array of any object that implements Arrow's protocol."""
    import pyarrow as pa

    try:
        if hasattr(data, "__arrow_c_stream__"):
            try:
                return pa.RecordBatchReader.from_stream(data).read_all()
            except pa.ArrowInvalid:  # a column
                return pa.chunked_array(data)
        array = pa.array(data)
        if pa.types.is_struct(array.type):
            return pa.Table.from_batches([pa.RecordBatch.from_struct_array(array)])
        return pa.chunked_array([array])
    except Exception as error:  # the errors of any library
        raise UserError(f"{_describe(data)} cannot be read: {first_line(error)}") from error


def _arrow_values(column: Any) -> list[Any]:
    import pyarrow as pa

    try:
        return to_python(column)
    except MemoryError:
        raise
    except (pa.ArrowException, OverflowError, ValueError) as error:
        raise UserError(
            f"{IN_MEMORY} are damaged, or contain values that cannot be read: {first_line(error)}"
        ) from error


def _describe(value: object) -> str:
    shown = f" {shortened_repr(value, 40)}" if isinstance(value, str | bytes | int | float) else ""
    return f"the {type(value).__name__}{shown}"


SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx")


def describe_sources(suffixes: Sequence[str]) -> str:
    """Describe the sources of data that users can name, for help texts and messages."""
    files = f"a {', '.join(suffixes[:-1])} or {suffixes[-1]} file, text also as .gz"
    return f"{files}, a folder with train, dev and test files, or hf://datasets/OWNER/NAME"


#: Suffixes of files of embeddings.
EMBEDDING_SUFFIXES = (".parquet", ".csv", ".npy")
#: Column of vectors in these outputs, and in those that are written in units.
VECTOR = "embedding"
SOURCE = describe_sources(SUFFIXES)
FILES = SOURCE.partition(", a folder")[0]
TEXT_FILES = f"{FILES}, a .txt file with one text per line, or - for standard input"
_SHARD = re.compile(r"-\d+-of-(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class Source:
    """Rows: a file, a folder with a file (or several shards) for each split, or a table in memory.

    Attributes:
        name: the name that the user gave.
        filesystem: the fsspec file system that opens the files.
        files: paths of the files.
        splits: for a folder, the files of each split; None for a single file.
        tables: tables in memory, by a name that serves as the path of a file.
        read: how the rows are read; None: the command has no such options.
        content: bytes of standard input; None for other sources.
        format: suffix whose reader reads the files; empty: that of each file.
    """

    name: str
    filesystem: Any
    files: Sequence[str]
    splits: Mapping[str, Sequence[str]] | None
    tables: Mapping[str, MemoryTable] = field(default_factory=dict)
    read: ReadOptions | None = None
    content: bytes | None = None
    format: str = ""

    @property
    def options(self) -> ReadOptions:
        """How the rows are read."""
        return self.read or ReadOptions()

    def suffix(self, file: str) -> str:
        """Return the suffix by which a file is read; empty for a table in memory."""
        if file in self.tables:
            return ""
        suffix = self.format or suffix_of(file)
        # A delimiter makes a table of a text file.
        return ".csv" if suffix in TEXT_SUFFIXES and self.options.delimiter else suffix or ".txt"

    @property
    def has_columns(self) -> bool:
        """Whether the texts are in columns with names, not one per line or in a list."""
        file = self.files[0]
        if file in self.tables:
            return self.tables[file].names is not None
        return self.suffix(file) != ".txt"

    def has_column(self, name: str) -> bool:
        """Return whether the table has a column; False for plain texts, and for splits.

        Raises:
            UserError: the first row cannot be read.
        """
        if self.splits is not None or not self.has_columns:
            return False
        try:
            with closing(read_records(self, self.files[0], [name])) as records:
                next(records, None)
        except MissingColumnError:
            return False
        return True


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


#: The name that users give standard input, and its name in messages.
STDIN, STDIN_NAME = "-", "standard input"


def _open_tables(data: Any, read: ReadOptions | None) -> Source:
    """Return rows in memory as a source: a table, or a mapping from split to table."""
    by_split = isinstance(data, Mapping) and data and set(data) <= set(SPLIT_NAMES)
    # A mapping from split to a list of texts would be a table with columns of these names.
    are_columns = by_split and all(
        isinstance(values, list | tuple) and not any(isinstance(v, Mapping) for v in values)
        for values in data.values()
    )
    if by_split and (splits_of(data) or not are_columns):
        if len({SPLIT_NAMES[name] for name in data}) < len(data):
            raise UserError(
                f"{', '.join(map(repr, data))} name the same split twice. Leave out one table."
            )
        tables = {SPLIT_NAMES[name]: open_table(data[name]) for name in data}
        return Source(IN_MEMORY, None, list(tables), {n: [n] for n in tables}, tables, read)
    return Source(IN_MEMORY, None, [IN_MEMORY], None, {IN_MEMORY: open_table(data)}, read)


def _open_stdin(read: ReadOptions | None, columns: Sequence[str]) -> Source:
    """Return standard input as a source, which is read once.

    It is a table if its first line is a JSON object, or has one of ``columns`` as a field, or if a
    delimiter is given or no text files are expected (``columns`` is empty); otherwise one text per
    line.
    """
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None or sys.stdin.isatty():
        raise UserError(
            "- reads standard input, which is a terminal. Send texts to it, for example: llmcond "
            "COMMAND - < texts.txt"
        )
    content = stream.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise too_large_error(STDIN_NAME)
    if not content.strip():
        raise UserError(f"{STDIN_NAME} is empty, or was read before. Send it one text per line.")
    source = Source(STDIN_NAME, None, [STDIN_NAME], None, read=read, content=content, format=".csv")
    delimiter = source.options.delimiter
    first = next((line for line in read_lines(source, STDIN_NAME) if line.strip()), "")
    form = ".csv"
    if not delimiter and _is_json(first):
        form = ".jsonl"
    elif columns and not delimiter:
        fields = {name for d in DELIMITERS for name in split_header([first], d)}
        form = ".csv" if fields & set(columns) or first.startswith("sep=") else ".txt"
    log.info(f"{STDIN_NAME}: {'one text per line' if form == '.txt' else f'a {form} table'}")
    return replace(source, format=form)


def _is_json(line: str) -> bool:
    """Return whether a line is a JSON object, or the beginning of an array of objects."""
    content = line.strip()
    if content in ("[", "[{"):
        return True
    try:
        value, _ = json.JSONDecoder().raw_decode(content.removeprefix("[").lstrip())
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


def hub_dataset(source: str) -> str | None:
    """Return the name of a dataset on the hub, ``OWNER/NAME``; None for any other source."""
    match = re.match(r"hf://datasets/([^/@]+/[^/@]+)", source)
    return match and match[1]


def open_source(
    data: Any,
    suffixes: Sequence[str] = SUFFIXES,
    read: ReadOptions | None = None,
    columns: Sequence[str] = (),
    *,
    lenient: bool = False,
) -> Source:
    """Open a path, ``hf://datasets/OWNER/NAME[@REVISION][/PATH]``, ``-``, or rows in memory.

    A source that is open already is returned as it is. Standard input and objects such as iterators
    can be read only once, so they must be opened once.

    Args:
        data: the path, the URI, ``-`` for standard input, or the rows.
        suffixes: suffixes of files that can be read.
        read: how the rows are read; None: the command has no such options.
        columns: columns by which standard input is recognised as a table. Empty: it is a table.
        lenient: whether an option that does not apply to the source is left out, not an error.

    Raises:
        UserError: the path does not exist, is a file of another format, or is a folder without
            files of splits; or an option of ``read`` does not apply to it.
        LlmcondError: the hub cannot be reached.
    """
    if isinstance(data, Source):
        return data
    if not isinstance(data, str | os.PathLike):
        source = _open_tables(data, read)
    elif os.fspath(data) == STDIN:
        source = _open_stdin(read, columns)
    else:
        source = _open_path(data, suffixes, read)
    return _check_read_options(source, lenient=lenient)


def _check_read_options(source: Source, *, lenient: bool) -> Source:
    """Return a source without options that cannot apply to it; raise a UserError unless lenient."""
    allowed = {"encoding": (*DELIMITED, ".json", ".jsonl"), "delimiter": DELIMITED}
    for name, suffixes in allowed.items():
        for file in source.files if getattr(source.options, name) is not None else ():
            if source.suffix(file) not in suffixes:
                if lenient:
                    changes: Any = {name: None}
                    read = replace(source.options, **changes)
                    return _check_read_options(replace(source, read=read), lenient=True)
                listed = f"{', '.join(suffixes[:-1])} and {suffixes[-1]}"
                subject = PurePosixPath(file).name
                raise UserError(
                    f"--{name} is for {listed} files, and not for {subject}. Leave it out."
                )
    return source


def _open_path(
    data: str | os.PathLike[str], suffixes: Sequence[str], read: ReadOptions | None
) -> Source:
    import fsspec

    name = os.fspath(data)
    expected = TEXT_FILES if "" in suffixes else describe_sources(suffixes)
    try:
        if "://" in name:
            filesystem, path = fsspec.core.url_to_fs(name)
        else:  # fsspec takes a double colon within a name for a chain of URIs.
            filesystem = fsspec.filesystem("file")
            path = filesystem._strip_protocol(name)
        info = filesystem.info(path)
        if info["type"] != "directory":
            suffix = suffix_of(path)
            if suffix not in suffixes:
                raise UserError(f"{name} ends in {suffix or 'no suffix'}. Expected {expected}.")
            return Source(name, filesystem, [path], None, read=read)
        paths = sorted(str(file) for file in filesystem.find(path, maxdepth=2))
    except FileNotFoundError as error:
        raise UserError(f"{name} does not exist. Expected {expected}.") from error
    except (ValueError, ImportError) as error:
        raise UserError(f"{name} cannot be opened: {error}") from error
    except OSError as error:
        raise LlmcondError(f"{name} cannot be read: {error}") from error
    except Exception as error:
        # The hub's client raises errors of its HTTP library, on which llmcond does not depend.
        if not name.startswith("hf://"):
            raise
        raise _unreachable_error(name, error) from error
    splits = _find_splits(name, paths, [suffix for suffix in suffixes if suffix])
    files = [file for split_files in splits.values() for file in split_files]
    return Source(name, filesystem, files, splits, read=read)


def _unreachable_error(name: str, error: Exception) -> LlmcondError:
    return LlmcondError(
        f"{name}: the Hugging Face hub cannot be reached ({error}). Check the connection, or "
        "download the files and name their folder."
    )


def without_shard(name: str) -> str:
    """Return a file's name without the part that says which shard it is."""
    return _SHARD.sub("", name)


def _find_splits(name: str, paths: Sequence[str], suffixes: Sequence[str]) -> dict[str, list[str]]:
    splits: dict[str, list[str]] = {}
    for path in paths:
        match = SPLIT_TOKEN.search(PurePosixPath(path).name)
        if match is not None and suffix_of(path) in suffixes:
            splits.setdefault(SPLIT_NAMES[match[1].lower()], []).append(path)
    if not splits:
        raise UserError(
            f"{name} is a folder without train, dev (or validation) or test files that end in "
            f"{', '.join(suffixes)}. Add them, or name a single file."
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
    source: Source, file: str, columns: Sequence[str] | None
) -> Generator[dict[str, Any], None, None]:
    """Yield a file's rows as dictionaries that contain at least ``columns``; None: all columns.

    A column that some rows of JSON lack is None in these rows. In a text file, and in a list, each
    text is the value of every column.

    Raises:
        UserError: the file is empty, lacks a column, is not text, or has a malformed row.
    """
    if file in source.tables:
        yield from _read_memory(source.tables[file], columns)
        return
    name, empty, n_blank = PurePosixPath(file).name, True, 0
    reader = READERS[source.suffix(file)]
    with _open_file(source, file) as stream:
        for record in reader(InputFile(stream, name, source.suffix(file), source.read), columns):
            if record is None:
                n_blank += 1
                continue
            # A blank line is a row without texts, unless only blank lines follow it.
            yield from (dict.fromkeys(record, "") for _ in range(n_blank))
            empty, n_blank = False, 0
            yield record
    if empty:
        raise UserError(f"{name} is empty: it has no rows.")


def read_lines(source: Source, file: str) -> Iterator[str]:
    """Yield the lines of a text file, without line breaks; raises as ``read_records``."""
    empty = True
    name = PurePosixPath(file).name
    with _open_file(source, file) as stream:
        for line in InputFile(stream, name, ".txt", source.read).lines():
            empty = False
            yield line.rstrip("\n")
    if empty:
        raise UserError(f"{name} is empty: it has no lines.")


@contextmanager
def _open_file(source: Source, file: str) -> Iterator[Any]:
    """Open a file of a source, and convert errors of reading it to a ``LlmcondError``."""
    name = PurePosixPath(file).name
    try:
        with _open_bytes(source, file) as stream:
            yield stream
    except UnicodeError as error:
        has_flag = source.read is not None
        with _open_bytes(source, file) as lines:
            raise undecodable_error(
                error, name, lines, source.options.encoding, has_flag
            ) from error
    except (EOFError, OSError, zlib.error) as error:
        raise LlmcondError(f"{name} cannot be read: {error}") from error
    except Exception as error:
        if isinstance(error, LlmcondError) or not source.name.startswith("hf://"):
            raise
        raise _unreachable_error(name, error) from error


def _open_bytes(source: Source, file: str) -> Any:
    if source.content is not None:
        return io.BytesIO(source.content)
    if "file" in source.filesystem.protocol and not source.filesystem.isfile(file):
        # A link may lead to /dev/random, which never ends.
        raise UserError(
            f"{file} is not a regular file. Give - and pipe its content to the command, or write "
            "it to a file first."
        )
    compression = "gzip" if file.lower().endswith(".gz") else None
    return source.filesystem.open(file, "rb", compression=compression)


def _read_memory(table: MemoryTable, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    if not len(table):
        raise UserError(f"{IN_MEMORY}: there are no rows.")
    if table.names is None:
        if columns is not None and len(set(columns)) > 1:
            finding = f"{IN_MEMORY} are a list of texts, without a column {columns[0]!r}."
            raise MissingColumnError(finding, "Give a table.", columns[0])
        yield from (dict.fromkeys(columns or TEXT_COLUMNS[:1], text) for text in table.values(0))
        return
    names = list(table.names)
    required = check_columns(IN_MEMORY, names, columns)
    values = (table.values(names.index(column)) for column in required)
    for row in zip(*values, strict=True):
        yield dict(zip(required, row, strict=True))
