"""The texts of an index: a Lance dataset, read at one version while others write newer ones.

A row's number (``_row``) stands for its text for good: a row whose text is replaced gets a new one,
and none is given twice. So whatever was computed of a numbered row stays right.
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
    UserError,
    brief,
    first_line,
    is_disk_full,
    plural,
    raise_disk_error,
)
from llmcond.files import check_room
from llmcond.lance_io import UNREADABLE, newest, without_panic
from llmcond.search.filters import parse_filter

NUMBER, VECTOR = "_row", "_vector"
#: Columns that every index has, or that hits have.
RESERVED = ("id", "text", "rank", "score", "explain")
#: Rows that are read, and computed with, at a time.
BLOCK = 8_192

#: More files than this are merged.
_FRAGMENTS = 32
#: For so long a version stays readable for who opened it.
_KEPT = datetime.timedelta(days=7)
#: Row numbers of a version begin with it.
_VERSION_BITS = 32

Positions = NDArray[np.int64]


class Table:
    """One version of the texts. A row's position counts from 0 in the order of this version."""

    def __init__(self, folder: Path) -> None:
        """Open the newest version; of a folder without one, an empty table."""
        self.folder = folder
        # Absolute: in a relative one with a colon Lance sees the name of a storage service.
        self._uri = str(folder.absolute() / "texts.lance")
        self.numbers: Positions = np.zeros(0, dtype=np.int64)
        with _reading(folder):
            self._dataset = newest(self._uri)
            if self._dataset is not None:
                self.numbers = self._dataset.to_table(columns=[NUMBER])[NUMBER].to_numpy()

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def version(self) -> int:
        """Return the number of the version; 0: nothing was written yet."""
        return int(self._dataset.version) if self._dataset else 0

    @property
    def is_newest(self) -> bool:
        """Return whether nobody has written a newer version since."""
        with _reading(self.folder):
            if self._dataset is None:
                return newest(self._uri) is None
            return bool(self._dataset.latest_version == self._dataset.version)

    @cached_property
    def columns(self) -> list[str]:
        """Return the names of the other columns."""
        names = self._dataset.schema.names if self._dataset else []
        return [name for name in names if name not in ("id", "text", NUMBER, VECTOR)]

    @cached_property
    def _order(self) -> Positions | None:
        """Return positions in the order of row numbers; None if they are in that order."""
        in_order = bool((np.diff(self.numbers) > 0).all())
        return None if in_order else np.argsort(self.numbers)

    def positions(self, numbers: Positions) -> Positions:
        """Return the positions of row numbers, -1 for those that are not there."""
        if not len(self):
            return np.full(len(numbers), -1)
        order = self._order
        ordered = self.numbers if order is None else self.numbers[order]
        found = np.minimum(np.searchsorted(ordered, numbers), len(ordered) - 1)
        there = ordered[found] == numbers
        places = found if order is None else order[found]
        return np.where(there, places, -1)

    def matching(self, where: str, seconds: float = math.inf) -> NDArray[np.bool_]:
        """Return which positions a filter lets through, (n,); see :mod:`llmcond.search.filters`.

        Raises:
            UserError: it cannot be read, names a column that is not there, casts a value that
                cannot be cast, or takes longer than so many seconds.
        """
        mask = np.zeros(len(self), dtype=np.bool_)
        if not len(self):
            return mask
        deadline = time.monotonic() + seconds
        schema = self._dataset.schema
        types = {name: schema.field(name).type for name in ("id", "text", *self.columns)}
        columns, predicate = parse_filter(where, types)
        for part, rows in self.blocks(np.arange(len(self)), columns or ["id"]):
            if time.monotonic() > deadline:
                raise UserError(
                    f"the filter {brief(where)} takes longer than {seconds:g} s. Use fewer "
                    "conditions."
                )
            try:
                matches = rows.append_column(NUMBER, pa.array(part)).filter(predicate)
            except pa.ArrowException as error:
                raise UserError(
                    f"the filter {brief(where)} cannot be applied: {first_line(error)}"
                ) from error
            mask[matches[NUMBER].to_numpy()] = True
        return mask

    def take(self, positions: Positions, columns: Sequence[str]) -> pa.Table:
        """Return some rows."""
        with _reading(self.folder):
            return self._dataset.take(positions, columns=list(columns))

    def blocks(
        self, positions: Positions, columns: Sequence[str]
    ) -> Iterator[tuple[Positions, Any]]:
        """Yield ascending positions, some at a time, with an Arrow batch of their columns."""
        if len(positions) < len(self):
            for start in range(0, len(positions), BLOCK):
                part = positions[start : start + BLOCK]
                yield part, self.take(part, columns)
            return
        start = 0
        with _reading(self.folder):
            for batch in self._dataset.to_batches(columns=list(columns), batch_size=BLOCK):
                yield np.arange(start, start + len(batch)), batch
                start += len(batch)

    def find(self, ids: Sequence[str]) -> Positions:
        """Return the positions of ids, -1 for those that are not there."""
        if not len(self):
            return np.full(len(ids), -1)
        with _reading(self.folder):
            known = self._dataset.to_table(columns=["id"])["id"].combine_chunks()
        found = pc.index_in(pa.array(ids, pa.string()), value_set=known)
        return np.asarray(found.fill_null(-1).to_numpy().astype(np.int64))

    def first_number(self) -> int:
        """Return the first row number that the next version may give; the writer's lock is held."""
        return (self.version + 1) << _VERSION_BITS

    def schema(self) -> pa.Schema | None:
        """Return its columns with their types; None: there are none yet."""
        return self._dataset.schema if self._dataset else None

    def put(self, rows: Iterable[pa.RecordBatch], schema: pa.Schema, size: int, new: bool) -> None:
        """Add rows in one commit, each in the place of one of the same id: a newer version.

        ``size`` is about how many bytes they have; ``new`` says that no id is there yet.

        Raises:
            DiskFullError: no room; nothing was changed.
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
        """Delete rows in one commit: a newer version."""
        with self._writing(0):
            merge = lance.dataset(self._uri).merge_insert("id")
            merge.when_matched_delete().execute(pa.table({"id": pa.array(ids, pa.string())}))
            self._tidy()

    def _tidy(self) -> None:
        """Keep files few; those of older versions go when nobody reads them any more."""
        dataset = lance.dataset(self._uri)
        if len(dataset.get_fragments()) > _FRAGMENTS:
            dataset.optimize.compact_files()
            dataset.cleanup_old_versions(older_than=_KEPT)

    @contextmanager
    def _writing(self, size: int) -> Iterator[None]:
        try:
            check_room(self.folder, 2 * size)
            yield
        except Exception as error:
            kept = f"what was in it is as it was ({plural(len(self), 'text')})"
            raise_disk_error(error, self.folder, kept)
            raise


def vectors_of(rows: Any) -> NDArray[Any]:
    """Return the stored vectors of an Arrow table or batch, (n, dim); (n, 0) if it has none."""
    if VECTOR not in rows.schema.names:
        return np.zeros((len(rows), 0), dtype=np.float32)
    column = rows[VECTOR]
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    found: NDArray[Any] = column.flatten().to_numpy(zero_copy_only=False)
    return found.reshape(len(rows), -1)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        with without_panic():
            yield
    except UNREADABLE as error:
        if is_disk_full(error) or isinstance(error, PermissionError):
            raise
        raise LlmcondError(
            f"{folder} cannot be read: {first_line(error)}. If it was changed since it was opened, "
            "open it again; if it is damaged, make it anew: llmcond index"
        ) from error
