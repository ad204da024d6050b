"""Texts that do not fit in memory: a folder of Parquet files or a Lance dataset, read in ranges.

Either may be a URI of an object store, whose credentials come from the environment.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from llmcond.data.datasets import Problems
from llmcond.data.readers import check_columns
from llmcond.errors import LlmcondError, UserError, brief, first_line, listed
from llmcond.files import digest_text
from llmcond.lance_io import UNREADABLE, without_panic
from llmcond.object_stores import failure, lance_options, open_filesystem
from llmcond.progress import ReadBar

#: Rows that are read at a time where a whole part is.
_BATCH_ROWS = 16_384
#: Parts that are surveyed at a time: an object store answers late, and many at once.
_AT_ONCE = 8
_UNREADABLE = (pa.ArrowException, *UNREADABLE)
#: Columns that are written beside those that are kept.
TAKEN = ("sentence", "condition", "embedding")
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"


class Part(NamedTuple):
    """A file, or a fragment of a Lance dataset.

    Attributes:
        name: unique within its source.
        state: what changes when its content does.
        rows: how many it has.
    """

    name: str
    state: str
    rows: int


@dataclass(frozen=True)
class Columns:
    """What is read of each row.

    Attributes:
        condition: the column of the conditions; None where one text is that of every row.
        keep: further columns, in types that hold those of all parts.
    """

    sentence: str
    condition: str | None
    keep: pa.Schema

    @property
    def schema(self) -> pa.Schema:
        """Return the kept columns, and those of texts behind them."""
        texts = dict.fromkeys(name for name in (self.sentence, self.condition) if name)
        others = [name for name in texts if name not in self.keep.names]
        return pa.schema([*self.keep, *(pa.field(name, pa.string()) for name in others)])


class TextSource(ABC):
    """Rows in parts, each read in ranges. Make one with :func:`open_texts`.

    Attributes:
        name: as records call it: a URI, or a path from the root.
    """

    name: str

    @abstractmethod
    def states(self) -> dict[str, str]:
        """Return the state of each part by its name, in order."""

    @abstractmethod
    def schema(self, part: str) -> pa.Schema:
        """Return the columns of a part."""

    @abstractmethod
    def count(self, part: str) -> int:
        """Return how many rows a part has, as its metadata says."""

    @abstractmethod
    def batches(self, part: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows of a part, some at a time."""

    @abstractmethod
    def rows(self, part: str, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        """Return rows of a part."""

    def columns(self) -> list[str]:
        """Return the names of the columns of the first part; none where there is no part."""
        part = next(iter(self.states()), None)
        if part is None:
            return []
        with _reading(self.where(part), self.name):
            return list(self.schema(part).names)

    def where(self, part: str) -> str:
        """Return what messages call a part."""
        return f"{part} of {self.name}"

    def read(self, part: str, start: int, stop: int, columns: Columns) -> pa.Table:
        """Return rows of a part in the types of ``columns.schema``.

        Raises:
            LlmcondError: they cannot be read, or are not there any more.
        """
        schema, where = columns.schema, self.where(part)
        with _reading(where, self.name):
            found = self.rows(part, start, stop, schema.names).select(schema.names).cast(schema)
        if len(found) != stop - start:
            raise LlmcondError(f"{where} has fewer rows than when it was checked: it was changed.")
        return found

    def counts(self, parts: Sequence[str]) -> list[int]:
        """Return how many rows parts have."""
        with _reading(self.name), ThreadPoolExecutor(_AT_ONCE) as threads:
            return list(threads.map(self.count, parts))

    def survey(self, part: str, texts: Sequence[str]) -> tuple[int, pa.Schema]:
        """Return how many rows a part has, and its columns; all its texts are there.

        Raises:
            UserError: a text is null or empty, with its row; no such column, or it has no texts.
        """
        where = self.where(part)
        with _reading(where, self.name):
            schema = self.schema(part)
        _check_texts(where, schema, texts)
        problems, rows = Problems(where), 0
        with _reading(where, self.name):
            for batch in self.batches(part, texts):
                for name in texts:
                    for index in pc.indices_nonzero(_absent(batch.column(name))).to_pylist():
                        problems.add(rows + index + 1, f"{name} is empty")
                rows += len(batch)
        problems.raise_if_any()
        return rows, schema


def open_texts(name: str, version: int | None = None, *, patient: bool = False) -> TextSource:
    """Open a Parquet file, a folder of them, or a Lance dataset (its name ends in ``.lance``).

    ``version`` is that of the dataset; None: the newest. ``patient``: see :func:`open_filesystem`.

    Raises:
        UserError: nothing there, or something else.
    """
    filesystem, root = open_filesystem(name, patient=patient)
    uri = name if "://" in name else str(Path(name).expanduser().absolute())
    if root.rstrip("/").endswith(".lance"):
        return LanceRows(uri, version, lance_options(name, patient=patient))
    with _reading(name):
        kind = filesystem.get_file_info(root).type
    if kind == fs.FileType.File and root.endswith(".parquet"):
        path = PurePosixPath(root)
        return ParquetFiles(uri, filesystem, str(path.parent), path.name)
    if kind != fs.FileType.Directory:
        wrong = "does not exist" if kind == fs.FileType.NotFound else "is of another format"
        raise UserError(
            f"{name} {wrong}. To write a folder or .lance, name a .parquet file, a folder of them, "
            "or a .lance dataset."
        )
    return ParquetFiles(uri, filesystem, root)


def survey(
    source: TextSource,
    parts: Sequence[str],
    texts: Sequence[str],
    keep: Sequence[str],
    kept: pa.Schema | None = None,
) -> tuple[list[Part], pa.Schema]:
    """Return parts with their rows, and what is kept of their columns, in types that hold all.

    All texts are read, and nothing else. ``keep`` empty: all columns but those of texts. ``kept``
    is what is kept of parts before.

    Raises:
        UserError: as of :meth:`TextSource.survey`; a part that lacks a column, or has it in a type
            of another kind than those before; a column of a name that is taken.
    """
    states, found = source.states(), []
    threads = ThreadPoolExecutor(_AT_ONCE)
    try:
        surveyed = threads.map(partial(source.survey, texts=texts), parts)
        with ReadBar(source.name) as bar:
            for part, (rows, schema) in zip(parts, surveyed, strict=True):
                found.append(Part(part, states[part], rows))
                kept = _kept(source.where(part), schema, texts, keep, kept)
                bar.add(rows)
    finally:
        threads.shutdown(cancel_futures=True)
    return found, pa.schema([]) if kept is None else kept


class ParquetFiles(TextSource):
    """Parquet files below a folder in the order of their names, or ``only`` one of them.

    What a path says of all its rows (``lang=en/1.parquet``) is a column of texts.
    """

    def __init__(self, name: str, filesystem: Any, root: str, only: str = "") -> None:
        self.name, self._filesystem, self._root, self._only = name, filesystem, root, only
        #: The file and columns that were read last, and what is left of them: a file need not be
        #: read from its first row for each range.
        self._of: tuple[str, tuple[str, ...]] | None = None
        self._left: Generator[tuple[int, pa.RecordBatch]] | None = None
        self._last: tuple[int, pa.RecordBatch] | None = None

    def states(self) -> dict[str, str]:
        """Return size and time of change of each file."""
        return self._states

    @cached_property
    def _states(self) -> dict[str, str]:
        with _reading(self.name):
            infos: Any = self._infos()
        found = {}
        for info in sorted(infos, key=lambda info: str(info.path)):
            inner = info.path.removeprefix(self._root).lstrip("/")
            hidden = any(part.startswith((".", "_")) for part in PurePosixPath(inner).parts)
            if info.type == fs.FileType.File and inner.endswith(".parquet") and not hidden:
                found[inner] = f"{info.size}-{info.mtime_ns}"
        if not found:
            raise UserError(f"{self.name} is a folder without .parquet files.")
        return found

    def _infos(self) -> list[Any]:
        """Return what lies below the folder; a file that several links lead to is there once."""
        if self._only:
            return [self._filesystem.get_file_info(f"{self._root}/{self._only}")]
        if not isinstance(self._filesystem, fs.LocalFileSystem):
            selector = fs.FileSelector(self._root, recursive=True)
            return list(self._filesystem.get_file_info(selector))
        return list(self._filesystem.get_file_info(_files_below(self._root)))

    def where(self, part: str) -> str:
        """Return the file."""
        return self.name if self._only else part

    @contextmanager
    def _file(self, part: str) -> Iterator[pq.ParquetFile]:
        path = f"{self._root}/{part}"
        with self._filesystem.open_input_file(path) as stream, pq.ParquetFile(stream) as file:
            yield file

    def schema(self, part: str) -> pa.Schema:
        """Return the columns of a file, and what its path says."""
        with self._file(part) as file:
            own = [field for field in file.schema_arrow if field.name not in _partition(part)]
        return pa.schema([*own, *(pa.field(name, pa.string()) for name in _partition(part))])

    def count(self, part: str) -> int:
        """Return how many rows a file has."""
        with self._file(part) as file:
            return int(file.metadata.num_rows)

    def batches(self, part: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows of a file, some at a time."""
        with self._file(part) as file:
            yield from self._with_partition(part, file, range(file.num_row_groups), columns)

    def _with_partition(
        self, part: str, file: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        told = _partition(part)
        own = [name for name in columns if name not in told]
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=own):
            made = [
                pa.array([told[name]] * len(batch), pa.string())
                if name in told
                else batch.column(name)
                for name in columns
            ]
            yield pa.record_batch(made, list(columns))

    def rows(self, part: str, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        """Return rows of a file; what follows those of before is read on from there."""
        wanted = (part, tuple(columns))
        if self._left is None or self._of != wanted or not self._last or self._last[0] > start:
            if self._left is not None:
                self._left.close()
            self._of, self._left, self._last = wanted, self._from(part, start, columns), None
            self._last = next(self._left, None)
        found = []
        while self._last is not None:
            at, batch = self._last
            begin, end = max(start - at, 0), min(stop - at, len(batch))
            if begin < end:
                found.append(batch.slice(begin, end - begin))
            if at + len(batch) > stop:
                break
            self._last = next(self._left, None)
        return pa.Table.from_batches(found) if found else pa.table({name: [] for name in columns})

    def _from(
        self, part: str, start: int, columns: Sequence[str]
    ) -> Generator[tuple[int, pa.RecordBatch]]:
        """Yield batches with the row that they begin at, from the row group that holds one on."""
        with self._file(part) as file:
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            at = first = 0
            while first < len(sizes) and at + sizes[first] <= start:
                at += sizes[first]
                first += 1
            groups = range(first, len(sizes))
            for batch in self._with_partition(part, file, groups, columns):
                yield at, batch
                at += len(batch)


def _files_below(root: str) -> list[str]:
    """Return the Parquet files below a folder, each once wherever links lead; links come last."""
    found, seen = [], set[str]()
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
            elif entry.name.endswith(".parquet") and os.path.realpath(entry.path) not in seen:
                seen.add(os.path.realpath(entry.path))
                found.append(entry.path)
    return found


class LanceRows(TextSource):
    """A version of a Lance dataset, fragment by fragment."""

    def __init__(
        self, name: str, version: int | None, options: dict[str, str] | None = None
    ) -> None:
        self.name = name
        with _reading(name):
            import lance

            self._dataset = lance.dataset(name, version=version, storage_options=options)

    @property
    def version(self) -> int:
        """Return which version it is."""
        return int(self._dataset.version)

    @cached_property
    def _fragments(self) -> dict[str, Any]:
        return {f"fragment {own.fragment_id}": own for own in self._dataset.get_fragments()}

    def states(self) -> dict[str, str]:
        """Return a digest of the files that each fragment consists of."""
        found = {}
        for name, fragment in self._fragments.items():
            files = [file.path for file in fragment.data_files()]
            found[name] = digest_text(*files, str(fragment.deletion_file() or ""), size=8)
        return found

    def schema(self, part: str) -> pa.Schema:
        """Return the columns."""
        return self._dataset.schema

    def count(self, part: str) -> int:
        """Return how many rows a fragment has."""
        return int(self._fragments[part].count_rows())

    def batches(self, part: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows of a fragment, some at a time."""
        fragment = self._fragments[part]
        yield from fragment.to_batches(columns=list(columns), batch_size=_BATCH_ROWS)

    def rows(self, part: str, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        """Return rows of a fragment."""
        fragment = self._fragments[part]
        return fragment.to_table(columns=list(columns), offset=start, limit=stop - start)


def _partition(part: str) -> dict[str, str | None]:
    """Return what a file's path says of its rows, as Hive writes it."""
    pairs = (folder.split("=", 1) for folder in PurePosixPath(part).parent.parts if "=" in folder)
    return {unquote(name): None if v == _NO_PARTITION else unquote(v) for name, v in pairs}


def _absent(column: Any) -> Any:
    """Return which texts of a column are null or empty."""
    if pa.types.is_null(column.type):
        return pa.array([True] * len(column))
    column = column.cast(pa.string())
    column.validate(full=True)
    return pc.equal(pc.utf8_trim_whitespace(column), "").fill_null(True)


def _check_texts(where: str, schema: pa.Schema, texts: Sequence[str]) -> None:
    advice = "Say which columns to read: --sentence, --condition."
    check_columns(where, schema.names, texts, advice)
    for name in texts:
        kind = schema.field(name).type
        held = kind.value_type if pa.types.is_dictionary(kind) else kind
        is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        if not any(check(held) for check in (*is_text, pa.types.is_null)):
            raise UserError(
                f"{where} has the column {brief(name)} of the type {kind}; expected texts. Name "
                "another column (--sentence, --condition), or write it as text."
            )


def _kept(
    where: str,
    schema: pa.Schema,
    texts: Sequence[str],
    keep: Sequence[str],
    before: pa.Schema | None,
) -> pa.Schema:
    """Return what is kept of a part's columns, in types that hold those of parts before too."""
    names = list(keep) or [name for name in schema.names if name not in texts]
    if before is not None:
        odd = sorted(set(names) ^ set(before.names))
        if odd:
            raise UserError(
                f"{where} has other columns than the parts before it: {listed(odd)}. Name those "
                "to keep that all have: --keep COL"
            )
        names = before.names
    check_columns(where, schema.names, names, "Name others with --keep.")
    taken = [name for name in names if name in TAKEN]
    if taken:
        raise UserError(
            f"{where} has a column {taken[0]!r}, and a column of that name is written. Name those "
            "to keep, without it: --keep COL"
        )
    # Metadata of pandas and others tells of columns that are not kept.
    own = pa.schema([schema.field(name).remove_metadata() for name in names])
    if before is None:
        return own
    try:
        return pa.unify_schemas([before, own], promote_options="permissive")
    except _UNREADABLE as error:
        raise UserError(
            f"{where} has a column of another type than the parts before it: {first_line(error)}. "
            "Mend it, or name the columns to keep: --keep COL"
        ) from error


@contextmanager
def _reading(where: str, name: str = "") -> Iterator[None]:
    """Tell what fails as our own errors; ``where`` is in the source of that name."""
    try:
        with without_panic():
            yield
    except FileNotFoundError as error:
        raise UserError(f"{where} does not exist.") from error
    except _UNREADABLE as error:
        # Not from the error: what a server writes of keys and signatures is told to nobody.
        raise LlmcondError(f"{where} cannot be read: {failure(name or where, error)}") from None
