"""Figures of texts with several attributes: wordings, ignored conditions, and mentions."""

import numpy as np
import pytest
from aspect_figures import (
    ConditionedVectors,
    IgnoringVectors,
    average_wordings,
    is_redundant,
    limit_conditions,
    list_wordings,
    measure,
    mention_aucs,
    needed_rows,
    sample_mentions,
)

from llmcond.base.errors import UserError
from llmcond.data.guides import AspectSample, AspectText, ConditionWordings, Triple

WHO, WHERE = "who", "where"
CONDITIONS = {WHO: ConditionWordings("the people"), WHERE: ConditionWordings("the place")}


def make_sample(n=90, seed=0):
    """Return a sample whose two attributes have three values each, independently."""
    values = np.random.default_rng(seed).integers(3, size=(n, 2))
    texts = [
        AspectText(f"{a} {b} {i}", {WHO: f"{a}", WHERE: f"{b}"}) for i, (a, b) in enumerate(values)
    ]
    first, second = ({v: np.flatnonzero(values[:, k] == v) for v in range(3)} for k in (0, 1))
    triples = []
    for i, (a, b) in enumerate(values):
        same_who = [j for j in first[a] if values[j, 1] != b]
        same_where = [j for j in second[b] if values[j, 0] != a]
        triples.append(Triple(i, same_who[0], same_where[0], WHO, WHERE))
    return AspectSample("sample", texts, CONDITIONS, triples), values


def one_hot_vectors(sample, values, sizes, noise=0.05):
    """Return the vectors of texts: under each condition, one-hot values times two sizes."""
    rng = np.random.default_rng(1)
    rows = [(i, key) for i in range(len(sample.texts)) for key in CONDITIONS]
    parts = [
        [size * np.eye(3)[value] for size, value in zip(sizes[key], values[i], strict=True)]
        for i, key in rows
    ]
    # Only a quarter of all dimensions may be ignored.
    vectors = np.array([np.concatenate([*part, np.zeros(10)]) for part in parts])
    return ConditionedVectors(rows, vectors + noise * rng.standard_normal(vectors.shape))


def test_wordings_are_distinct_and_known_ones_come_first():
    wordings = ConditionWordings("the tone", "What is the tone?", ("the mood", "the tone"))
    texts = list_wordings(wordings, 5)
    assert texts[:4] == ["the tone", "the mood", "What is the tone?", "tone"]
    assert len(set(texts)) == 5
    assert len(list_wordings(ConditionWordings("tone"), 5)) == 5
    with pytest.raises(UserError, match="'tone' has only 5 wordings, fewer than 6"):
        list_wordings(ConditionWordings("tone"), 6)


def test_vectors_that_follow_conditions_have_perfect_figures():
    sample, values = make_sample()
    figures = measure(sample, one_hot_vectors(sample, values, {WHO: (1, 0), WHERE: (0, 1)}))
    assert (figures.accuracy.value, figures.both.value, figures.precision.value) == (1, 1, 1)
    assert figures.v_measure.value == pytest.approx(1)
    assert figures.chance == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.parametrize("at_once", [False, True])
def test_ignoring_finds_condition_behind_a_larger_one(at_once):
    sample, values = make_sample()
    # Under the people, places differ more than people do.
    vectors = one_hot_vectors(sample, values, {WHO: (0.5, 0.7), WHERE: (0.1, 1)})
    before = measure(sample, vectors)
    assert before.both.value == 0
    assert before.pairs[WHO, WHERE]["v_other"] > before.pairs[WHO, WHERE]["v_measure"]
    after = measure(sample, IgnoringVectors(sample, vectors, at_once))
    assert after.both.value > 0.9
    assert after.conditions[WHO]["v_measure"] > 0.9 > before.conditions[WHO]["v_measure"]
    assert set(after.pairs) == {(WHO, WHERE), (WHERE, WHO)}


def test_condition_with_the_same_values_is_not_ignored():
    sample, _ = make_sample()
    texts = [
        AspectText(t.text, {**t.attributes, "city": t.attributes[WHERE]}) for t in sample.texts
    ]
    conditions = {**CONDITIONS, "city": ConditionWordings("the city")}
    sample = AspectSample("sample", texts, conditions, sample.triples)
    assert is_redundant(sample, WHERE, "city")
    assert not is_redundant(sample, WHERE, WHO)


def test_general_component_and_wordings_change_vectors():
    sample, values = make_sample()
    vectors = one_hot_vectors(sample, values, {WHO: (1, 0), WHERE: (0, 1)}, noise=0)
    same = vectors.without_general(vectors.under(WHO, range(len(sample.texts))))
    assert not same.under(WHO, [0]).any()
    swapped = one_hot_vectors(sample, values, {WHO: (0, 1), WHERE: (1, 0)}, noise=0)
    mean = average_wordings([vectors, swapped])
    np.testing.assert_allclose(mean.under(WHO, [0]), mean.under(WHERE, [0]))


def test_limit_keeps_conditions_with_triples_between_them():
    texts = [AspectText(f"{i}", dict.fromkeys("abc", f"{i % 2}")) for i in range(8)]
    conditions = {key: ConditionWordings(f"the {key}") for key in "abc"}
    triples = [Triple(0, 2, 1, *pair) for pair in ("bc", "bc", "ab")]
    limited = limit_conditions(AspectSample("sample", texts, conditions, triples), 2)
    assert (list(limited.conditions), len(limited.triples)) == (["b", "c"], 2)
    assert {key for _, key in needed_rows(limited)} == {"b", "c"}


def test_texts_without_an_attribute_are_of_the_same_topic_and_lack_similar_ones():
    def texts(n, *keys):
        return [AspectText(f"{keys} {i}", dict.fromkeys(keys, "x")) for i in range(n)]

    named = {
        "hotel.price": "the price",
        "hotel.price_range": "the price range",
        "hotel.stars": "the stars",
        "cab.seats": "the seats",
    }
    conditions = {key: ConditionWordings(text) for key, text in named.items()}
    every = [texts(40, key) for key in named]
    whole = AspectSample("whole", [text for group in every for text in group], conditions)
    (price,) = [each for each in sample_mentions(whole) if each.condition == "hotel.price"]
    assert not any("price" in text for text in (*price.same_topic, *price.any_topic))
    assert all("hotel" in text for text in price.same_topic)
    scores = {text.text: float("hotel.price'" in text.text) for text in whole.texts}
    assert mention_aucs(price, scores) == (1, 1)
