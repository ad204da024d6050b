"""Rows of data: scaled ratings, errors that name the row, and splits without shared pairs."""

import json
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

from llmcond.data.datasets import (
    FRACTIONS,
    Columns,
    RatingScale,
    open_collection,
    read_collection,
    read_dataset,
    read_rows,
    resolve_conditions,
)
from llmcond.data.rows import Rows, leaked_pairs, rows_digest, shares_sentence, split_by_pair
from llmcond.errors import UserError

WriteRows = Callable[..., Path]
NAMES = ("sentence1", "sentence2", "condition", "label")


def load_rows(*arguments: Any, **options: Any) -> Rows:
    return read_rows(*arguments, **options)[0]


def write_json_lines(path: Path, *labels: str) -> str:
    start = '{"sentence1": "a", "sentence2": "b", "condition": "c", "label": '
    path.write_text("".join(f"{start}{label}}}\n" for label in labels))
    return str(path)


def make_rows(pairs: list[tuple[str, str]]) -> Rows:
    return Rows(
        sentence1=[first for first, _ in pairs],
        sentence2=[second for _, second in pairs],
        condition=[f"condition {i}" for i in range(len(pairs))],
        rating=np.linspace(0, 1, len(pairs)),
        number=np.arange(1, len(pairs) + 1),
        file="rows.csv",
    )


def unordered_pairs(rows: Rows) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in zip(rows.sentence1, rows.sentence2, strict=True)}


# --- Ratings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "labels", "expected"),
    [
        (RatingScale(), [1, 2, 3.5, 5], [0, 0.25, 0.625, 1]),
        (RatingScale(), [2, 3, 4], [0.25, 0.5, 0.75]),
        (RatingScale(), ["1e0", " 3 ", "+5"], [0, 0.5, 1]),
        (RatingScale(0, 1), [0, 0.25, 1], [0, 0.25, 1]),
        (RatingScale(-5, 5, unrated=99), [-5, -1, 99, 5], [0, 0.4, np.nan, 1]),
        (RatingScale(0, 10, unrated=-2.5), [-2.5, 10], [np.nan, 1]),
        (RatingScale(), [-1, "-1.0", 5], [np.nan, np.nan, 1]),
        (RatingScale(unrated="empty"), ["", " ", "NaN", None, 5], [np.nan] * 4 + [1]),
        (RatingScale(-5, 5, unrated="empty"), ["", -1, 5], [np.nan, 0.4, 1]),
    ],
)
def test_ratings_are_scaled_by_the_range_and_not_by_the_data(
    write_rows: WriteRows, scale: RatingScale, labels: list[object], expected: list[float]
):
    path = write_rows([("a", "b", "c", label) for label in labels])
    rows = load_rows(str(path), scale=scale)
    np.testing.assert_allclose(rows.rating, expected, rtol=0, atol=1e-15)
    assert rows.rated.tolist() == [not np.isnan(value) for value in expected]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (0, "label is 0, outside the rating range 1 to 5"),
        (5.01, "label is 5.01, outside the rating range 1 to 5"),
        (-2, "label is -2, outside"),
        ("high", "label is 'high', not a number"),
        ("3,5", "label is '3,5', not a number"),
        ("", "label is '', not a number; to read such rows as unrated: --unrated empty"),
        ("nan", "label is 'nan', not a number; to read such rows as unrated: --unrated empty"),
        ("inf", "label is inf, outside the rating range 1 to 5"),
        ("True", "label is 'True', not a number"),
    ],
)
def test_invalid_label_is_reported_with_its_row(write_rows: WriteRows, label: object, message: str):
    path = write_rows([("a", "b", "c", 1), ("a", "b", "c", label)])
    with pytest.raises(UserError) as caught:
        load_rows(str(path))
    assert f"row 2 of rows.csv: {message}" in str(caught.value)


@pytest.mark.parametrize("label", ["true", "null", "NaN", "[3]", '"x"'])
def test_json_label_that_is_not_a_number_is_reported_with_its_row(tmp_path: Path, label: str):
    path = write_json_lines(tmp_path / "rows.jsonl", "1", label)
    with pytest.raises(UserError, match=r"row 2 of rows.jsonl: label is .*, not a number"):
        load_rows(path)


