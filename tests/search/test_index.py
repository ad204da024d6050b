"""Indexes score like a comparison with every text, whatever is added, replaced and deleted."""

import importlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.processes import Command
from helpers.vectors import normalize

import llmcond
from llmcond import Condition, Index, LlmcondError, UserError
from llmcond.cli import run
from llmcond.search import views
from llmcond.search.model import SearchModel

PEOPLE = ["two men", "three women", "children", "two dogs", "people"]
LOCATIONS = ["in the park", "at the beach", "in the kitchen", "on the street", "in the rain"]
TEXTS = [f"{who} {act} {where}" for who in PEOPLE for act in ("play", "sit") for where in LOCATIONS]
LABELS = [text.split()[-1] for text in TEXTS[:20]]
QUERY = "children walk at the beach"
LOCATION, NUMBER = "the place", "the number of people"
#: Views are stored in half precision, whose rounding errors a guide amplifies.
TOLERANCE = 2e-3
GUIDE_TOLERANCE = 4 * TOLERANCE


@pytest.fixture(scope="module", autouse=True)
def _use_one_thread(one_thread: None) -> None:
    """Vectors of 32 numbers gain nothing from threads."""


@pytest.fixture
def build(tmp_path: Path, heads_run: Path) -> Callable[..., Index]:
    def build_index(texts=(), *, head: str = "low", name: str = "index", **options) -> Index:
        return Index.build(
            tmp_path / name, texts, run=heads_run, head=head, device="cpu", **options
        )

    return build_index


def reopen(index: Index) -> Index:
    return Index.open(index.folder, device="cpu")


def compare_all(index: Index, texts: list[str], query: str, condition: str) -> np.ndarray:
    """Return the similarity of every text to a query, without an index."""
    return index.embedder.similarity([query] * len(texts), texts, condition)


def cosines_without_condition(index: Index, texts: list[str]) -> np.ndarray:
    vectors = normalize(index.embedder.encoder.encode([*texts, QUERY]))
    return vectors[:-1] @ vectors[-1]


def check_scores(
    index: Index, texts: list[str], condition: str = LOCATION, tolerance: float = TOLERANCE
) -> None:
    hits = index.search(QUERY, condition, len(texts))
    expected = dict(zip(texts, compare_all(index, texts, QUERY, condition).tolist(), strict=True))
    assert sorted(row["text"] for row in hits.rows) == sorted(texts)
    assert [row["rank"] for row in hits.rows] == list(range(1, len(texts) + 1))
    scores = [row["score"] for row in hits.rows]
    assert scores == pytest.approx([expected[row["text"]] for row in hits.rows], abs=tolerance)
    assert scores == sorted(scores, reverse=True)


# -- scores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "prompt", "encodes_pairs"),
    [
        ("low", None, False),
        ("relu", None, False),
        ("hadamard", None, False),
        ("own", None, True),
        ("both", None, True),
        ("none", "separate", False),
    ],
)
def test_scores_match_comparison_with_every_text(build, head: str, prompt, encodes_pairs: bool):
    index = build(TEXTS, head=head, prompt=prompt)
    assert index.encodes_pairs is encodes_pairs
    check_scores(index, TEXTS)
    check_scores(index, TEXTS, NUMBER)
    # Vectors that were encoded are stored. All others are computed again by each process.
    assert index.conditions == (sorted([LOCATION, NUMBER]) if encodes_pairs else [])


def test_queries_and_conditions_are_searched_together(build, monkeypatch):
    index = build(TEXTS)
    single_hits = [index.search(query, LOCATION, 3).rows for query in TEXTS[:5]]
    monkeypatch.setattr("llmcond.search.query._MAX_SCORES", 100)  # two queries at a time
    batch_hits = index.search(TEXTS[:5], LOCATION, 3)
    assert [[row["id"] for row in hits.rows] for hits in batch_hits] == [
        [row["id"] for row in rows] for rows in single_hits
    ]
    assert index.search([], LOCATION) == []
    # The score under several conditions is the weighted sum of cosines.
    parts = [compare_all(index, TEXTS, QUERY, condition) for condition in (LOCATION, NUMBER)]
    total = 2 * parts[0] - 0.5 * parts[1]
    hits = index.search(QUERY, {LOCATION: 2, NUMBER: -0.5}, 5)
    scores = [row["score"] for row in hits.rows]
    assert scores == pytest.approx(np.sort(total)[:-6:-1], abs=TOLERANCE)


def test_scores_never_exceed_one(build):
    index = build(TEXTS)
    for text in TEXTS[:10]:
        hits = index.search(text, {LOCATION: 1}, len(TEXTS), explain=True)
        assert hits.rows[0]["score"] == pytest.approx(1, abs=1e-5)
        scores = [[row["score"], *row["explain"]["under"].values()] for row in hits.rows]
        assert np.abs(scores).max() <= 1


