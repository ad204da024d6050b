"""Texts with several attributes: metrics of synthetic vectors, samples, and invalid files."""

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


def make_texts(copies=4):
    return [
        AspectText(f"{colour} {size} {n}", {"colour": colour, "size": size}, str(n % 2))
        for colour in COLOURS
        for size in SIZES
        for n in range(copies)
    ]


@pytest.fixture(scope="module")
def sample():
    wordings = {key: ConditionWordings(f"the {key}") for key in ("colour", "size")}
    return aspect_samples.draw_sample(AspectSample("made", make_texts(), wordings), n_triples=200)


def make_vectors(sample, make):
    rows = needed_rows(sample)
    return ConditionedVectors(rows, np.array([make(*row) for row in rows]))


def make_perfect_vectors(sample):
    """Return vectors of the attribute's value, with a small part that identifies the text."""
    values = COLOURS + SIZES

    def make(position, condition):
        value = sample.texts[position].attributes[condition]
        basis = np.eye(len(values) + len(sample.texts))
        return basis[values.index(value)] + 0.01 * basis[len(values) + position]

    return make_vectors(sample, make)


def make_unconditioned_vectors(sample):
    rng = np.random.default_rng(0)
    by_text = rng.normal(size=(len(sample.texts), 8))
    return make_vectors(sample, lambda position, _: by_text[position])


def test_vectors_of_requested_attribute_have_perfect_metrics(sample):
    figures = measure(sample, make_perfect_vectors(sample))
    for name in ("accuracy", "both", "nearest", "v_measure"):
        assert getattr(figures, name).value == pytest.approx(1), name
        assert getattr(figures, name).high == pytest.approx(1), name
    assert figures.counts["n_triples"] == len(sample.triples) == 200
    assert figures.conditions["colour"]["accuracy"] == 1


def test_vectors_that_ignore_condition_have_accuracy_of_one_half(sample):
    figures = measure(sample, make_unconditioned_vectors(sample))
    assert figures.accuracy == Estimate(0.5, 0.5, 0.5)
    assert figures.both == Estimate(0.0, 0.0, 0.0)
    assert figures.nearest.low < figures.chance < figures.nearest.high
    assert figures.v_measure.low < 0.1


def test_equal_vectors_count_as_ties(sample):
    figures = measure(sample, make_vectors(sample, lambda *_: [1.0, 2.0]))
    assert (figures.accuracy.value, figures.both.value) == (0.5, 0)
    assert figures.nearest.value == pytest.approx(figures.chance)
    assert figures.v_measure.value == 0


def test_metrics_per_condition_show_which_attribute_vectors_follow(sample):
    values = COLOURS + SIZES

    def make(position, _):
        return np.eye(len(values))[values.index(sample.texts[position].attributes["colour"])]

    figures = measure(sample, make_vectors(sample, make))
    # The colour decides under every condition: this is right for the colour, wrong for the size.
    assert figures.accuracy.value == 0.5
    assert figures.conditions["colour"]["accuracy"] == 1
    assert figures.conditions["size"]["accuracy"] == 0
    assert figures.conditions["colour"]["v_measure"] == pytest.approx(1)
    assert figures.conditions["size"]["v_measure"] == pytest.approx(0, abs=0.01)
    assert figures.v_measure.value == pytest.approx(0.5, abs=0.01)


def test_intervals_resample_anchors(sample):
    """Repeating the same triples ten times adds no information."""
    base = make_perfect_vectors(sample)
    rng = np.random.default_rng(0)
    noisy = make_vectors(
        sample, lambda i, c: base.under(c, [i])[0] + 0.6 * rng.normal(size=base._vectors.shape[1])
    )
    original = measure(sample, noisy).accuracy
    repeated = measure(replace(sample, triples=[*sample.triples] * 10), noisy).accuracy
    assert 0.5 < original.low < original.value < original.high < 1
    assert repeated.value == pytest.approx(original.value)
    assert repeated.high - repeated.low == pytest.approx(original.high - original.low, rel=0.01)


def test_values_with_fewer_than_eight_texts_are_not_clustered():
    items = [AspectText(f"{i}", {"kind": str(i % 4), "rare": str(i)}) for i in range(31)]
    wordings = {key: ConditionWordings(key) for key in ("kind", "rare")}
    clusters = cluster_texts(AspectSample("made", items, wordings))
    assert list(clusters) == ["kind"]
    assert set(clusters["kind"].values) == {"0", "1", "2"}  # only seven texts have the last value