def test_error_of_rating_out_of_range_names_the_options(write_rows: WriteRows):
    path = write_rows([("a", "b", "c", 7)])
    with pytest.raises(UserError, match=r"-1, which marks unrated rows.*--rating-range"):
        load_rows(str(path))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (RatingScale(5, 1), "low must be below high"),
        (RatingScale(3, 3), "low must be below high"),
        (RatingScale(1, float("nan")), "rating range"),
        (RatingScale(1, float("inf")), "rating range"),
        (RatingScale(float("-inf"), 1, unrated=9), "rating range"),
        (RatingScale(-1, 1), "-1 marks unrated rows, but is within .* -1 to 1.*--unrated"),
        (RatingScale(0, 10, unrated=10), "10 marks unrated rows, but is within"),
        (RatingScale(unrated=float("nan")), "--unrated is nan; expected a number, or empty"),
        (RatingScale(unrated="none"), "--unrated is 'none'; expected a number, or empty"),
    ],
)
def test_invalid_rating_scale_is_rejected(write_rows: WriteRows, scale: RatingScale, message: str):
    path = write_rows([("a", "b", "c", 1)])
    with pytest.raises(UserError, match=message):
        load_rows(str(path), scale=scale)
    with pytest.raises(UserError, match=message):
        read_dataset(str(path), scale=scale)


def test_out_of_range_label_is_rejected_if_empty_means_unrated(write_rows: WriteRows):
    path = write_rows([("a", "b", "c", -1)])
    with pytest.raises(UserError, match=r"is -1, outside .*not empty, which marks unrated rows"):
        load_rows(str(path), scale=RatingScale(unrated="empty"))


@pytest.mark.parametrize("dtype", ["float64", "Float64", "object"])
def test_missing_labels_in_memory_can_be_unrated(dtype: str):
    texts = {name: ["a", "b"] for name in NAMES[:3]}
    table = pd.DataFrame({**texts, "label": pd.Series([None, 3], dtype=dtype)})
    for source in (table, pa.Table.from_pandas(table), {**texts, "label": [np.nan, 3]}):
        rows = load_rows(source, scale=RatingScale(unrated="empty"))
        np.testing.assert_array_equal(rows.rating, [np.nan, 0.5])
        with pytest.raises(UserError, match=r"row 1 of rows in memory: label is .*--unrated empty"):
            load_rows(source)


@pytest.mark.parametrize("suffix", [".parquet", ".xlsx", ".jsonl"])
def test_null_labels_of_every_format_can_be_unrated(tmp_path: Path, suffix: str):
    table = pd.DataFrame([("a", "b", "c", 3), ("a", "b", "c", None)], columns=NAMES)
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        table.to_json(path, orient="records", lines=True)
    else:
        getattr(table, {".parquet": "to_parquet", ".xlsx": "to_excel"}[suffix])(path)
    rows = load_rows(str(path), scale=RatingScale(unrated="empty"))
    np.testing.assert_array_equal(rows.rating, [0.5, np.nan])


def test_unrated_rows_are_read_and_counted(tmp_path: Path, write_rows: WriteRows):
    write_rows([("a", "b", "c", -1), ("a", "b", "d", 2), ("e", "f", "c", -1)], "d/train.csv")
    write_rows([("g", "h", "c", 3)], "d/dev.csv")
    record = read_dataset(str(tmp_path / "d")).to_json()
    assert record["rows"] == {"train": 3, "dev": 1}
    assert record["unrated"] == {"train": 2, "dev": 0}


# --- Texts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [("", "b", "c", 1)],
            "data row 1 of rows.csv: sentence1 is empty. The header is not counted. Correct or",
        ),
        (
            [("a", "b", "c", 1), ("a", " \t", "c", 1)],
            "data row 2 of rows.csv: sentence2 is empty. The header is not counted.",
        ),
        (
            [("a", "b", "\n", 1), ("a", "b", "c", 9)],
            "row 1 of rows.csv: condition is empty (1 more row is invalid: 2). The header",
        ),
        (
            [("a", "b", "c", 1), ("", "", "", ""), ("", "b", "c", 1), ("a", "b", "c", 0)],
            "row 2 of rows.csv: sentence1 is empty (2 more rows are invalid: 3, 4)",
        ),
    ],
)
def test_first_invalid_row_is_named_and_others_are_listed(
    write_rows: WriteRows, rows: list[tuple[object, ...]], message: str
):
    with pytest.raises(UserError) as caught:
        load_rows(str(write_rows(rows)))
    assert message in str(caught.value)


