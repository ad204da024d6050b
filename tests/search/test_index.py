"""Indexes score like a comparison with every text, whatever is added, replaced and deleted."""

import importlib
import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.processes import Command

import llmcond
from llmcond import Index, LlmcondError, UserError
from llmcond.cli import run
from llmcond.search import views

PEOPLE = ["two men", "three women", "children", "two dogs", "people"]
PLACES = ["in the park", "at the beach", "in the kitchen", "on the street", "in the rain"]
TEXTS = [f"{who} {act} {where}" for who in PEOPLE for act in ("play", "sit") for where in PLACES]
QUERY = "children walk at the beach"
PLACE, NUMBER = "the place", "the number of people"
#: Views are stored in half precision.
TOLERANCE = 2e-3


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


def compare_all(index: Index, texts: list[str], query: str, condition: str) -> np.ndarray:
    """Return the similarity of every text to a query, without an index."""
    return index.embedder.similarity([query] * len(texts), texts, condition)


def check_scores(
    index: Index, texts: list[str], condition: str = PLACE, tolerance: float = TOLERANCE
) -> None:
    hits = index.search(QUERY, condition, len(texts))
    expected = dict(zip(texts, compare_all(index, texts, QUERY, condition).tolist(), strict=True))
    assert sorted(row["text"] for row in hits.rows) == sorted(texts)
    assert [row["rank"] for row in hits.rows] == list(range(1, len(texts) + 1))
    for row in hits.rows:
        assert row["score"] == pytest.approx(expected[row["text"]], abs=tolerance)
    assert [row["score"] for row in hits.rows] == sorted(
        (row["score"] for row in hits.rows), reverse=True
    )


# -- every kind of head ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "pairs"),
    [
        ("low", False),
        ("relu", False),
        ("hadamard", False),
        ("concat", False),
        ("own", True),
        ("linear", True),
        ("both", True),
    ],
)
def test_scores_match_comparison_with_every_text(build, head: str, pairs: bool):
    index = build(TEXTS, head=head)
    assert index.encodes_pairs is pairs
    check_scores(index, TEXTS)
    check_scores(index, TEXTS, NUMBER)
    # Vectors that were encoded are stored. All others are computed again by each process.
    assert index.conditions == (sorted([PLACE, NUMBER]) if pairs else [])


@pytest.mark.parametrize(("prompt", "pairs"), [("separate", False), ("own", True)])
def test_zero_shot_scores_match_comparison_with_every_text(build, prompt: str, pairs: bool):
    index = build(TEXTS, head="none", prompt=prompt)
    assert index.encodes_pairs is pairs
    check_scores(index, TEXTS)


def test_low_rank_condition_stores_rank_numbers_per_text(build, tmp_path: Path):
    build(TEXTS, conditions=[PLACE])
    vectors = [np.load(path) for path in (tmp_path / "index" / "views").glob("*/*.npy")]
    assert {array.shape for array in vectors} == {(50,), (50, 4)}
    norms = np.linalg.norm(
        next(array for array in vectors if array.ndim == 2).astype(float), axis=1
    )
    assert norms == pytest.approx(1, abs=TOLERANCE)


def test_several_conditions_give_weighted_sum_of_cosines(build):
    index = build(TEXTS)
    parts = [compare_all(index, TEXTS, QUERY, condition) for condition in (PLACE, NUMBER)]
    total = 2 * parts[0] - 0.5 * parts[1]
    hits = index.search(QUERY, {PLACE: 2, NUMBER: -0.5}, 5)
    assert [row["score"] for row in hits.rows] == pytest.approx(
        np.sort(total)[:-6:-1], abs=TOLERANCE
    )


def test_several_queries_give_same_hits_as_each_alone(build, monkeypatch):
    index = build(TEXTS)
    single_hits = [index.search(query, PLACE, 3).rows for query in TEXTS[:5]]
    monkeypatch.setattr("llmcond.search.query._MAX_SCORES", 100)  # two queries at a time
    batch_hits = index.search(TEXTS[:5], PLACE, 3)
    assert [[row["id"] for row in hits.rows] for hits in batch_hits] == [
        [row["id"] for row in rows] for rows in single_hits
    ]
    assert index.search([], PLACE) == []


# -- adding, replacing, deleting ---------------------------------------------------------------


@pytest.mark.parametrize("head", ["relu", "own"])
def test_scores_match_comparison_after_any_changes(build, heads_run: Path, head: str, monkeypatch):
    """Random changes are made through several objects, and segments are merged repeatedly."""
    monkeypatch.setattr(views, "_MAX_SEGMENTS", 2)
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
            index = Index.open(index.folder, device="cpu")
        if step % 2:
            index.prepare([PLACE])
        hits = index.search(QUERY, PLACE, 50)
        assert {row["id"]: row["text"] for row in hits.rows} == current
        expected = compare_all(index, list(current.values()), QUERY, PLACE)
        scores = {row["id"]: row["score"] for row in hits.rows}
        assert [scores[key] for key in current] == pytest.approx(expected, abs=TOLERANCE)
    assert not (index.folder / "encoding").exists()
    record_path = next((index.folder / "views").glob("*/view.json"))
    segments = json.loads(record_path.read_text())["segments"]
    assert len(list(record_path.parent.glob("*.npy"))) == 2 * len(segments) <= 6


def test_unchanged_texts_are_not_written_again(build, heads_run: Path, caplog):
    index = build(TEXTS, conditions=[PLACE], head="own")
    before = index._version.table.version
    caplog.clear()
    rebuilt = build(TEXTS, conditions=[PLACE], head="own")
    assert (rebuilt.written.added, rebuilt.written.unchanged) == (0, 50)
    assert rebuilt._version.table.version == before
    assert "encoder" not in vars(rebuilt._model)  # the encoder is not even loaded


