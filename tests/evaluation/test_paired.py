"""Paired comparisons: compared with a slow reference; pairs, seeds, families, undefined metrics."""

from dataclasses import astuple
from itertools import combinations
from math import isnan, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from scipy.stats import t as student

from llmcond.base.metrics import DEFAULT_METRICS, METRICS, Metric
from llmcond.evaluation import paired
from llmcond.evaluation.paired import MIN_PAIRS, bootstrap_metrics, holm, paired_differences

METRIC_NAMES = ("spearman", "pearson", "accuracy")


def compare(candidates, baseline, *data, **options):
    result = bootstrap_metrics([baseline, *candidates], *data, **options)
    return list(paired_differences(result, {0: range(1, 1 + len(candidates))}).values())


def simulate_rows(n_pairs, errors, seed=0, common=1.0, conditions=2):
    """Return predictions with individual and common errors, ratings 1 to 5, and pair numbers."""
    rng = np.random.default_rng(seed)
    n = conditions * n_pairs
    rating = rng.integers(1, 6, size=n).astype(float)
    shared = common * rng.standard_normal(n)
    systems = [(rating + shared + error * rng.standard_normal(n))[None] for error in errors]
    return systems, rating, np.repeat(np.arange(n_pairs), conditions)


def compute_accuracy_slowly(predicted, rating, pair):
    right = [
        (np.sign((predicted[i] - predicted[j]) * (rating[i] - rating[j])) + 1) / 2
        for i, j in combinations(range(len(pair)), 2)
        if pair[i] == pair[j] and rating[i] != rating[j]
    ]
    return np.mean(right) if right else nan


def compute_metrics_slowly(similarity, rating, pair, count):
    """Compute a system's metrics with each sentence pair repeated as often as ``count`` says."""
    _, dense = np.unique(pair, return_inverse=True)
    counts = count.astype(int)[dense]
    expanded = np.repeat(np.arange(len(pair)), counts)
    # Each copy of a sentence pair counts as a separate sentence pair.
    copy_index = np.concatenate([np.arange(k) for k in counts])
    pair_copies = dense[expanded] * (1 + int(count.max())) + copy_index
    return np.mean(
        [
            (
                spearmanr(predictions[expanded], rating[expanded]).statistic,
                pearsonr(predictions[expanded], rating[expanded]).statistic,
                compute_accuracy_slowly(predictions[expanded], rating[expanded], pair_copies),
            )
            for predictions in similarity
        ],
        axis=0,
    )


# -- bootstrap ----------------------------------------------------------------------------------

# Values are few, so that most examples have ties. Sentence pairs have any size and order.
VALUE = st.integers(-3, 3).map(float)
EXAMPLE = st.integers(2, 14).flatmap(
    lambda n: st.tuples(
        st.lists(st.lists(VALUE, min_size=n, max_size=n), min_size=1, max_size=2),
        st.lists(VALUE, min_size=n, max_size=n),
        st.lists(st.integers(0, 5), min_size=n, max_size=n),
    )
)


@given(EXAMPLE)
@settings(max_examples=40, deadline=None)
@pytest.mark.filterwarnings("ignore::scipy.stats.ConstantInputWarning")
def test_metrics_of_bootstrap_samples_equal_slow_reference(example):
    similarity, rating, pair = map(np.array, example)
    result = bootstrap_metrics([similarity], rating, pair, resamples=5, seed=3)
    n_pairs = len(np.unique(pair))
    expected = compute_metrics_slowly(similarity, rating, pair, np.ones(n_pairs))
    np.testing.assert_allclose(result.values[:, 0], expected, atol=1e-12)
    (counts,) = paired._sample_pairs(n_pairs, len(pair), 5, seed=3)
    expected = np.array(
        [compute_metrics_slowly(similarity, rating, pair, count) for count in counts]
    )
    np.testing.assert_allclose(result.sampled[:, 0], expected.T, atol=1e-12)


@pytest.mark.parametrize("decimals", [0, 9])
def test_paired_difference_equals_slow_reference(decimals):
    systems, rating, pair = simulate_rows(25, [0.5, 2.0], conditions=3)
    systems = [np.round(system, decimals) for system in systems]
    (differences,) = compare(systems[:1], systems[1], rating, pair, resamples=60, seed=5)
    (counts,) = paired._sample_pairs(25, 75, 60, seed=5)
    full, resampled = (
        np.array(
            [
                np.subtract(*(compute_metrics_slowly(w, rating, pair, c) for w in systems))
                for c in times
            ]
        )
        for times in (np.ones((1, 25)), counts)
    )
    compared = sum(len(set(rating[pair == i])) > 1 for i in range(25))
    assert compared == 23  # two sentence pairs have three equal ratings
    for metric_name, value, sampled, k in zip(
        METRIC_NAMES, full[0], resampled.T, (25, 25, compared), strict=True
    ):
        difference = differences[metric_name]
        error = sampled.std(ddof=1) * np.sqrt(k / (k - 1))
        half_width = student.ppf(0.975, k - 1) * error
        np.testing.assert_allclose(
            [difference.value, difference.low, difference.high, difference.p],
            [
                value,
                value - half_width,
                value + half_width,
                2 * student.sf(abs(value) / error, k - 1),
            ],
        )
        power = student.ppf(0.8, k - 1) * error
        assert difference.minimum == pytest.approx(half_width + power)
        assert difference.p_holm == difference.p