def test_at_most_ten_invalid_rows_are_listed(write_rows: WriteRows):
    rows = write_rows([("", "b", "c", 1)] * 12)
    with pytest.raises(UserError, match=r"\(11 more rows are invalid: 2, 3, .*, 9, 10, …\)"):
        load_rows(str(rows))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "sentence1 is empty"),
        (7, "sentence1 is 7, not a text"),
        (["a"], "sentence1 is ['a'], not a text"),
        ("\ud800", "sentence1 contains half of a surrogate pair"),
        ("a \udfff b", "sentence1 contains half of a surrogate pair"),
    ],
)
def test_json_value_that_is_not_a_text_is_rejected(tmp_path: Path, value: object, message: str):
    path = tmp_path / "rows.jsonl"
    record = {"sentence1": value, "sentence2": "b", "condition": "c", "label": 1}
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(UserError) as caught:
        load_rows(str(path))
    assert f"row 1 of rows.jsonl: {message}" in str(caught.value)


def test_complete_surrogate_pair_is_a_character(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"sentence1": "\\ud83d\\ude42", "sentence2": "b", "condition": "c", "label": 1}'
    )
    assert load_rows(str(path)).sentence1 == ["🙂"]


def test_columns_may_have_other_names(write_rows: WriteRows):
    path = write_rows([("a", "b", "c", 3)], header="text_a,text_b,aspect,score")
    columns = Columns("text_b", "text_a", "aspect", "score")
    rows = load_rows(str(path), columns=columns)
    assert (rows.sentence1, rows.sentence2, rows.condition) == (["b"], ["a"], ["c"])
    assert rows.rating.tolist() == [0.5]
    write_rows([("a", "b", "", 3)], header="text_a,text_b,aspect,score")
    with pytest.raises(UserError, match=r"row 1 of rows.csv: aspect is empty"):
        load_rows(str(path), None, columns)


# --- Splits -----------------------------------------------------------------------------------

SENTENCE = st.sampled_from("abcdef")
PAIRS = st.lists(st.tuples(SENTENCE, SENTENCE), min_size=1, max_size=60)


@given(PAIRS, st.integers(0, 3))
def test_no_sentence_pair_is_in_two_splits(pairs: list[tuple[str, str]], seed: int):
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


@given(PAIRS, st.randoms(use_true_random=False))
def test_row_order_does_not_change_the_split(pairs: list[tuple[str, str]], random):
    pairs = [*pairs, ("g", "h"), ("i", "j"), ("k", "l")]
    shuffled = [pair if random.random() < 0.5 else pair[::-1] for pair in pairs]
    random.shuffle(shuffled)
    first = split_by_pair(make_rows(pairs), FRACTIONS, 0)
    second = split_by_pair(make_rows(shuffled), FRACTIONS, 0)
    assert {name: unordered_pairs(part) for name, part in first.items()} == {
        name: unordered_pairs(part) for name, part in second.items()
    }


def test_single_file_is_split_70_15_15_by_seed(write_rows: WriteRows):
    rows = [(f"a{i}", f"b{i}", condition, 3) for i in range(100) for condition in ("c", "d")]
    path = str(write_rows(rows))
    dataset = read_dataset(path, seed=1)
    assert dataset.to_json()["rows"] == {"train": 140, "dev": 30, "test": 30}
    assert "split by sentence pair with seed 1" in dataset.notes[0]
    assert read_dataset(path, seed=1).digest == dataset.digest
    assert read_dataset(path, seed=2).digest != dataset.digest


def test_split_rows_keep_their_number_in_the_file(write_rows: WriteRows):
    path = write_rows([(f"a{i}", f"b{i}", "c", 3) for i in range(10)])
    for rows in read_dataset(str(path)).splits.values():
        assert [f"a{number - 1}" for number in rows.number] == rows.sentence1
        assert rows.describe(0) == f"row {rows.number[0]} of rows.csv"


@pytest.mark.parametrize("n_pairs", [1, 2])
def test_file_with_fewer_pairs_than_splits_is_rejected(write_rows: WriteRows, n_pairs: int):
    rows = [(f"a{i % n_pairs}", "b", f"c{i}", 3) for i in range(10)]
    with pytest.raises(UserError, match=f"has {n_pairs} distinct sentence pairs; at least 3"):
        read_dataset(str(write_rows(rows)))