def test_only_new_texts_are_encoded_and_projected(build, caplog):
    caplog.set_level("INFO")
    index = build(TEXTS[:40], conditions=[PLACE], head="linear")
    caplog.clear()
    index.add(TEXTS)
    assert "texts under 'the place': 10 of 10 inputs encoded" in caplog.text
    segments = views.ConditionViews(index.folder / "views").read(PLACE)
    assert [len(segment.numbers) for segment in segments] == [40, 10]


def test_condition_is_encoded_only_for_texts_without_it(build, caplog):
    caplog.set_level("INFO")
    index = build(TEXTS[:40], conditions=[PLACE], head="linear")
    index.search(QUERY, NUMBER)
    caplog.clear()
    build(TEXTS, conditions=[PLACE, NUMBER, "the colour"], head="linear")
    messages = [record.message for record in caplog.records if "inputs encoded" in record.message]
    assert [message.partition(" inputs")[0].rpartition(": ")[2] for message in messages] == [
        "30 of 30",  # new texts, under all three
        "40 of 50",  # all others, under the colour
    ]


def test_columns_change_without_encoding_texts_again(build, caplog):
    caplog.set_level("INFO")
    index = build(TEXTS[:3], ids=["a", "b", "c"], columns={"year": [1, 2, 3]})
    first = index.search(QUERY, PLACE).rows
    caplog.clear()
    written = index.add(TEXTS[:3], ids=["a", "b", "c"], columns={"year": [1, 5, 3]})
    assert (written.replaced, written.unchanged) == (1, 2)
    assert "encoded" not in caplog.text
    second = {row["id"]: row for row in index.search(QUERY, PLACE).rows}
    assert [second[key]["year"] for key in "abc"] == [1, 5, 3]
    assert {row["id"]: row["score"] for row in first} == {
        key: row["score"] for key, row in second.items()
    }


def test_readers_use_version_they_opened_until_refresh(build):
    writer = build(TEXTS[:20], conditions=[PLACE], head="own")
    reader = Index.open(writer.folder, device="cpu")
    writer.add(TEXTS[20:30])
    writer.delete([row["id"] for row in writer.search(QUERY, PLACE, 3).rows])
    assert len(reader) == 20
    check_scores(reader, TEXTS[:20])
    assert len(Index.open(writer.folder, device="cpu")) == 27
    reader.refresh()
    assert len(reader) == 27
    check_scores(reader, [row["text"] for row in writer.search(QUERY, PLACE, 27).rows])


def test_reader_ignores_added_texts_until_they_are_encoded(build, monkeypatch):
    writer = build(TEXTS[:4], conditions=[PLACE], head="linear")
    reader = Index.open(writer.folder, device="cpu")
    monkeypatch.setattr(Index, "_complete", lambda *_: None)  # as if the writer were killed
    writer.add(TEXTS[4:6])
    reader.refresh()
    assert len(reader.search(QUERY, PLACE, prepare=False).rows) == 4
    monkeypatch.undo()
    writer.prepare([PLACE])
    reader.refresh()
    assert len(reader.search(QUERY, PLACE, prepare=False).rows) == 6


def test_many_small_additions_are_merged_into_few_files(build, monkeypatch):
    monkeypatch.setattr("llmcond.search.table._MAX_FRAGMENTS", 3)
    index = build()
    for start in range(0, 50, 5):
        index.add(TEXTS[start : start + 5])
    assert len(index._version.table._dataset.get_fragments()) <= 4
    check_scores(index, TEXTS)


# -- ids, columns and filters ------------------------------------------------------------------


def test_default_ids_are_derived_from_texts(build, caplog):
    caplog.set_level("INFO")
    index = build([TEXTS[0], TEXTS[1], TEXTS[0]])
    assert "duplicate texts, which are all indexed: 1" in caplog.text
    ids = [row["id"] for row in index.search(TEXTS[0], PLACE).rows]
    assert len(set(ids)) == 3
    assert ids[1] == f"{ids[0]}-2"
    assert build([TEXTS[2], TEXTS[0]]).written.unchanged == 1


def test_filter_restricts_hits(build):
    years = list(range(50))
    index = build(TEXTS, columns={"year": years, "my kind": ["a", None] * 25})
    hits = index.search(QUERY, PLACE, 30, where="year >= 40 AND `my kind` = 'a'", explain=True)
    assert (hits.searched, len(hits)) == (5, 5)
    assert {row["year"] for row in hits.rows} == {40, 42, 44, 46, 48}
    assert {row["explain"]["rank_without"] for row in hits.rows} == set(range(1, 6))
    all_hits = index.search(QUERY, PLACE, 50)
    expected_ids = [
        row["id"] for row in all_hits.rows if row["year"] >= 40 and row["my kind"] == "a"
    ]
    assert [row["id"] for row in hits.rows] == expected_ids
    assert index.search(QUERY, PLACE, where="year > 99").rows == []


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("year > ", "character 8: expected a column, a number or a text, got the end"),
        ("repeat('a', 2000000000) = text", "functions are not allowed"),
    ],
)
def test_invalid_filter_reports_columns_of_index(build, where: str, message: str):
    index = build(TEXTS[:5], columns={"year": [1, 2, 3, 4, 5], "kind": list("abcde")})
    with pytest.raises(UserError) as error:
        index.search(QUERY, PLACE, where=where)
    assert message in str(error.value)
    assert str(error.value).endswith("The columns are id, text, year, kind.")


