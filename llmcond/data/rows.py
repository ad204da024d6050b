"""Rows of two sentences, a condition and a rating, as columns; their pairs, splits and file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError
from llmcond.files import digest_bytes, digest_text


@dataclass(frozen=True)
class Rows:
    """Rows of one split, as columns of equal length.

    Attributes:
        sentence1, sentence2, condition: texts, never empty.
        rating: (n,) float64 on 0 to 1; NaN where the row is unrated or ill-defined.
        number: (n,) the row's number in its file, from 1.
        file: the name of the file they came from.
        extra: further columns of text by name, for templates that name them.
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
        """Return (n,) whether a row has a rating."""
        return ~np.isnan(self.rating)

    @cached_property
    def pair(self) -> NDArray[np.int64]:
        """Return (n,) the number of each row's sentence pair, whichever sentence comes first.

        Sentences that differ in case or spaces only are the same sentence.
        """
        numbers: dict[tuple[str, str], int] = {}
        found = [numbers.setdefault(pair, len(numbers)) for pair in self._folded_pairs()]
        return np.array(found, dtype=np.int64)

    def pair_keys(self) -> list[tuple[str, str]]:
        """Return each distinct sentence pair once, as it first stands, in the order of ``pair``."""
        keys: dict[tuple[str, str], tuple[str, str]] = {}
        for pair, key in zip(
            zip(self.sentence1, self.sentence2, strict=True), self._folded_pairs(), strict=True
        ):
            keys.setdefault(key, _in_order(*pair))
        return list(keys.values())

    def folded_sentences(self) -> set[str]:
        """Return the distinct sentences of either side, see :func:`fold_text`."""
        return {fold_text(text) for text in {*self.sentence1, *self.sentence2}}

    def _folded_pairs(self) -> Iterator[tuple[str, str]]:
        folded = {text: fold_text(text) for text in {*self.sentence1, *self.sentence2}}
        for a, b in zip(self.sentence1, self.sentence2, strict=True):
            yield _in_order(folded[a], folded[b])

    def take(self, chosen: NDArray[Any]) -> Rows:
        """Return the rows at the chosen positions (numbers or a mask)."""
        positions = np.arange(len(self))[chosen]
        texts = {name: [column[i] for i in positions] for name, column in self.texts.items()}
        rating, number = self.rating[positions], self.number[positions]
        return replace(_with_texts(self, texts), rating=rating, number=number)

    @property
    def texts(self) -> dict[str, Sequence[str]]:
        """Return the columns of text by name: both sentences, the condition, further ones."""
        own = {"sentence1": self.sentence1, "sentence2": self.sentence2}
        return {**own, "condition": self.condition, **self.extra}

    def describe(self, position: int) -> str:
        """Return the name of a row for messages: ``row 17 of train.csv``."""
        return f"row {self.number[position]} of {self.file}"


def fold_text(text: str) -> str:
    """Return a text without differences in case and in white space."""
    return " ".join(text.split()).casefold()


