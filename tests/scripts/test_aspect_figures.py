"""Texts with several attributes: figures of vectors made by hand, samples, and damaged files."""

import json
import math
from dataclasses import replace

import aspect_samples
import numpy as np
import pytest
from aspect_figures import (
    ConditionedVectors,
    LabelFitted,
    cluster_texts,
    mean_estimate,
    measure,
    measure_labels,
    needed_rows,
)

from llmcond.data.aspects import (
    AspectSample,
    AspectText,
    ConditionWordings,
    Triple,
    is_valid,
    parse_sample,
)
from llmcond.errors import UserError
from llmcond.metrics import Estimate

COLOURS, SIZES = ("red", "green", "blue"), ("small", "large", "huge", "tiny")


def texts(copies=4):
    return [
        AspectText(f"{colour} {size} {n}", {"colour": colour, "size": size}, str(n % 2))
        for colour in COLOURS
        for size in SIZES
        for n in range(copies)
    ]


@pytest.fixture(scope="module")
def sample():
    wordings = {key: ConditionWordings(f"the {key}") for key in ("colour", "size")}
    return aspect_samples.draw_sample(AspectSample("made", texts(), wordings), n_triples=200)


def vectors(sample, make):
    rows = needed_rows(sample)
    return ConditionedVectors(rows, np.array([make(*row) for row in rows]))


def perfect(sample):
    """Vectors that hold the value asked for, and a little of which text it is."""
    values = COLOURS + SIZES

    def make(position, condition):
        value = sample.texts[position].attributes[condition]
        one = np.eye(len(values) + len(sample.texts))
        return one[values.index(value)] + 0.01 * one[len(values) + position]

    return vectors(sample, make)


def blind(sample):
    rng = np.random.default_rng(0)
    by_text = rng.normal(size=(len(sample.texts), 8))
    return vectors(sample, lambda position, _: by_text[position])


def test_vectors_that_hold_what_is_asked_for_are_always_right(sample):
    figures = measure(sample, perfect(sample))
    for name in ("accuracy", "both", "nearest", "v_measure"):
        assert getattr(figures, name).value == pytest.approx(1), name
        assert getattr(figures, name).high == pytest.approx(1), name
    assert figures.counts["n_triples"] == len(sample.triples) == 200
    assert figures.conditions["colour"]["accuracy"] == 1


def test_vectors_that_ignore_the_condition_have_exactly_half(sample):
    figures = measure(sample, blind(sample))
    assert figures.accuracy == Estimate(0.5, 0.5, 0.5)
    assert figures.both == Estimate(0.0, 0.0, 0.0)
    assert figures.nearest.low < figures.chance < figures.nearest.high
    assert figures.v_measure.low < 0.1


def test_equal_vectors_tie(sample):
    figures = measure(sample, vectors(sample, lambda *_: [1.0, 2.0]))
    assert (figures.accuracy.value, figures.both.value) == (0.5, 0)
    assert figures.nearest.value == pytest.approx(figures.chance)
    assert figures.v_measure.value == 0


def test_figures_of_conditions_show_which_one_is_followed(sample):
    values = COLOURS + SIZES

    def make(position, _):
        return np.eye(len(values))[values.index(sample.texts[position].attributes["colour"])]

    figures = measure(sample, vectors(sample, make))
    # Whatever is asked, the colour decides: right under the colour, wrong under the size.
    assert figures.accuracy.value == 0.5
    assert figures.conditions["colour"]["accuracy"] == 1
    assert figures.conditions["size"]["accuracy"] == 0
    assert figures.conditions["colour"]["v_measure"] == pytest.approx(1)
    assert figures.conditions["size"]["v_measure"] == pytest.approx(0, abs=0.01)
    assert figures.v_measure.value == pytest.approx(0.5, abs=0.01)


def test_intervals_are_over_anchors(sample):
    """The same triples ten times over tell no more than once."""
    mixed = perfect(sample)
    rng = np.random.default_rng(0)
    noisy = vectors(
        sample, lambda i, c: mixed.under(c, [i])[0] + 0.6 * rng.normal(size=mixed._vectors.shape[1])
    )
    once = measure(sample, noisy).accuracy
    repeated = measure(replace(sample, triples=[*sample.triples] * 10), noisy).accuracy
    assert 0.5 < once.low < once.value < once.high < 1
    assert repeated.value == pytest.approx(once.value)
    assert repeated.high - repeated.low == pytest.approx(once.high - once.low, rel=0.01)