def test_hits_convert_to_json_and_data_frame(build):
    columns = {"share": [0.5, float("nan"), float("inf")], "tags": [["a"], [], None]}
    hits = build(TEXTS[:3], ids=[7, 8, 9], columns=columns).search(QUERY, PLACE)
    result = json.loads(json.dumps(hits.to_json(), allow_nan=False))
    rows = {row["id"]: row for row in result["results"]}
    assert rows["7"] == {**rows["7"], "text": TEXTS[0], "share": 0.5, "tags": ["a"]}
    assert (rows["8"]["share"], rows["9"]["share"], rows["9"]["tags"]) == (None, None, None)
    assert result["conditions"] == {PLACE: 1.0}
    assert list(hits.to_pandas()["id"]) == [row["id"] for row in hits.rows]


def test_explain_gives_scores_under_each_condition_and_without(build):
    index = build(TEXTS)
    hits = index.search(QUERY, {PLACE: 1, NUMBER: 0.5}, 5, explain=True)
    vectors = index.embedder.encoder.encode([*TEXTS, QUERY])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors[:-1] @ vectors[-1]
    for row in hits.rows:
        explanation, position = row["explain"], TEXTS.index(row["text"])
        total = explanation["under"][PLACE] + 0.5 * explanation["under"][NUMBER]
        assert row["score"] == pytest.approx(total, abs=1e-5)
        assert explanation["without"] == pytest.approx(cosines[position], abs=TOLERANCE)
        assert explanation["rank_without"] == pytest.approx(
            1 + (cosines > cosines[position]).sum(), abs=1
        )


def test_explain_encodes_hits_if_no_plain_vectors_are_stored(build):
    index = build(TEXTS[:9], head="linear")
    hits = index.search(QUERY, PLACE, 3, explain=True)
    plain = index.embedder.encoder.encode([QUERY, *(row["text"] for row in hits.rows)])
    plain /= np.linalg.norm(plain, axis=1, keepdims=True)
    explanations = [row["explain"] for row in hits.rows]
    assert [explanation["without"] for explanation in explanations] == pytest.approx(
        (plain[1:] @ plain[0]), abs=1e-5
    )
    assert {explanation["rank_without"] for explanation in explanations} == {None}


def test_explain_uses_base_encoder_without_adapter(minilm, tmp_path: Path):
    options = {"model": "minilm-csts", "conditions": [PLACE], "device": "cpu"}
    index = Index.build(tmp_path / "index", TEXTS[:3], **options)
    hits = index.search(QUERY, PLACE, explain=True)
    assert hits.to_json()["plain"] == "minilm"
    plain = minilm.encode([QUERY, *(row["text"] for row in hits.rows)])
    plain /= np.linalg.norm(plain, axis=1, keepdims=True)
    scores = [row["explain"]["without"] for row in hits.rows]
    assert scores == pytest.approx((plain[1:] @ plain[0]).tolist(), abs=0.02)  # in bfloat16


# -- conditions that texts are encoded with ----------------------------------------------------


def test_unprepared_condition_is_encoded_on_demand_only(build, caplog):
    caplog.set_level("INFO")
    index = build(TEXTS, head="linear", conditions=[PLACE])
    assert len(index.search(QUERY, PLACE, prepare=False)) == 10
    with pytest.raises(
        UserError,
        match=r"50 of 50 texts have no vectors under 'the number of people'\. Encode them",
    ):
        index.search(QUERY, NUMBER, prepare=False)
    assert index.conditions == [PLACE]
    caplog.clear()
    index.search(QUERY, NUMBER)
    assert "encoding 50 texts under 'the number of people' and storing the vectors" in caplog.text
    reopened = Index.open(index.folder, device="cpu")
    caplog.clear()
    reopened.search(QUERY, NUMBER, prepare=False)
    assert caplog.text == ""
    reopened.add(["one more"])  # encoded under the prepared condition only
    reopened.search(QUERY, PLACE, prepare=False)
    with pytest.raises(
        UserError, match=r"1 of 51 texts have no vectors under 'the number of people'\. Encode them"
    ):
        reopened.search(QUERY, NUMBER, prepare=False)
    reopened.search(QUERY, NUMBER)
    assert "encoding 1 text under 'the number of people' and storing the vectors" in caplog.text


# -- example values ----------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["low", "linear"])
def test_condition_text_stands_for_recorded_values(build, head: str):
    seas, snow = (llmcond.Condition(PLACE, values) for values in (["sea", "lake"], ["snow"]))
    index = build(TEXTS, head=head, conditions=[seas])
    check_scores(index, TEXTS, seas)
    recorded = index.search(QUERY, PLACE, prepare=False)
    assert list(recorded.conditions) == [seas]
    assert recorded.rows == index.search(QUERY, seas).rows
    # Other values, and no values, are other conditions, whatever is recorded.
    check_scores(index, TEXTS, snow)
    plain = index.search(QUERY, llmcond.Condition(PLACE))
    assert list(plain.conditions) == [PLACE]
    scores = [hits.rows[0]["score"] for hits in (plain, recorded, index.search(QUERY, snow))]
    assert len(set(scores)) == 3
    # A reopened index knows the values, and uses them for texts that are added without values.
    reopened = Index.open(index.folder, device="cpu")
    assert reopened.search(QUERY, PLACE, prepare=False).rows == recorded.rows
    build(["people ski in the snow"], head=head, conditions=[PLACE])
    reopened.refresh()
    check_scores(reopened, [*TEXTS, "people ski in the snow"], seas)
    # The values named last are recorded, even if there are none.
    reopened.prepare([snow])
    assert list(index.search(QUERY, PLACE).conditions) == [snow]
    reopened.prepare([llmcond.Condition(PLACE)])
    assert list(index.search(QUERY, PLACE).conditions) == [PLACE]
    assert sorted(reopened.conditions) == [PLACE, seas, snow]


