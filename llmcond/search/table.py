"""The texts of an index: a Lance dataset, read at one version while others write newer versions.

A row number (``_row``) identifies a row with its text permanently: a row whose text is replaced
gets a new number, and no number is used twice. So anything computed for a row number stays valid.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from llmcond.errors import (
    LlmcondError,
    first_line,
    format_count,
    is_disk_full,
    raise_disk_error,
    shortened_repr,
)
from llmcond.files import check_free_space
from llmcond.lance_io import READ_ERRORS, check_not_forked, convert_panics, open_newest
from llmcond.search.errors import FilterError
from llmcond.search.filters import parse_filter

NUMBER, VECTOR = "_row", "_vector"
#: Names of columns that every index has, or that every hit has.
RESERVED = ("id", "text", "rank", "score", "explain")
#: Number of rows that are read and processed at a time.
BLOCK = 8_192

#: Files are merged if there are more than this.
_MAX_FRAGMENTS = 32
#: How long an old version stays readable for processes that have opened it.
_RETENTION = datetime.timedelta(days=7)
#: Number of low bits of a row number that count within a version; the high bits are the version.
_VERSION_BITS = 32

Positions = NDArray[np.int64]


class TextTable:
    """One version of the texts. A row's position counts from 0 in the order of this version."""

    def __init__(self, folder: Path) -> None:
        """Open the newest version; a folder without one gives an empty table."""
        self.folder = folder
        # The path is absolute, because Lance takes a relative path with a colon for a store URI.
        self._uri = str(folder.absolute() / "texts.lance")
        self.numbers: Positions = np.zeros(0, dtype=np.int64)
        with _reading(folder):
            self._dataset = open_newest(self._uri)
            if self._dataset is not None:
                self.numbers = self._dataset.to_table(columns=[NUMBER])[NUMBER].to_numpy()

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def version(self) -> int:
        """The number of the version; 0 if nothing has been written yet."""
        return int(self._dataset.version) if self._dataset else 0

    @property
    def is_newest(self) -> bool:
        """Whether this is still the newest version."""
        with _reading(self.folder):
            if self._dataset is None:
                return open_newest(self._uri) is None
            return bool(self._dataset.latest_version == self._dataset.version)

    @cached_property
    def columns(self) -> list[str]:
        """The names of the columns besides ``id`` and ``text``."""
        names = self._dataset.schema.names if self._dataset else []
        return [name for name in names if name not in ("id", "text", NUMBER, VECTOR)]

    @cached_property
    def _order(self) -> Positions | None:
        """Positions in ascending order of row number; None if the rows have that order already."""
        in_order = bool((np.diff(self.numbers) > 0).all())
        return None if in_order else np.argsort(self.numbers)

    def positions(self, numbers: Positions) -> Positions:
        """Return the positions of row numbers, -1 for rows that the table does not have."""
        if not len(self):
            return np.full(len(numbers), -1)
        order = self._order
        ordered = self.numbers if order is None else self.numbers[order]
        candidates = np.minimum(np.searchsorted(ordered, numbers), len(ordered) - 1)
        exists = ordered[candidates] == numbers
        positions = candidates if order is None else order[candidates]
        return np.where(exists, positions, -1)

    def match_filter(self, where: str, seconds: float = math.inf) -> NDArray[np.bool_]:
        """Return which rows match a filter, (n,); see ``llmcond.search.filters`` for the grammar.

        Raises:
            FilterError: if the filter cannot be parsed, names an unknown column, casts a value that
                cannot be cast, or takes longer than ``seconds``.
        """
        mask = np.zeros(len(self), dtype=np.bool_)
        if not len(self):
            return mask
        deadline = time.monotonic() + seconds
        schema = self._dataset.schema
        types = {name: schema.field(name).type for name in ("id", "text", *self.columns)}
        columns, predicate = parse_filter(where, types)
        for block, rows in self.blocks(np.arange(len(self)), columns or ["id"]):
            if time.monotonic() > deadline:
                raise FilterError(
                    f"the filter {shortened_repr(where)} takes longer than {seconds:g} s. Use "
                    "fewer "
                    "conditions."
                )
            try:
                matches = rows.append_column(NUMBER, pa.array(block)).filter(predicate)
            except pa.ArrowException as error:
                problem = first_line(error).removesuffix(".")
                # Arrow raises ArrowInvalid for values, and other errors for types.
                advice = " Use TRY_CAST, which is NULL for such values."
                raise FilterError(
                    f"the filter {shortened_repr(where)} cannot be applied: {problem}."
                    f"{advice if isinstance(error, pa.ArrowInvalid) else ''}"
                ) from error
            mask[matches[NUMBER].to_numpy()] = True
        return mask

    def take(self, positions: Positions, columns: Sequence[str]) -> pa.Table:
        """Read some columns of the rows at some positions."""
        with _reading(self.folder):
            return self._dataset.take(positions, columns=list(columns))

    def blocks(
        self, positions: Positions, columns: Sequence[str]
    ) -> Iterator[tuple[Positions, Any]]:
        """Yield blocks of the ascending positions, each with an Arrow batch of the columns."""
        if len(positions) < len(self):
            for start in range(0, len(positions), BLOCK):
                block = positions[start : start + BLOCK]
                yield block, self.take(block, columns)
            return
        start = 0
        with _reading(self.folder):
            for batch in self._dataset.to_batches(columns=list(columns), batch_size=BLOCK):
                yield np.arange(start, start + len(batch)), batch
                start += len(batch)

    def find(self, ids: Sequence[str]) -> Positions:
        """Return the positions of ids, -1 for unknown ids."""
        if not len(self):
            return np.full(len(ids), -1)
        with _reading(self.folder):
            stored_ids = self._dataset.to_table(columns=["id"])["id"].combine_chunks()
        matches = pc.index_in(pa.array(ids, pa.string()), value_set=stored_ids)
        return np.asarray(matches.fill_null(-1).to_numpy().astype(np.int64))

    def first_number(self) -> int:
        """Return the first row number of the next version; the caller holds the write lock."""
        return (self.version + 1) << _VERSION_BITS

    def schema(self) -> pa.Schema | None:
        """Return the Arrow schema; None if nothing has been written yet."""
        return self._dataset.schema if self._dataset else None

    def write(
        self, rows: Iterable[pa.RecordBatch], schema: pa.Schema, size: int, new: bool
    ) -> None:
        """Write rows in one commit, each replacing the row with the same id: a newer version.

        Args:
            rows: batches of rows.
            schema: their schema.
            size: their approximate size in bytes.
            new: whether none of the ids exists yet.

        Raises:
            DiskFullError: if there is not enough space; nothing is changed then.
        """
        with self._writing(size):
            reader = pa.RecordBatchReader.from_batches(schema, iter(rows))
            if self._dataset is None:
                lance.write_dataset(reader, self._uri, schema)
            elif new:
                lance.write_dataset(reader, self._uri, schema, mode="append")
            else:
                merge = lance.dataset(self._uri).merge_insert("id")
                merge.when_matched_update_all().when_not_matched_insert_all().execute(reader)
            self._tidy()

    def delete(self, ids: Sequence[str]) -> None:
        """Delete rows by id in one commit: a newer version."""
        with self._writing(0):
            merge = lance.dataset(self._uri).merge_insert("id")
            merge.when_matched_delete().execute(pa.table({"id": pa.array(ids, pa.string())}))
            self._tidy()

    def _tidy(self) -> None:
        """Merge files if there are many, and delete versions past the retention time."""
        dataset = lance.dataset(self._uri)
        if len(dataset.get_fragments()) > _MAX_FRAGMENTS:
            dataset.optimize.compact_files()
            dataset.cleanup_old_versions(older_than=_RETENTION)

    @contextmanager
    def _writing(self, size: int) -> Iterator[None]:
        try:
            check_free_space(self.folder, 2 * size)
            yield
        except Exception as error:
            unchanged = f"its previous contents are unchanged ({format_count(len(self), 'text')})"
            raise_disk_error(error, self.folder, unchanged)
            raise


def vectors_of(rows: Any) -> NDArray[Any]:
    """Return the stored vectors of an Arrow table or batch, (n, dim); (n, 0) if it has none."""
    if VECTOR not in rows.schema.names:
        return np.zeros((len(rows), 0), dtype=np.float32)
    column = rows[VECTOR]
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    vectors: NDArray[Any] = column.flatten().to_numpy(zero_copy_only=False)
    return vectors.reshape(len(rows), -1)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    check_not_forked()
    try:
        with convert_panics():
            yield
    except READ_ERRORS as error:
        if is_disk_full(error) or isinstance(error, PermissionError):
            raise
        raise LlmcondError(
            f"{folder} cannot be read: {first_line(error)}. If it was changed since it was opened, "
            "open it again; if it is damaged, build it again: llmcond index"
        ) from error
