"""Objects in memory: every kind, through every function that takes texts, rated rows or a guide."""

import datetime
import decimal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import llmcond
from llmcond.base.errors import UserError
from llmcond.data.datasets import open_collection, read_collection, read_dataset, read_rows
from llmcond.data.formats import ReadOptions
from llmcond.data.guides import read_guide
from llmcond.data.readers import list_texts
from llmcond.data.rows import to_arrow
from llmcond.options.texts import IndexOptions
from llmcond.workflows.evaluate import read_comparisons
from llmcond.workflows.index import index_texts

TEXTS = ["red", "blue"]
RATED = {"sentence1": ["a"] * 4, "sentence2": list("bcde"), "condition": ["c"] * 4}
RATED |= {"label": [1, 2, 3, 4]}

#: Lists and columns of texts.
COLUMNS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "iterator": iter,
    "NumPy strings": lambda texts: np.array(texts, dtype=np.dtypes.StringDType()),
    "Series of objects": lambda texts: pd.Series(texts, dtype=object, index=[7] * len(texts)),
    "categorical Series": lambda texts: pd.Series(texts, dtype="category"),
    "pandas array": lambda texts: pd.array(texts, dtype="string"),
    "polars categories": lambda texts: pl.Series(texts, dtype=pl.Categorical),
    "chunked array": lambda texts: pa.chunked_array([texts[:1], texts[1:]]),
    "dictionary": lambda texts: pa.array(texts).dictionary_encode(),
    "string views": lambda texts: pa.array(texts, pa.string_view()),
    "dataset column": lambda texts: datasets.Dataset.from_dict({"t": texts})["t"],
}


def shuffled(columns: dict[str, list[Any]]) -> Any:
    """Return a dataset whose rows are a selection of others."""
    reversed_columns = {name: values[::-1] for name, values in columns.items()}
    dataset = datasets.Dataset.from_dict(reversed_columns)
    return dataset.select(range(len(dataset) - 1, -1, -1))


def list_rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


#: Tables, from columns by name.
TABLES: dict[str, Callable[[dict[str, list[Any]]], Any]] = {
    "columns of several libraries": lambda columns: {
        name: kind(values)
        for (name, values), kind in zip(
            columns.items(), [np.array, pd.Series, pl.Series, pa.array], strict=False
        )
    },
    "iterator of dicts": lambda columns: iter(list_rows(columns)),
    "DataFrame with an index": lambda c: pd.DataFrame(c, index=[7] * len(next(iter(c.values())))),
    "nullable DataFrame": lambda columns: pd.DataFrame(columns).convert_dtypes(),
    "lazy polars": pl.LazyFrame,
    "batch reader": lambda columns: pa.table(columns).to_reader(),
    "struct array": lambda columns: pa.table(columns).to_struct_array().combine_chunks(),
    "selected rows": shuffled,
    "streamed dataset": lambda c: datasets.Dataset.from_dict(c).to_iterable_dataset(),
    "dataset with a split": lambda c: datasets.DatasetDict(only=datasets.Dataset.from_dict(c)),
}


def read(data: Any, keep: str = "", **options: Any) -> list[Any]:
    source = open_collection(data, ReadOptions(**options))
    source.has_column("sentence")  # as commands do
    collection = read_collection(source, "text", [keep] if keep else [])
    return collection.columns[keep] if keep else collection.texts


@pytest.mark.parametrize("kind", COLUMNS)
def test_every_list_of_texts_is_read(kind: str):
    assert read(COLUMNS[kind](TEXTS)) == TEXTS
    assert list_texts(COLUMNS[kind](TEXTS)) == TEXTS


@pytest.mark.parametrize("kind", TABLES)
def test_every_table_gives_texts_ratings_and_a_guide(kind: str):
    table = {"text": TEXTS, "n": [1, 2], "label": ["x", "y"]}
    assert read(TABLES[kind](table), keep="n") == [1, 2]
    assert list_texts(TABLES[kind](table)) == TEXTS
    (guide,) = read_guide(TABLES[kind](table), None, ["the colour"])
    assert (guide.texts, guide.labels, guide.source) == (TEXTS, ["x", "y"], "the guide")
    rows, _ = read_rows(TABLES[kind](RATED))
    assert (rows.sentence2, rows.rating.tolist()) == (list("bcde"), [0, 0.25, 0.5, 0.75])
    assert sum(map(len, read_dataset(TABLES[kind](RATED)).splits.values())) == 4
    assert {second for _, second, _ in read_comparisons(TABLES[kind](RATED))} == set("bcde")


def test_rated_splits_are_read_by_name():
    names = ("train", "validation", "test")
    for data in (
        {name: pl.DataFrame(RATED) for name in names},
        datasets.DatasetDict({name: datasets.Dataset.from_dict(RATED) for name in names}),
    ):
        assert list(read_dataset(data).splits) == ["train", "dev", "test"]
        with pytest.raises(UserError, match=r"data has the splits .*give one.*data\['train'\]"):
            read(data)


