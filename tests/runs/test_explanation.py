"""Explanations: exact contributions sum to the similarity, and others compare encodings."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from helpers import checkpoints

import llmcond
from llmcond import extract, fit_head
from llmcond.base.errors import UserError

FIRST, SECOND = "three women sit on the beach", "two dogs play in the rain"
CONDITIONS = ["the number of people", "the place"]
OPTIONS = {"dtype": "float32", "device": "cpu", "pooling": "mean"}


@pytest.fixture(scope="module")
def routed_run(tmp_path_factory, model, tiny_run):
    folder = tmp_path_factory.mktemp("routed") / "run"
    data, prompts = str(tiny_run.parent / "rows.csv"), ["routed", "separate"]
    extract(model=model, **OPTIONS, normalize=True, run=folder, data=data, prompt=prompts)
    return folder


@pytest.fixture(scope="module")
def routed(routed_run):
    return llmcond.load_embedder(routed_run, "none", prompt="routed", device="cpu")


def test_weights_depend_on_condition_and_give_embedding(routed):
    explanation = routed.explain(FIRST, CONDITIONS)
    assert (explanation.method, explanation.quantity) == ("pooling-weights", "weight")
    first, second = explanation.conditions
    assert [first.condition, second.condition] == CONDITIONS
    assert [token.text for token in first.tokens] == ["[CLS]", *FIRST.split(), "[SEP]"]
    assert np.abs(first.values - second.values).max() > 1e-3
    assert first.values.sum() == pytest.approx(1)
    item = routed.view.prompts[0].conditional.render(FIRST, CONDITIONS[0])
    pooled = first.values @ routed.encoder.token_weights(item).states
    vector = pooled / np.linalg.norm(pooled) - routed.encoder.encode([CONDITIONS[0]])[0]
    expected = routed.encode(FIRST, CONDITIONS[0], normalize=False)
    np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_layers_of_router_inside_encoder_have_rows_and_mean(model, tiny_run, tmp_path):
    router = {"router": "csr", "router_layers": 2, "data": str(tiny_run.parent / "rows.csv")}
    extract(model=model, **OPTIONS, **router, run=tmp_path / "run")
    embedder = llmcond.load_embedder(tmp_path / "run", device="cpu")
    explanation = embedder.explain(FIRST, "the place")
    assert explanation.method == "router-weights"
    (explained,) = explanation.conditions
    assert list(explained.layers) == [1, 2]
    np.testing.assert_allclose(explained.values, np.mean([*explained.layers.values()], axis=0))
    rows = explanation.rows()
    assert [row["layer"] for row in rows] == [n for n in ("1", "2", "mean") for _ in range(8)]
    tokens = explanation.to_json()["explanations"][0]["tokens"]
    assert tokens[1]["by_layer"] == [rows[1]["weight"], rows[9]["weight"]]
    assert embedder.explain(FIRST, "the place", to=SECOND).method == "leave-one-out"


def test_exact_contributions_sum_to_similarity(routed):
    explanation = routed.explain(FIRST, CONDITIONS, to=SECOND)
    assert explanation.method == "exact"
    expected = routed.similarity([FIRST] * 2, [SECOND] * 2, CONDITIONS)
    for explained, similarity in zip(explanation.conditions, expected, strict=True):
        condition = explained.condition
        first, second = (routed.encode(text, condition) for text in (FIRST, SECOND))
        assert explained.similarity == pytest.approx(similarity)
        total = explained.values.sum() + explained.condition_term
        assert total == pytest.approx(first @ second, abs=1e-6)
        # The subtracted vector has its own part, computed without the tokens.
        length = np.linalg.norm(routed.encode(FIRST, condition, normalize=False))
        term = -(routed.encoder.encode([condition])[0] @ second) / length
        assert explained.condition_term == pytest.approx(term, abs=1e-6)
        np.testing.assert_allclose(explained.pairs.sum(axis=1)[:-1], explained.values)
        (reverse,) = routed.explain(SECOND, condition, to=FIRST).conditions
        np.testing.assert_allclose(reverse.pairs, explained.pairs.T, atol=1e-7)
    plain = replace(routed, view=replace(routed.view, subtract=False))
    (explained,) = plain.explain(FIRST, "the place", to=SECOND).conditions
    assert explained.condition_term is None
    assert explained.values.sum() == pytest.approx(plain.similarity(FIRST, SECOND, "the place"))


@pytest.mark.parametrize("change", ["head", "guide", "dense", "fewer dimensions"])
def test_anything_after_pooling_is_explained_by_leaving_out(change, routed, routed_run, tmp_path):
    if change == "guide":
        texts, labels = [FIRST, SECOND, "two women", "dogs"], ["a", "b", "a", "b"]
        embedder = routed.guided(texts, labels, "the place")
        assert embedder.explain(FIRST, "the mood", to=SECOND).method == "exact"
    elif change == "head":
        folder, settings = shutil.copytree(routed_run, tmp_path / "run"), {"epochs": "1"}
        fit_head(run=folder, head="linear", dim=4, prompt="routed", set=settings, device="cpu")
        embedder = llmcond.load_embedder(folder, "linear", device="cpu")
        assert embedder.explain(FIRST, "the place").method == "pooling-weights"
    elif change == "fewer dimensions":
        embedder = replace(routed, truncate_dim=4)
    else:
        # Its dense layers turn the pooled states.
        checkpoints.build_checkpoint("gemma", tmp_path / "model")
        embedder = replace(routed, encoder=checkpoints.load_on_cpu(tmp_path / "model"))
    explanation = embedder.explain(FIRST, "the place", to=SECOND)
    assert explanation.method == "leave-one-out"
    assert explanation.conditions[0].condition_term is None


def test_condition_of_several_wordings_is_explained_by_leaving_out(routed):
    explanation = routed.explain(FIRST, ["the place | where", "the mood"])
    assert explanation.method == "leave-one-out"
    (explained,) = routed.explain(FIRST, "the place | where", to=SECOND).conditions
    assert explained.similarity == pytest.approx(
        routed.similarity(FIRST, SECOND, "the place | where")
    )


def test_left_out_token_changes_similarity_by_its_contribution(embedder):
    explanation = embedder.explain(FIRST, CONDITIONS, to=SECOND)
    assert (explanation.method, explanation.quantity) == ("leave-one-out", "contribution")
    words = FIRST.split()
    for explained in explanation.conditions:
        assert [token.text for token in explained.tokens] == words
        whole = embedder.similarity(FIRST, SECOND, explained.condition)
        assert explained.similarity == pytest.approx(whole)
        for position, value in enumerate(explained.values):
            rest = " ".join(words[:position] + words[position + 1 :])
            without = embedder.similarity(rest, SECOND, explained.condition)
            assert value == pytest.approx(whole - without, abs=1e-6)
    # Without a second sentence, the embedding is compared with itself.
    (explained,) = embedder.explain(FIRST, "the place").conditions
    rest = FIRST.removeprefix("three ")
    similarity = embedder.encode(FIRST, "the place") @ embedder.encode(rest, "the place")
    assert explained.values[0] == pytest.approx(1 - similarity, abs=1e-6)
    assert explained.similarity is None


@pytest.mark.parametrize("end", [" \u2764\ufe0f", "\u200b", " cafe\u0301"])
def test_text_may_end_in_characters_without_token(embedder, end):
    (explained,) = embedder.explain(FIRST + end, "the place").conditions
    assert explained.values.any()


def test_invalid_texts_are_rejected(embedder):
    for sentence, conditions, to, message in (
        ("", "the place", None, "sentence 1 of 1 is empty"),
        (FIRST, "the place", "", "sentence 2 of 2 is empty"),
        ("beach", "the place", None, "'beach' has only one token"),
        ("dogs " * 999, "the place", None, r"more than the \d+ tokens that .* reads at a time"),
    ):
        with pytest.raises(UserError, match=message):
            embedder.explain(sentence, conditions, to=to)