def test_values_are_preserved_if_run_is_moved(build, heads_run: Path, tmp_path: Path):
    seas = llmcond.Condition(PLACE, ["sea", "lake"])
    folder = build(TEXTS, conditions=[seas]).folder
    moved = shutil.copytree(heads_run, tmp_path / "moved")
    index = Index.build(folder, run=moved, device="cpu")
    assert list(index.search(QUERY, PLACE).conditions) == [seas]


# -- spellings of conditions -------------------------------------------------------------------

SPELLINGS = [" the  place", "the\u00a0place\n", "The Place", "THE PLACE"]


@pytest.mark.parametrize("values", [(), ["sea"]])
@pytest.mark.parametrize("head", ["low", "linear"])
def test_spellings_of_a_condition_share_vectors_values_and_guide(build, head: str, values):
    index = build(TEXTS, head=head, conditions=[llmcond.Condition("the  place", values)])
    assert len(index.conditions) == 1
    plain = index.search(QUERY, PLACE, prepare=False)
    # The capitals of a condition are known if the index records it, or once it has a guide.
    for spelling in SPELLINGS if index.encodes_pairs or values else SPELLINGS[:2]:
        assert index.search(QUERY, spelling, prepare=False).rows == plain.rows
    labels = [text.split()[-1] for text in TEXTS[:20]]
    index.guide(TEXTS[:20], labels, SPELLINGS[0])
    guided = index.search(QUERY, PLACE, prepare=False)
    assert guided.rows != plain.rows
    for spelling in SPELLINGS:
        assert index.search(QUERY, spelling, prepare=False) == guided
    index.guide(TEXTS[:20], labels, SPELLINGS[2])  # replaces the guide and its file
    assert len(index.guides) == len([*(index.folder / "guides").iterdir()]) == 1
    index.unguide(SPELLINGS[3])
    assert not [*(index.folder / "guides").iterdir()]
    assert index.search(QUERY, PLACE, prepare=False).rows == plain.rows


def test_index_with_conditions_in_another_form_is_used_as_it_is(build, monkeypatch):
    """Indexes of earlier versions recorded conditions as they were given."""
    raw = "the cafe\u0301 "
    with monkeypatch.context() as patch:
        patch.setattr("llmcond.conditions.normalise_condition", str)
        folder = build(TEXTS, head="linear", conditions=[raw]).folder
    index = Index.open(folder, device="cpu")
    assert index.conditions == [raw]
    for spelling in (raw, "the café", "The  Café"):
        assert index.search(QUERY, spelling, prepare=False).rows
    labels = [text.split()[-1] for text in TEXTS[:20]]
    index.guide(TEXTS[:20], labels, "the café")
    assert index.search(QUERY, "THE CAFÉ", prepare=False).guides.keys() == {raw}
    index.add(["one more"])
    assert index.conditions == [raw]


def test_scores_never_exceed_one(build):
    index = build(TEXTS, head="low")
    for text in TEXTS[:10]:
        hits = index.search(text, {PLACE: 1}, len(TEXTS), explain=True)
        assert hits.rows[0]["score"] == pytest.approx(1, abs=1e-5)
        scores = [[row["score"], *row["explain"]["under"].values()] for row in hits.rows]
        assert np.abs(scores).max() <= 1


def test_ids_are_texts_or_whole_numbers(build):
    index = build(TEXTS[:3], ids=np.array([1, 2, 3]))
    index.add(TEXTS[3:5], ids=pd.Series(["4", "x"]))
    with pytest.raises(UserError, match=r"the id is 1\.0; expected a text or a whole number"):
        index.delete([1.0])
    for ids in ("x", None, [None], ["\ud800"]):
        with pytest.raises(UserError):
            index.delete(ids)
    assert (index.delete([1, np.int64(2), "x"]), len(index)) == (3, 2)


@pytest.mark.parametrize("folder", [None, 7, "a\0", "\ud800", "a" * 400])
def test_invalid_folders_are_reported_in_one_line(folder):
    for call in (Index.open, Index.build):
        with pytest.raises(UserError, match=r"^folder is "):
            call(folder)


@pytest.mark.parametrize("head", ["own", "both"])
def test_rerank_encodes_only_nearest_texts(build, head: str, caplog):
    caplog.set_level("INFO")
    index = build(TEXTS, head=head)
    hits = index.search(QUERY, PLACE, 5, rerank=20)
    assert not hits.exact
    assert "of 50 texts, only the 20 nearest without the condition" in caplog.text
    vectors = index.embedder.encoder.encode([*TEXTS, QUERY])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    nearest = [TEXTS[i] for i in np.argsort(-(vectors[:-1] @ vectors[-1]))[:20]]
    scores = compare_all(index, nearest, QUERY, PLACE)
    best = [nearest[i] for i in np.argsort(-scores)[:5]]
    assert {row["text"] for row in hits.rows} == set(best)
    assert [row["score"] for row in hits.rows] == pytest.approx(
        np.sort(scores)[:-6:-1], abs=TOLERANCE
    )
    assert index.conditions == []
    assert index.search(QUERY, PLACE, 5, rerank=50).exact


@pytest.mark.parametrize(
    ("head", "rerank", "message"),
    [
        ("low", 20, "compares every text anyway. Leave it out"),
        ("linear", 20, "the prompt concat-sent-cond does not encode texts without one"),
        ("own", 3, "--rerank is 3, but 5 hits are requested"),
    ],
)
def test_useless_rerank_is_rejected(build, head: str, rerank: int, message: str):
    with pytest.raises(UserError, match=message):
        build(TEXTS[:9], head=head).search(QUERY, PLACE, 5, rerank=rerank)


