"""Rows of two sentences, a condition and a rating: their columns, pairs, splits and storage."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcond.base.errors import UserError
from llmcond.base.files import (
    as_json,
    digest_bytes,
    digest_text,
    replace_atomically,
    suffix,
    write_csv,
    write_text,
)


@dataclass(frozen=True)
class Rows:
    """Rows of one split, as columns of equal length.

    Attributes:
        sentence1: n texts, never empty.
        sentence2: n texts, never empty.
        condition: n texts, never empty.
        rating: (n,) float64 from 0 to 1; NaN for rows that are unrated or ill-defined.
        number: (n,) number of each row in its file, from 1.
        file: name of the file that they were read from.
        extra: further columns of text by name, for prompts that use them.
        conditioned: whether the first and the second sentence are encoded under the condition.
    """

    sentence1: Sequence[str]
    sentence2: Sequence[str]
    condition: Sequence[str]
    rating: NDArray[np.float64]
    number: NDArray[np.int64]
    file: str
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)
    conditioned: tuple[bool, bool] = (True, True)

    def __len__(self) -> int:
        return len(self.rating)

    @property
    def rated(self) -> NDArray[np.bool_]:
        """(n,) whether a row has a rating."""
        return ~np.isnan(self.rating)

    @cached_property
    def pair(self) -> NDArray[np.int64]:
        """(n,) number of each row's sentence pair, regardless of the order of the sentences.

        Sentences that differ only in case or white space count as the same.
        """
        numbers: dict[tuple[str, str], int] = {}
        pair_numbers = [numbers.setdefault(pair, len(numbers)) for pair in self._folded_pairs()]
        return np.array(pair_numbers, dtype=np.int64)

    def pair_keys(self) -> list[tuple[str, str]]:
        """Return each distinct sentence pair once, in the order of ``pair``.

        A pair has the least of its spellings, so that the order of rows does not matter.
        """
        keys: dict[tuple[str, str], tuple[str, str]] = {}
        for pair, key in zip(
            zip(self.sentence1, self.sentence2, strict=True), self._folded_pairs(), strict=True
        ):
            spelling = _sort_pair(*pair)
            keys[key] = min(keys.get(key, spelling), spelling)
        return list(keys.values())

    def folded_sentences(self) -> set[str]:
        """Return the distinct sentences of both columns, folded by ``fold_text``."""
        return {fold_text(text) for text in {*self.sentence1, *self.sentence2}}

    def _folded_pairs(self) -> Iterator[tuple[str, str]]:
        folded = {text: fold_text(text) for text in {*self.sentence1, *self.sentence2}}
        for a, b in zip(self.sentence1, self.sentence2, strict=True):
            yield _sort_pair(folded[a], folded[b])

    def take(self, selection: NDArray[Any]) -> Rows:
        """Select rows by positions or by a boolean mask."""
        positions = np.arange(len(self))[selection]
        texts = {name: [column[i] for i in positions] for name, column in self.texts.items()}
        rating, number = self.rating[positions], self.number[positions]
        return replace(_replace_texts(self, texts), rating=rating, number=number)

    @property
    def texts(self) -> dict[str, Sequence[str]]:
        """The columns of text by name: both sentences, the condition, and further columns."""
        sentences = {"sentence1": self.sentence1, "sentence2": self.sentence2}
        return {**sentences, "condition": self.condition, **self.extra}

    def describe(self, position: int) -> str:
        """Return the name of a row for messages: ``row 17 of train.csv``."""
        return f"row {self.number[position]} of {self.file}"


def fold_text(text: str) -> str:
    """Normalise case and white space of a text."""
    return " ".join(text.split()).casefold()


def _sort_pair(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a <= b else (b, a)


def pairs_digest(rows: Rows) -> str:
    """Return a digest of the distinct sentence pairs, whatever their order, conditions and ratings.

    Sentences that differ only in case or white space count as the same.
    """
    return digest_text(*sorted("\0".join(pair) for pair in set(rows._folded_pairs())))


def rows_digest(rows: Rows) -> str:
    """Return a digest of the rows' texts and ratings, which depends on their order."""
    ratings = [None if np.isnan(r) else float(r) for r in rows.rating]
    columns = [*(list(texts) for texts in rows.texts.values()), ratings]
    return digest_bytes(json.dumps(columns).encode(), size=16).hex()