def test_only_values_of_eight_texts_are_clustered():
    items = [AspectText(f"{i}", {"kind": str(i % 4), "rare": str(i)}) for i in range(31)]
    wordings = {key: ConditionWordings(key) for key in ("kind", "rare")}
    found = cluster_texts(AspectSample("made", items, wordings))
    assert list(found) == ["kind"]
    assert set(found["kind"].values) == {"0", "1", "2"}  # the last has seven


def test_the_mean_of_sets_leaves_out_what_is_undefined():
    mean = mean_estimate([Estimate(0.5, 0.4, 0.6), Estimate(math.nan), Estimate(0.7, 0.6, 0.8)])
    assert mean.value == pytest.approx(0.6)
    assert (mean.low, mean.high) == pytest.approx((0.6 - 0.02**0.5 / 2, 0.6 + 0.02**0.5 / 2))
    assert math.isnan(mean_estimate([Estimate(math.nan)]).value)


def test_labels_are_learned_on_the_labelled_texts_alone(sample):
    seen = []

    def fit(points, labelled, labels):
        assert len(set(labels)) > 1
        seen.append(tuple(labelled))
        nearest = (points @ points[labelled].T).argmax(axis=1)
        vectors = points if len(labels) > 2 else None
        return LabelFitted(np.array(labels)[nearest], np.zeros(len(points)), vectors)

    few, more, too_many = measure_labels(sample, perfect(sample), [2, 24, 40], fit, draws=3)
    assert few.n_conditions == more.n_conditions == 2
    assert few.accuracy < more.accuracy == 1
    assert (more.v_measure, more.nearest, math.isnan(few.nearest)) == (0, 1, True)
    assert (too_many.n_conditions, math.isnan(too_many.accuracy)) == (0, True)
    assert len(set(seen)) == len(seen) == 12


# -- samples -----------------------------------------------------------------------------------


def test_every_triple_drawn_is_valid_and_another(sample):
    assert len(set(sample.triples)) == 200
    assert all(is_valid(triple, sample.texts) for triple in sample.triples)
    assert {triple.condition for triple in sample.triples} == {"colour", "size"}
    assert not is_valid(Triple(0, 0, 1, "colour", "size"), sample.texts)


def test_the_same_seed_draws_the_same(sample):
    whole = AspectSample("made", texts(), sample.conditions)
    assert aspect_samples.draw_sample(whole, n_triples=200) == sample
    assert aspect_samples.draw_sample(whole, n_triples=200, seed=1).triples != sample.triples


def test_triples_stay_within_a_group_and_a_number_of_texts(sample):
    whole = AspectSample("made", texts(20), sample.conditions)
    drawn = aspect_samples.draw_sample(whole, same_group=True, n_triples=100, n_texts=30)
    assert (len(drawn.texts), len(drawn.triples)) == (30, 100)
    for triple in drawn.triples:
        assert (
            len({drawn.texts[i].group for i in (triple.anchor, triple.first, triple.second)}) == 1
        )


def test_nested_conditions_have_no_triples_but_texts(sample):
    items = [AspectText(str(i), {"part": str(i % 9), "whole": str(i % 3)}) for i in range(90)]
    wordings = {key: ConditionWordings(key) for key in ("part", "whole")}
    drawn = aspect_samples.draw_sample(AspectSample("nested", items, wordings), n_texts=60)
    assert (len(drawn.texts), list(drawn.triples)) == (60, [])
    figures = measure(drawn, blind(drawn))
    assert math.isnan(figures.accuracy.value)
    assert figures.to_json()["accuracy"] is None


# -- files -------------------------------------------------------------------------------------


def as_json(items=None):
    own = [{"text": t.text, "attrs": dict(t.attributes)} for t in items or texts()]
    return {"texts": own, "conds": {"colour": {"text": "the colour"}, "size": "the size"}}


def write(folder, values, name="made.json"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(values))


def test_triples_are_taken_as_the_file_has_them(tmp_path):
    values = as_json()
    write(tmp_path, values)
    kept = [item for item in values["texts"] if item["attrs"]["size"] != "huge"]
    triple = [0, 4, 12, "colour", "size"]  # red small; red large; green small
    write(tmp_path / "triples", {**values, "texts": kept, "triples": [triple]})
    (sample,) = aspect_samples.read_samples(tmp_path)
    assert sample.triples == [Triple(*triple)]
    assert len(sample.texts) == 36
    assert sample.values == {"colour": [], "size": ["huge"]}
    assert len(aspect_samples.limited(sample, 1).texts) == 3