def test_projected_views_above_budget_are_dropped(build, monkeypatch):
    monkeypatch.setattr(views, "BUDGET", 1500)
    index = build(TEXTS)
    for condition in (PLACE, NUMBER, "the colour"):
        index.prepare([condition])
    assert "the colour" in index.conditions
    assert len(index.conditions) < 3
    check_scores(Index.open(index.folder, device="cpu"), TEXTS)
    joint = build(TEXTS, head="linear", name="joint", conditions=[PLACE, NUMBER, "the colour"])
    assert len(joint.conditions) == 3


def list_files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("head", "guided", "precision"),
    [("low", False, "float16"), ("relu", True, "int8"), ("linear", True, "float16")],
)
def test_searches_write_no_files_and_keep_few_views_in_memory(
    build, monkeypatch, head: str, guided: bool, precision: str
):
    texts = [f"{text} {number}" for number in range(2) for text in TEXTS]
    index = build(texts, head=head, conditions=[PLACE], precision=precision)
    if guided:
        index.guide(texts[:4], ["a", "b"] * 2, PLACE)
    index = Index.open(index.folder, device="cpu")
    before = list_files(index.folder)

    def search(n_conditions: int) -> list[views.ConditionView]:
        for number in range(n_conditions):
            condition = PLACE if index.encodes_pairs else f"{PLACE} {number}"
            index.search(QUERY, condition, 3, prepare=False, explain=True)
        return list(index._version._open.values())

    monkeypatch.setattr("llmcond.search.query._MAX_OPEN", 5)
    assert len(search(10)) == (1 if index.encodes_pairs else 5)
    budget = 3 * max(view.n_bytes for view in search(1))
    monkeypatch.setattr("llmcond.search.query.BUDGET", budget)
    assert 0 < sum(view.n_bytes for view in search(10)) <= budget
    assert list_files(index.folder) == before


# -- invalid input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": ["a", "  "]}, "row 2: the text is empty"),
        ({"texts": ["a", 3]}, "row 2: the text is 3, not a text"),
        ({"texts": ["a", "\ud800"]}, "row 2: the text contains half of a surrogate pair"),
        ({"texts": "abc"}, "texts is a single string; give a list of texts"),
        ({"texts": ["a", "b"], "ids": ["x", "x"]}, "the rows 1 and 2 have the same id, 'x'"),
        ({"texts": ["a", "b"], "ids": ["x"]}, "1 id for 2 texts"),
        ({"texts": ["a", "b"], "ids": ["x", None]}, "row 2: the id is empty"),
        ({"texts": ["a", "b"], "ids": [float("nan"), 1]}, "row 1: the id is empty"),
        ({"texts": ["a", "b"], "ids": [pd.NA, 1]}, "row 1: the id is empty"),
        ({"texts": ["a", "b"], "ids": [pd.NaT, 1]}, "row 1: the id is empty"),
        ({"texts": ["a", "b"], "ids": [1.0, 2.0]}, "the id is 1.0; expected a text or a whole"),
        ({"texts": ["a", "b"], "ids": [True, 2]}, "the id is True; expected a text or a whole"),
        ({"texts": ["a", "b"], "ids": ["x", b"y"]}, "row 2: the id is b'y'; expected a text"),
        ({"texts": ["a", "b"], "ids": "xy"}, "expected a list for ids, not the str 'xy'"),
        ({"texts": ["a"], "ids": ["\ud800"]}, "row 1: the id contains half of a surrogate pair"),
        ({"texts": None}, "data is the NoneType"),
        ({"texts": ["a"], "columns": ["year"]}, "columns is .'year'.; expected a dictionary"),
        ({"texts": ["a"], "columns": {"year": 1}}, "a list for the column 'year', not the int 1"),
        ({"texts": ["a"], "columns": {"year": "x"}}, "a list for the column 'year', not the str"),
        ({"texts": ["a"], "columns": {1: [1]}}, "the column name is 1; expected a text"),
        ({"texts": ["a"], "columns": {"a.b": [1]}}, "'a.b' contains '.', so it cannot be stored"),
        ({"texts": ["a"], "columns": {"\ud800": [1]}}, "the column name .* half of a surrogate"),
        ({"texts": ["a"], "conditions": [7]}, "the condition is 7, not a text"),
        ({"texts": ["a"], "conditions": 7}, "expected a list for conditions, not the int 7"),
        ({"texts": ["a"], "head": 7}, "head is 7; expected a name"),
        ({"texts": ["a"], "truncate_dim": True}, "truncate_dim is True; expected a whole number"),
        ({"texts": ["a"], "truncate_dim": 0}, "truncate_dim is 0; it must be at least 1"),
        ({"texts": ["a"], "columns": {"year": [1, 2]}}, "'year' has 2 values for 1 text;"),
        ({"texts": ["a"], "columns": {"score": [1]}}, "'score' is reserved"),
        ({"texts": ["a"], "columns": {"_row": [1]}}, "'_row' is reserved"),
        ({"texts": ["a"], "columns": {"kind": ["\ud800"]}}, "'kind' has a text that contains half"),
        ({"texts": ["a"], "conditions": [" "]}, "condition is empty"),
        ({"texts": ["a"], "head": "lw"}, "no fitted head 'lw'"),
    ],
)
def test_invalid_texts_create_no_index(build, tmp_path: Path, options: dict, message: str):
    with pytest.raises(UserError, match=message):
        build(**options)
    assert not (tmp_path / "index" / "texts.lance").exists()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"year": ["x"], "kind": ["y"]}, "'year' has the type int64 in the index"),
        ({"year": [1]}, "the columns 'year', but the index has 'kind', 'year'"),
        ({"year": [1], "kind": ["y"], "more": [1]}, "Give the same columns"),
    ],
)
def test_added_texts_need_columns_of_index(build, columns: dict, message: str):
    index = build(TEXTS[:2], columns={"year": [1, 2], "kind": ["a", "b"]})
    with pytest.raises(UserError, match=message):
        index.add(["one more"], columns=columns)
    index.add(["without any"])
    assert {row["text"]: row["kind"] for row in index.search(QUERY, PLACE).rows} == {
        TEXTS[0]: "a",
        TEXTS[1]: "b",
        "without any": None,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": " "}, "the query is empty"),
        ({"query": ["a", ""]}, "the query is empty"),
        ({"query": "\ud800"}, "the query contains half of a surrogate pair"),
        ({"query": ["a", 1]}, "the query is 1, not a text"),
        ({"condition": ""}, "the condition is empty"),
        ({"condition": None}, "the condition is None; expected a text, or a dictionary"),
        ({"condition": [PLACE]}, "expected a text, or a dictionary from conditions to weights"),
        ({"condition": {PLACE: 1, " The Place": 2}}, "two are the same up to case and spacing"),
        ({"condition": {"\ud800": 1}}, "the condition contains half of a surrogate pair"),
        ({"query": None}, "expected a list for the query, not the NoneType None"),
        ({"k": "3"}, "k is '3'; expected a whole number"),
        ({"k": True}, "k is True; expected a whole number"),
        ({"where": 7}, "where is 7; expected a filter"),
        ({"where": "text = '\ud800'"}, "the filter .* contains half of a surrogate pair"),
        ({"rerank": 1.5}, "rerank is 1.5; expected a whole number"),
        ({"condition": {}}, "no condition was given"),
        ({"condition": {PLACE: float("nan")}}, "is nan; it must be between -1,000,000 and 1,000,0"),
        ({"condition": {PLACE: 1e308}}, r"is 1e\+308; it must be between"),
        ({"condition": {PLACE: -(10**400)}}, "it must be between"),
        ({"condition": {PLACE: "2"}}, "not a number"),
        ({"condition": {PLACE: 0}}, "all weights are 0"),
        ({"k": 0}, "k is 0; it must be at least 1"),
    ],
)
def test_invalid_queries_are_rejected(build, arguments: dict, message: str):
    with pytest.raises(UserError, match=message):
        build(TEXTS[:2]).search(**{"query": QUERY, "condition": PLACE, **arguments})