def test_comparison_depends_on_seed_but_not_on_blocks_or_order_of_rows(monkeypatch):
    systems, rating, pair = simulate_rows(30, [0.5, 1.0])
    (first,) = compare(systems[:1], systems[1], rating, pair, resamples=50, seed=4)
    (other,) = compare(systems[:1], systems[1], rating, pair, resamples=50, seed=5)
    order = np.random.default_rng(0).permutation(len(pair))
    shuffled = [system[:, order] for system in systems]
    data = rating[order], (1_000 * pair - 7)[order]
    monkeypatch.setattr(paired, "BLOCK", 60 * 7)
    (blocks,) = compare(systems[:1], systems[1], rating, pair, resamples=50, seed=4)
    (reordered,) = compare(shuffled[:1], shuffled[1], *data, resamples=50, seed=4)
    for name in METRIC_NAMES:
        assert first[name].value == other[name].value
        assert first[name].low != other[name].low
        expected = pytest.approx((first[name].value, first[name].low, first[name].p))
        for same in (blocks[name], reordered[name]):
            assert (same.value, same.low, same.p) == expected


def test_custom_metrics_equal_fast_metrics_on_same_samples():
    """User-defined metrics, which have no fast path, get the values of the built-in ones."""
    systems, rating, pair = simulate_rows(20, [0.5, 2.0], conditions=3)
    systems = [np.round(system) for system in systems]
    custom_metrics = [
        Metric(metric.name, lambda *rows, metric=metric: metric.function(*rows))
        for metric in DEFAULT_METRICS
    ]
    fast = bootstrap_metrics(systems, rating, pair, resamples=30)
    general = bootstrap_metrics(systems, rating, pair, custom_metrics, resamples=30)
    np.testing.assert_array_equal(general.values, fast.values)
    np.testing.assert_allclose(general.sampled, fast.sampled, rtol=0, atol=1e-12)


# -- verdicts and families ----------------------------------------------------------------------


def test_verdict_depends_on_direction_of_metric():
    (baseline, good, same, bad), rating, pair = simulate_rows(150, [1.0, 0.3, 1.0, 4.0])
    error = Metric("mae", lambda p, r, g: np.abs(p - r).mean(), higher_is_better=False)
    results = compare(
        [good, same, bad], baseline, rating, pair, [METRICS["spearman"], error], resamples=100
    )
    for name in ("spearman", "mae"):
        verdicts = [result[name].verdict for result in results]
        assert verdicts == ["better", "no evidence", "worse"]
    assert results[0]["mae"].value < 0 < results[0]["spearman"].value
    assert compare([], baseline, rating, pair, resamples=10) == []


def test_verdict_uses_corrected_p():
    (baseline, candidate, *others), rating, pair = simulate_rows(
        60, [1.5, 1.1, *[1.5] * 40], seed=2
    )
    (alone,) = compare([candidate], baseline, rating, pair)
    among = compare([candidate, *others], baseline, rating, pair)[0]
    assert (alone["spearman"].p, alone["spearman"].verdict) == (among["spearman"].p, "better")
    assert (among["spearman"].p_holm > 0.05, among["spearman"].verdict) == (True, "no evidence")


def test_several_baselines_share_one_holm_family():
    result = bootstrap_metrics(*simulate_rows(80, [1.0, 0.2, 0.6, 0.9, 1.2]))
    family = paired_differences(result, {0: [1, 2], 4: [3]})
    alone = {**paired_differences(result, {0: [1, 2]}), **paired_differences(result, {4: [3]})}
    assert list(family) == list(alone) == [1, 2, 3]
    for name in METRIC_NAMES:
        p = [difference[name].p for difference in family.values()]
        assert p == [difference[name].p for difference in alone.values()]
        corrected = [difference[name].p_holm for difference in family.values()]
        assert corrected == holm(np.array(p)).tolist()
    assert paired_differences(result, {}) == {}


# -- undefined figures --------------------------------------------------------------------------


def assert_undefined(difference):
    value, low, high, _, p, p_holm, minimum, verdict = astuple(difference)
    assert all(map(isnan, (value, low, high, p, p_holm, minimum)))
    assert verdict == "no evidence"


@pytest.mark.filterwarnings("error")
def test_constant_predictions_have_no_spearman_and_are_at_chance():
    (baseline, good), rating, pair = simulate_rows(60, [0.5, 0.1])
    constant = np.full((1, 120), 0.7, dtype=np.float32)
    result = compare([constant, good], baseline, rating, pair, resamples=50)
    assert_undefined(result[0]["spearman"])
    assert result[0]["accuracy"].verdict == "worse"
    # The undefined difference still counts in the Holm family.
    assert result[1]["spearman"].p_holm == pytest.approx(2 * result[1]["spearman"].p)
    (result,) = compare([good], constant, rating, pair, resamples=50)
    assert_undefined(result["spearman"])
    assert result["accuracy"].verdict == "better"