def test_mean_estimate_ignores_undefined_sets():
    mean = mean_estimate([Estimate(0.5, 0.4, 0.6), Estimate(math.nan), Estimate(0.7, 0.6, 0.8)])
    assert mean.value == pytest.approx(0.6)
    assert (mean.low, mean.high) == pytest.approx((0.6 - 0.02**0.5 / 2, 0.6 + 0.02**0.5 / 2))
    assert math.isnan(mean_estimate([Estimate(math.nan)]).value)


def test_labels_are_learned_from_labelled_texts_only(sample):
    labelled_sets = []

    def fit(points, labelled, labels):
        assert len(set(labels)) > 1
        labelled_sets.append(tuple(labelled))
        nearest = (points @ points[labelled].T).argmax(axis=1)
        vectors = points if len(labels) > 2 else None
        return LabelFitted(np.array(labels)[nearest], np.zeros(len(points)), vectors)

    few, more, too_many = measure_labels(
        sample, make_perfect_vectors(sample), [2, 24, 40], fit, draws=3
    )
    assert few.n_conditions == more.n_conditions == 2
    assert few.accuracy < more.accuracy == 1
    assert (more.v_measure, more.nearest, math.isnan(few.nearest)) == (0, 1, True)
    assert (too_many.n_conditions, math.isnan(too_many.accuracy)) == (0, True)
    assert len(set(labelled_sets)) == len(labelled_sets) == 12


# -- samples -----------------------------------------------------------------------------------


def test_sampled_triples_are_valid_and_distinct(sample):
    assert len(set(sample.triples)) == 200
    assert all(is_valid(triple, sample.texts) for triple in sample.triples)
    assert {triple.condition for triple in sample.triples} == {"colour", "size"}
    assert not is_valid(Triple(0, 0, 1, "colour", "size"), sample.texts)


def test_sample_is_reproducible_by_seed(sample):
    whole = AspectSample("made", make_texts(), sample.conditions)
    assert aspect_samples.draw_sample(whole, n_triples=200) == sample
    assert aspect_samples.draw_sample(whole, n_triples=200, seed=1).triples != sample.triples


def test_triples_respect_groups_and_number_of_texts(sample):
    whole = AspectSample("made", make_texts(20), sample.conditions)
    result = aspect_samples.draw_sample(whole, same_group=True, n_triples=100, n_texts=30)
    assert (len(result.texts), len(result.triples)) == (30, 100)
    for triple in result.triples:
        assert (
            len({result.texts[i].group for i in (triple.anchor, triple.first, triple.second)}) == 1
        )


def test_sample_of_nested_conditions_has_texts_but_no_triples(sample):
    items = [AspectText(str(i), {"part": str(i % 9), "whole": str(i % 3)}) for i in range(90)]
    wordings = {key: ConditionWordings(key) for key in ("part", "whole")}
    result = aspect_samples.draw_sample(AspectSample("nested", items, wordings), n_texts=60)
    assert (len(result.texts), list(result.triples)) == (60, [])
    figures = measure(result, make_unconditioned_vectors(result))
    assert math.isnan(figures.accuracy.value)
    assert figures.to_json()["accuracy"] is None


# -- files -------------------------------------------------------------------------------------


def as_json(items=None):
    rows = [{"text": t.text, "attrs": dict(t.attributes)} for t in items or make_texts()]
    return {"texts": rows, "conds": {"colour": {"text": "the colour"}, "size": "the size"}}


def write_json(folder, values, name="made.json"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(values))


def test_triples_and_their_texts_are_read_from_file(tmp_path):
    values = as_json()
    write_json(tmp_path, values)
    remaining = [item for item in values["texts"] if item["attrs"]["size"] != "huge"]
    triple = [0, 4, 12, "colour", "size"]  # red small; red large; green small
    write_json(tmp_path / "triples", {**values, "texts": remaining, "triples": [triple]})
    (sample,) = aspect_samples.read_samples(tmp_path)
    assert sample.triples == [Triple(*triple)]
    assert len(sample.texts) == 36
    assert sample.values == {"colour": [], "size": ["huge"]}
    assert len(aspect_samples.limited(sample, 1).texts) == 3


