"""Sources of texts that are read in ranges of rows, so that they need not fit in memory.

They are folders of Parquet files and Lance datasets. Other tables are read into memory first. A
source may be the URI of an object store, whose credentials come from the environment.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs
from typing_extensions import override

from llmcond.base.errors import LlmcondError, UserError, first_line, format_list, shortened_repr
from llmcond.base.files import digest_bytes, digest_text, expand_home
from llmcond.base.output import ProgressBar
from llmcond.base.stores import (
    READ_ERRORS,
    check_not_forked,
    convert_panics,
    describe_failure,
    lance_options,
    open_filesystem,
)
from llmcond.base.text import check_string
from llmcond.data.datasets import (
    Problems,
    open_collection,
    read_collection,
    several_splits_error,
)
from llmcond.data.formats import ReadOptions, check_columns
from llmcond.data.readers import STDIN, Source, read_records
from llmcond.data.rows import to_arrow

#: Rows per batch when a whole part is read.
_BATCH_ROWS = 16_384
#: Parts that are surveyed in parallel: an object store has a high latency, but serves many requests
#: at once.
_MAX_THREADS = 8
_UNREADABLE = (pa.ArrowException, *READ_ERRORS)
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


class SourcePart(NamedTuple):
    """A file, or a fragment of a Lance dataset.

    Attributes:
        name: its name, unique within the source.
        state: a text that changes with its content.
        rows: number of rows.
    """

    name: str
    state: str
    rows: int


@dataclass(frozen=True)
class StreamColumns:
    """The columns that are read.

    Attributes:
        sentence: column of the sentences.
        conditions: columns of conditions; empty if texts are the conditions of all rows.
        keep: further columns, in types that can represent the values of all parts.
    """

    sentence: str
    conditions: Sequence[str]
    keep: pa.Schema

    @property
    def schema(self) -> pa.Schema:
        """The columns of ``--keep``, followed by the columns of texts."""
        texts = dict.fromkeys((self.sentence, *self.conditions))
        others = [name for name in texts if name not in self.keep.names]
        return pa.schema([*self.keep, *(pa.field(name, pa.string()) for name in others)])


class TextSource(ABC):
    """Rows in parts, each read in ranges, as returned by ``open_texts``.

    Attributes:
        name: its name in records: a URI or an absolute path.
        can_skip: whether rows without a text can be left out.
    """

    name: str
    can_skip: bool = False

    @property
    def reference(self) -> Any:
        """The argument of ``open_texts`` that opens this source in another process."""
        return self.name

    def with_texts(self, sentence: str, conditions: Sequence[str]) -> TextSource:
        """Return the source with rows whose texts were cleaned by the options of reading."""
        return self

    @abstractmethod
    def states(self) -> dict[str, str]:
        """Return the state of each part, keyed by the part's name, in order."""

    @abstractmethod
    def schema(self, part: str) -> pa.Schema:
        """Return the columns of a part."""

    @abstractmethod
    def count(self, part: str) -> int:
        """Return the number of rows of a part, according to its metadata."""

    @abstractmethod
    def batches(self, part: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows of a part, in batches."""

    @abstractmethod
    def rows(self, part: str, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        """Return the rows of a part from ``start`` to ``stop``, end excluded."""

    def columns(self) -> list[str]:
        """Return the column names of the first part; empty if there are no parts."""
        part = next(iter(self.states()), None)
        if part is None:
            return []
        with _convert_errors(self.part_name(part), self.name):
            return list(self.schema(part).names)

    def has_column(self, name: str) -> bool:
        """Return whether the first part has a column."""
        return name in self.columns()

    def part_name(self, part: str) -> str:
        """Return the name of a part in messages."""
        return f"{part} of {self.name}"

    def read(self, part: str, start: int, stop: int, columns: StreamColumns) -> pa.Table:
        """Return rows of a part, from ``start`` to ``stop``, in the types of ``columns.schema``.

        Raises:
            LlmcondError: the rows cannot be read, or no longer exist.
        """
        schema, where = columns.schema, self.part_name(part)
        with _convert_errors(where, self.name):
            table = self.rows(part, start, stop, schema.names).select(schema.names).cast(schema)
        if len(table) != stop - start:
            raise LlmcondError(
                f"{where} has fewer rows than when it was checked, so it was changed meanwhile. "
                "Run the command again."
            )
        return table

    def counts(self, parts: Sequence[str]) -> list[int]:
        """Return the number of rows of each part."""
        with _convert_errors(self.name), ThreadPoolExecutor(_MAX_THREADS) as threads:
            return list(threads.map(self.count, parts))

    def survey(self, part: str, texts: Sequence[str]) -> tuple[int, pa.Schema]:
        """Check that a part has no empty texts, and return its number of rows and its columns.

        Raises:
            UserError: a text is null or empty, or a column does not exist or does not have texts.
        """
        where = self.part_name(part)
        problems, rows = Problems(where, can_skip=self.can_skip), 0
        with _convert_errors(where, self.name):
            schema = self.schema(part)
            _check_texts(where, schema, texts)
            for batch in self.batches(part, texts):
                for name in texts:
                    for index in pc.indices_nonzero(_find_missing(batch.column(name))).to_pylist():
                        problems.add(rows + index + 1, f"{name} is empty", empty=True)
                rows += len(batch)
        problems.raise_if_any()
        return rows, schema


def open_texts(
    data: Any,
    version: int | None = None,
    *,
    read: ReadOptions | None = None,
    column: str | None = None,
    patient: bool = False,
) -> TextSource:
    """Open a Parquet file, a folder of Parquet files, a Lance dataset, or another table of texts.

    Args:
        data: path or URI, where that of a Lance dataset ends in ``.lance``; a table in memory; or a
            source that is open.
        version: version of a Lance dataset; None: the latest.
        read: how other tables are read; None: the command has no such options.
        column: column of the texts that the user named; see ``open_collection``.
        patient: see ``open_filesystem``.

    Raises:
        UserError: it does not exist, or is of another format; or an option of ``read`` does not
            apply to it.
    """
    if isinstance(data, TextSource):
        return data
    has_options = read not in (None, ReadOptions())
    if not isinstance(data, str | os.PathLike) or str(data) == STDIN:
        return TableRows(open_collection(data, read, column))
    name = os.fspath(data)
    filesystem, root = open_filesystem(name, patient=patient)
    uri = name.rstrip("/") if "://" in name else str(expand_home(name).absolute())
    if root.rstrip("/").endswith(".lance"):
        _reject_options(name, has_options)
        return LanceRows(uri, version, lance_options(name, patient=patient))
    with _convert_errors(name):
        kind = filesystem.get_file_info(root).type
    if kind == fs.FileType.File and (has_options or not _is_parquet(root)):
        return TableRows(open_collection(name, read, column))
    if kind == fs.FileType.File:
        path = PurePosixPath(root)
        return ParquetFiles(uri, filesystem, str(path.parent), path.name)
    if kind != fs.FileType.Directory:
        raise UserError(
            f"{name} does not exist. Name a file or table of texts, a folder of .parquet files, or "
            "a .lance dataset."
        )
    _reject_options(name, has_options)
    return ParquetFiles(uri, filesystem, root)


def _is_parquet(name: str) -> bool:
    return name.lower().endswith(".parquet")


def _reject_options(name: str, has_options: bool) -> None:
    if has_options:
        raise UserError(
            "--encoding, --delimiter, --skip-empty and --strip-html are for single files, and "
            f"{name} is read part by part. Leave them out, and correct its texts first."
        )


def survey(
    source: TextSource,
    parts: Sequence[str],
    texts: Sequence[str],
    keep: Sequence[str],
    keep_schema: pa.Schema | None = None,
) -> tuple[list[SourcePart], pa.Schema]:
    """Check parts, and determine the schema of the columns to keep.

    All texts are read, but no other columns.

    Args:
        source: the source.
        parts: names of the parts.
        texts: columns of texts.
        keep: columns to keep; empty: all columns but those of texts.
        keep_schema: schema of the columns kept from previous parts, if any.

    Returns:
        The parts, and a schema whose types can represent the kept columns of all parts.

    Raises:
        UserError: as ``TextSource.survey``, or a part lacks a column, or has it in an incompatible
            type.
    """
    states, surveyed_parts = source.states(), []
    threads = ThreadPoolExecutor(_MAX_THREADS)
    try:
        surveyed = threads.map(partial(source.survey, texts=texts), parts)
        with ProgressBar(f"reading {source.name}", visible=False) as bar:
            for part, (rows, schema) in zip(parts, surveyed, strict=True):
                surveyed_parts.append(SourcePart(part, states[part], rows))
                keep_schema = _merge_schemas(
                    source.part_name(part), schema, texts, keep, keep_schema
                )
                bar.add(rows)
    finally:
        threads.shutdown(cancel_futures=True)
    return surveyed_parts, pa.schema([]) if keep_schema is None else keep_schema


class ParquetFiles(TextSource):
    """Parquet files below a folder, in the order of their names, or ``only`` one of them.

    A Hive partition in a path (``lang=en/1.parquet``) becomes a column of texts.
    """

    def __init__(self, name: str, filesystem: Any, root: str, only: str = "") -> None:
        self.name, self._filesystem, self._root, self._only = name, filesystem, root, only
        self.can_skip = bool(only)
        #: The file and columns that were read last, its remaining batches, and the number of their
        #: first row, so that a file need not be read from its first row for each range.
        self._key: tuple[str, tuple[str, ...]] | None = None
        self._remaining: Iterator[pa.RecordBatch] = iter(())
        self._position = 0

    @override
    def states(self) -> dict[str, str]:
        """Return the size and the modification time of each file."""
        return self._states

    @cached_property
    def _states(self) -> dict[str, str]:
        is_local = isinstance(self._filesystem, fs.LocalFileSystem)
        with _convert_errors(self.name):
            if self._only:
                selected: Any = [f"{self._root}/{self._only}"]
            elif is_local:  # a file with several links to it occurs once
                selected = _files_below(self._root)
            else:
                selected = fs.FileSelector(self._root, recursive=True)
            infos: Any = self._filesystem.get_file_info(selected)
        states = {}
        for info in sorted(infos, key=lambda info: str(info.path)):
            inner = info.path.removeprefix(self._root).lstrip("/")
            hidden = any(part.startswith((".", "_")) for part in PurePosixPath(inner).parts)
            if info.type == fs.FileType.File and _is_parquet(inner) and not hidden:
                states[inner] = f"{info.size}-{info.mtime_ns}"
        if not states:
            raise UserError(f"{self.name} is a folder without .parquet files.")
        return states

    @override
    def part_name(self, part: str) -> str:
        return self.name if self._only else part

    @contextmanager
    def _open_parquet(self, part: str) -> Iterator[pq.ParquetFile]:
        path = f"{self._root}/{part}"
        with self._filesystem.open_input_file(path) as stream, pq.ParquetFile(stream) as file:
            yield file

    @override
    def schema(self, part: str) -> pa.Schema:
        partition = _parse_partition(part)
        with self._open_parquet(part) as file:
            columns = [field for field in file.schema_arrow if field.name not in partition]
        return pa.schema([*columns, *(pa.field(name, pa.string()) for name in partition)])

    @override
    def count(self, part: str) -> int:
        with self._open_parquet(part) as file:
            return int(file.metadata.num_rows)

    @override
    def batches(
        self, part: str, columns: Sequence[str], first_group: int = 0
    ) -> Iterator[pa.RecordBatch]:
        partition = _parse_partition(part)
        file_columns = [name for name in columns if name not in partition]
        with self._open_parquet(part) as file:
            groups = list(range(first_group, file.num_row_groups))
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=file_columns):
                arrays = [
                    pa.array([partition[name]] * len(batch), pa.string())
                    if name in partition
                    else batch.column(name)
                    for name in columns
                ]
                yield pa.record_batch(arrays, list(columns))

    @override
    def rows(self, part: str, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        """Return rows of a file; a range after the previous one continues reading from there."""
        key = (part, tuple(columns))
        if key != self._key or start < self._position:
            with self._open_parquet(part) as file:
                sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            ends = np.cumsum(sizes, dtype=np.int64)
            first_group = int(np.searchsorted(ends, start, side="right"))
            self._position = int(ends[first_group - 1]) if first_group else 0
            self._key, self._remaining = key, self.batches(part, columns, first_group)
        batches = []
        while self._position < stop and (batch := next(self._remaining, None)) is not None:
            begin, end = max(start - self._position, 0), min(stop - self._position, len(batch))
            if begin < end:
                batches.append(batch.slice(begin, end - begin))
            if end < len(batch):
                self._remaining = chain([batch.slice(end)], self._remaining)
            self._position += end
        return (
            pa.Table.from_batches(batches) if batches else pa.table({name: [] for name in columns})
        )


def _files_below(root: str) -> list[str]:
    """List the Parquet files below a folder, each only once; links are followed last."""
    paths, seen = [], set[str]()
    folders, linked = deque([root]), deque[str]()
    while folders or linked:
        folder = (folders or linked).popleft()
        if os.path.realpath(folder) in seen:
            continue
        seen.add(os.path.realpath(folder))
        with os.scandir(folder) as entries:
            inner = sorted(entries, key=lambda entry: (entry.is_symlink(), entry.name))
        for entry in inner:
            if entry.is_dir():
                (linked if entry.is_symlink() else folders).append(entry.path)
            elif _is_parquet(entry.name) and os.path.realpath(entry.path) not in seen:
                seen.add(os.path.realpath(entry.path))
                paths.append(entry.path)
    return paths


class LanceRows(TextSource):
    """A version of a Lance dataset, whose parts are its fragments."""

    def __init__(
        self, name: str, version: int | None, options: dict[str, str] | None = None
    ) -> None:
        self.name = name
        check_not_forked()
        with _convert_errors(name):
            import lance

            self._dataset = lance.dataset(name, version=version, storage_options=options)

    @property
    def version(self) -> int:
        """The version of the dataset."""
        return int(self._dataset.version)

    @cached_property
    def _fragments(self) -> dict[str, Any]:
        return {f"fragment {part.fragment_id}": part for part in self._dataset.get_fragments()}

    @override
    def states(self) -> dict[str, str]:
        """Return a digest of the names of each fragment's files."""
        states = {}
        for name, fragment in self._fragments.items():
            files = [file.path for file in fragment.data_files()]
            states[name] = digest_text(*files, str(fragment.deletion_file() or ""), size=8)
        return states

    @override
    def schema(self, part: str) -> pa.Schema:
        return self._dataset.schema

    @override
    def count(self, part: str) -> int:
        return int(self._fragments[part].count_rows())

    @override
    def batches(self, part: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        fragment = self._fragments[part]
        yield from fragment.to_batches(columns=list(columns), batch_size=_BATCH_ROWS)

    @override
    def rows(self, part: str, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        fragment = self._fragments[part]
        return fragment.to_table(columns=list(columns), offset=start, limit=stop - start)


class TableRows(TextSource):
    """A table that was read into memory, as a single part: a file, standard input or an object."""

    def __init__(self, source: Source, table: Any = None) -> None:
        if source.splits is not None:
            raise several_splits_error(source)
        is_path = not source.tables and source.content is None and "://" not in source.name
        self.name = str(expand_home(source.name).absolute()) if is_path else source.name
        self._source, self._table = source, table

    @property
    @override
    def reference(self) -> Any:
        return self

    @override
    def columns(self) -> list[str]:
        with closing(read_records(self._source, self._source.files[0], None)) as records:
            return [check_string(name, "the name of a column") for name in next(records)]

    @override
    def with_texts(self, sentence: str, conditions: Sequence[str]) -> TextSource:
        """Read the table.

        Raises:
            UserError: a column is missing, or a text is empty.
        """
        others = [name for name in self.columns() if name not in (sentence, *conditions)]
        cells = [name for name in conditions if name != sentence]
        rows = read_collection(self._source, sentence, others, conditions=cells)
        columns: dict[Any, Any] = {sentence: rows.texts, **rows.conditions, **rows.columns}
        arrays = {name: to_arrow(values) for name, values in columns.items()}
        return TableRows(self._source, pa.table(arrays))

    @override
    def states(self) -> dict[str, str]:
        """Return a digest of the rows."""
        return self._states

    @cached_property
    def _states(self) -> dict[str, str]:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._table.schema) as writer:
            writer.write_table(self._table)
        return {"rows": digest_bytes(sink.getvalue(), size=8).hex()}

    @override
    def part_name(self, part: str) -> str:
        return self.name

    @override
    def schema(self, part: str) -> pa.Schema:
        return self._table.schema

    @override
    def count(self, part: str) -> int:
        return len(self._table)

    @override
    def batches(self, part: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        yield from self._table.select(list(columns)).to_batches()

    @override
    def rows(self, part: str, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        return self._table.select(list(columns)).slice(start, stop - start)


def _parse_partition(part: str) -> dict[str, str | None]:
    """Return the Hive partition in a file's path, as values by column."""
    pairs = (folder.split("=", 1) for folder in PurePosixPath(part).parent.parts if "=" in folder)
    return {unquote(name): None if v == _NULL_PARTITION else unquote(v) for name, v in pairs}


def _find_missing(column: Any) -> Any:
    """Return (n,) whether a text of a column is null or empty."""
    if pa.types.is_null(column.type):
        return pa.array([True] * len(column))
    column = column.cast(pa.string())
    column.validate(full=True)
    return pc.equal(pc.utf8_trim_whitespace(column), "").fill_null(True)


def _check_texts(where: str, schema: pa.Schema, texts: Sequence[str]) -> None:
    advice = "Name the columns to read: --text, --condition."
    check_columns(where, schema.names, texts, advice)
    for name in texts:
        column_type = schema.field(name).type
        value_type = column_type.value_type if pa.types.is_dictionary(column_type) else column_type
        is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        if not any(check(value_type) for check in (*is_text, pa.types.is_null)):
            raise UserError(
                f"{where} has the column {shortened_repr(name)} of the type {column_type}; "
                "expected texts. "
                "Name another column (--text, --condition), or save it as text."
            )


def _merge_schemas(
    where: str,
    schema: pa.Schema,
    texts: Sequence[str],
    keep: Sequence[str],
    previous: pa.Schema | None,
) -> pa.Schema:
    """Return the schema of a part's columns to keep, merged with that of previous parts."""
    names = list(keep) or [name for name in schema.names if name not in texts]
    if previous is not None:
        differing = sorted(set(names) ^ set(previous.names))
        if differing:
            raise UserError(
                f"{where} and previous parts have different columns: {format_list(differing)}. "
                "Keep "
                "only columns that all parts have: --keep COL"
            )
        names = previous.names
    check_columns(where, schema.names, names, "Name other columns with --keep.")
    # Metadata of pandas and other libraries describes columns that are not kept.
    keep_schema = pa.schema([schema.field(name).remove_metadata() for name in names])
    if previous is None:
        return keep_schema
    try:
        return pa.unify_schemas([previous, keep_schema], promote_options="permissive")
    except _UNREADABLE as error:
        raise UserError(
            f"{where} has a column of another type than previous parts: {first_line(error)}. "
            "Correct it, or keep only other columns: --keep COL"
        ) from error


@contextmanager
def _convert_errors(where: str, name: str = "") -> Iterator[None]:
    """Convert errors of reading ``part_name``, in the source ``name``, to errors of llmcond."""
    try:
        with convert_panics():
            yield
    except FileNotFoundError as error:
        raise UserError(f"{where} does not exist.") from error
    except _UNREADABLE as error:
        # The original error is dropped, because a server's text may contain keys and signatures.
        raise LlmcondError(
            f"{where} cannot be read: {describe_failure(name or where, error)}"
        ) from None