def split_by_pair(rows: Rows, fractions: Mapping[str, float], seed: int) -> dict[str, Rows]:
    """Divide rows into splits so that all rows of a sentence pair are in the same split.

    Args:
        rows: the rows.
        fractions: for each split, its share of the pairs; they sum to 1.
        seed: random seed. Only the seed and the sentences decide the split of a pair.

    Raises:
        UserError: there are fewer pairs than splits.
    """
    keys = rows.pair_keys()
    if len(keys) < len(fractions):
        raise UserError(
            f"{rows.file} has {len(keys)} distinct sentence pairs; at least {len(fractions)} are "
            f"needed to divide it into {', '.join(fractions)}."
        )
    split_of_pair = split_keys(keys, fractions, seed)
    return {
        name: rows.take(split_of_pair[rows.pair] == index) for index, name in enumerate(fractions)
    }


def split_keys(
    keys: Sequence[Sequence[str]], fractions: Mapping[str, float], seed: int
) -> NDArray[np.int64]:
    """Return (n,) the split of each of n distinct keys, as its position in ``fractions``.

    Only the texts and the seed decide. Every split gets at least one key; the first split gets the
    remaining ones.
    """
    order = sorted(range(len(keys)), key=lambda i: digest_text(str(seed), *keys[i]))
    sizes = [max(1, int(share * len(keys))) for share in fractions.values()]
    sizes[0] += len(keys) - sum(sizes)
    split = np.empty(len(keys), dtype=np.int64)
    split[order] = np.repeat(np.arange(len(sizes)), sizes)
    return split


def fold_of_pair(rows: Rows, folds: int, seed: int) -> NDArray[np.int64]:
    """Return (n,) the fold of each row, from 0, with all rows of a pair in the same fold.

    Folds have about the same number of pairs. Only the seed and the sentences decide.
    """
    keys = rows.pair_keys()
    order = sorted(range(len(keys)), key=lambda i: digest_text(str(seed), *keys[i]))
    fold = np.empty(len(keys), dtype=np.int64)
    fold[order] = np.arange(len(keys)) % folds
    return np.asarray(fold[rows.pair])


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenate rows that have the same columns."""
    names = parts[0].texts
    texts = {name: [text for rows in parts for text in rows.texts[name]] for name in names}
    return replace(
        _replace_texts(parts[0], texts),
        rating=np.concatenate([rows.rating for rows in parts]),
        number=np.concatenate([rows.number for rows in parts]),
        file=" and ".join(dict.fromkeys(rows.file for rows in parts)),
    )


def _replace_texts(rows: Rows, texts: dict[str, Any]) -> Rows:
    required = {name: texts.pop(name) for name in ("sentence1", "sentence2", "condition")}
    return replace(rows, **required, extra=texts)


def leaked_pairs(rows: Rows, train: Rows) -> int:
    """Count the sentence pairs of ``rows`` that also occur in ``train``."""
    return len(set(rows._folded_pairs()) & set(train._folded_pairs()))


def shares_sentence(rows: Rows, sentences: Set[str]) -> NDArray[np.bool_]:
    """Return (n,) whether a sentence of the row, once folded, is among ``sentences``."""
    pairs = zip(rows.sentence1, rows.sentence2, strict=True)
    shared = [fold_text(a) in sentences or fold_text(b) in sentences for a, b in pairs]
    return np.array(shared, dtype=np.bool_)


def save_rows(path: Path, splits: Mapping[str, Rows]) -> None:
    """Write the rows of all splits to a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = [
        pa.table(
            {
                "split": [name] * len(rows),
                "file": [rows.file] * len(rows),
                "number": rows.number,
                **{name: list(texts) for name, texts in rows.texts.items()},
                "rating": rows.rating,
            }
        )
        for name, rows in splits.items()
    ]
    # The path is made absolute, because Arrow takes the part before a colon in a relative path for
    # the name of a file system.
    pq.write_table(pa.concat_tables(tables), path.absolute())


#: The Arrow types of the columns; all others are texts.
_COLUMN_TYPES = {
    **dict.fromkeys(("split", "file", "sentence1", "sentence2", "condition"), "string"),
    "number": "int64",
    "rating": "double",
}


#: The names of the columns that rows are stored in, in addition to those that prompts read.
STORED_COLUMNS = frozenset(_COLUMN_TYPES)


def _intern_values(column: Any) -> list[Any]:
    """Return the values of a column; equal texts share one object."""
    import pyarrow as pa

    if not pa.types.is_string(column.type):
        return list(column.to_pylist())
    encoded = column.combine_chunks().dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    return [texts[i] for i in encoded.indices.to_numpy()]


