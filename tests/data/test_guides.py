"""Embeddings guided by a few labelled texts: Python, ``llmcond embed`` and ``llmcond serve``."""

import base64

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from helpers.commands import run_json, run_rejected
from helpers.serving import serve

import llmcond
from llmcond.data.guides import read_guide
from llmcond.errors import UserError
from llmcond.serving.model_server import load_model
from llmcond.serving.settings import ServedSource

LOCATION, MOOD = "the place", "the mood"
WHO = ("two men", "three women", "children", "two dogs")
WHERE = ("in the park", "at the beach")
TEXTS = [f"{who} {act} {where}" for who in WHO for act in ("play", "sit") for where in WHERE]
LABELS = [where for _ in WHO for _ in "ab" for where in ("park", "beach")]


@pytest.fixture(scope="module")
def embedder(tiny_run):
    return llmcond.load_embedder(tiny_run, device="cpu")


@pytest.fixture
def rows(write_rows):
    """A guide file for one condition, and another file for two."""
    pairs = list(zip(TEXTS[:8], LABELS[:8], strict=True))
    both = [(*pair, LOCATION) for pair in pairs] + [(*pair, MOOD) for pair in pairs[:4]]
    write_rows(both, "both.csv", "text,label,condition")
    return write_rows(pairs, "labels.csv", "text,label")


def test_guided_embeddings_follow_the_labels(embedder):
    guided = embedder.guided(TEXTS[:8], LABELS[:8], LOCATION)
    before, after = embedder.encode(TEXTS[8:], LOCATION), guided.encode(TEXTS[8:], LOCATION)
    assert after.shape == before.shape
    assert np.linalg.norm(after, axis=1) == pytest.approx(1, abs=1e-5)
    same = np.array(LABELS[8:])[:, None] == LABELS[8:]
    gap = [
        cosines[same].mean() - cosines[~same].mean()
        for cosines in (before @ before.T, after @ after.T)
    ]
    assert gap[1] > gap[0] + 0.1
    assert (guided.encode(TEXTS, MOOD) == embedder.encode(TEXTS, MOOD)).all()
    similar = guided.similarity(TEXTS[8], TEXTS[9], LOCATION)
    assert similar == pytest.approx(float(after[0] @ after[1]), abs=1e-5)
    assert guided.encode_with_counts([(TEXTS[8], LOCATION)]).vectors == pytest.approx(
        after[:1], abs=1e-4
    )
    # A guide replaces another one of the same condition, and is added to those of other conditions.
    both = guided.guided(TEXTS[:8], LABELS[:8], MOOD).guided(TEXTS[:8], LABELS[:8], LOCATION)
    assert both.encode(TEXTS[8:], LOCATION) == pytest.approx(after, abs=1e-5)
    assert set(both.guides) == {LOCATION, MOOD}


def test_guide_applies_to_a_condition_with_its_values(embedder):
    condition = llmcond.Condition(LOCATION, ["park", "beach"])
    guided = embedder.guided(TEXTS[:8], LABELS[:8], condition)
    assert (guided.encode(TEXTS[8], LOCATION) == embedder.encode(TEXTS[8], LOCATION)).all()
    assert (
        abs(guided.encode(TEXTS[8], condition) - embedder.encode(TEXTS[8], condition)).max() > 0.01
    )