def test_objects_without_valid_texts_are_rejected_in_one_line():
    for data, words in (
        ({"a"}, "a set, which has no order"),
        (np.array([["a"]]), r"array of the shape \(1, 1\)"),
        (pd.DataFrame({("a", "b"): ["c"]}), "columns on several levels"),
        (pd.Series(["a", pd.NA]), r"row 2 of .*text is empty"),
        (pl.Series([datetime.date(2020, 1, 1)]), r"row 1 .*datetime.date\(2020.*not a text"),
        (np.array(["a", "b\0c"], object), "row 2 of .*a NUL character"),
        (pd.DataFrame([TEXTS], columns=["text", "text"]), "'text' twice"),
        ([{"text": "a"}, "b"], "row 2 of rows in memory is the str 'b'"),
        ({"text": ["a"], "n": [1, 2]}, r"different lengths: \[1, 2\]"),
        ({"text": {0: "a"}}, "data is the dict"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            read(data)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"a list of texts, so it has no column 'id'"):
        read(TEXTS, keep="id")
    with pytest.raises(UserError, match=r"list of texts, without a column 'sentence1'"):
        read_dataset(TEXTS)
    for option, value in (("encoding", "utf-8"), ("delimiter", ";")):
        with pytest.raises(UserError, match=f"--{option} is for .* not for rows in memory"):
            read(TEXTS, **{option: value})


MOMENT = datetime.datetime(2020, 2, 29, 12, 30, 1, 5)
#: Columns with a value, and the type with which it is written.
TYPED: dict[str, tuple[Any, Any, Any]] = {
    "nanoseconds": (
        pa.array([1_582_979_401_000_005_999, None], pa.timestamp("ns")),
        MOMENT,
        pa.timestamp("us"),
    ),
    "time zone": (
        pa.array([MOMENT, None], pa.timestamp("s", "UTC")).cast(pa.timestamp("us", "UTC")),
        MOMENT.replace(microsecond=0, tzinfo=datetime.UTC),
        pa.timestamp("us", "UTC"),
    ),
    "decimal": (
        pa.array([decimal.Decimal("1.50"), None]),
        decimal.Decimal("1.50"),
        pa.decimal128(38, 2),
    ),
    "large integer": (pa.array([2**64 - 1, None], pa.uint64()), 2**64 - 1, pa.string()),
    "dictionary": (pa.array(["x", None]).dictionary_encode(), "x", pa.string()),
}


@pytest.mark.parametrize("kind", TYPED)
def test_other_columns_have_their_types(tmp_path: Path, kind: str):
    column, value, expected = TYPED[kind]
    table = pa.table({"text": TEXTS, "kept": column})
    pq.write_table(table, tmp_path / "a.parquet")
    sources = [tmp_path / "a.parquet", table, pl.from_arrow(table), datasets.Dataset(table)]
    if kind != "large integer":  # types that pandas lacks
        sources.append(table.to_pandas())
    for source in sources:
        values = read(source, keep="kept")
        assert values == [value, None]
        assert to_arrow(values).type == expected
        if not isinstance(value, str):
            with pytest.raises(UserError, match=r"row 1 of .*: kept is .* not a text"):
                read_collection(open_collection(source), "kept")


def test_functions_take_objects_that_can_be_read_once(in_tmp: Path):
    texts = ["A red car.", "A blue car.", "Two dogs run.", "A cat sleeps."]
    days = [datetime.date(2020, 1, day) for day in (1, 2, 3, 4)]
    table = {"text": texts, "label": ["car", "car", "animal", "animal"], "day": days}

    def once() -> Any:
        return pa.table(table).to_reader()

    result = llmcond.embed(
        texts=once(), out="v.parquet", condition_text="the topic", keep=["label"], guide=once()
    )
    assert result.rows == 4
    assert pq.read_table("v.parquet")["label"].to_pylist() == table["label"]
    clusters = llmcond.cluster(texts=once(), condition="the topic", clusters=2, labels=["label"])
    assert clusters.texts == 4
    assert llmcond.check_condition(texts=iter(texts), condition="the topic").texts == 4
    options = IndexOptions(texts=once(), out="index", keep=["label", "day"])
    assert index_texts(options).texts == 4
    search = llmcond.Index.open("index").search
    (hit,) = search("A car", "the topic", where="day < date '2020-01-02'").rows
    assert (hit["text"], hit["day"]) == (texts[0], days[0])
    assert len(llmcond.Index.build("other", once())) == 4


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, "a", float("nan")], ["1", "a", None]),
        ([pd.NA, 1], [None, 1]),
        ([pd.NaT, pd.Timestamp("2024-01-31")], [None, datetime.datetime(2024, 1, 31)]),
        ([np.float32(1), np.float32("nan")], [1, None]),
        (
            [datetime.date(2024, 1, 31), datetime.datetime(2024, 1, 31, 18, 30)],
            ["2024-01-31", "2024-01-31 18:30:00"],
        ),
        ([{"a": {}}, None], ["{'a': {}}", None]),
    ],
)
def test_missing_values_are_null_and_mixed_types_are_texts(values: list[Any], expected: list[Any]):
    assert to_arrow(values).to_pylist() == expected