def test_unknown_search_option_is_rejected(build):
    with pytest.raises(TypeError, match="unexpected keyword argument 'reranked'"):
        build(TEXTS[:2]).search(QUERY, PLACE, reranked=3)


def test_index_rejects_other_model_and_head(build, heads_run: Path, tmp_path: Path):
    index = build(TEXTS[:5])
    with pytest.raises(
        UserError, match=r"built with run .*, head low; the given model has another head"
    ):
        build(TEXTS, head="relu")
    with pytest.raises(UserError, match="another prompt and another head"):
        build(TEXTS, head="none", prompt="own")
    with pytest.raises(UserError, match=r"was built with run .*, head low: .* no fitted head"):
        Index.build(index.folder, TEXTS, model="minilm-csts")
    moved = Path(shutil.copytree(heads_run, tmp_path / "moved"))
    Index.build(index.folder, run=moved, device="cpu")  # the same run in another folder
    assert json.loads((index.folder / "index.json").read_text())["made_by"]["run"] == str(moved)
    shutil.rmtree(moved / "heads" / "low")
    shutil.copytree(moved / "heads" / "relu", moved / "heads" / "low")
    with pytest.raises(UserError, match="the current model has another head"):
        Index.open(index.folder)
    shutil.rmtree(moved)
    with pytest.raises(UserError, match=r"there is no run .*moved, name it: llmcond index --out"):
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
    newer = build(name="newer")
    record = json.loads((newer.folder / "index.json").read_text())
    (newer.folder / "index.json").write_text(json.dumps({**record, "format": 99}))
    with pytest.raises(UserError, match="newer version of llmcond"):
        Index.open(newer.folder)


def test_empty_index_returns_no_hits(build):
    assert build().search(QUERY, PLACE).rows == []
    check_scores(build(TEXTS[:3], head="relu"), TEXTS[:3])  # an empty index accepts another head
    emptied = build(TEXTS[:2], ids=["a", "b"], name="emptied")
    emptied.delete(["a", "b"])
    assert emptied.search(QUERY, PLACE, explain=True).rows == []
    emptied.add(TEXTS[:3])
    check_scores(emptied, TEXTS[:3])


def test_long_texts_and_queries_are_truncated_with_warning(build, caplog):
    caplog.set_level("INFO")
    long_text = " ".join(["beach"] * 200)
    index = build([long_text, TEXTS[0]])
    assert "1 input is longer than 64 tokens: the ends of sentences" in caplog.text
    with pytest.warns(UserWarning, match="1 of 1 inputs are longer than the 64 tokens"):
        assert index.search(long_text, PLACE, 1).rows[0]["text"] == long_text


def test_index_and_hits_are_public():
    assert llmcond.Index is Index
    assert llmcond.Hits.__name__ == "Hits"


# -- threads, kills and damage -----------------------------------------------------------------


def test_threads_search_while_texts_are_added(build):
    index = build(TEXTS[:20], conditions=[PLACE], head="own")
    reader = Index.open(index.folder, device="cpu")
    expected = [row["id"] for row in reader.search(QUERY, PLACE).rows]
    with ThreadPoolExecutor(3) as pool:
        additions = [pool.submit(index.add, TEXTS[20 + i : 21 + i]) for i in range(6)]
        searches = [pool.submit(reader.search, QUERY, PLACE) for _ in range(30)]
        assert all([row["id"] for row in future.result().rows] == expected for future in searches)
        assert sum(future.result().added for future in additions) == 6
    check_scores(index, TEXTS[:26])


