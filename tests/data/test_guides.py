"""Embeddings guided by a few labelled texts: Python, ``llmcond embed`` and ``llmcond serve``."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.commands import run_json, run_rejected

import llmcond
from llmcond.base.errors import LlmcondError, UserError
from llmcond.data.formats import ReadOptions
from llmcond.data.guides import parse_sample, read_guide, read_triples

LOCATION, MOOD = "the place", "the mood"
WHO = ("two men", "three women", "children", "two dogs")
WHERE = ("in the park", "at the beach")
TEXTS = [f"{who} {act} {where}" for who in WHO for act in ("play", "sit") for where in WHERE]
ASPECTS = [("a", "a man", 2020), ("b", "a man", 2021), ("c", "a dog", 2020)]
LABELS = [where for _ in WHO for _ in "ab" for where in ("park", "beach")]


@pytest.fixture
def rows(in_tmp, write_rows):
    """A guide file for one condition, and another file for two."""
    pairs = list(zip(TEXTS[:8], LABELS[:8], strict=True))
    both = [(*pair, " The  place") for pair in pairs] + [(*pair, MOOD) for pair in pairs[:4]]
    write_rows(both, "both.csv", "text,label,condition")
    return write_rows(pairs, "labels.csv", "text,label")


def test_guided_embeddings_follow_the_labels(embedder):
    guided = embedder.guided(TEXTS[:8], LABELS[:8], LOCATION)
    before, after = embedder.encode(TEXTS[8:], LOCATION), guided.encode(TEXTS[8:], LOCATION)
    assert np.linalg.norm(after, axis=1) == pytest.approx(1, abs=1e-5)
    same = np.array(LABELS[8:])[:, None] == LABELS[8:]
    gap = [
        cosines[same].mean() - cosines[~same].mean()
        for cosines in (before @ before.T, after @ after.T)
    ]
    assert gap[1] > gap[0] + 0.1
    assert (guided.encode(TEXTS, MOOD) == embedder.encode(TEXTS, MOOD)).all()
    vectors = guided.encode_with_counts([(TEXTS[8], LOCATION)]).vectors
    assert vectors == pytest.approx(after[:1], abs=1e-4)
    # A guide replaces another one of the same condition, and is added to those of other conditions.
    both = guided.guided(TEXTS[:8], LABELS[:8], MOOD).guided(TEXTS[:8], LABELS[:8], LOCATION)
    assert both.encode(TEXTS[8:], LOCATION) == pytest.approx(after, abs=1e-5)
    assert set(both.guides) == {LOCATION, MOOD}
    # A condition with values is another one.
    condition = llmcond.Condition(LOCATION, ["park", "beach"])
    guided = embedder.guided(TEXTS[:8], LABELS[:8], condition)
    assert (guided.encode(TEXTS[8], LOCATION) == embedder.encode(TEXTS[8], LOCATION)).all()
    change = guided.encode(TEXTS[8], condition) - embedder.encode(TEXTS[8], condition)
    assert abs(change).max() > 0.01


def test_labels_are_merged_and_counted(embedder, caplog):
    caplog.set_level("INFO")
    labels = ["Pos", "neg", "pos ", "NEG", "Pos", "cafe\u0301", "café", "other"]
    guide = embedder.guided(TEXTS[:8], labels, LOCATION).guides[LOCATION]
    assert guide.labels == {"Pos": 3, "neg": 2, "café": 2, "other": 1}
    message = "labels that differ only in case or form count as one: 'pos' as 'Pos', 'NEG' as 'neg'"
    assert f"the guide: {message}" in caplog.messages
    assert "8 texts of 4 labels guide embeddings under 'the place'" in caplog.text
    assert "labels with only one text: 'other'" in caplog.text


def test_invalid_labels_are_rejected(embedder):
    for texts, labels, message in (
        (TEXTS[:3], LABELS[:2], "3 texts and 2 labels"),
        (TEXTS[:2], ["a", "a"], "the guide has one label under 'the place', 'a'"),
        (["a", " "], ["x", "y"], "row 2 of the guide: text is empty"),
        (["a", "b"], ["x", pd.NA], "row 2 of the guide: label is empty"),
        (["a", "b", "a"], ["x", "y", "y"], "row 3 .*: 'a' has the label 'y', but an earlier row"),
    ):
        with pytest.raises(UserError, match=message):
            embedder.guided(texts, labels, LOCATION)


def test_guide_file_names_the_conditions_of_its_labels(rows):
    location, mood = read_guide("both.csv", None, [LOCATION, MOOD, "the time"])
    assert (location.condition, len(location.texts)) == (LOCATION, 8)
    assert (mood.condition, len(mood.texts)) == (MOOD, 4)
    with_values = llmcond.Condition(LOCATION, ["park"])
    assert read_guide("both.csv", None, [with_values], closed=False)[0].condition is with_values
    with pytest.raises(UserError, match=r"row 9 of both.csv: no texts are embedded under .*mood"):
        read_guide("both.csv", None, [LOCATION])
    with pytest.raises(UserError, match=r"labels\.csv has no column condition, but there are 2"):
        read_guide(rows, None, [LOCATION, MOOD])
    assert read_guide(rows, None, [LOCATION])[0].digest == location.digest != mood.digest


def test_embed_matches_the_guided_embedder(capsys, rows, tiny_run, embedder):
    texts = [(text, condition) for text in TEXTS for condition in (LOCATION, MOOD)]
    pd.DataFrame(texts, columns=["text", "condition"]).to_parquet("texts.parquet")
    command = ["embed", "texts.parquet", "--out", "folder", "--run", tiny_run, "--device", "cpu"]
    summary = run_json(capsys, *command, "--guide", "both.csv")
    assert summary["guides"][MOOD] == {"labels": {"park": 2, "beach": 2}, "source": "both.csv"}
    table = pq.read_table("folder")
    guided = embedder.guided(TEXTS[:8], LABELS[:8], LOCATION).guided(TEXTS[:4], LABELS[:4], MOOD)
    expected = guided.encode(*map(list, zip(*texts, strict=True)))
    assert np.stack(table["embedding"].to_numpy()) == pytest.approx(expected, abs=5e-3)
    assert "another guides" in run_rejected(capsys, *command)
    assert run_json(capsys, *command, "--guide", "both.csv")["rows"] == len(texts)


def test_rows_of_a_guide_are_numbered_as_in_its_file(tmp_path):
    path = tmp_path / "guide.csv"
    path.write_text("text,label\n,park\ntwo men,park\ntwo men,beach\n")
    with pytest.raises(UserError, match=r"row 3 of .*guide\.csv: 'two men' has the label"):
        read_guide(path, None, [LOCATION], read=ReadOptions(skip_empty=True))


def test_options_of_the_texts_apply_to_a_guide_as_far_as_it_has_them(tmp_path):
    table = pa.table({"text": ["two men", "a dog"], "label": ["park", "beach"]})
    pq.write_table(table, tmp_path / "guide.parquet")
    read = ReadOptions(encoding="cp1252", delimiter=";", skip_empty=True)
    (labelled,) = read_guide(tmp_path / "guide.parquet", None, [LOCATION], read=read)
    assert labelled.labels == ["park", "beach"]


def test_triples_need_the_texts_of_their_dataset(tmp_path):
    (tmp_path / "triples").mkdir()
    for path, content in (("n.json", "{}"), ("triples/n.json", '{"triples": []}')):
        (tmp_path / path).write_text(content)
    with pytest.raises(LlmcondError, match="the key 'texts' is missing"):
        read_triples(tmp_path / "n.json")


def test_datasets_of_aspects_are_checked():
    texts = [{"text": name, "attrs": {"who": who, "year": year}} for name, who, year in ASPECTS]
    values = {"name": "n", "texts": texts, "conds": {"who": "the person", "year": {"text": "y"}}}
    sample = parse_sample({**values, "triples": [[0, 1, 2, "who", "year"]]}, "n", "n.json")
    assert sample.texts[0].attributes == {"who": "a man", "year": "2020"}
    assert (sample.conditions["who"].text, sample.triples[0].other) == ("the person", "year")
    blank = parse_sample(
        {**values, "conds": {"who": {"text": "w", "question": " "}}}, "n", "n.json"
    )
    assert blank.conditions["who"].question == ""
    for changes, message in (
        (
            {"conds": {"who": {"text": "a", "para": 3}}},
            "n.json was damaged: .*para. is 3: it should",
        ),
        ({"texts": [{"text": " ", "attrs": {}}]}, r"n\.json: texts\[0\]: text is empty"),
        ({"texts": [{"text": "a", "attrs": {"who": []}}]}, r"texts\[0\] is .* expected an object"),
        ({"conds": {"mood": "the mood"}}, "no attribute of a text matches a condition"),
        ({"triples": [[0, 1, 9, "who", "year"]]}, r"triples\[0\] is .* expected \[a, x, y, c"),
        ({"triples": [[0, 2, 1, "who", "year"]]}, "x must have the same value of c as a"),
    ):
        with pytest.raises(LlmcondError, match=message):
            parse_sample({**values, **changes}, "n", "n.json")
