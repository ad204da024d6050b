"""The rows of an index: a Lance dataset, and the rows that are written into it.

A row number (``_row``) identifies a row with its text permanently: a row whose text is replaced
gets a new number, and no number is used twice. So anything computed for a row number stays valid.
The dataset is read at one version while others write newer versions.
"""

from __future__ import annotations

import datetime
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from itertools import chain, count
from numbers import Integral
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from llmcond.base.arrays import as_list
from llmcond.base.errors import (
    LlmcondError,
    UserError,
    first_line,
    format_count,
    format_list,
    is_disk_full,
    raise_disk_error,
    shortened_repr,
)
from llmcond.base.files import check_free_space, digest_text
from llmcond.base.options import check_argument
from llmcond.base.output import log
from llmcond.base.stores import (
    READ_ERRORS,
    check_lance_column_names,
    check_not_forked,
    convert_panics,
    open_newest,
)
from llmcond.base.text import check_text
from llmcond.data.datasets import is_missing
from llmcond.data.readers import list_texts
from llmcond.data.rows import to_arrow
from llmcond.encoders.spec import EncoderInput
from llmcond.features.store import FeatureStore
from llmcond.search import FilterError
from llmcond.search.filters import parse_filter

#: Pattern that all values of a column must match, and the type that the column then gets. Values
#: with leading zeros, or with more digits than the type can hold, are keys rather than amounts:
#: such a column remains a text column.
_TYPES = (
    (r"^-?(0|[1-9]\d{0,17})$", pa.int64()),
    (r"^-?(0|[1-9]\d{0,15})(\.\d+)?(e[-+]?\d{1,2})?$", pa.float64()),
    (r"^(true|false)$", pa.bool_()),
)


def infer_types(
    columns: Mapping[str, Sequence[str]], schema: pa.Schema | None = None
) -> dict[str, Any]:
    """Convert columns of strings to Arrow arrays of the type that all values of a column share.

    An empty value becomes null in a column of numbers or Boolean values.

    Args:
        columns: the strings of each column, by column name.
        schema: the schema of an index that the columns will be added to, if there is one. Columns
            that it declares as text remain text. Its other columns are returned as strings, because
            they are cast to the index's types when the rows are added.

    Raises:
        UserError: as ``to_column``, or a value of a known column would not have got its type.
    """
    known_types = {} if schema is None else {field.name: field.type for field in schema}
    arrays = {name: to_column(name, texts) for name, texts in columns.items()}
    for name, texts in arrays.items():
        if name in known_types and pa.types.is_string(known_types[name]):
            continue
        trimmed = pc.utf8_trim_whitespace(texts)
        values = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)
        if name in known_types:
            arrays[name] = values
        for pattern, arrow_type in _TYPES if values.null_count < len(values) else ():
            if known_types.get(name, arrow_type) != arrow_type:
                continue
            matches = pc.match_substring_regex(values, pattern, ignore_case=True)
            if pc.all(matches).as_py():
                arrays[name] = values.cast(arrow_type)
                break
            if name in known_types:
                wrong = values.filter(pc.invert(matches))[0].as_py()
                raise _type_error(name, arrow_type, f"{shortened_repr(wrong)} is not of this type")
    return arrays


def _type_error(name: str, arrow_type: pa.DataType, reason: str) -> UserError:
    return UserError(
        f"the column {shortened_repr(name)} has the type {arrow_type} in the index: {reason}. "
        "Correct the value, or build another index."
    )


def to_column(name: str, values: Sequence[Any]) -> Any:
    """Return the values of a column as an Arrow array; a column without values is one of texts.

    Raises:
        UserError: a text contains half of a surrogate pair.
    """
    try:
        column = to_arrow(values)
    except UnicodeEncodeError:
        raise UserError(
            f"the column {shortened_repr(name)} has a text that contains half of a surrogate pair, "
            "which is not a valid character. Correct it."
        ) from None
    return column.cast(pa.string()) if pa.types.is_null(column.type) else column


NUMBER, VECTOR = "_row", "_vector"
#: Names of columns that every index has, or that every hit has.
RESERVED = ("id", "text", "rank", "score", "explain", "mentions")
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


@dataclass(frozen=True)
class WriteCounts:
    """Numbers of texts that were added, replaced or left unchanged.

    Attributes:
        added: texts with a new id.
        replaced: texts with an existing id whose text or columns changed.
        unchanged: texts that the index already held with the same id and columns.
    """

    added: int
    replaced: int
    unchanged: int

    @property
    def summary(self) -> str:
        """The counts in words, for the log."""
        return f"{self.added:,} added, {self.replaced:,} replaced, {self.unchanged:,} unchanged"