@pytest.mark.parametrize("n", [1, 3, 9_000])
def test_numpy_and_torch_give_equal_results_in_half_precision(monkeypatch, n):
    rng = np.random.default_rng(n)
    vectors = rng.standard_normal((n, 24)).astype(np.float16)
    queries = rng.standard_normal((2, 24)).astype(np.float32)

    def compute_both(function, *arguments):
        numpy_result = function(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(views, "_MAX_NUMPY_VALUES", 0)
            return numpy_result, function(*arguments)

    wide = rng.standard_normal((n, 24)).astype(np.float32)
    for array, dtype in ((vectors, "float32"), (wide, "float16")):
        converted = compute_both(views.convert_dtype, array, dtype, array.size)
        np.testing.assert_array_equal(*converted)
    products = compute_both(views.inner_products, vectors, queries)
    np.testing.assert_allclose(*products, atol=1e-5)
    bits = np.packbits(vectors > 0, axis=1)
    signs = compute_both(views.inner_products, bits, queries, partial(np.unpackbits, axis=1))
    np.testing.assert_allclose(*signs, atol=1e-5)
    indices = compute_both(views.top_k, products[0][0], min(5, n))
    assert set(indices[0]) == set(indices[1])


# -- adding, replacing, deleting -------------------------------------------------------------------


@pytest.mark.parametrize("head", ["relu", "own"])
def test_scores_match_comparison_after_any_changes(build, head: str, monkeypatch):
    """Random changes are made through several objects, and segments are merged repeatedly."""
    monkeypatch.setattr(views, "_MAX_SEGMENTS", 2)
    monkeypatch.setattr("llmcond.search.table._MAX_FRAGMENTS", 3)
    rng = np.random.default_rng(0)
    index, current = build(head=head), {}
    for step in range(12):
        if current and rng.random() < 0.4:
            removed = rng.choice(sorted(current), size=min(len(current), 5), replace=False).tolist()
            assert index.delete([*removed, "never there"]) == len(removed)
            current = {key: text for key, text in current.items() if key not in removed}
        else:
            ids = [str(number) for number in rng.choice(30, size=8, replace=False)]
            texts = rng.choice(TEXTS, size=8).tolist()
            index.add(texts, ids=ids)
            current |= dict(zip(ids, texts, strict=True))
        if step % 3 == 0:
            index = reopen(index)
        if step % 2:
            index.prepare([LOCATION])
        hits = index.search(QUERY, LOCATION, 50)
        assert {row["id"]: row["text"] for row in hits.rows} == current
        expected = compare_all(index, list(current.values()), QUERY, LOCATION)
        scores = {row["id"]: row["score"] for row in hits.rows}
        assert [scores[key] for key in current] == pytest.approx(expected, abs=TOLERANCE)
    assert not (index.folder / "encoding").exists()
    assert len(index._version.table._dataset.get_fragments()) <= 4
    record_path = next((index.folder / "views").glob("*/view.json"))
    segments = json.loads(record_path.read_text())["segments"]
    assert len(list(record_path.parent.glob("*.npy"))) == 2 * len(segments) <= 6


def test_only_new_texts_and_conditions_are_encoded(build, caplog):
    def encoded() -> list[str]:
        messages = [record.message for record in caplog.records]
        caplog.clear()
        return [re.search(r"\d+ of \d+", text)[0] for text in messages if "inputs encoded" in text]

    caplog.set_level("INFO")
    index = build(TEXTS[:40], conditions=[LOCATION], head="linear")
    assert encoded() == ["40 of 40"]
    index.add(TEXTS)
    assert encoded() == ["10 of 10"]
    segments = views.ConditionViews(index.folder / "views").read(LOCATION)
    assert [len(segment.numbers) for segment in segments] == [40, 10]
    version = index._version.table.version
    rebuilt = build(TEXTS, conditions=[LOCATION], head="linear")
    assert (rebuilt.written.added, rebuilt.written.unchanged) == (0, 50)
    assert rebuilt._version.table.version == version
    assert "encoder" not in vars(rebuilt._model)  # the encoder is not even loaded
    index.search(QUERY, NUMBER)
    caplog.clear()
    more = [f"{text} again" for text in TEXTS[:10]]
    build([*TEXTS, *more], conditions=[LOCATION, NUMBER, "the colour"], head="linear")
    # New texts are encoded under all three conditions, and all others under the colour.
    assert encoded() == ["30 of 30", "50 of 60"]


def test_columns_change_without_encoding_texts_again(build, caplog):
    index = build(TEXTS[:3], ids=["a", "b", "c"], columns={"year": [1, 2, 3]})
    first = {row["id"]: row["score"] for row in index.search(QUERY, LOCATION).rows}
    caplog.set_level("INFO")
    caplog.clear()
    written = index.add(TEXTS[:3], ids=["a", "b", "c"], columns={"year": [1, 5, 3]})
    assert (written.replaced, written.unchanged) == (1, 2)
    assert "encoded" not in caplog.text
    second = {row["id"]: row for row in index.search(QUERY, LOCATION).rows}
    assert [second[key]["year"] for key in "abc"] == [1, 5, 3]
    assert {key: row["score"] for key, row in second.items()} == first


def test_readers_use_version_they_opened_until_refresh(build, monkeypatch):
    writer = build(TEXTS[:20], conditions=[LOCATION], head="own")
    reader = reopen(writer)
    writer.add(TEXTS[20:30])
    writer.delete([row["id"] for row in writer.search(QUERY, LOCATION, 3).rows])
    assert len(reader) == 20
    check_scores(reader, TEXTS[:20])
    assert len(reopen(writer)) == 27
    reader.refresh()
    check_scores(reader, [row["text"] for row in writer.search(QUERY, LOCATION, 27).rows])
    # Added texts are ignored until they are encoded.
    with monkeypatch.context() as patch:
        patch.setattr(Index, "_complete", lambda *_: None)  # as if the writer were killed
        writer.add(TEXTS[40:42])
        reader.refresh()
        assert len(reader.search(QUERY, LOCATION, 50, prepare=False)) == 27
    writer.prepare([LOCATION])
    reader.refresh()
    assert len(reader.search(QUERY, LOCATION, 50, prepare=False)) == 29


# -- ids, columns and hits -------------------------------------------------------------------------


def test_ids_are_texts_or_whole_numbers_or_digests(build, caplog):
    caplog.set_level("INFO")
    index = build([TEXTS[0], TEXTS[1], TEXTS[0]])
    assert "duplicate texts, which are all indexed: 1" in caplog.text
    digests = [row["id"] for row in index.search(TEXTS[0], LOCATION).rows]
    assert len(set(digests)) == 3
    assert digests[1] == f"{digests[0]}-2"
    assert build([TEXTS[2], TEXTS[0]]).written.unchanged == 1
    other = build(TEXTS[:3], ids=np.array([1, 2, 3]), name="other")
    other.add(TEXTS[3:5], ids=pd.Series(["4", "x"]))
    for ids in ([1.0], "x", None, [None], ["\ud800"]):
        with pytest.raises(UserError):
            other.delete(ids)
    assert (other.delete([1, np.int64(2), "x"]), len(other)) == (3, 2)


def test_filter_restricts_hits(build):
    index = build(TEXTS, columns={"year": list(range(50)), "my kind": ["a", None] * 25})
    assert index.columns == ["year", "my kind"]
    hits = index.search(QUERY, LOCATION, 30, where="year >= 40 AND `my kind` = 'a'", explain=True)
    assert (hits.searched, len(hits)) == (5, 5)
    assert {row["year"] for row in hits.rows} == {40, 42, 44, 46, 48}
    assert {row["explain"]["rank_without"] for row in hits.rows} == set(range(1, 6))
    all_hits = index.search(QUERY, LOCATION, 50)
    matches = [row["id"] for row in all_hits.rows if row["year"] >= 40 and row["my kind"] == "a"]
    assert [row["id"] for row in hits.rows] == matches
    assert index.search(QUERY, LOCATION, where="year > 99").rows == []
    with pytest.raises(UserError, match=r"character 8: expected .* The columns are id, text, year"):
        index.search(QUERY, LOCATION, where="year > ")


def test_hits_convert_to_json_and_data_frame(build):
    columns = {"share": [0.5, float("nan"), float("inf")], "tags": [["a"], [], None]}
    hits = build(TEXTS[:3], ids=[7, 8, 9], columns=columns).search(QUERY, LOCATION)
    result = json.loads(json.dumps(hits.to_json(), allow_nan=False))
    rows = {row["id"]: row for row in result["results"]}
    assert rows["7"] == {**rows["7"], "text": TEXTS[0], "share": 0.5, "tags": ["a"]}
    assert (rows["8"]["share"], rows["9"]["share"], rows["9"]["tags"]) == (None, None, None)
    assert result["conditions"] == {LOCATION: 1.0}
    assert list(hits.to_pandas()["id"]) == [row["id"] for row in hits.rows]


def test_explain_gives_scores_under_each_condition_and_without(build):
    index = build(TEXTS)
    hits = index.search(QUERY, {LOCATION: 1, NUMBER: 0.5}, 5, explain=True)
    cosines = cosines_without_condition(index, TEXTS)
    for row in hits.rows:
        explanation, position = row["explain"], TEXTS.index(row["text"])
        total = explanation["under"][LOCATION] + 0.5 * explanation["under"][NUMBER]
        assert row["score"] == pytest.approx(total, abs=1e-5)
        assert explanation["without"] == pytest.approx(cosines[position], abs=TOLERANCE)
        rank = 1 + (cosines > cosines[position]).sum()
        assert explanation["rank_without"] == pytest.approx(rank, abs=1)
    # Hits are encoded if no vectors without the condition are stored.
    joint = build(TEXTS[:9], head="linear", name="joint")
    hits = joint.search(QUERY, LOCATION, 3, explain=True)
    cosines = cosines_without_condition(joint, [row["text"] for row in hits.rows])
    scores = [row["explain"]["without"] for row in hits.rows]
    assert scores == pytest.approx(cosines.tolist(), abs=1e-5)
    assert {row["explain"]["rank_without"] for row in hits.rows} == {None}


# -- conditions ------------------------------------------------------------------------------------


def test_unprepared_condition_is_encoded_on_demand_only(build, caplog):
    caplog.set_level("INFO")
    index = build(TEXTS, head="linear", conditions=[LOCATION])
    assert len(index.search(QUERY, LOCATION, prepare=False)) == 10
    message = "{} of {} texts have no vectors under 'the number of people'. Run: llmcond index"
    with pytest.raises(UserError, match=message.format(50, 50)):
        index.search(QUERY, NUMBER, prepare=False)
    assert index.conditions == [LOCATION]
    caplog.clear()
    index.search(QUERY, NUMBER)
    assert "encoding 50 texts under 'the number of people' and storing the vectors" in caplog.text
    reopened = reopen(index)
    caplog.clear()
    reopened.search(QUERY, NUMBER, prepare=False)
    assert caplog.text == ""
    reopened.add(["one more"])  # encoded under the prepared condition only
    reopened.search(QUERY, LOCATION, prepare=False)
    with pytest.raises(UserError, match=message.format(1, 51)):
        reopened.search(QUERY, NUMBER, prepare=False)
    reopened.search(QUERY, NUMBER)
    assert "encoding 1 text under 'the number of people' and storing the vectors" in caplog.text


@pytest.mark.parametrize("head", ["low", "linear"])
def test_condition_text_stands_for_recorded_values(build, head: str):
    seas, snow = (llmcond.Condition(LOCATION, values) for values in (["sea", "lake"], ["snow"]))
    index = build(TEXTS, head=head, conditions=[seas])
    check_scores(index, TEXTS, seas)
    recorded = index.search(QUERY, LOCATION, prepare=False)
    assert list(recorded.conditions) == [seas]
    assert recorded.rows == index.search(QUERY, seas).rows
    # Other values, and no values, are other conditions, whatever is recorded.
    check_scores(index, TEXTS, snow)
    plain = index.search(QUERY, llmcond.Condition(LOCATION))
    assert list(plain.conditions) == [LOCATION]
    scores = [hits.rows[0]["score"] for hits in (plain, recorded, index.search(QUERY, snow))]
    assert len(set(scores)) == 3
    # A reopened index knows the values, and uses them for texts that are added without values.
    reopened = reopen(index)
    assert reopened.search(QUERY, LOCATION, prepare=False).rows == recorded.rows
    build(["people ski in the snow"], head=head, conditions=[LOCATION])
    reopened.refresh()
    check_scores(reopened, [*TEXTS, "people ski in the snow"], seas)
    # The values named last are recorded, even if there are none.
    reopened.prepare([llmcond.Condition(LOCATION)])
    assert list(index.search(QUERY, LOCATION).conditions) == [LOCATION]
    assert {LOCATION, seas} <= set(reopened.conditions)


@pytest.mark.parametrize(("head", "values"), [("low", ()), ("low", ["sea"]), ("linear", ["sea"])])
def test_spellings_of_a_condition_share_vectors_values_and_guide(build, head: str, values):
    spellings = [" the  place", "the\u00a0place\n", "The Place", "THE PLACE"]
    index = build(TEXTS, head=head, conditions=[llmcond.Condition("the  place", values)])
    assert len(index.conditions) == 1
    plain = index.search(QUERY, LOCATION, prepare=False)
    # The capitals of a condition are known if the index records it, or once it has a guide.
    for spelling in spellings if index.encodes_pairs or values else spellings[:2]:
        assert index.search(QUERY, spelling, prepare=False).rows == plain.rows
    index.guide(TEXTS[:20], LABELS, spellings[0])
    guided = index.search(QUERY, LOCATION, prepare=False)
    assert guided.rows != plain.rows
    for spelling in spellings:
        assert index.search(QUERY, spelling, prepare=False) == guided
    index.guide(TEXTS[:20], LABELS, spellings[2])  # replaces the guide and its file
    assert len(index.guides) == len([*(index.folder / "guides").iterdir()]) == 1
    index.unguide(spellings[3])
    assert not [*(index.folder / "guides").iterdir()]
    assert index.search(QUERY, LOCATION, prepare=False).rows == plain.rows


@pytest.mark.parametrize("head", ["own", "both"])
def test_rerank_encodes_only_nearest_texts(build, head: str, caplog):
    caplog.set_level("INFO")
    index = build(TEXTS, head=head)
    hits = index.search(QUERY, LOCATION, 5, rerank=20)
    assert not hits.exact
    assert "of 50 texts, only the 20 nearest without the condition" in caplog.text
    nearest = [TEXTS[i] for i in np.argsort(-cosines_without_condition(index, TEXTS))[:20]]
    scores = compare_all(index, nearest, QUERY, LOCATION)
    assert {row["text"] for row in hits.rows} == {nearest[i] for i in np.argsort(-scores)[:5]}
    expected = np.sort(scores)[:-6:-1]
    assert [row["score"] for row in hits.rows] == pytest.approx(expected, abs=TOLERANCE)
    assert index.conditions == []
    assert index.search(QUERY, LOCATION, 5, rerank=50).exact


@pytest.mark.parametrize("head", ["low", "linear"])
def test_searches_write_no_files_and_keep_few_views_in_memory(build, monkeypatch, head: str):
    index = build(TEXTS, head=head, conditions=[LOCATION])
    index.guide(TEXTS[:4], ["a", "b"] * 2, LOCATION)
    index = reopen(index)

    def list_files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in index.folder.rglob("*")}

    def search(n_conditions: int) -> list[views.ConditionView]:
        for number in range(n_conditions):
            condition = LOCATION if index.encodes_pairs else f"{LOCATION} {number}"
            index.search(QUERY, condition, 3, prepare=False, explain=True)
        return list(index._version._open.values())

    before = list_files()
    monkeypatch.setattr("llmcond.search.query._MAX_OPEN", 5)
    assert len(search(10)) == (1 if index.encodes_pairs else 5)
    budget = 3 * max(view.n_bytes for view in search(1))
    monkeypatch.setattr("llmcond.search.query.BUDGET", budget)
    assert 0 < sum(view.n_bytes for view in search(10)) <= budget
    assert list_files() == before