def kill_at_call(module: str, name: str) -> None:
    """Make this process kill itself when it calls a function."""
    target: Any = importlib.import_module(module)
    *classes, function = name.split(".")
    for attribute in classes:
        target = getattr(target, attribute)
    setattr(target, function, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize(
    "target",
    [
        ("llmcond.search.table", "IndexUpdatePlan.write"),  # texts are encoded
        ("llmcond.search.views", "np.save"),  # texts are written, their vectors are not
        ("llmcond.search.views", "write_json"),  # vectors are written, but not listed yet
    ],
    ids=lambda target: target[1],
)
def test_kill_loses_no_texts_and_leaves_no_partial_files(build, tmp_path: Path, target, capsys):
    index = build(TEXTS[:30], conditions=[PLACE], head="linear")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    arguments = ["index", tmp_path / "texts.txt", "--out", index.folder, "--condition", NUMBER]
    command = Command(tmp_path / "killed", arguments, setup=partial(kill_at_call, *target))
    status, _, err = command.finish()
    encoded = 1 if target[1] == "IndexUpdatePlan.write" else 2
    assert (status, err.count("inputs encoded")) == (-signal.SIGKILL, encoded)
    reopened = Index.open(index.folder, device="cpu")
    assert len(reopened) == (30 if target[1] == "IndexUpdatePlan.write" else 50)
    if len(reopened) == 30:
        check_scores(reopened, TEXTS[:30])
    capsys.readouterr()
    assert run([str(argument) for argument in arguments]) == 0
    assert capsys.readouterr().err.count("inputs encoded") == (target[1] == "IndexUpdatePlan.write")
    check_scores(Index.open(index.folder, device="cpu"), TEXTS)
    assert not (index.folder / "encoding").exists()
    for record in (index.folder / "views").glob("*/view.json"):
        names = {path.name.partition(".")[0] for path in record.parent.iterdir()}
        assert names == {"view", *json.loads(record.read_text())["segments"]}


def limit_file_size(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize(
    ("head", "size", "message"),
    [
        ("linear", 2_000, r"encoding/.* cannot grow"),  # vectors while texts are encoded
        (
            "low",
            9_000,
            r"its previous contents are unchanged \(30 texts\)",
        ),  # the texts, in one piece
    ],
)
def test_full_disk_is_reported_in_one_line(
    build, tmp_path: Path, head: str, size: int, message: str
):
    columns = {"note": ["n" * 300] * 50}
    index = build(TEXTS[:30], columns={"note": columns["note"][:30]}, conditions=[PLACE], head=head)
    rows = [{"text": f"{text} {i}", "note": f"{i}" * 200} for i, text in enumerate(TEXTS)]
    (tmp_path / "texts.json").write_text(json.dumps(rows))
    arguments = ["index", tmp_path / "texts.json", "--out", index.folder, "--keep", "note"]
    command = Command(tmp_path / "full", arguments, setup=partial(limit_file_size, size))
    status, _, err = command.finish()
    assert status == 2
    assert re.fullmatch(f"llmcond: error: the disk is full: .*{message}.*", err.splitlines()[-1])
    check_scores(Index.open(index.folder, device="cpu"), TEXTS[:30])
    assert run([str(argument) for argument in arguments]) == 0
    assert len(Index.open(index.folder, device="cpu")) == 80


@pytest.mark.parametrize(
    ("pattern", "n_bytes", "message"),
    [
        ("texts.lance/data/*", 10, "cannot be read: .* if it is damaged, build it again"),
        ("texts.lance/_versions/*", 10, "cannot be read: "),
        ("views/*/*[0-9a-f].npy", 200, "is damaged. Delete it; it is computed again"),
        ("views/*/*.rows.npy", 0, "is damaged. Delete it"),
        ("index.json", 0, "is not a readable JSON file"),
    ],
)
def test_damaged_files_are_reported(build, pattern: str, n_bytes: int, message: str):
    folder = build(TEXTS[:9], conditions=[PLACE], head="linear").folder
    for path in folder.glob(pattern):
        path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(LlmcondError, match=message):
        Index.open(folder, device="cpu").search(QUERY, PLACE)


def test_damaged_record_is_reported(build):
    folder = build(TEXTS[:2]).folder
    (folder / "index.json").write_text('{"format": 2, "made_by": {"run": 3}}')
    with pytest.raises(LlmcondError, match=r"was damaged: .*\. Build another index"):
        Index.open(folder)


# -- guides ------------------------------------------------------------------------------------

#: A guide amplifies the rounding errors of half precision.
GUIDE_TOLERANCE = 4 * TOLERANCE


@pytest.mark.parametrize("head", ["low", "linear"])
def test_guide_learned_from_labels_changes_scores(build, head: str, tmp_path: Path, monkeypatch):
    index = build(TEXTS, head=head, conditions=[PLACE, NUMBER])
    plain = index.search(QUERY, PLACE, 5).to_json()
    other_condition = index.search(QUERY, NUMBER, 5).to_json()
    labels = [text.split()[-1] for text in TEXTS[:20]]
    with monkeypatch.context() as patch:  # the texts of the index are not encoded again
        patch.setattr(Index, "_encode", None)
        index.guide(TEXTS[:20], labels, PLACE)
        check_scores(index, TEXTS, tolerance=GUIDE_TOLERANCE)
    guided = index.search(QUERY, PLACE, 5).to_json()
    assert guided["results"] != plain["results"]
    assert guided["guides"][PLACE]["labels"]["beach"] == 4
    assert index.search(QUERY, NUMBER, 5).to_json() == other_condition
    weighted = index.search(QUERY, {PLACE: 1, NUMBER: 0.5}, 5, explain=True)
    assert weighted.guides.keys() == {PLACE}
    # The guide is stored. It applies to added texts, and to embeddings of the index's model.
    reopened = Index.open(tmp_path / "index", device="cpu")
    reopened.add(["dogs walk at the beach"])
    check_scores(reopened, [*TEXTS, "dogs walk at the beach"], tolerance=GUIDE_TOLERANCE)
    assert reopened.conditions == sorted([PLACE, NUMBER])
    # Another guide replaces it, and without a guide the vectors are as before.
    reopened.guide(TEXTS[:20], [text.split()[0] for text in TEXTS[:20]], PLACE)
    check_scores(reopened, [*TEXTS, "dogs walk at the beach"], tolerance=GUIDE_TOLERANCE)
    reopened.delete([row["id"] for row in reopened.search("dogs walk at the beach", PLACE, 1).rows])
    reopened.unguide(PLACE)
    assert Index.open(tmp_path / "index", device="cpu").search(QUERY, PLACE, 5).to_json() == plain


# -- smaller vectors ---------------------------------------------------------------------------

MANY = [f"{text} for {hours} hours" for text in TEXTS for hours in (2, 3, 4)]
#: Largest error of a cosine in each precision, with 32 or fewer dimensions.
ERRORS = {"int8": 0.02, "uint8": 0.02, "binary": 0.6, "ubinary": 0.6}


def list_views(folder: Path) -> list[np.ndarray]:
    paths = (folder / "views").glob("*/*.npy")
    return [np.load(path) for path in paths if not path.name.endswith(".rows.npy")]


@pytest.mark.parametrize("precision", ERRORS)
def test_quantised_vectors_give_approximate_scores(build, tmp_path: Path, precision):
    index = build(MANY, head="linear", precision=precision, conditions=[PLACE])
    assert index.encodes_pairs
    (codes,) = list_views(tmp_path / "index")
    dim = index.embedder.dim
    width = dim if "int8" in precision else -(-dim // 8)
    assert (codes.shape, codes.itemsize) == ((len(MANY), width), 1)
    hits = index.search(QUERY, PLACE, len(MANY))
    assert not hits.exact
    expected = dict(zip(MANY, compare_all(index, MANY, QUERY, PLACE).tolist(), strict=True))
    errors = [abs(row["score"] - expected[row["text"]]) for row in hits.rows]
    assert max(errors) < ERRORS[precision]
    opened = Index.open(tmp_path / "index", device="cpu")
    assert opened.precision == precision
    scores = [row["score"] for row in opened.search(QUERY, PLACE, 5).rows]
    assert scores == [row["score"] for row in hits.rows[:5]]


def test_hits_are_scored_again_if_texts_are_encoded_alone(build):
    exact, index = (
        build(MANY, name=precision, precision=precision) for precision in ("float16", "int8")
    )
    rows, expected = (item.search(QUERY, PLACE, 10).rows for item in (index, exact))
    assert [row["score"] for row in rows] == [row["score"] for row in expected]


def test_added_texts_use_recorded_ranges(build, tmp_path: Path):
    index = build(MANY[:120], head="linear", precision="int8", conditions=[PLACE])
    record = next((tmp_path / "index" / "views").glob("*/view.json"))
    before = json.loads(record.read_text())
    index.add(MANY[120:])
    after = json.loads(record.read_text())
    assert after["ranges"] == before["ranges"]
    assert len(after["segments"]) == 2
    expected = dict(zip(MANY, compare_all(index, MANY, QUERY, PLACE).tolist(), strict=True))
    hits = index.search(QUERY, PLACE, len(MANY))
    errors = [abs(row["score"] - expected[row["text"]]) for row in hits.rows]
    assert np.quantile(errors, 0.9) < ERRORS["int8"]


@pytest.mark.parametrize("head", ["low", "relu", "hadamard", "linear"])
def test_truncated_vectors_are_those_of_embedder(build, head: str):
    index = build(TEXTS, head=head, truncate_dim=7)
    assert index.embedder.dim == 7
    check_scores(index, TEXTS)
    if head in ("low", "linear"):
        index.guide(TEXTS[:20], [text.split()[-1] for text in TEXTS[:20]], PLACE)
        check_scores(index, TEXTS, tolerance=GUIDE_TOLERANCE)


def test_form_of_vectors_is_recorded_and_cannot_change(build, tmp_path: Path):
    build(TEXTS, truncate_dim=3, precision="binary")
    record = json.loads((tmp_path / "index" / "index.json").read_text())
    assert (record["precision"], record["truncate_dim"]) == ("binary", 3)
    assert build(["one more"]).truncate_dim == 3
    with pytest.raises(UserError, match="was built with precision binary, not int8"):
        build(precision="int8")
    with pytest.raises(UserError, match="was built with truncate_dim 3, not 4"):
        build(truncate_dim=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int4"}, "precision is 'int4'. Did you mean 'int8'"),
        ({"precision": "int8"}, "50 texts are too few. Add at least 100 at first"),
        ({"truncate_dim": 500}, "truncate_dim is 500, but the embeddings have"),
    ],
)
def test_invalid_forms_of_vectors_are_rejected(build, options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        build(TEXTS, conditions=[PLACE], **options)


def test_guide_of_binary_vectors_is_rejected(build):
    index = build(TEXTS, precision="binary")
    with pytest.raises(UserError, match="a guide needs vectors of more than 1 bit"):
        index.guide(["a park", "a beach"], ["green", "blue"], PLACE)