def test_missing_dev_file_is_replaced_by_tenth_of_training_pairs(
    tmp_path: Path, write_rows: WriteRows
):
    rows = [(f"a{i}", f"b{i}", condition, 3) for i in range(50) for condition in ("c", "d")]
    write_rows(rows, "d/train.csv")
    write_rows([("x", "y", "c", 3)], "d/test.csv")
    dataset = read_dataset(str(tmp_path / "d"), seed=4)
    assert list(dataset.splits) == ["train", "dev", "test"]
    assert dataset.to_json()["rows"] == {"train": 90, "dev": 10, "test": 1}
    assert leaked_pairs(dataset.splits["dev"], dataset.splits["train"]) == 0
    assert "10% of the training pairs are dev, chosen with seed 4" in dataset.notes[0]
    assert dataset.splits["dev"].sentence1 != (
        read_dataset(str(tmp_path / "d"), seed=5).splits["dev"].sentence1
    )


def test_train_file_with_one_pair_cannot_be_split(tmp_path: Path, write_rows: WriteRows):
    write_rows([("a", "b", "c", 3), ("b", "a", "d", 3)], "d/train.csv")
    with pytest.raises(UserError, match="1 distinct sentence pairs; at least 2"):
        read_dataset(str(tmp_path / "d"))


def test_sentences_that_differ_in_case_or_spaces_are_equal():
    pairs = [(f"Two men play {i}", f"A dog sits {i}") for i in range(20)]
    variants = [(f"a DOG  sits {i}", f"two men play {i} ") for i in range(20)]
    rows = make_rows([*pairs, *variants])
    assert rows.pair.tolist() == [*range(20), *range(20)]
    # Keys have the spelling of the first occurrence, so that splits without such duplicates do not
    # change.
    assert rows.pair_keys() == [tuple(sorted(pair)) for pair in pairs]
    split = split_by_pair(rows, {"train": 0.7, "dev": 0.3}, 0)
    assert set(split["train"].number % 20).isdisjoint(split["dev"].number % 20)
    without_variants = split_by_pair(make_rows(pairs), {"train": 0.7, "dev": 0.3}, 0)
    assert set(without_variants["dev"].number % 20) == set(split["dev"].number % 20)
    assert leaked_pairs(make_rows(variants), make_rows(pairs)) == 20


def test_shares_sentence_compares_both_sides():
    train = make_rows([("a", "b"), ("c", "d")])
    shared = shares_sentence(
        make_rows([("x", " A"), ("D", "y"), ("x", "y"), ("ab", "y")]), train.folded_sentences()
    )
    assert shared.tolist() == [True, True, False, False]


def test_leaked_pairs_are_counted_once_and_in_either_order():
    train = make_rows([("a", "b"), ("c", "d"), ("e", "f")])
    assert leaked_pairs(make_rows([("b", "a"), ("a", "b"), ("e", "f"), ("a", "d")]), train) == 2


# --- Texts for embedding ----------------------------------------------------------------------


def test_conditions_are_read_from_columns(write_rows: WriteRows):
    path = write_rows([("a", "x"), ("b", "y")], header="sentence,condition")
    names = ["condition", "sentence"]
    collection = read_collection(str(path), "sentence", ["condition"], conditions=names)
    assert (collection.texts, collection.file) == (["a", "b"], "rows.csv")
    assert collection.conditions == {"condition": ["x", "y"], "sentence": ["a", "b"]}
    assert collection.columns == {"condition": ["x", "y"]}
    with pytest.raises(
        UserError, match=r"no column 'conditoin'.*Did you mean 'condition'.*--condition COL_OR_TEXT"
    ):
        read_collection(str(path), "sentence", conditions=["conditoin"])


def test_condition_is_a_column_or_a_text(write_rows: WriteRows):
    source = open_collection(str(write_rows([("a", "x")], header="sentence,condition")))
    assert resolve_conditions(source, None) == ("condition", None)
    assert resolve_conditions(source, "sentence") == ("sentence", None)
    assert resolve_conditions(source, "the place") == (None, "the place")
    assert resolve_conditions(source, None, "sentence") == (None, "sentence")
    with pytest.raises(UserError, match="both --condition and --condition-text"):
        resolve_conditions(source, "condition", "the place")
    for condition, text in ((" ", None), (None, " "), (None, "")):
        with pytest.raises(UserError, match="--condition-text is empty"):
            resolve_conditions(source, condition, text)


