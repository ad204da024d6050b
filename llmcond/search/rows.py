"""Rows that are to be written into an index: checked, and compared with those that are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from llmcond.arrays import as_list
from llmcond.data.datasets import cell_text
from llmcond.data.rows import column_of
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError, brief, first_line, listed, plural
from llmcond.features.store import FeatureStore
from llmcond.files import digest_text
from llmcond.log import log
from llmcond.search.table import BLOCK, NUMBER, RESERVED, VECTOR, Positions, Table, vectors_of


@dataclass(frozen=True)
class Written:
    """What became of rows: texts added, replaced, and left as they were."""

    added: int
    replaced: int
    unchanged: int

    @property
    def told(self) -> str:
        """Return it in words."""
        return f"{self.added:,} added, {self.replaced:,} replaced, {self.unchanged:,} unchanged"

    def to_json(self) -> dict[str, int]:
        """Return what ``--json`` prints."""
        return asdict(self)


@dataclass(frozen=True)
class Rows:
    """Texts with their ids, and other columns as Arrow arrays."""

    texts: Sequence[str]
    ids: Sequence[str]
    columns: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def checked(
        cls,
        texts: Sequence[str],
        ids: Sequence[object] | None,
        columns: Mapping[str, Sequence[Any]] | None,
    ) -> Rows:
        """Return rows with ids, which are made of the texts where none are given.

        Raises:
            UserError: an empty text, an id that repeats, columns of another length or with names
                that are taken.
        """
        if isinstance(texts, str):
            raise UserError("one text was given; give a list of texts.")
        texts = as_list(texts)
        for number, text in enumerate(texts, 1):
            check_text(text, f"row {number}: the text")
        repeated = len(texts) - len(set(texts))
        if repeated:
            log.info(f"texts that repeat others, which are kept: {repeated:,}")
        own = _made_of(texts) if ids is None else _checked_ids(ids, len(texts))
        columns = dict(columns or {})
        for name, values in columns.items():
            if name in RESERVED or name.startswith("_"):
                raise UserError(
                    f"the column {name!r} cannot be kept: {', '.join(RESERVED)} and names that "
                    "begin with _ are taken. Rename it."
                )
            if len(values) != len(texts):
                raise UserError(
                    f"the column {name!r} has {plural(len(values), 'value')} for "
                    f"{plural(len(texts), 'text')}; they must be as many."
                )
        return cls(texts, own, {name: _arrow(name, values) for name, values in columns.items()})

    def against(self, table: Table) -> Plan:
        """Return what is to be done so that a table holds the rows.

        Raises:
            UserError: other columns than the table has.
        """
        rows, schema = self, table.schema()
        if schema is not None and self.columns:
            rows = Rows(self.texts, self.ids, _cast(self.columns, schema, table.columns))
        places = table.find(self.ids)
        there = np.flatnonzero(places >= 0)
        numbers = np.full(len(self), -1, dtype=np.int64)
        changed = np.ones(len(self), dtype=np.bool_)
        if len(there):
            names = ["text", *rows.columns]
            old = table.take(places[there], [NUMBER, *names])
            known, texts = old[NUMBER].to_numpy(), old["text"].to_pylist()
            own = (rows.texts[i] for i in there.tolist())
            same = np.array([a == b for a, b in zip(own, texts, strict=True)])
            numbers[there[same]] = known[same]
            changed[there] = ~same
            for name, column in rows.columns.items():
                before, now = old[name].to_pylist(), column.take(there).to_pylist()
                changed[there] |= [a != b for a, b in zip(before, now, strict=True)]
        todo = np.flatnonzero(changed)
        replaced = int((places[todo] >= 0).sum())
        written = Written(len(todo) - replaced, replaced, len(self) - len(todo))
        return Plan(rows, table, todo, places, numbers, written)


@dataclass(frozen=True)
class Plan:
    """What is to be done so that a table holds rows.

    Attributes:
        todo: rows to write, ascending.
        places: (n,) of each row's id in the table, -1 where it is new.
        numbers: (n,) of each row whose text is there, -1 where it is to be encoded.
    """

    rows: Rows
    table: Table
    todo: Positions
    places: Positions
    numbers: Positions
    written: Written

    def __len__(self) -> int:
        return len(self.todo)

    @cached_property
    def _new(self) -> Positions:
        return self.todo[self.numbers[self.todo] < 0]

    @property
    def n_new(self) -> int:
        """Return how many texts are to be encoded."""
        return len(self._new)

    @property
    def new_texts(self) -> list[str]:
        """Return them."""
        return [self.rows.texts[i] for i in self._new]

    def write(
        self, store: FeatureStore, stored: Callable[[Sequence[str]], list[EncoderInput]]
    ) -> None:
        """Write the rows in one commit; the store holds the vectors of all new texts' inputs.

        Raises:
            DiskFullError: no room; nothing was changed.
        """
        self.numbers[self._new] = self.table.first_number() + np.arange(self.n_new)
        new = np.zeros(len(self.rows), dtype=np.bool_)
        new[self._new] = True

        starts = range(0, len(self.todo), BLOCK)
        made = (self._batch(self.todo[i : i + BLOCK], new, store, stored) for i in starts)
        first = next(made)
        size = len(self.todo) * first.nbytes // len(first)
        all_new = bool((self.places[self.todo] < 0).all())
        self.table.put(chain([first], made), first.schema, size, all_new)

    def _batch(
        self,
        part: Positions,
        new: Any,
        store: FeatureStore,
        stored: Callable[[Sequence[str]], list[EncoderInput]],
    ) -> pa.RecordBatch:
        texts = [self.rows.texts[i] for i in part]
        found = {
            "id": pa.array([self.rows.ids[i] for i in part], pa.string()),
            "text": pa.array(texts, pa.string()),
        }
        schema = self.table.schema() or ()
        absent = set(self.table.columns) - set(self.rows.columns)
        found |= {name: column.take(part) for name, column in self.rows.columns.items()}
        found |= {own.name: pa.nulls(len(part), own.type) for own in schema if own.name in absent}
        found[NUMBER] = pa.array(self.numbers[part])
        inputs = stored(texts[:1])
        if inputs:
            found[VECTOR] = self._vectors(part, new[part], texts, store, stored)
        return pa.record_batch(found)

    def _vectors(self, part: Positions, new: Any, texts: Any, store: Any, stored: Any) -> Any:
        """Return the vectors of rows: of new texts from the store, of others from the table."""
        made = []
        if new.any():
            inputs = stored([text for text, own in zip(texts, new, strict=True) if own])
            made.append(store.lookup(inputs)[:].reshape(int(new.sum()), -1))
        if not new.all():
            made.append(vectors_of(self.table.take(self.places[part][~new], [VECTOR])))
        vectors = np.empty((len(part), made[0].shape[1]), dtype=made[0].dtype)
        for own in (new, ~new):
            if own.any():
                vectors[own] = made.pop(0)
        return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])


def check_text(text: str, what: str) -> str:
    """Return a text that can be encoded; a UserError that begins with ``what`` if it is none."""
    try:
        cell_text(text)
    except ValueError as error:
        raise UserError(f"{what} {error}.") from error
    return text


def _made_of(texts: Sequence[str]) -> list[str]:
    """Return an id for each text: a digest, with a number where the text repeats others."""
    seen: Counter[str] = Counter()
    ids = []
    for text in texts:
        seen[text] += 1
        digest = digest_text(text, size=8)
        ids.append(digest if seen[text] == 1 else f"{digest}-{seen[text]}")
    return ids


def _checked_ids(ids: Sequence[object], n: int) -> list[str]:
    if len(ids) != n:
        raise UserError(f"{plural(len(ids), 'id')} for {plural(n, 'text')}; they must be as many.")
    own = ["" if value is None else str(value) for value in ids]
    rows: dict[str, int] = {}
    for number, value in enumerate(own, 1):
        check_text(value, f"row {number}: the id")
        if value in rows:
            raise UserError(
                f"the id {brief(value)} is that of row {rows[value]} and of row {number}; an id "
                "stands for one text."
            )
        rows[value] = number
    return own


def _arrow(name: str, values: Sequence[Any]) -> Any:
    try:
        column = column_of(values)
    except UnicodeEncodeError as error:
        raise UserError(f"the column {name!r} holds what is no text: {error.reason}.") from error
    return column.cast(pa.string()) if pa.types.is_null(column.type) else column


def _cast(columns: Mapping[str, Any], schema: pa.Schema, known: Sequence[str]) -> dict[str, Any]:
    if set(columns) != set(known):
        raise UserError(
            f"the texts have the columns {listed(sorted(columns))}, and those of the index "
            f"{listed(sorted(known))}. Give the same ones."
        )
    found = {}
    for name, column in columns.items():
        kind = schema.field(name).type
        try:
            found[name] = column.cast(kind)
        except pa.ArrowException as error:
            raise UserError(
                f"the column {name!r} is of the type {kind} in the index: {first_line(error)}. "
                "Correct the value, or make another index."
            ) from error
    return found
