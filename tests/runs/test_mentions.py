"""Scores of whether texts say anything about a condition: in Python, embed, cluster and search."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.commands import read_csv, run_json, run_rejected
from sklearn.metrics import roc_auc_score

import llmcond
from llmcond import Condition, Index, UserError
from llmcond.encoders import EncoderInput
from llmcond.encoders.spec import Router
from llmcond.runs.embedder import base_encoder

pytestmark = pytest.mark.usefixtures("one_thread")

PRICE = "the price"
DEAR = ["It costs 20 dollars.", "The price was fair.", "Much too expensive!", "A cheap kettle."]
OTHERS = ["The screen is too dark.", "It was scratched.", "Thank you.", "The parcel never came."]
TEXTS = [*DEAR, *OTHERS]


@pytest.fixture(scope="module")
def embedder():
    return llmcond.load_embedder(device="cpu")


@pytest.fixture
def table(write_rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_rows([(text,) for text in TEXTS], "texts.csv", "text")


def test_texts_that_mention_condition_score_higher(embedder):
    scores = embedder.mentions(TEXTS, PRICE)
    assert (scores.shape, scores.dtype) == ((8,), np.float32)
    assert ((scores > 0) & (scores < 1)).all()
    assert roc_auc_score([1] * 4 + [0] * 4, scores) == 1
    assert embedder.mentions(TEXTS[1], PRICE) == pytest.approx(scores[1], abs=1e-5)
    delivery = embedder.mentions(TEXTS, ["the delivery"] * 8)
    assert delivery.argmax() == 7
    assert embedder.mentions([], PRICE).shape == (0,)


def test_score_is_of_nearest_token_and_of_neutral_text(embedder):
    base, text = base_encoder(embedder.encoder), TEXTS[0]
    item = EncoderInput("", text, router=Router(PRICE, 1.0, False, False))
    states = base.token_weights(item).states
    (condition,) = base.encode([PRICE])
    cosines = states @ condition / np.linalg.norm(states, axis=1) / np.linalg.norm(condition)
    similarity = embedder.similarity(text, "-", PRICE)
    expected = 1 / (1 + np.exp(-(6.2 * cosines.max() - 6.4 * similarity + 2.4)))
    assert float(embedder.mentions(text, PRICE)) == pytest.approx(float(expected), abs=2e-3)


def test_wordings_are_averaged_and_guides_and_size_make_no_difference(embedder):
    single = [embedder.mentions(TEXTS, wording) for wording in (PRICE, "the cost")]
    both = embedder.mentions(TEXTS, f"{PRICE} | the cost")
    np.testing.assert_allclose(both, np.mean(single, axis=0), atol=1e-5)
    guided = embedder.guided(TEXTS, [*"aabbccdd"], PRICE)
    np.testing.assert_allclose(guided.mentions(TEXTS, PRICE), single[0], atol=1e-5)
    shorter = replace(embedder, truncate_dim=32)
    np.testing.assert_allclose(shorter.mentions(TEXTS, PRICE), single[0], atol=1e-5)
    ignoring = Condition(PRICE, ignore=["the product"])
    np.testing.assert_allclose(embedder.mentions(TEXTS, ignoring), single[0], atol=1e-5)


@pytest.mark.parametrize(
    ("sentences", "conditions", "expected"),
    [
        ("x", "", "the condition is empty"),
        ([" "], PRICE, "empty"),
        (["a", "b"], [PRICE], "there are 2 sentences and 1 conditions"),
    ],
)
def test_invalid_texts_are_rejected(embedder, sentences, conditions, expected):
    with pytest.raises(UserError, match=expected):
        embedder.mentions(sentences, conditions)


def test_embed_writes_a_column_for_each_condition(embedder, table, capsys):
    flags = ("--condition", PRICE, "--condition", "the delivery", "--mentions")
    run_json(capsys, "embed", table, *flags, "--out", "out.csv")
    rows = read_csv("out.csv")
    for condition in (PRICE, "the delivery"):
        written = [float(row[f"mentions ({condition})"]) for row in rows]
        np.testing.assert_allclose(written, embedder.mentions(TEXTS, condition), atol=1e-3)
    run_json(capsys, "embed", table, "--condition", PRICE, "--mentions", "--out", "one.csv")
    assert list(read_csv("one.csv")[0]) == ["sentence", "condition", "mentions", "embedding"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--out", "out.npy"), "out.npy holds vectors only"),
        (("--out", "folder"), "--out folder is a folder"),
        (("--out", "out.csv", "--keep", "mentions"), "'mentions' is written anyway"),
    ],
)
def test_embed_rejects_outputs_without_columns(table, tmp_path, capsys, flags, expected):
    command = ("embed", table, "--condition", PRICE, "--mentions")
    assert expected in run_rejected(capsys, *command, *flags)
    assert {path.name for path in tmp_path.iterdir()} == {"texts.csv"}


def test_cluster_puts_texts_that_say_nothing_into_a_group(embedder, table, capsys):
    command = ("cluster", table, "--condition", PRICE, "--clusters", 2, "--out", "out.csv")
    least = float(np.sort(embedder.mentions(TEXTS, PRICE))[3:5].mean())
    result = run_json(capsys, *command, "--not-mentioned-below", least)
    rows = read_csv("out.csv")
    assert [row["name"] == "not mentioned" for row in rows] == [False] * 4 + [True] * 4
    assert [int(row["cluster"]) == -1 for row in rows] == [False] * 4 + [True] * 4
    (clustering,) = result["clusterings"]
    assert (clustering["k"], clustering["noise"]) == (2, 4)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--not-mentioned-below", 1), "it must be above 0 and below 1"),
        (("--not-mentioned-below", "x"), "invalid float value"),
        (
            ("--not-mentioned-below", 0.99),
            "reach --not-mentioned-below (lower it to have more) have 0 distinct vectors",
        ),
        (("--not-mentioned-below", 0.5, "--method", "hdbscan"), "--method hdbscan"),
    ],
)
def test_cluster_rejects_invalid_thresholds(table, capsys, flags, expected):
    command = ("cluster", table, "--condition", PRICE, "--out", "out.csv")
    assert expected in run_rejected(capsys, *command, *flags)


def test_cluster_needs_condition_for_mentions(table, write_rows, capsys):
    guide = write_rows([("a", "x"), ("b", "y")], "guide.csv", "text,label")
    command = ("cluster", table, "--guide", guide, "--not-mentioned-below", 0.5)
    assert "--not-mentioned-below needs --condition" in run_rejected(capsys, *command)


def test_search_shows_scores_of_hits(embedder, tmp_path, capsys):
    index = Index.build(tmp_path / "index", TEXTS, device="cpu")
    hits = index.search("cheap", {PRICE: 1, "the delivery": 0.5}, 8, mentions=True)
    for condition in (PRICE, "the delivery"):
        expected = embedder.mentions([row["text"] for row in hits.rows], condition)
        scores = [row["mentions"][condition] for row in hits.rows]
        np.testing.assert_allclose(scores, expected, atol=1e-3)
    assert "mentions" not in index.search("cheap", PRICE, 1).rows[0]
    assert (
        llmcond.cli.run(["search", str(index.folder), "cheap", "--condition", PRICE, "--mentions"])
        == 0
    )
    assert "mentions" in capsys.readouterr().out