#: Spellings of the condition of a guide. The last ones are other texts for the encoder.
SPELLINGS = [" the  place", "the\u00a0place", "the place\n", "The Place", "THE PLACE\u200b"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_guide_applies_to_any_spelling_of_its_condition(embedder, spelling):
    guided = embedder.guided(TEXTS[:8], LABELS[:8], LOCATION)
    expected = guided.guides[LOCATION].transform(embedder.encode(TEXTS, spelling))
    assert guided.encode(TEXTS, spelling) == pytest.approx(expected, abs=1e-5)
    assert guided.encode(TEXTS, [spelling] * len(TEXTS)) == pytest.approx(expected, abs=1e-5)
    assert guided.similarity(TEXTS[0], TEXTS[1], spelling) == pytest.approx(
        float(expected[0] @ expected[1]), abs=1e-5
    )
    matrix = guided.similarity_matrix(TEXTS[:2], TEXTS, spelling)
    assert matrix == pytest.approx(expected[:2] @ expected.T, abs=1e-5)
    assert matrix.max() <= 1
    if spelling.strip().islower():  # the encoder reads the same text
        assert (guided.encode(TEXTS, spelling) == guided.encode(TEXTS, LOCATION)).all()
        again = embedder.guided(TEXTS[:8], LABELS[:8], spelling)
        assert (again.encode(TEXTS, LOCATION) == guided.encode(TEXTS, LOCATION)).all()


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_embed_applies_a_guide_whose_file_spells_the_condition_otherwise(
    spelling, capsys, rows, write_rows, tiny_run, embedder
):
    texts = write_rows([(text, spelling) for text in TEXTS], "texts.csv", "text,condition")
    labelled = [
        (text, label, "the  place ") for text, label in zip(TEXTS[:8], LABELS, strict=False)
    ]
    guide = write_rows(labelled, "guide.csv", "text,label,condition")
    vectors = {}
    for name, options in {"column": [], "text": ["--condition-text", spelling]}.items():
        out = rows.parent / f"{name}.npy"
        command = ["embed", texts, "--out", out, "--guide", guide, *options]
        run_json(capsys, *command, "--run", tiny_run, "--device", "cpu")
        vectors[name] = np.load(out)
    expected = embedder.guided(TEXTS[:8], LABELS[:8], spelling).encode(TEXTS, spelling)
    assert vectors["column"] == pytest.approx(expected, abs=5e-3)
    assert (vectors["column"] == vectors["text"]).all()


def test_labels_that_differ_in_case_or_form_are_one_label(embedder, caplog):
    caplog.set_level("INFO")
    labels = ["Pos", "neg", "pos ", "NEG", "Pos", "cafe\u0301", "café", "neg"]
    guide = embedder.guided(TEXTS[:8], labels, LOCATION).guides[LOCATION]
    assert guide.labels == {"Pos": 3, "neg": 3, "café": 2}
    message = "labels that differ only in case or form count as one: 'pos' as 'Pos', 'NEG' as 'neg'"
    assert f"the guide: {message}" in caplog.messages


def test_guided_minilm_separates_two_classes_by_eight_labels(minilm):
    from llmcond.features.view import FeatureView
    from llmcond.prompts import load_prompt

    embedder = llmcond.Embedder(
        minilm, FeatureView((load_prompt("concat-cond-sent"),), subtract=False)
    )
    things = ("phone", "hotel", "soup", "car", "jacket", "film", "lamp", "book")
    texts = [f"The {thing} is {word}." for thing in things for word in ("wonderful", "terrible")]
    labels = ["praise", "complaint"] * len(things)
    guided = embedder.guided(texts[:8], labels[:8], "the opinion")

    def compute_accuracy(model):
        vectors = model.encode(texts[8:], "the opinion")
        cosines = vectors @ vectors.T - 2 * np.eye(8)
        return (np.array(labels[8:])[cosines.argmax(axis=1)] == labels[8:]).mean()

    assert compute_accuracy(embedder) < 1
    assert compute_accuracy(guided) == 1


@pytest.mark.parametrize(
    ("texts", "labels", "message"),
    [
        (TEXTS[:3], LABELS[:2], "3 texts and 2 labels"),
        (TEXTS[:2], ["a", "a"], "the guide has one label under 'the place', 'a'"),
        ([], [], "the guide has no texts"),
        (["a", " "], ["x", "y"], "row 2 of the guide: text is empty"),
        (["a", "b"], ["x", float("nan")], "row 2 of the guide: label is empty"),
        (["a", "b"], ["x", pd.NA], "row 2 of the guide: label is empty"),
        (["a", "b"], ["x", "\ud800"], "row 2 of the guide: label contains half of a surrogate"),
        (["a", 7], ["x", "y"], "row 2 of the guide: text is 7, not a text"),
        ("ab", ["x", "y"], "expected a list for texts, not the str 'ab'"),
        (["a", "b"], 7, "expected a list for labels, not the int 7"),
        (
            ["a", "b", "a"],
            ["x", "y", "y"],
            "row 3 of the guide: 'a' has the label 'y', but an earlier row has 'x'",
        ),
    ],
)
def test_invalid_labels_are_rejected(embedder, texts, labels, message):
    with pytest.raises(UserError, match=message):
        embedder.guided(texts, labels, LOCATION)


def test_label_with_a_single_text_is_reported(embedder, capsys):
    embedder.guided(TEXTS[:3], ["a", "a", "b"], LOCATION)
    messages = " ".join(capsys.readouterr().err.split())
    assert "the guide: 3 texts of 2 labels guide embeddings under 'the place'" in messages
    assert "labels with only one text: 'b'" in messages


def test_guide_file_names_the_conditions_of_its_labels(rows):
    both = rows.parent / "both.csv"
    location_guide, mood_guide = read_guide(both, None, [LOCATION, MOOD, "the time"])
    assert (
        location_guide.condition,
        len(location_guide.texts),
        mood_guide.condition,
        len(mood_guide.texts),
    ) == (
        LOCATION,
        8,
        MOOD,
        4,
    )
    with_values = llmcond.Condition(LOCATION, ["park"])
    assert read_guide(both, None, [with_values], closed=False)[0].condition is with_values
    with pytest.raises(UserError, match=r"row 9 of both.csv: no texts are embedded under .*mood"):
        read_guide(both, None, [LOCATION])
    with pytest.raises(UserError, match=r"labels\.csv has no column condition, but there are 2"):
        read_guide(rows, None, [LOCATION, MOOD])
    assert (
        read_guide(rows, None, [LOCATION])[0].digest == location_guide.digest != mood_guide.digest
    )


@pytest.mark.parametrize("out", ["out.parquet", "folder"])
def test_embed_matches_the_guided_embedder(
    out, capsys, rows, write_rows, tiny_run, embedder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    texts = [(text, condition) for text in TEXTS for condition in (LOCATION, MOOD)]
    source = write_rows(texts, "texts.csv", "text,condition")
    if out == "folder":  # Only Parquet tables can be embedded into a folder, part by part.
        import pyarrow.csv

        pq.write_table(pyarrow.csv.read_csv(source), "texts.parquet")
        source = "texts.parquet"
    command = ["embed", source, "--out", out, "--run", tiny_run, "--device", "cpu"]
    summary = run_json(capsys, *command, "--guide", "both.csv")
    assert summary["guides"][MOOD] == {"labels": {"park": 2, "beach": 2}, "source": "both.csv"}
    table = pq.read_table(out)
    guided = embedder.guided(TEXTS[:8], LABELS[:8], LOCATION).guided(TEXTS[:4], LABELS[:4], MOOD)
    expected = guided.encode(*map(list, zip(*texts, strict=True)))
    assert np.stack(table["embedding"].to_numpy()) == pytest.approx(expected, abs=5e-3)
    if out == "folder":
        assert "another guides" in run_rejected(capsys, *command)
        assert run_json(capsys, *command, "--guide", "both.csv")["rows"] == len(texts)
    else:
        assert "there are 2 conditions" in run_rejected(capsys, *command, "--guide", rows)
        assert "missing.csv does not exist" in run_rejected(
            capsys, *command, "--guide", "missing.csv"
        )


def test_server_applies_its_guide(tiny_run, rows, embedder):
    loaded = load_model(ServedSource(run=tiny_run, device="cpu", condition=LOCATION, guide=rows))
    with serve(loaded) as (client, _):
        request = {"input": TEXTS[8], "encoding_format": "base64"}
        answer = client.post("/v1/embeddings", request).json
        (model,) = client.get("/v1/models").json["data"]
        pair = {"sentence1": TEXTS[8], "sentence2": TEXTS[9]}
        (similarity,) = client.post("/v1/similarity", pair).json["similarities"]
        spelled = {**pair, "condition": " The  place"}
        (spelled_similarity,) = client.post("/v1/similarity", spelled).json["similarities"]
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), dtype="<f4")
    guided = embedder.guided(TEXTS[:8], LABELS[:8], LOCATION)
    assert vector == pytest.approx(guided.encode(TEXTS[8], LOCATION), abs=1e-4)
    assert similarity == pytest.approx(guided.similarity(*pair.values(), LOCATION), abs=1e-4)
    assert spelled_similarity == pytest.approx(
        guided.similarity(*pair.values(), "The place"), abs=1e-4
    )
    assert model["guides"] == {
        LOCATION: {"labels": {"park": 4, "beach": 4}, "source": "labels.csv"}
    }
    with pytest.raises(UserError, match="no column condition, but there are 0 conditions"):
        load_model(ServedSource(run=tiny_run, device="cpu", guide=rows))