def test_example_values_are_words_that_no_text_measured_has(tmp_path):
    values = as_json()
    sizes = ("very_large", '"next week"', '{"hour": 9}', "", "x" * 40, "very_large")
    more = [{"text": "more", "attrs": {"size": size}} for size in sizes]
    write(tmp_path, {**values, "texts": [*values["texts"], *more]})
    write(tmp_path / "triples", {**values, "triples": [[0, 4, 16, "colour", "size"]]})
    (sample,) = aspect_samples.read_samples(tmp_path)
    assert sample.values == {"colour": [], "size": ["very large", "next week"]}


def test_triples_alone_are_of_the_texts_of_the_set(tmp_path):
    write(tmp_path, as_json())
    triple = dict(zip("axycd", (0, 4, 16, "colour", "size"), strict=True))
    write(tmp_path / "triples", {"triples": [triple]})
    (sample,) = aspect_samples.read_samples(tmp_path)
    assert (len(sample.texts), len(sample.triples)) == (48, 1)


def test_values_may_be_numbers_and_empty_and_missing():
    items = [{"text": "a", "attrs": {"n": 1, "size": None}}, {"text": "b", "attrs": {"n": ""}}]
    sample = parse_sample({"texts": items, "conds": {"n": {"text": "the number"}}}, "s", "s.json")
    assert [text.attributes for text in sample.texts] == [{"n": "1"}, {"n": ""}]


def test_a_wording_that_is_missing_is_the_noun_phrase():
    wordings = ConditionWordings("the colour of it", "Which colour?", ("its colour", "the colour"))
    assert [aspect_samples.say(wordings, wording) for wording in aspect_samples.WORDINGS] == [
        "the colour of it",
        "Which colour?",
        "its colour",
        "its colour",
    ]
    said = {aspect_samples.say(ConditionWordings("c"), own) for own in aspect_samples.WORDINGS}
    assert said == {"c"}


def changed(key, value):
    return {**as_json(), key: value}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "'texts' is missing; expected a list"),
        (changed("texts", [{"text": "a"}]), "texts[0]: 'attrs' is missing; expected an object"),
        (changed("texts", ["a"]), "texts[0] is 'a'; expected an object"),
        (changed("texts", [{"text": " ", "attrs": {}}]), "texts[0] is empty"),
        (changed("texts", []), "has no texts"),
        (changed("conds", {}), "has no conds"),
        (changed("texts", [{"text": "a", "attrs": {"size": ["x"]}}]), "expected one value"),
        (
            changed("conds", {"taste": {"text": "the taste"}}),
            "no attribute of a text matches a condition",
        ),
        (changed("conds", {"size": {"text": "s", "para": [1]}}), "a list of texts for 'para'"),
        (changed("conds", {"size": {"question": "?"}}), "'text' is missing; expected a text"),
        (changed("triples", [[0, 1]]), "triples[0] is [0, 1]; expected [a, x, y, c, d]"),
        (changed("triples", [[0, 4, 99, "colour", "size"]]), "a position from 0 to 47"),
        (changed("triples", [[0, 4, True, "colour", "size"]]), "names the text True"),
        (changed("triples", [[0, 4, 16, "color", "size"]]), "Did you mean 'colour'?"),
        (changed("triples", [[0, 16, 4, "colour", "size"]]), "triples[0] is not a paired triple"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(values, said, tmp_path):
    write(tmp_path, values)
    with pytest.raises(UserError, match=r"made\.json") as error:
        aspect_samples.read_samples(tmp_path)
    assert said in str(error.value)


def test_a_folder_without_the_set_says_so(tmp_path):
    with pytest.raises(UserError, match="contains no dataset"):
        aspect_samples.read_samples(tmp_path)
    write(tmp_path, as_json())
    with pytest.raises(UserError, match=r"has no set 'mad'\. Did you mean 'made'"):
        aspect_samples.read_samples(tmp_path, ["mad"])
    (tmp_path / "made.json").write_text("[")
    with pytest.raises(UserError, match="not a readable JSON file"):
        aspect_samples.read_samples(tmp_path)
