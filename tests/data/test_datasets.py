"""Rows of data: scaled ratings, errors that name the row, and splits without shared pairs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcond.base.errors import UserError
from llmcond.data.datasets import (
    FRACTIONS,
    RatingScale,
    open_collection,
    read_collection,
    read_dataset,
    read_rows,
    resolve_conditions,
)
from llmcond.data.formats import ReadOptions
from llmcond.data.rows import Rows, leaked_pairs, rows_digest, shares_sentence, split_by_pair

WriteRows = Callable[..., Path]
NAMES = ("sentence1", "sentence2", "condition", "label")


def load_rows(*arguments: Any, **options: Any) -> Rows:
    return read_rows(*arguments, **options)[0]


def make_rows(pairs: list[tuple[str, str]]) -> Rows:
    return Rows(
        sentence1=[first for first, _ in pairs],
        sentence2=[second for _, second in pairs],
        condition=[f"condition {i}" for i in range(len(pairs))],
        rating=np.linspace(0, 1, len(pairs)),
        number=np.arange(1, len(pairs) + 1),
        file="rows.csv",
    )


# -- ratings ---------------------------------------------------------------------------------------


def test_ratings_are_scaled_by_the_range_and_not_by_the_data(write_rows: WriteRows):
    for scale, labels, expected in (
        (RatingScale(), [1, 2, 3.5, 5], [0, 0.25, 0.625, 1]),
        (RatingScale(-5, 5, unrated=99), [-5, -1, 99, 5], [0, 0.4, np.nan, 1]),
        (RatingScale(), [-1, "-1.0", 5], [np.nan, np.nan, 1]),
        (RatingScale(-5, 5, unrated="empty"), ["", " ", "NaN", -1, 5], [np.nan] * 3 + [0.4, 1]),
    ):
        path = write_rows([("a", "b", "c", label) for label in labels])
        rows = load_rows(str(path), scale=scale)
        np.testing.assert_allclose(rows.rating, expected, rtol=0, atol=1e-15)
        assert rows.rated.tolist() == [not np.isnan(value) for value in expected]


def test_invalid_rating_or_scale_is_reported(write_rows: WriteRows):
    for scale, label, message in (
        (RatingScale(), 5.01, "row 2 of rows.csv: label is 5.01, outside the rating range 1 to 5"),
        (RatingScale(), 0, "label is 0, outside .*-1, which marks unrated rows.*--rating-range"),
        (RatingScale(), "3,5", "row 2 of rows.csv: label is '3,5', not a number"),
        (RatingScale(), "", "label is '', not a number; .* as unrated: --unrated empty"),
        (RatingScale(unrated="empty"), -1, "is -1, outside .*not empty, which marks unrated rows"),
        (RatingScale(3, 3), 3, "low must be below high"),
        (RatingScale(-1, 1), 1, "-1 marks unrated rows, but is within .* -1 to 1.*--unrated"),
    ):
        path = write_rows([("a", "b", "c", 1), ("a", "b", "c", label)])
        for read in (load_rows, read_dataset):
            with pytest.raises(UserError, match=message):
                read(str(path), scale=scale)


@pytest.mark.parametrize("dtype", ["float64", "Float64", "object"])
def test_missing_labels_can_be_unrated(tmp_path: Path, dtype: str):
    texts = {name: ["a", "b"] for name in NAMES[:3]}
    table = pd.DataFrame({**texts, "label": pd.Series([None, 3], dtype=dtype)})
    table.to_parquet(tmp_path / "rows.parquet")
    table.to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    table.to_excel(tmp_path / "rows.xlsx")
    paths = map(str, tmp_path.glob("rows.*"))
    for source in (table, pa.Table.from_pandas(table), {**texts, "label": [np.nan, 3]}, *paths):
        rows = load_rows(source, scale=RatingScale(unrated="empty"))
        np.testing.assert_array_equal(rows.rating, [np.nan, 0.5])
        with pytest.raises(UserError, match=r"row 1 of rows.*: label is .*--unrated empty"):
            load_rows(source)


# -- texts -----------------------------------------------------------------------------------------


def test_first_invalid_row_is_named_and_others_are_listed(write_rows: WriteRows):
    first = ("a", "b", "c", 1)
    for rows, message in (
        ([first, ("a", " \t", "c", 1)], "data row 2 of rows.csv: sentence2 is empty"),
        (
            [("a", "b", "\n", 1), ("a", "b", "c", 9)],
            r"row 1 of rows.csv: condition is empty \(1 more row is invalid: 2\). The header",
        ),
    ):
        with pytest.raises(UserError, match=message):
            load_rows(str(write_rows(rows)))


# -- splits ----------------------------------------------------------------------------------------

SENTENCE = st.sampled_from("abcdef")
PAIRS = st.lists(st.tuples(SENTENCE, SENTENCE), min_size=1, max_size=60)


def unordered_pairs(rows: Rows) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in zip(rows.sentence1, rows.sentence2, strict=True)}


@given(PAIRS, st.integers(0, 3), st.randoms(use_true_random=False))
def test_no_sentence_pair_is_in_two_splits(pairs: list[tuple[str, str]], seed: int, random):
    rows = make_rows(pairs)
    if len(unordered_pairs(rows)) < 3:
        with pytest.raises(UserError, match="distinct sentence pairs; at least 3"):
            split_by_pair(rows, FRACTIONS, seed)
        return
    splits = split_by_pair(rows, FRACTIONS, seed)
    pair_sets = [unordered_pairs(part) for part in splits.values()]
    assert list(splits) == ["train", "dev", "test"]
    assert all(pair_sets)
    assert sum(map(len, pair_sets)) == len(set.union(*pair_sets)) == len(unordered_pairs(rows))
    numbers = np.concatenate([part.number for part in splits.values()])
    assert sorted(numbers) == list(rows.number)
    # The order of rows, and of the sentences of a pair, does not change the split.
    shuffled = [pair if random.random() < 0.5 else pair[::-1] for pair in pairs]
    random.shuffle(shuffled)
    again = split_by_pair(make_rows(shuffled), FRACTIONS, seed)
    assert [unordered_pairs(part) for part in again.values()] == pair_sets


def test_single_file_is_split_70_15_15_by_seed(write_rows: WriteRows):
    rows = [(f"a{i}", f"b{i}", condition, 3) for i in range(100) for condition in ("c", "d")]
    path = str(write_rows(rows))
    dataset = read_dataset(path, seed=1)
    assert dataset.to_json()["rows"] == {"train": 140, "dev": 30, "test": 30}
    assert "split by sentence pair with seed 1" in dataset.notes[0]
    assert read_dataset(path, seed=1).digest == dataset.digest
    assert read_dataset(path, seed=2).digest != dataset.digest
    for split in dataset.splits.values():  # Rows keep their number in the file.
        assert [f"a{(number - 1) // 2}" for number in split.number] == split.sentence1
        assert split.describe(0) == f"row {split.number[0]} of rows.csv"


def test_missing_dev_file_is_replaced_by_tenth_of_training_pairs(tmp_path: Path, write_rows):
    rows = [(f"a{i}", f"b{i}", condition, 3) for i in range(50) for condition in ("c", "d")]
    write_rows(rows, "d/train.csv")
    write_rows([("x", "y", "c", 3)], "d/test.csv")
    dataset = read_dataset(str(tmp_path / "d"), seed=4)
    assert list(dataset.splits) == ["train", "dev", "test"]
    assert dataset.to_json()["rows"] == {"train": 90, "dev": 10, "test": 1}
    assert leaked_pairs(dataset.splits["dev"], dataset.splits["train"]) == 0
    assert "10% of the training pairs are dev, chosen with seed 4" in dataset.notes[0]
    other = read_dataset(str(tmp_path / "d"), seed=5)
    assert dataset.splits["dev"].sentence1 != other.splits["dev"].sentence1
    write_rows([("a", "b", "c", 3), ("b", "a", "d", 3)], "d/train.csv")
    with pytest.raises(UserError, match="1 distinct sentence pairs; at least 2"):
        read_dataset(str(tmp_path / "d"))


def test_sentences_that_differ_in_case_or_spaces_are_equal():
    pairs = [(f"Two men play {i}", f"A dog sits {i}") for i in range(20)]
    variants = [(f"a DOG  sits {i}", f"two men play {i} ") for i in range(20)]
    rows = make_rows([*pairs, *variants])
    assert rows.pair.tolist() == [*range(20), *range(20)]
    # Keys have the least spelling, so that the order of rows does not matter.
    assert rows.pair_keys() == [tuple(sorted(pair)) for pair in pairs]
    split = split_by_pair(rows, {"train": 0.7, "dev": 0.3}, 0)
    assert set(split["train"].number % 20).isdisjoint(split["dev"].number % 20)
    without_variants = split_by_pair(make_rows(pairs), {"train": 0.7, "dev": 0.3}, 0)
    assert set(without_variants["dev"].number % 20) == set(split["dev"].number % 20)
    reverse = split_by_pair(make_rows([*variants, *pairs][::-1]), {"train": 0.7, "dev": 0.3}, 0)
    assert set(reverse["dev"].folded_sentences()) == set(split["dev"].folded_sentences())


def test_rows_have_their_number_in_the_file_if_others_are_left_out(write_rows):
    rows = [("a", "b", "c", 3), ("", "b", "c", 3), ("d", "e", "c", 4), ("f", "g", "c", 4)]
    dataset = read_dataset(str(write_rows(rows)), reading=ReadOptions(skip_empty=True))
    by_text = {
        text: number
        for part in dataset.splits.values()
        for text, number in zip(part.sentence1, part.number.tolist(), strict=True)
    }
    assert by_text == {"a": 1, "d": 3, "f": 4}


def test_leaked_pairs_and_sentences_are_counted():
    train = make_rows([("a", "b"), ("c", "d"), ("e", "f")])
    # Pairs count once and in either order.
    assert leaked_pairs(make_rows([("b", "A"), ("a", "b"), ("e", "f"), ("a", "d")]), train) == 2
    rows = make_rows([("x", " A"), ("D", "y"), ("x", "y"), ("ab", "y")])
    shared = shares_sentence(rows, train.folded_sentences())
    assert shared.tolist() == [True, True, False, False]


def test_digest_depends_on_texts_ratings_and_splits_only(tmp_path: Path, write_rows: WriteRows):
    rows = [("a", "b", "c", 1), ("a", "b", "d", 4), ("é", "f", "c", -1), ("g", "h", "c", 2)]
    for folder, train, dev in (("first", rows[:2], rows[2:]), ("second", rows[2:], rows[:2])):
        for name, part in (("train", train), ("dev", dev)):
            path = write_rows(part, f"{folder}/{name}.csv")
            (tmp_path / f"{folder} parquet").mkdir(exist_ok=True)
            pq.write_table(pa.csv.read_csv(path), tmp_path / f"{folder} parquet/{name}.parquet")
    first, copy, second = (
        read_dataset(str(tmp_path / name)) for name in ("first", "first parquet", "second")
    )
    assert first.digest == copy.digest == first.to_json()["digest"] != second.digest
    digests = {rows_digest(load_rows(str(write_rows(rows))))}
    for row, column, value in ((0, 0, "A"), (1, 2, "e"), (3, 3, 3), (2, 3, 1), (0, 3, -1)):
        changed = [list(values) for values in rows]
        changed[row][column] = value
        digests.add(rows_digest(load_rows(str(write_rows(changed)))))
    assert len(digests) == 6


# -- texts for embedding ---------------------------------------------------------------------------


def test_conditions_are_read_from_columns(write_rows: WriteRows):
    path = write_rows([("a", "x"), ("b", "y")], header="sentence,condition")
    names = ["condition", "sentence"]
    collection = read_collection(str(path), "sentence", ["condition"], conditions=names)
    assert (collection.texts, collection.file) == (["a", "b"], "rows.csv")
    assert collection.conditions == {"condition": ["x", "y"], "sentence": ["a", "b"]}
    assert collection.columns == {"condition": ["x", "y"]}
    folder = write_rows([("a", "b")], "d/test.csv").parent
    empty = write_rows([("a", ""), ("", "")], "empty.csv", "sentence,condition")
    for source, sentence, condition, message in (
        (path, "sentence", "conditoin", "no column .*'condition'.*--condition COL_OR_TEXT"),
        (path, "sentense", "condition", "no column 'sentense'.*Did you mean 'sentence'"),
        (empty, "sentence", "sentence", "row 2 of .*: sentence is empty"),
        (empty, "sentence", "condition", "row 1 .*condition is empty .1 more row"),
        (folder, "sentence", "condition", "is a folder; name a single file"),
    ):
        with pytest.raises(UserError, match=message):
            read_collection(str(source), sentence, conditions=[condition])


def test_condition_is_a_column_or_a_text(write_rows: WriteRows):
    source = open_collection(str(write_rows([("a", "x")], header="sentence,condition")))
    assert resolve_conditions(source, None) == ("condition", None)
    assert resolve_conditions(source, "sentence") == ("sentence", None)
    assert resolve_conditions(source, "the place") == (None, "the place")
    assert resolve_conditions(source, None, "sentence") == (None, "sentence")
    with pytest.raises(UserError, match="both --condition and --condition-text"):
        resolve_conditions(source, "condition", "the place")
    for condition, text in ((" ", None), (None, "")):
        with pytest.raises(UserError, match="--condition-text is empty"):
            resolve_conditions(source, condition, text)
