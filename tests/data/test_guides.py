"""Embeddings guided by a few labelled texts: Python, ``llmcond embed`` and ``llmcond serve``."""

import base64

import numpy as np
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
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), dtype="<f4")
    guided = embedder.guided(TEXTS[:8], LABELS[:8], LOCATION)
    assert vector == pytest.approx(guided.encode(TEXTS[8], LOCATION), abs=1e-4)
    assert similarity == pytest.approx(guided.similarity(*pair.values(), LOCATION), abs=1e-4)
    assert model["guides"] == {
        LOCATION: {"labels": {"park": 4, "beach": 4}, "source": "labels.csv"}
    }
    with pytest.raises(UserError, match="no column condition, but there are 0 conditions"):
        load_model(ServedSource(run=tiny_run, device="cpu", guide=rows))