def load_rows(path: Path, conditioned: tuple[bool, bool] = (True, True)) -> dict[str, Rows]:
    """Read the rows that ``save_rows`` wrote, by split; raises a ``UserError`` if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path.absolute())
        table.select([*_COLUMN_TYPES])
        types = ((name, _COLUMN_TYPES.get(name, "string")) for name in table.column_names)
        table = table.cast(pa.schema([pa.field(*kind, nullable=False) for kind in types]))
        columns = {name: _intern_values(table[name]) for name in table.column_names}
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {error}. Extract into a new --run.") from error
    split = np.array(columns["split"])
    everything = Rows(
        sentence1=columns["sentence1"],
        sentence2=columns["sentence2"],
        condition=columns["condition"],
        rating=table["rating"].to_numpy(),
        number=table["number"].to_numpy(),
        file="",
        extra={name: columns[name] for name in columns if name not in _COLUMN_TYPES},
        conditioned=conditioned,
    )
    rows_by_split: dict[str, Rows] = {}
    for name in dict.fromkeys(columns["split"]):
        positions = np.flatnonzero(split == name)
        rows_by_split[name] = replace(
            everything.take(positions), file=columns["file"][positions[0]]
        )
    return rows_by_split


def is_null(value: Any) -> bool:
    """Return whether a value is one of those for missing values: None, NaN, NaT or pandas' NA."""
    if value is None or isinstance(value, str):
        return value is None
    try:
        return bool(value != value)  # noqa: PLR0124 - NaN and NaT differ from themselves
    except TypeError:  # NA has no truth value.
        return True
    except ValueError:  # An array has none either, but is not missing.
        return False


def to_arrow(values: Sequence[Any]) -> Any:
    """Convert values to an Arrow array; NaN, NaT and NA become null.

    Values of several types become texts, and so do objects without fields, which Parquet cannot
    store. Decimals have the largest precision, so that later rows may have more digits.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        array = pa.array(values, from_pandas=True)
        as_texts = _contains_empty_struct(array.type)
        if pa.types.is_date(array.type):  # Arrow would cut the times of later values.
            as_texts = any(isinstance(value, datetime) for value in values)
    except (pa.ArrowException, OverflowError):  # values of several types
        as_texts = True
    if as_texts:
        return pa.array([None if is_null(value) else str(value) for value in values])
    if pa.types.is_floating(array.type):  # the scalars of NumPy remain NaN
        return pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    if pa.types.is_decimal128(array.type):
        return array.cast(pa.decimal128(38, array.type.scale))
    return array


def _contains_empty_struct(arrow_type: Any) -> bool:
    import pyarrow as pa

    children = [arrow_type.field(i).type for i in range(arrow_type.num_fields)]
    is_empty = pa.types.is_struct(arrow_type) and not children
    return is_empty or any(map(_contains_empty_struct, children))


def write_table(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write columns as a .parquet, .jsonl or .csv file, atomically."""
    form = suffix(path)
    if form == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        arrays = {name: to_arrow(values) for name, values in columns.items()}
        with replace_atomically(path) as temporary:
            pq.write_table(pa.table(arrays), temporary.absolute())
        return
    rows = zip(*columns.values(), strict=True)
    if form == ".jsonl":
        records = (dict(zip(columns, row, strict=True)) for row in rows)
        lines = (json.dumps(as_json(record), ensure_ascii=False) for record in records)
        write_text(path, "".join(f"{line}\n" for line in lines))
        return
    write_csv(path, columns, rows)


class KnownAnswers(Protocol):
    """The known correct answers of queries."""

    def gather(
        self, sentence: NDArray[np.integer], condition: NDArray[np.integer], /
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the answers of m queries, flattened.

        Args:
            sentence: (m,) index of each query's sentence.
            condition: (m,) index of each query's condition.

        Returns:
            (k,) position of a query, and (k,) index of one of its answers.
        """


@dataclass(frozen=True)
class QueryRows:
    """Queries as columns of n texts.

    Attributes:
        columns: all columns that the files have, by name.
        heading: names of the columns that state the question.
        texts: names of the columns with the subject of the question, and with the answer.
        group_column: name of the column whose values define the groups that metrics are reported
            for.
    """

    columns: Mapping[str, Sequence[str]]
    heading: Sequence[str]
    texts: Sequence[str]
    group_column: str

    def __len__(self) -> int:
        return len(self.columns[self.group_column])

    @property
    def headings(self) -> list[str]:
        """The question of each query, for example ``the place`` or ``dialogue d3, history 2``.

        Several columns are joined, each with its name.
        """
        columns = [self.columns[name] for name in self.heading]
        if len(columns) == 1:
            return list(columns[0])
        return [
            ", ".join(f"{name} {text}" for name, text in zip(self.heading, row, strict=True))
            for row in zip(*columns, strict=True)
        ]