def test_example_values_do_not_occur_in_measured_texts(tmp_path):
    values = as_json()
    sizes = ("very_large", '"next week"', '{"hour": 9}', "", "x" * 40, "very_large")
    extra = [{"text": "more", "attrs": {"size": size}} for size in sizes]
    write_json(tmp_path, {**values, "texts": [*values["texts"], *extra]})
    write_json(tmp_path / "triples", {**values, "triples": [[0, 4, 16, "colour", "size"]]})
    (sample,) = aspect_samples.read_samples(tmp_path)
    assert sample.values == {"colour": [], "size": ["very large", "next week"]}


def test_file_with_triples_only_refers_to_texts_of_the_set(tmp_path):
    write_json(tmp_path, as_json())
    triple = dict(zip("axycd", (0, 4, 16, "colour", "size"), strict=True))
    write_json(tmp_path / "triples", {"triples": [triple]})
    (sample,) = aspect_samples.read_samples(tmp_path)
    assert (len(sample.texts), len(sample.triples)) == (48, 1)


def test_values_can_be_numbers_empty_or_missing():
    items = [{"text": "a", "attrs": {"n": 1, "size": None}}, {"text": "b", "attrs": {"n": ""}}]
    sample = parse_sample({"texts": items, "conds": {"n": {"text": "the number"}}}, "s", "s.json")
    assert [text.attributes for text in sample.texts] == [{"n": "1"}, {"n": ""}]


def test_missing_wording_falls_back_to_noun_phrase():
    wordings = ConditionWordings("the colour of it", "Which colour?", ("its colour", "the colour"))
    assert [aspect_samples.say(wordings, wording) for wording in aspect_samples.WORDINGS] == [
        "the colour of it",
        "Which colour?",
        "its colour",
        "its colour",
    ]
    texts = {aspect_samples.say(ConditionWordings("c"), name) for name in aspect_samples.WORDINGS}
    assert texts == {"c"}


def with_value(key, value):
    return {**as_json(), key: value}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "'texts' is missing; expected a list"),
        (with_value("texts", [{"text": "a"}]), "texts[0]: 'attrs' is missing; expected an object"),
        (with_value("texts", ["a"]), "texts[0] is 'a'; expected an object"),
        (with_value("texts", [{"text": " ", "attrs": {}}]), "texts[0] is empty"),
        (with_value("texts", []), "has no texts"),
        (with_value("conds", {}), "has no conds"),
        (with_value("texts", [{"text": "a", "attrs": {"size": ["x"]}}]), "expected one value"),
        (
            with_value("conds", {"taste": {"text": "the taste"}}),
            "no attribute of a text matches a condition",
        ),
        (with_value("conds", {"size": {"text": "s", "para": [1]}}), "a list of texts for 'para'"),
        (with_value("conds", {"size": {"question": "?"}}), "'text' is missing; expected a text"),
        (with_value("triples", [[0, 1]]), "triples[0] is [0, 1]; expected [a, x, y, c, d]"),
        (with_value("triples", [[0, 4, 99, "colour", "size"]]), "a position from 0 to 47"),
        (with_value("triples", [[0, 4, True, "colour", "size"]]), "names the text True"),
        (with_value("triples", [[0, 4, 16, "color", "size"]]), "Did you mean 'colour'?"),
        (
            with_value("triples", [[0, 16, 4, "colour", "size"]]),
            "triples[0] is not a paired triple",
        ),
    ],
)
def test_invalid_file_error_says_what_is_wrong(values, expected, tmp_path):
    write_json(tmp_path, values)
    with pytest.raises(UserError, match=r"made\.json") as error:
        aspect_samples.read_samples(tmp_path)
    assert expected in str(error.value)


def test_folder_without_requested_set_is_rejected(tmp_path):
    with pytest.raises(UserError, match="contains no dataset"):
        aspect_samples.read_samples(tmp_path)
    write_json(tmp_path, as_json())
    with pytest.raises(UserError, match=r"has no set 'mad'\. Did you mean 'made'"):
        aspect_samples.read_samples(tmp_path, ["mad"])
    (tmp_path / "made.json").write_text("[")
    with pytest.raises(UserError, match="not a readable JSON file"):
        aspect_samples.read_samples(tmp_path)
