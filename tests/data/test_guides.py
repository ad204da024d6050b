"""Embeddings that follow a few labelled texts: in Python, `llmcond embed` and `llmcond serve`."""

import base64

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers.commands import ok, refused
from helpers.serving import served

import llmcond
from llmcond.data.guides import read_guide
from llmcond.errors import UserError
from llmcond.serving.model_server import load_model
from llmcond.serving.settings import ServedSource

PLACE, MOOD = "the place", "the mood"
WHO = ("two men", "three women", "children", "two dogs")
WHERE = ("in the park", "at the beach")
TEXTS = [f"{who} {act} {where}" for who in WHO for act in ("play", "sit") for where in WHERE]
LABELS = [where for _ in WHO for _ in "ab" for where in ("park", "beach")]


@pytest.fixture(scope="module")
def embedder(tiny_run):
    return llmcond.load_embedder(tiny_run, device="cpu")


@pytest.fixture
def rows(write_rows):
    """A guide's file for one condition, and one for two."""
    pairs = list(zip(TEXTS[:8], LABELS[:8], strict=True))
    both = [(*pair, PLACE) for pair in pairs] + [(*pair, MOOD) for pair in pairs[:4]]
    write_rows(both, "both.csv", "text,label,condition")
    return write_rows(pairs, "labels.csv", "text,label")


def test_embeddings_under_its_condition_follow_the_labels(embedder):
    guided = embedder.guided(TEXTS[:8], LABELS[:8], PLACE)
    before, after = embedder.encode(TEXTS[8:], PLACE), guided.encode(TEXTS[8:], PLACE)
    assert after.shape == before.shape
    assert np.linalg.norm(after, axis=1) == pytest.approx(1, abs=1e-5)
    same = np.array(LABELS[8:])[:, None] == LABELS[8:]
    gap = [
        cosines[same].mean() - cosines[~same].mean()
        for cosines in (before @ before.T, after @ after.T)
    ]
    assert gap[1] > gap[0] + 0.1
    assert (guided.encode(TEXTS, MOOD) == embedder.encode(TEXTS, MOOD)).all()
    similar = guided.similarity(TEXTS[8], TEXTS[9], PLACE)
    assert similar == pytest.approx(float(after[0] @ after[1]), abs=1e-5)
    assert guided.encode_counted([(TEXTS[8], PLACE)]).vectors == pytest.approx(after[:1], abs=1e-4)
    # Another guide of the same condition begins anew; one of another condition is added.
    both = guided.guided(TEXTS[:8], LABELS[:8], MOOD).guided(TEXTS[:8], LABELS[:8], PLACE)
    assert both.encode(TEXTS[8:], PLACE) == pytest.approx(after, abs=1e-5)
    assert set(both.guides) == {PLACE, MOOD}


def test_a_guide_is_of_the_condition_with_its_values(embedder):
    place = llmcond.Condition(PLACE, ["park", "beach"])
    guided = embedder.guided(TEXTS[:8], LABELS[:8], place)
    assert (guided.encode(TEXTS[8], PLACE) == embedder.encode(TEXTS[8], PLACE)).all()
    assert abs(guided.encode(TEXTS[8], place) - embedder.encode(TEXTS[8], place)).max() > 0.01


def test_minilm_tells_apart_what_eight_labels_name(minilm):
    from llmcond.features.view import FeatureView
    from llmcond.prompts import load_prompt

    embedder = llmcond.Embedder(
        minilm, FeatureView((load_prompt("concat-cond-sent"),), subtract=False)
    )
    things = ("phone", "hotel", "soup", "car", "jacket", "film", "lamp", "book")
    texts = [f"The {one} is {word}." for one in things for word in ("wonderful", "terrible")]
    labels = ["praise", "complaint"] * len(things)
    guided = embedder.guided(texts[:8], labels[:8], "the opinion")

    def right(own):
        vectors = own.encode(texts[8:], "the opinion")
        cosines = vectors @ vectors.T - 2 * np.eye(8)
        return (np.array(labels[8:])[cosines.argmax(axis=1)] == labels[8:]).mean()

    assert right(embedder) < 1
    assert right(guided) == 1