# -- invalid input ---------------------------------------------------------------------------------


def test_invalid_texts_create_no_index(build, tmp_path: Path):
    for options, message in (
        ({"texts": ["a", "  "]}, "row 2: the text is empty"),
        ({"texts": "abc"}, "texts is a single string; give a list of texts"),
        ({"texts": ["a", "b"], "ids": ["x", "x"]}, "the rows 1 and 2 have the same id, 'x'"),
        ({"texts": ["a", "b"], "ids": ["x", None]}, "row 2: the id is empty"),
        ({"texts": ["a", "b"], "ids": [1.0, 2.0]}, "the id is 1.0; expected a text or a whole"),
        ({"texts": ["a"], "columns": {"a.b": [1]}}, "'a.b' contains '.', so it cannot be stored"),
        ({"texts": ["a"], "columns": {"year": [1, 2]}}, "'year' has 2 values for 1 text;"),
        ({"texts": ["a"], "columns": {"score": [1]}}, "'score' is reserved"),
        ({"texts": ["a"], "truncate_dim": 0}, "truncate_dim is 0, but .* whole number from 1 to"),
        ({"texts": ["a"], "precision": "int8"}, "1 text are too few. Add at least 100 at first"),
    ):
        with pytest.raises(UserError, match=message):
            build(**options)
        assert not (tmp_path / "index" / "texts.lance").exists()