def test_missing_condition_is_not_replaced_by_the_column_name(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"sentence": "a", "condition": "x"}\n{"sentence": "b"}\n')
    with pytest.raises(UserError, match="condition"):
        read_collection(str(path), "sentence", conditions=["condition"])


@pytest.mark.parametrize(
    ("rows", "sentence", "condition", "message"),
    [
        ([("a", "x")], "sentense", "condition", "no column 'sentense'.*Did you mean 'sentence'"),
        ([("a", "x"), ("", "y")], "sentence", "condition", "row 2 of .*: sentence is empty"),
        ([("a", ""), ("b", "")], "sentence", "condition", "row 1 .*condition is empty .1 more row"),
        ([], "sentence", "condition", "rows.csv is empty"),
    ],
)
def test_invalid_texts_are_rejected(
    write_rows: WriteRows,
    rows: list[tuple[object, ...]],
    sentence: str,
    condition: str,
    message: str,
):
    path = write_rows(rows, header="sentence,condition")
    with pytest.raises(UserError, match=message):
        read_collection(str(path), sentence, conditions=[condition])


def test_collection_is_not_a_folder(tmp_path: Path, write_rows: WriteRows):
    write_rows([("a", "b", "c", 1)], "d/test.csv")
    with pytest.raises(UserError, match="is a folder; name a single file"):
        read_collection(str(tmp_path / "d"), "sentence1", conditions=["condition"])


# --- Digests ----------------------------------------------------------------------------------

ROWS = [("a", "b", "c", 1), ("a", "b", "d", 4), ("é", "f", "c", -1), ("g", "h", "c", 2)]


def test_digest_does_not_depend_on_the_file_format(tmp_path: Path, write_rows: WriteRows):
    for name in ("train", "dev"):
        path = write_rows(ROWS, f"csv/{name}.csv")
        (tmp_path / "parquet").mkdir(exist_ok=True)
        pq.write_table(pa.csv.read_csv(path), tmp_path / "parquet" / f"{name}.parquet")
    digests = {read_dataset(str(tmp_path / kind)).digest for kind in ("csv", "parquet")}
    assert len(digests) == 1
    assert read_dataset(str(tmp_path / "csv")).to_json()["digest"] in digests


@pytest.mark.parametrize(
    ("position", "column", "value"),
    [(0, 0, "A"), (0, 1, "B"), (1, 2, "e"), (3, 3, 3), (2, 3, 1), (0, 3, -1)],
)
def test_digest_changes_with_every_text_and_rating(
    write_rows: WriteRows, position: int, column: int, value: Any
):
    before = rows_digest(load_rows(str(write_rows(ROWS))))
    changed = [list(row) for row in ROWS]
    changed[position][column] = value
    assert rows_digest(load_rows(str(write_rows([tuple(row) for row in changed])))) != before


def test_digest_depends_on_the_split_of_rows(tmp_path: Path, write_rows: WriteRows):
    for folder, train, dev in (("first", ROWS[:2], ROWS[2:]), ("second", ROWS[2:], ROWS[:2])):
        write_rows(train, f"{folder}/train.csv")
        write_rows(dev, f"{folder}/dev.csv")
    first, second = (read_dataset(str(tmp_path / folder)).digest for folder in ("first", "second"))
    assert first != second


def test_read_rows_returns_the_name_of_the_split(tmp_path: Path, write_rows: WriteRows):
    for name in ("train", "dev"):
        write_rows([("a", "b", "c", 1)], f"{name}.csv")
    assert read_rows(str(tmp_path))[1] == "dev"
    assert read_rows(str(tmp_path / "train.csv"))[1] == "test"
    assert read_rows(str(tmp_path / "train.csv"), "dev")[1] == "dev"


def test_column_condition_is_required_without_other_condition(write_rows: WriteRows):
    path = str(write_rows([("a", "x")], header="sentence,place"))
    with pytest.raises(UserError, match="no column 'condition'"):
        read_collection(path, "sentence", conditions=["condition"])