@dataclass(frozen=True)
class IndexRows:
    """Texts with their ids, and further columns as Arrow arrays."""

    texts: Sequence[str]
    ids: Sequence[str]
    columns: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def validate(
        cls,
        texts: Sequence[str],
        ids: Sequence[object] | None,
        columns: Mapping[str, Sequence[Any]] | None,
    ) -> IndexRows:
        """Validate rows; without ``ids``, the ids are digests of the texts.

        Raises:
            UserError: if a text is empty, an id is invalid or repeats, or a column has another
                length or a name that cannot be stored.
        """
        texts = list_texts(texts)
        for number, text in enumerate(texts, 1):
            check_text(text, f"row {number}: the text")
        repeated = len(texts) - len(set(texts))
        if repeated:
            log.info(f"duplicate texts, which are all indexed: {repeated:,}")
        row_ids = digest_ids(texts) if ids is None else check_row_ids(ids, texts)
        columns = {} if columns is None else columns
        check_argument("columns", columns, (Mapping,), "a dictionary from names to lists of values")
        check_column_names(columns)
        arrays = {}
        for name, values in columns.items():
            if not hasattr(values, "__len__") or isinstance(values, str | bytes):
                values = as_list(values, f"the column {name!r}")  # noqa: PLW2901
            _check_count(f"the column {name!r} has", values, "value", texts)
            arrays[name] = to_column(name, values)
        return cls(texts, row_ids, arrays)

    def plan_update(self, table: TextTable) -> IndexUpdatePlan:
        """Compare the rows with a table, and return what must be written so that it holds them.

        Raises:
            UserError: if the columns differ from those of the table.
        """
        rows, schema = self, table.schema()
        if schema is not None and self.columns:
            rows = IndexRows(
                self.texts, self.ids, _cast_columns(self.columns, schema, table.columns)
            )
        positions = table.find(self.ids)
        existing = np.flatnonzero(positions >= 0)
        numbers = np.full(len(self), -1, dtype=np.int64)
        changed = np.ones(len(self), dtype=np.bool_)
        if len(existing):
            columns = ["text", *rows.columns]
            old_rows = table.take(positions[existing], [NUMBER, *columns])
            old_numbers, old_texts = old_rows[NUMBER].to_numpy(), old_rows["text"].to_pylist()
            new_texts = (rows.texts[i] for i in existing.tolist())
            same = np.array([new == old for new, old in zip(new_texts, old_texts, strict=True)])
            numbers[existing[same]] = old_numbers[same]
            changed[existing] = ~same
            for name, column in rows.columns.items():
                pairs = zip(
                    old_rows[name].to_pylist(), column.take(existing).to_pylist(), strict=True
                )
                changed[existing] |= [old != new for old, new in pairs]
        to_write = np.flatnonzero(changed)
        replaced = int((positions[to_write] >= 0).sum())
        written = WriteCounts(len(to_write) - replaced, replaced, len(self) - len(to_write))
        new = to_write[numbers[to_write] < 0]
        return IndexUpdatePlan(rows, table, to_write, new, positions, numbers, written)


@dataclass(frozen=True)
class IndexUpdatePlan:
    """The changes to a table so that it holds all given rows.

    Attributes:
        to_write: indices of the rows to write, ascending.
        new: indices of those rows whose texts have to be encoded, ascending.
        positions: (n,): position in the table of each row's id, -1 if the id is new.
        numbers: (n,): row number of each row whose text the table holds; -1 for other rows.
        written: counts of the texts that are added and replaced.
    """

    rows: IndexRows
    table: TextTable
    to_write: Positions
    new: Positions
    positions: Positions
    numbers: Positions
    written: WriteCounts

    def write(
        self, store: FeatureStore, stored: Callable[[Sequence[str]], list[EncoderInput]]
    ) -> None:
        """Write the rows in one commit.

        Args:
            store: the feature store that holds the vectors of all new texts' inputs.
            stored: returns the inputs whose vectors are stored for given texts.

        Raises:
            DiskFullError: if there is not enough space; nothing is changed then.
        """
        self.numbers[self.new] = self.table.first_number() + np.arange(len(self.new))
        blocks = (self.to_write[i : i + BLOCK] for i in range(0, len(self.to_write), BLOCK))
        batches = (self._make_batch(block, store, stored) for block in blocks)
        first = next(batches)
        size = len(self.to_write) * first.nbytes // len(first)
        all_new = bool((self.positions[self.to_write] < 0).all())
        self.table.write(chain([first], batches), first.schema, size, all_new)

    def _make_batch(
        self,
        indices: Positions,
        store: FeatureStore,
        stored: Callable[[Sequence[str]], list[EncoderInput]],
    ) -> pa.RecordBatch:
        texts = [self.rows.texts[i] for i in indices]
        columns = {
            "id": pa.array([self.rows.ids[i] for i in indices], pa.string()),
            "text": pa.array(texts, pa.string()),
        }
        columns |= {name: column.take(indices) for name, column in self.rows.columns.items()}
        known = (*columns, NUMBER, VECTOR)
        if missing := [f.name for f in self.table.schema() or () if f.name not in known]:
            # A text that is replaced keeps the columns that are not given, and a new one has none.
            old = self.positions[indices]
            before = self.table.take(old[old >= 0], missing)
            picked = pa.array(np.cumsum(old >= 0) - 1, mask=old < 0)
            columns |= {name: before[name].combine_chunks().take(picked) for name in missing}
        columns[NUMBER] = pa.array(self.numbers[indices])
        if not stored(texts[:1]):
            return pa.record_batch(columns)
        # The vectors of new texts are in the store, and those of the others in the table.
        is_new = np.isin(indices, self.new)
        parts = []
        if is_new.any():
            inputs = stored([text for text, new in zip(texts, is_new, strict=True) if new])
            parts.append((is_new, store.lookup(inputs)[:].reshape(int(is_new.sum()), -1)))
        if not is_new.all():
            rows = self.table.take(self.positions[indices][~is_new], [VECTOR])
            parts.append((~is_new, vectors_of(rows)))
        first = parts[0][1]
        vectors = np.empty((len(indices), first.shape[1]), dtype=first.dtype)
        for selected, part in parts:
            vectors[selected] = part
        flat = pa.array(vectors.reshape(-1))
        columns[VECTOR] = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        return pa.record_batch(columns)