def test_added_texts_need_columns_of_index(build):
    index = build(TEXTS[:2], columns={"year": [1, 2], "kind": ["a", "b"]})
    for columns, message in (
        ({"year": ["x"], "kind": ["y"]}, "'year' has the type int64 in the index"),
        ({"year": [1]}, "the columns 'year', but the index has 'kind', 'year'"),
        ({"year": [1], "kind": ["y"], "more": [1]}, "Give the same columns"),
    ):
        with pytest.raises(UserError, match=message):
            index.add(["one more"], columns=columns)
    index.add(["without any"])
    kinds = {row["text"]: row["kind"] for row in index.search(QUERY, LOCATION).rows}
    assert kinds == {TEXTS[0]: "a", TEXTS[1]: "b", "without any": None}
    # A text that is replaced keeps the columns that are not given.
    index = build(TEXTS[:2], ids=["x", "y"], columns={"kind": ["a", "b"]}, name="other")
    index.add([TEXTS[2], TEXTS[3]], ids=["z", "y"])
    kinds = {row["text"]: row["kind"] for row in index.search(QUERY, LOCATION).rows}
    assert kinds == {TEXTS[0]: "a", TEXTS[3]: "b", TEXTS[2]: None}


def test_missing_and_larger_values_of_columns_can_be_added(build):
    stars, prices = [4.0, float("nan"), None], [Decimal("9.99"), None, None]
    columns = {"stars": np.array(stars, float), "price": prices, "meta": [{}, None, {}]}
    index = build(TEXTS[:3], ids=["a", "b", "c"], columns=columns)
    assert build(TEXTS[:3], ids=["a", "b", "c"], columns=columns).written.unchanged == 3
    more = {"stars": [1], "price": [Decimal("1000.5")], "meta": [None]}
    index.add([TEXTS[3]], ids=["d"], columns=more)
    for where, expected in (("stars IS NULL", "bc"), ("stars != 4", "d"), ("price > 10", "d")):
        rows = index.search(QUERY, LOCATION, where=where).rows
        assert sorted(row["id"] for row in rows) == list(expected)