@pytest.mark.parametrize(
    ("texts", "labels", "said"),
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
def test_labels_that_say_nothing_are_refused(embedder, texts, labels, said):
    with pytest.raises(UserError, match=said):
        embedder.guided(texts, labels, PLACE)


def test_a_single_text_of_a_label_is_reported(embedder, capsys):
    embedder.guided(TEXTS[:3], ["a", "a", "b"], PLACE)
    messages = " ".join(capsys.readouterr().err.split())
    assert "the guide: 3 texts of 2 labels guide embeddings under 'the place'" in messages
    assert "labels with only one text: 'b'" in messages


def test_a_file_names_the_conditions_of_its_labels(rows):
    both = rows.parent / "both.csv"
    place, mood = read_guide(both, None, [PLACE, MOOD, "the time"])
    assert (place.condition, len(place.texts), mood.condition, len(mood.texts)) == (
        PLACE,
        8,
        MOOD,
        4,
    )
    with_values = llmcond.Condition(PLACE, ["park"])
    assert read_guide(both, None, [with_values], closed=False)[0].condition is with_values
    with pytest.raises(UserError, match=r"row 9 of both.csv: no texts are embedded under .*mood"):
        read_guide(both, None, [PLACE])
    with pytest.raises(UserError, match=r"labels\.csv has no column condition, but there are 2"):
        read_guide(rows, None, [PLACE, MOOD])
    assert read_guide(rows, None, [PLACE])[0].digest == place.digest != mood.digest


@pytest.mark.parametrize("out", ["out.parquet", "folder"])
def test_embed_writes_what_the_guided_embedder_gives(
    out, capsys, rows, write_rows, tiny_run, embedder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    given = [(text, condition) for text in TEXTS for condition in (PLACE, MOOD)]
    source = write_rows(given, "texts.csv", "text,condition")
    if out == "folder":  # only tables of Parquet are embedded bit by bit
        import pyarrow.csv

        pq.write_table(pyarrow.csv.read_csv(source), "texts.parquet")
        source = "texts.parquet"
    command = ["embed", source, "--out", out, "--run", tiny_run, "--device", "cpu"]
    found = ok(capsys, *command, "--guide", "both.csv")
    assert found["guides"][MOOD] == {"labels": {"park": 2, "beach": 2}, "source": "both.csv"}
    table = pq.read_table(out)
    guided = embedder.guided(TEXTS[:8], LABELS[:8], PLACE).guided(TEXTS[:4], LABELS[:4], MOOD)
    wanted = guided.encode(*map(list, zip(*given, strict=True)))
    assert np.stack(table["embedding"].to_numpy()) == pytest.approx(wanted, abs=5e-3)
    if out == "folder":
        assert "another guides" in refused(capsys, *command)
        assert ok(capsys, *command, "--guide", "both.csv")["rows"] == len(given)
    else:
        assert "there are 2 conditions" in refused(capsys, *command, "--guide", rows)
        assert "missing.csv does not exist" in refused(capsys, *command, "--guide", "missing.csv")


def test_a_server_follows_its_guide(tiny_run, rows, embedder):
    loaded = load_model(ServedSource(run=tiny_run, device="cpu", condition=PLACE, guide=rows))
    with served(loaded) as (client, _):
        asked = {"input": TEXTS[8], "encoding_format": "base64"}
        answer = client.post("/v1/embeddings", asked).json
        (model,) = client.get("/v1/models").json["data"]
        pair = {"sentence1": TEXTS[8], "sentence2": TEXTS[9]}
        (similar,) = client.post("/v1/similarity", pair).json["similarities"]
    found = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), dtype="<f4")
    guided = embedder.guided(TEXTS[:8], LABELS[:8], PLACE)
    assert found == pytest.approx(guided.encode(TEXTS[8], PLACE), abs=1e-4)
    assert similar == pytest.approx(guided.similarity(*pair.values(), PLACE), abs=1e-4)
    assert model["guides"] == {PLACE: {"labels": {"park": 4, "beach": 4}, "source": "labels.csv"}}
    with pytest.raises(UserError, match="no column condition, but there are 0 conditions"):
        load_model(ServedSource(run=tiny_run, device="cpu", guide=rows))