def digest_ids(texts: Sequence[str]) -> list[str]:
    """Return an id for each text: a digest, with a number appended where the text repeats."""
    seen: Counter[str] = Counter()
    ids = []
    for text in texts:
        seen[text] += 1
        digest = digest_text(text, size=8)
        ids.append(digest if seen[text] == 1 else f"{digest}-{seen[text]}")
    return ids


def check_column_names(names: Iterable[str]) -> None:
    """Check that an index can hold columns of these names, besides its own.

    Raises:
        UserError: a name is reserved, is not a text, or cannot be stored.
    """
    names = list(names)
    for name in names:
        check_argument("the column name", name, (str,), "a text")
        if name in RESERVED or name.startswith("_"):
            raise UserError(
                f"the column name {shortened_repr(name)} is reserved, like {', '.join(RESERVED)} "
                "and all names that begin with _. Rename the column."
            )
    check_lance_column_names(names)


def check_ids(ids: Iterable[object], numbers: Iterable[int] | None = None) -> list[str]:
    """Return ids as they are stored; ``numbers`` are those of their rows in messages.

    Raises:
        UserError: an id is missing, or is neither a text nor a whole number, such as 1.0.
    """
    row_ids = []
    for number, value in zip(numbers or count(1), as_list(ids, "ids"), strict=False):
        if is_missing(value):
            raise UserError(f"row {number}: the id is empty. Fill it in.")
        if isinstance(value, bool) or not isinstance(value, str | Integral | UUID | date):
            raise UserError(
                f"row {number}: the id is {shortened_repr(value)}; expected a text or a whole "
                "number."
            )
        row_ids.append(check_text(str(value), f"row {number}: the id"))
    return row_ids


def _check_count(what: str, values: Sized, noun: str, texts: Sized) -> None:
    if len(values) != len(texts):
        raise UserError(
            f"{what} {format_count(len(values), noun)} for {format_count(len(texts), 'text')}; the "
            "numbers must be equal."
        )


def check_row_ids(
    ids: Iterable[object], texts: Sized, numbers: Iterable[int] | None = None
) -> list[str]:
    """Return the ids of texts as they are stored; ``numbers`` are those of their rows in messages.

    Raises:
        UserError: as ``check_ids``, two ids are equal, or their number is not that of the texts.
    """
    row_ids = check_ids(ids, numbers)
    _check_count("there are", row_ids, "id", texts)
    rows: dict[str, int] = {}
    for number, value in zip(numbers or count(1), row_ids, strict=False):
        if rows.setdefault(value, number) != number:
            raise UserError(
                f"the rows {rows[value]} and {number} have the same id, {shortened_repr(value)}; "
                "each row "
                "needs a different id."
            )
    return row_ids


def _cast_columns(
    columns: Mapping[str, Any], schema: pa.Schema, index_columns: Sequence[str]
) -> dict[str, Any]:
    if set(columns) != set(index_columns):
        raise UserError(
            f"the texts have the columns {format_list(sorted(columns))}, but the index has "
            f"{format_list(sorted(index_columns))}. Give the same columns."
        )
    cast_columns = {}
    for name, column in columns.items():
        arrow_type = schema.field(name).type
        try:
            cast_columns[name] = column.cast(arrow_type)
        except pa.ArrowException as error:
            raise _type_error(name, arrow_type, first_line(error)) from error
    return cast_columns