def test_index_that_another_process_creates_meanwhile_is_opened(build, monkeypatch):
    find = SearchModel.find

    def find_slowly(**arguments):
        monkeypatch.setattr(SearchModel, "find", find)
        build(TEXTS[:2], head="relu" if arguments["head"] == "low" else "low")
        return find(**arguments)

    monkeypatch.setattr(SearchModel, "find", find_slowly)
    with pytest.raises(UserError, match="head relu; the given model has another head"):
        build(TEXTS[2:4])
    index = build(TEXTS[2:4], head="relu")
    check_scores(index, TEXTS[:4])


def test_invalid_queries_are_rejected(build):
    index = build(TEXTS[:9])
    for arguments, message in (
        ({"query": ["a", ""]}, "the query is empty"),
        ({"condition": ""}, "the condition is empty"),
        ({"condition": {LOCATION: 1, " The Place": 2}}, "two are the same up to case and spacing"),
        (
            {"condition": {LOCATION: float("nan")}},
            "is nan; it must be between -1,000,000 and 1,000,0",
        ),
        ({"condition": {LOCATION: 0}}, "all weights are 0"),
        ({"k": 0}, "k is 0; it must be at least 1"),
        ({"rerank": 20}, "compares every text anyway. Leave it out"),
    ):
        with pytest.raises(UserError, match=message):
            index.search(**{"query": QUERY, "condition": LOCATION, **arguments})
    assert len(index.search(QUERY, {LOCATION: -1_000_000})) == 9
    with pytest.raises(UserError, match="does not encode texts without one"):
        build(TEXTS[:9], head="linear", name="joint").search(QUERY, LOCATION, 5, rerank=20)
    with pytest.raises(UserError, match="--rerank is 3, but 5 hits are requested"):
        build(TEXTS[:9], head="own", name="own").search(QUERY, LOCATION, 5, rerank=3)