@pytest.mark.filterwarnings("error")
def test_metrics_without_variation_are_undefined():
    (baseline, fit), rating, pair = simulate_rows(30, [1.0, 0.5])
    seeds = np.concatenate([fit, np.zeros((1, 60))])  # one seed is constant
    (differences,) = compare([seeds], baseline, rating, pair, resamples=50)
    assert_undefined(differences["spearman"])
    assert isnan(bootstrap_metrics([seeds], rating, pair, resamples=0).deviations(0)["spearman"])
    (differences,) = compare([fit], baseline, np.ones_like(rating), pair, resamples=50)
    assert_undefined(differences["spearman"])
    assert_undefined(differences["accuracy"])
    # Each pair has a single condition, so there are no comparisons.
    (differences,) = compare([fit], baseline, rating, np.arange(60), resamples=50)
    assert_undefined(differences["accuracy"])
    spearman = differences["spearman"]
    assert spearman.low < spearman.value < spearman.high


# -- seeds and single systems -------------------------------------------------------------------


def test_seeds_are_averaged_and_their_deviation_is_reported():
    (baseline, *fits), rating, pair = simulate_rows(60, [1.0, 0.5, 0.8, 1.5])
    seeds = np.concatenate(fits)
    (differences,) = compare([seeds], baseline, rating, pair)
    separate = compare(fits, baseline, rating, pair)
    for metric_name in METRIC_NAMES:
        mean = np.mean([single[metric_name].value for single in separate])
        assert differences[metric_name].value == pytest.approx(mean)
    scores = [spearmanr(fit[0], rating).statistic for fit in fits]
    measured = bootstrap_metrics([seeds, *fits], rating, pair, resamples=0)
    deviations = [measured.deviations(i)["spearman"] for i in range(4)]
    assert deviations == [pytest.approx(np.std(scores, ddof=1)), None, None, None]


def assert_interval(figure, rows, seeds, seed_freedom):
    """Check an interval from the variances of 200 pairs and of seeds."""
    freedom = (rows + seeds) ** 2 / (rows**2 / 199 + seeds**2 / seed_freedom)
    half = student.ppf(0.975, freedom) * np.sqrt(rows + seeds)
    assert figure.high - figure.value == pytest.approx(half)
    assert figure.value - figure.low == pytest.approx(half)


def test_intervals_cover_rows_and_seeds():
    rng, pair = np.random.default_rng(7), np.repeat(np.arange(200), 2)
    truth = rng.standard_normal(400)
    rating = np.round(truth * 2) / 2
    # The three fits of a system are not equally good.
    errors, noise = 1 + 0.1 * rng.standard_normal((5, 3, 1)), rng.standard_normal((5, 1, 400))
    systems = list(truth + errors * noise)
    scores = np.array([[spearmanr(fit, rating).statistic for fit in system] for system in systems])
    result = bootstrap_metrics(systems, rating, pair)
    sampled = result.sampled[0]
    for i, system_scores in enumerate(scores):
        spearman = result.estimates(i)["spearman"]
        assert spearman.value == pytest.approx(system_scores.mean())
        rows = sampled[i].var(ddof=1) * 200 / 199
        assert_interval(spearman, rows, system_scores.var(ddof=1) / 3, 2)
    pooled = scores.var(axis=1, ddof=1).mean()  # 5 systems of 3 seeds: 10 degrees of freedom
    for i, difference in paired_differences(result, {0: range(1, 5)}).items():
        rows = (sampled[i] - sampled[0]).var(ddof=1) * 200 / 199
        assert difference["spearman"].seed_error == pytest.approx(np.sqrt(2 * pooled / 3))
        assert_interval(difference["spearman"], rows, 2 * pooled / 3, 10)
        assert difference["accuracy"].seed_error > 0
    # The deviation of two seeds is too uncertain for an interval.
    two_seeds = bootstrap_metrics([systems[0][:2]], rating, pair).estimates(0)["spearman"]
    assert np.isnan([two_seeds.low, two_seeds.high]).all()


@pytest.mark.parametrize("n_pairs", [3, 4, 5, 20])
def test_few_pairs_have_no_interval_and_intervals_stay_in_range(n_pairs):
    pair = np.repeat(np.arange(n_pairs), 2)
    rating = np.tile([0.0, 1.0], n_pairs)
    for estimate in bootstrap_metrics([rating[None]], rating, pair).estimates(0).values():
        assert estimate.value == pytest.approx(1)
        if n_pairs < MIN_PAIRS:
            assert np.isnan([estimate.low, estimate.high]).all()
        else:
            assert estimate.low < estimate.high == 1
