"""Rows to write into an index: validated, and compared with the rows that it already holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cached_property
from itertools import chain
from numbers import Integral
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from llmcond.arrays import as_list
from llmcond.data.candidates import is_missing
from llmcond.data.memory import list_texts
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError, first_line, format_count, format_list, shortened_repr
from llmcond.features.store import FeatureStore
from llmcond.files import digest_text
from llmcond.lance_io import check_lance_column_names
from llmcond.log import log
from llmcond.options import check_argument
from llmcond.search.columns import to_column
from llmcond.search.table import BLOCK, NUMBER, RESERVED, VECTOR, Positions, TextTable, vectors_of
from llmcond.text import cell_text


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

    def to_json(self) -> dict[str, int]:
        """Return the counts as ``--json`` prints them."""
        return asdict(self)


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
        row_ids = _digest_ids(texts) if ids is None else _check_row_ids(ids, len(texts))
        columns = {} if columns is None else columns
        check_argument("columns", columns, (Mapping,), "a dictionary from names to lists of values")
        check_column_names(columns)
        columns = {
            name: values
            if hasattr(values, "__len__") and not isinstance(values, str | bytes)
            else as_list(values, f"the column {name!r}")
            for name, values in columns.items()
        }
        for name, values in columns.items():
            if len(values) != len(texts):
                raise UserError(
                    f"the column {name!r} has {format_count(len(values), 'value')} for "
                    f"{format_count(len(texts), 'text')}; the numbers must be equal."
                )
        return cls(
            texts, row_ids, {name: to_column(name, values) for name, values in columns.items()}
        )

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
                old_values, new_values = (
                    old_rows[name].to_pylist(),
                    column.take(existing).to_pylist(),
                )
                changed[existing] |= [
                    old != new for old, new in zip(old_values, new_values, strict=True)
                ]
        to_write = np.flatnonzero(changed)
        replaced = int((positions[to_write] >= 0).sum())
        written = WriteCounts(len(to_write) - replaced, replaced, len(self) - len(to_write))
        return IndexUpdatePlan(rows, table, to_write, positions, numbers, written)


@dataclass(frozen=True)
class IndexUpdatePlan:
    """The changes to a table so that it holds all given rows.

    Attributes:
        to_write: indices of the rows to write, ascending.
        positions: (n,): position in the table of each row's id, -1 if the id is new.
        numbers: (n,): row number of each row whose text the table holds, -1 if the text has to be
            encoded.
    """

    rows: IndexRows
    table: TextTable
    to_write: Positions
    positions: Positions
    numbers: Positions
    written: WriteCounts

    def __len__(self) -> int:
        return len(self.to_write)

    @cached_property
    def _new_rows(self) -> Positions:
        return self.to_write[self.numbers[self.to_write] < 0]

    @property
    def n_new(self) -> int:
        """Number of texts to encode."""
        return len(self._new_rows)

    @property
    def new_texts(self) -> list[str]:
        """The texts to encode."""
        return [self.rows.texts[i] for i in self._new_rows]

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
        self.numbers[self._new_rows] = self.table.first_number() + np.arange(self.n_new)
        is_new = np.zeros(len(self.rows), dtype=np.bool_)
        is_new[self._new_rows] = True

        starts = range(0, len(self.to_write), BLOCK)
        batches = (
            self._make_batch(self.to_write[i : i + BLOCK], is_new, store, stored) for i in starts
        )
        first = next(batches)
        size = len(self.to_write) * first.nbytes // len(first)
        all_new = bool((self.positions[self.to_write] < 0).all())
        self.table.write(chain([first], batches), first.schema, size, all_new)

    def _make_batch(
        self,
        indices: Positions,
        is_new: Any,
        store: FeatureStore,
        stored: Callable[[Sequence[str]], list[EncoderInput]],
    ) -> pa.RecordBatch:
        texts = [self.rows.texts[i] for i in indices]
        columns = {
            "id": pa.array([self.rows.ids[i] for i in indices], pa.string()),
            "text": pa.array(texts, pa.string()),
        }
        schema = self.table.schema() or ()
        missing = set(self.table.columns) - set(self.rows.columns)
        columns |= {name: column.take(indices) for name, column in self.rows.columns.items()}
        columns |= {
            field.name: pa.nulls(len(indices), field.type)
            for field in schema
            if field.name in missing
        }
        columns[NUMBER] = pa.array(self.numbers[indices])
        inputs = stored(texts[:1])
        if inputs:
            columns[VECTOR] = self._read_vectors(indices, is_new[indices], texts, store, stored)
        return pa.record_batch(columns)

    def _read_vectors(
        self, indices: Positions, is_new: Any, texts: Any, store: Any, stored: Any
    ) -> Any:
        """Read the vectors of new texts from the store, and of the others from the table."""
        pieces = []
        if is_new.any():
            inputs = stored([text for text, new in zip(texts, is_new, strict=True) if new])
            pieces.append(store.lookup(inputs)[:].reshape(int(is_new.sum()), -1))
        if not is_new.all():
            pieces.append(vectors_of(self.table.take(self.positions[indices][~is_new], [VECTOR])))
        vectors = np.empty((len(indices), pieces[0].shape[1]), dtype=pieces[0].dtype)
        for selected in (is_new, ~is_new):
            if selected.any():
                vectors[selected] = pieces.pop(0)
        return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])


def check_text(text: str, what: str) -> str:
    """Return a text that can be encoded; else raise a UserError that begins with ``what``."""
    try:
        cell_text(text)
    except ValueError as error:
        raise UserError(f"{what} {error}.") from error
    return text


def _digest_ids(texts: Sequence[str]) -> list[str]:
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


def check_ids(ids: Iterable[object]) -> list[str]:
    """Return ids as they are stored.

    Raises:
        UserError: an id is missing, or is neither a text nor a whole number, such as 1.0.
    """
    row_ids = []
    for number, value in enumerate(as_list(ids, "ids"), 1):
        if is_missing(value):
            raise UserError(f"row {number}: the id is empty. Fill it in.")
        if isinstance(value, bool) or not isinstance(value, str | Integral | UUID | date):
            raise UserError(
                f"row {number}: the id is {shortened_repr(value)}; expected a text or a whole "
                "number."
            )
        row_ids.append(check_text(str(value), f"row {number}: the id"))
    return row_ids


def _check_row_ids(ids: Iterable[object], n: int) -> list[str]:
    row_ids = check_ids(ids)
    if len(row_ids) != n:
        raise UserError(
            f"there are {format_count(len(row_ids), 'id')} for {format_count(n, 'text')}; "
            "the numbers must be equal."
        )
    rows: dict[str, int] = {}
    for number, value in enumerate(row_ids, 1):
        if value in rows:
            raise UserError(
                f"the rows {rows[value]} and {number} have the same id, {shortened_repr(value)}; "
                "each row "
                "needs a different id."
            )
        rows[value] = number
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
            raise UserError(
                f"the column {name!r} has the type {arrow_type} in the index: {first_line(error)}. "
                "Correct the value, or build another index."
            ) from error
    return cast_columns