def test_index_rejects_other_model_and_head(build, heads_run: Path, tmp_path: Path):
    seas = llmcond.Condition(LOCATION, ["sea", "lake"])
    index = build(TEXTS[:5], conditions=[seas])
    with pytest.raises(UserError, match=r"built with run .*, head low; .* has another head"):
        build(TEXTS, head="relu")
    with pytest.raises(UserError, match="another prompt and another head"):
        build(TEXTS, head="none", prompt="own")
    with pytest.raises(UserError, match=r"was built with run .*, head low: .* no fitted head"):
        Index.build(index.folder, TEXTS, model="minilm-csts")
    moved = Path(shutil.copytree(heads_run, tmp_path / "moved"))
    index = Index.build(index.folder, run=moved, device="cpu")  # the same run in another folder
    assert json.loads((index.folder / "index.json").read_text())["made_by"]["run"] == str(moved)
    assert list(index.search(QUERY, LOCATION).conditions) == [seas]
    shutil.rmtree(moved / "heads" / "low")
    shutil.copytree(moved / "heads" / "relu", moved / "heads" / "low")
    with pytest.raises(UserError, match="the current model has another head"):
        Index.open(index.folder)


def test_folders_without_index_are_rejected(build, tmp_path: Path):
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "mine.txt").write_text("x")
    with pytest.raises(UserError, match="is not an index"):
        build(TEXTS)
    assert [path.name for path in (tmp_path / "index").iterdir()] == ["mine.txt"]
    with pytest.raises(UserError, match="is not an index"):
        Index.open(tmp_path / "index")
    with pytest.raises(UserError, match=r"does not exist\. Build one: llmcond index TEXTS"):
        Index.open(tmp_path / "nowhere")


def test_empty_index_returns_no_hits(build):
    assert build().search(QUERY, LOCATION).rows == []
    check_scores(build(TEXTS[:3], head="relu"), TEXTS[:3])  # an empty index accepts another head
    emptied = build(TEXTS[:2], ids=["a", "b"], name="emptied")
    emptied.delete(["a", "b"])
    assert emptied.search(QUERY, LOCATION, explain=True).rows == []
    emptied.add(TEXTS[:3])
    check_scores(emptied, TEXTS[:3])


# -- threads, kills and damage ---------------------------------------------------------------------


def test_threads_search_while_texts_are_added(build):
    index = build(TEXTS[:20], conditions=[LOCATION], head="own")
    reader = reopen(index)
    expected = [row["id"] for row in reader.search(QUERY, LOCATION).rows]
    with ThreadPoolExecutor(3) as pool:
        additions = [pool.submit(index.add, TEXTS[20 + i : 21 + i]) for i in range(6)]
        searches = [pool.submit(reader.search, QUERY, LOCATION) for _ in range(30)]
        assert all([row["id"] for row in future.result().rows] == expected for future in searches)
        assert sum(future.result().added for future in additions) == 6
    check_scores(index, TEXTS[:26])