def _in_order(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a <= b else (b, a)


def rows_digest(rows: Rows) -> str:
    """Identify rows by their texts and ratings, in their order."""
    ratings = [None if np.isnan(r) else float(r) for r in rows.rating]
    columns = [*(list(texts) for texts in rows.texts.values()), ratings]
    return digest_bytes(json.dumps(columns).encode(), size=16).hex()


def split_by_pair(rows: Rows, fractions: Mapping[str, float], seed: int) -> dict[str, Rows]:
    """Divide rows so that all rows of a sentence pair are in one split.

    ``fractions`` are the share of the pairs for each split, adding up to 1. The seed and the
    sentences themselves decide which pairs go where.

    Raises:
        UserError: fewer pairs than splits.
    """
    keys = rows.pair_keys()
    if len(keys) < len(fractions):
        raise UserError(
            f"{rows.file} has {len(keys)} distinct sentence pairs; {len(fractions)} at least are "
            f"needed to make {', '.join(fractions)}."
        )
    split_of_pair = split_keys(keys, fractions, seed)
    return {
        name: rows.take(split_of_pair[rows.pair] == index) for index, name in enumerate(fractions)
    }


def split_keys(
    keys: Sequence[Sequence[str]], fractions: Mapping[str, float], seed: int
) -> NDArray[np.int64]:
    """Return (n,) which split each of n distinct keys is in, by their texts and the seed.

    Every split gets one at least, however few there are; the first one gets what is left.
    """
    order = sorted(range(len(keys)), key=lambda i: digest_text(str(seed), *keys[i]))
    sizes = [max(1, int(share * len(keys))) for share in fractions.values()]
    sizes[0] += len(keys) - sum(sizes)
    split = np.empty(len(keys), dtype=np.int64)
    split[order] = np.repeat(np.arange(len(sizes)), sizes)
    return split


def fold_of_pair(rows: Rows, folds: int, seed: int) -> NDArray[np.int64]:
    """Return (n,) which of ``folds`` parts of like size each row is in, all of a pair in one.

    The seed and the sentences themselves decide.
    """
    keys = rows.pair_keys()
    order = sorted(range(len(keys)), key=lambda i: digest_text(str(seed), *keys[i]))
    fold = np.empty(len(keys), dtype=np.int64)
    fold[order] = np.arange(len(keys)) % folds
    return np.asarray(fold[rows.pair])


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Return rows that have the same columns as one, in their order."""
    names = parts[0].texts
    texts = {name: [text for rows in parts for text in rows.texts[name]] for name in names}
    return replace(
        _with_texts(parts[0], texts),
        rating=np.concatenate([rows.rating for rows in parts]),
        number=np.concatenate([rows.number for rows in parts]),
        file=" and ".join(dict.fromkeys(rows.file for rows in parts)),
    )


def _with_texts(rows: Rows, texts: dict[str, Any]) -> Rows:
    own = {name: texts.pop(name) for name in ("sentence1", "sentence2", "condition")}
    return replace(rows, **own, extra=texts)


def leaked_pairs(rows: Rows, train: Rows) -> int:
    """Count the sentence pairs of ``rows`` that occur in ``train`` too."""
    return len(set(rows._folded_pairs()) & set(train._folded_pairs()))


def shares_sentence(rows: Rows, sentences: Set[str]) -> NDArray[np.bool_]:
    """Return (n,) whether one of a row's two sentences is among ``sentences``, folded ones."""
    pairs = zip(rows.sentence1, rows.sentence2, strict=True)
    found = [fold_text(a) in sentences or fold_text(b) in sentences for a, b in pairs]
    return np.array(found, dtype=np.bool_)


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
    # Absolute: in a relative one with a colon Arrow sees the name of a file system.
    pq.write_table(pa.concat_tables(tables), path.absolute())


#: The columns that rows have, by the names of their Arrow types; all others are texts.
_COLUMNS = {
    **dict.fromkeys(("split", "file", "sentence1", "sentence2", "condition"), "string"),
    "number": "int64",
    "rating": "double",
}


def _shared(column: Any) -> list[Any]:
    """Return the values of a column; texts that occur again are one object."""
    import pyarrow as pa

    if not pa.types.is_string(column.type):
        return list(column.to_pylist())
    encoded = column.combine_chunks().dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    return [texts[i] for i in encoded.indices.to_numpy()]


def load_rows(path: Path, conditioned: tuple[bool, bool] = (True, True)) -> dict[str, Rows]:
    """Return the rows that :func:`save_rows` wrote, by split; a UserError if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path.absolute())
        table.select([*_COLUMNS])
        kinds = ((name, _COLUMNS.get(name, "string")) for name in table.column_names)
        table = table.cast(pa.schema([pa.field(*kind, nullable=False) for kind in kinds]))
        columns = {name: _shared(table[name]) for name in table.column_names}
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
        extra={name: columns[name] for name in columns if name not in _COLUMNS},
        conditioned=conditioned,
    )
    found: dict[str, Rows] = {}
    for name in dict.fromkeys(columns["split"]):
        positions = np.flatnonzero(split == name)
        found[name] = replace(everything.take(positions), file=columns["file"][positions[0]])
    return found


def column_of(values: Sequence[Any]) -> Any:
    """Return values as an Arrow array, as texts where they are of several types."""
    import pyarrow as pa

    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):  # values of several types
        return pa.array([None if value is None else str(value) for value in values])