def kill_at_call(module: str, name: str) -> None:
    target: Any = importlib.import_module(module)
    *classes, function = name.split(".")
    for attribute in classes:
        target = getattr(target, attribute)
    setattr(target, function, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize(
    ("module", "name", "n_encoded", "n_texts"),
    [
        ("llmcond.search.table", "IndexUpdatePlan.write", 1, 30),  # texts are encoded
        ("llmcond.search.views", "np.save", 2, 50),  # texts are written, their vectors are not
        ("llmcond.search.views", "write_json", 2, 50),  # vectors are not listed yet
    ],
)
def test_kill_loses_no_texts_and_leaves_no_partial_files(
    build, tmp_path: Path, module, name, n_encoded, n_texts, capsys
):
    index = build(TEXTS[:30], conditions=[LOCATION], head="linear")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    arguments = ["index", tmp_path / "texts.txt", "--out", index.folder, "--condition", NUMBER]
    setup = partial(kill_at_call, module, name)
    status, _, err = Command(tmp_path / "killed", arguments, setup=setup).finish()
    assert (status, err.count("inputs encoded")) == (-signal.SIGKILL, n_encoded)
    assert len(reopen(index)) == n_texts
    capsys.readouterr()
    assert run([str(argument) for argument in arguments]) == 0
    assert capsys.readouterr().err.count("inputs encoded") == 2 - n_encoded
    check_scores(reopen(index), TEXTS)
    assert not (index.folder / "encoding").exists()
    for record in (index.folder / "views").glob("*/view.json"):
        names = {path.name.partition(".")[0] for path in record.parent.iterdir()}
        assert names == {"view", *json.loads(record.read_text())["segments"]}


def test_damaged_files_are_reported(build, tmp_path: Path):
    folder = build(TEXTS[:9], conditions=[LOCATION], head="linear").folder
    for pattern, content, message in (
        ("texts.lance/data/*", 10, "cannot be read: .* if it is damaged, build it again"),
        ("views/*/*[0-9a-f].npy", 200, "is damaged. Delete it; it is computed again"),
        ("index.json", 0, "is not a readable JSON file"),
        ("index.json", b'{"format": 2, "made_by": {"run": 3}}', "was damaged: .* Build another"),
        ("index.json", b'{"format": 99}', "newer version of llmcond"),
    ):
        copy = shutil.copytree(folder, tmp_path / "copy")
        for path in copy.glob(pattern):
            is_size = isinstance(content, int)
            path.write_bytes(path.read_bytes()[:content] if is_size else content)
        with pytest.raises(LlmcondError, match=message):
            Index.open(copy, device="cpu").search(QUERY, LOCATION)
        shutil.rmtree(copy)


# -- guides ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["low", "linear"])
def test_guide_learned_from_labels_changes_scores(build, head: str, monkeypatch):
    index = build(TEXTS, head=head, conditions=[LOCATION, NUMBER])
    plain = index.search(QUERY, LOCATION, 5).to_json()
    other_condition = index.search(QUERY, NUMBER, 5).to_json()
    with monkeypatch.context() as patch:  # the texts of the index are not encoded again
        patch.setattr(Index, "_encode", None)
        index.guide(TEXTS[:20], LABELS, LOCATION)
        check_scores(index, TEXTS, tolerance=GUIDE_TOLERANCE)
    guided = index.search(QUERY, LOCATION, 5).to_json()
    assert guided["results"] != plain["results"]
    assert guided["guides"][LOCATION]["labels"]["beach"] == 4
    assert index.search(QUERY, NUMBER, 5).to_json() == other_condition
    assert index.search(QUERY, {LOCATION: 1, NUMBER: 0.5}, 5).guides.keys() == {LOCATION}
    # The guide is stored. It applies to added texts, and to embeddings of the index's model.
    reopened = reopen(index)
    reopened.add(["dogs walk at the beach"])
    check_scores(reopened, [*TEXTS, "dogs walk at the beach"], tolerance=GUIDE_TOLERANCE)
    assert reopened.conditions == sorted([LOCATION, NUMBER])
    reopened.delete(
        [row["id"] for row in reopened.search("dogs walk at the beach", LOCATION, 1).rows]
    )
    reopened.unguide(LOCATION)
    assert reopen(index).search(QUERY, LOCATION, 5).to_json() == plain


@pytest.mark.parametrize("head", ["low", "relu", "linear"])
def test_wordings_are_averaged_and_ignored_conditions_removed(build, head: str, caplog):
    caplog.set_level("INFO")
    wordings = Condition(f"{LOCATION} | where it is", ignore=[NUMBER])
    ignoring = Condition(LOCATION, ignore=[NUMBER])
    index = build(TEXTS, head=head, conditions=[LOCATION])
    plain = index.search(QUERY, LOCATION, 5).to_json()
    with pytest.raises(UserError, match=f"--condition '{LOCATION}' --ignore '{NUMBER}'"):
        index.search(QUERY, ignoring, prepare=False)
    for condition in (ignoring, wordings, f"{LOCATION} | where it is"):  # found at the first search
        check_scores(index, TEXTS, condition, GUIDE_TOLERANCE)
    assert caplog.text.count(f"to ignore '{NUMBER}'") == 2
    assert index.search(QUERY, LOCATION, 5).to_json() == plain
    # An index that was open before reads what another one found.
    other = reopen(index)
    index.guide(TEXTS[:20], LABELS, ignoring)
    index.prepare([Condition("the activity", ignore=[LOCATION, NUMBER])])
    caplog.clear()
    other.search(QUERY, Condition("The Activity", ignore=[LOCATION, NUMBER]), 5, prepare=False)
    other.add(["dogs walk at the beach"])
    check_scores(other, [*TEXTS, "dogs walk at the beach"], wordings, GUIDE_TOLERANCE)
    assert "to ignore" not in caplog.text
    # A guide comes after the map, which stays when the guide is removed.
    guided = reopen(index)
    assert guided.guides[ignoring].to_json()["ignored"] == [NUMBER]
    check_scores(guided, [*TEXTS, "dogs walk at the beach"], ignoring, 4 * GUIDE_TOLERANCE)
    guided.unguide(ignoring)
    assert not reopen(index).guides[ignoring].labels


def test_guide_of_a_condition_does_not_change_what_it_ignores(build):
    """A condition that ignores others is a condition of its own."""
    ignoring, digests = Condition(LOCATION, ignore=[NUMBER]), []
    for name in ("plain", "guided"):
        index = build(TEXTS, name=name, conditions=[LOCATION])
        if name == "guided":
            index.guide(TEXTS[:20], LABELS, LOCATION)
        embedder = index.embedder.ignoring(TEXTS, ignoring)
        index.prepare([ignoring])
        digests.append([each.guides[ignoring].digest for each in (index, embedder)])
    assert digests[0] == digests[1]
    with pytest.raises(UserError, match="has no texts yet"):
        build(name="bare").search(QUERY, ignoring)


def test_columns_of_index_can_be_ignored(build):
    people = [text.split()[1] for text in TEXTS]
    index = build(TEXTS, head="linear", columns={"people": people})
    index.ignore(LOCATION, columns=["people"])
    vectors = reopen(index).embedder.encode(TEXTS, LOCATION)
    means = [vectors[[p == kind for p in people]].mean(axis=0) for kind in sorted(set(people))]
    spread = np.linalg.norm(means - np.mean(means, axis=0), axis=1).max()
    assert spread < 0.1 * np.linalg.norm(vectors - vectors.mean(axis=0), axis=1).mean()
    index.unguide(LOCATION)
    assert LOCATION not in reopen(index).guides
    ignoring = Condition(LOCATION, ignore=[NUMBER])
    for condition, columns, message in (
        (LOCATION, (), "'the place' ignores nothing"),
        (LOCATION, ["peple"], "no column 'peple'. Did you mean 'people'"),
        (ignoring, ["id"], "no column 'id'"),
    ):
        with pytest.raises(UserError, match=message):
            index.ignore(condition, columns)
    few = build(TEXTS[:30], name="few")
    for call in (few.ignore, lambda condition: few.search(QUERY, condition)):
        with pytest.raises(UserError, match="30 distinct texts, and at least 50 are needed"):
            call(ignoring)


# -- smaller vectors -------------------------------------------------------------------------------

MANY = [f"{text} for {hours} hours" for text in TEXTS for hours in (2, 3, 4)]


@pytest.mark.parametrize(
    ("precision", "max_error"), [("int8", 0.02), ("uint8", 0.02), ("binary", 0.6), ("ubinary", 0.6)]
)
def test_quantised_vectors_give_approximate_scores(build, precision, max_error):
    index = build(MANY[:100], head="linear", precision=precision, conditions=[LOCATION])
    index.add(MANY[100:])
    paths = [path for path in index.folder.glob("views/*/*.npy") if ".rows" not in path.name]
    dim = index.embedder.dim
    for codes in map(np.load, paths):
        assert (codes.shape[1], codes.itemsize) == (dim if "int8" in precision else -(-dim // 8), 1)
    hits = index.search(QUERY, LOCATION, len(MANY))
    assert not hits.exact
    expected = dict(zip(MANY, compare_all(index, MANY, QUERY, LOCATION).tolist(), strict=True))
    errors = [abs(row["score"] - expected[row["text"]]) for row in hits.rows]
    assert np.quantile(errors, 0.9) < max_error
    opened = reopen(index)
    assert opened.precision == precision
    scores = [row["score"] for row in opened.search(QUERY, LOCATION, 5).rows]
    assert scores == [row["score"] for row in hits.rows[:5]]


def test_hits_are_scored_again_if_texts_are_encoded_alone(build):
    exact, index = (
        build(MANY, name=precision, precision=precision) for precision in ("float16", "int8")
    )
    rows, expected = (item.search(QUERY, LOCATION, 10).rows for item in (index, exact))
    assert [row["score"] for row in rows] == [row["score"] for row in expected]


@pytest.mark.parametrize("head", ["low", "hadamard", "linear"])
def test_truncated_vectors_are_those_of_embedder(build, head: str):
    index = build(TEXTS, head=head, truncate_dim=7)
    assert index.embedder.dim == 7
    check_scores(index, TEXTS)
    if head != "hadamard":
        index.guide(TEXTS[:20], LABELS, LOCATION)
        check_scores(index, TEXTS, tolerance=GUIDE_TOLERANCE)


def test_form_of_vectors_is_recorded_and_cannot_change(build):
    index = build(TEXTS, truncate_dim=3, precision="binary")
    record = json.loads((index.folder / "index.json").read_text())
    assert (record["precision"], record["truncate_dim"]) == ("binary", 3)
    assert build(["one more"]).truncate_dim == 3
    with pytest.raises(UserError, match="was built with precision binary, not int8"):
        build(precision="int8")
    with pytest.raises(UserError, match="was built with truncate_dim 3, not 4"):
        build(truncate_dim=4)
    with pytest.raises(UserError, match="need vectors of more than 1 bit"):
        index.guide(["a park", "a beach"], ["green", "blue"], LOCATION)
    with pytest.raises(UserError, match="truncate_dim is 500, but the embeddings have"):
        build(TEXTS, truncate_dim=500, name="long")
