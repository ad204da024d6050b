"""Paired comparisons: compared with a slow reference; pairs, seeds, ties, undefined metrics."""

from itertools import combinations
from math import isnan, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from scipy.stats import t as student

from llmcond.evaluation import paired
from llmcond.evaluation.paired import MIN_PAIRS, bootstrap_metrics, holm, paired_differences
from llmcond.metrics import DEFAULT_METRICS, METRICS, Metric

ROOT = Path(__file__).resolve().parents[2]
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
@settings(max_examples=60, deadline=None)
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


def test_bootstrap_samples_have_as_many_pairs_as_data():
    counts = np.concatenate(list(paired._sample_pairs(40, 80, 3_000, seed=0)))
    assert counts.shape == (3_000, 40)
    assert (counts.sum(axis=1) == 40).all()
    np.testing.assert_allclose(counts.mean(axis=0), 1, atol=0.1)
    np.testing.assert_allclose(counts.var(axis=0), 1 - 1 / 40, atol=0.15)


def test_result_does_not_depend_on_block_size(monkeypatch):
    systems, rating, pair = simulate_rows(30, [0.5, 1.0])
    whole = compare(systems[:1], systems[1], rating, pair, resamples=50)
    monkeypatch.setattr(paired, "BLOCK", 60 * 7)
    assert compare(systems[:1], systems[1], rating, pair, resamples=50) == whole


def test_difference_equals_difference_of_metric_values():
    (candidate, baseline), rating, pair = simulate_rows(60, [0.5, 2.0])
    (differences,) = compare([candidate], baseline, rating, pair, resamples=20)
    for metric in DEFAULT_METRICS:
        values = [metric(system[0], rating, pair) for system in (candidate, baseline)]
        assert differences[metric.name].value == np.subtract(*values)


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


def test_lower_can_be_better():
    (good, bad), rating, pair = simulate_rows(100, [0.1, 3.0])
    error = Metric("mae", lambda p, r, g: np.abs(p - r).mean(), higher_is_better=False)
    (differences,) = compare([good], bad, rating, pair, [error], resamples=50)
    assert (differences["mae"].value < 0, differences["mae"].verdict) == (True, "better")


def interval_width(difference):
    return difference.high - difference.low


def test_duplicated_rows_of_pairs_add_no_evidence():
    systems, rating, pair = simulate_rows(40, [0.5, 1.0])
    (original,) = compare(systems[:1], systems[1], rating, pair)
    tiled = [np.tile(system, 4) for system in systems]
    (doubled,) = compare(tiled[:1], tiled[1], np.tile(rating, 4), np.tile(pair, 4))
    # Resampling rows counts the copies as evidence: four times the rows halve the width.
    (by_row,) = compare(tiled[:1], tiled[1], np.tile(rating, 4), np.arange(4 * len(pair)))
    assert interval_width(doubled["spearman"]) == pytest.approx(
        interval_width(original["spearman"]), rel=0.01
    )
    assert doubled["spearman"].p == pytest.approx(original["spearman"].p, rel=0.05)
    assert interval_width(by_row["spearman"]) < 0.65 * interval_width(original["spearman"])


def test_error_shared_by_rows_of_pair_widens_interval():
    rng = np.random.default_rng(0)
    pair = np.repeat(np.arange(60), 4)
    rating = rng.integers(1, 6, size=60)[pair].astype(float) + rng.integers(0, 2, size=240)
    systems = [(rating + 2 * rng.standard_normal(60)[pair])[None] for n in "ab"]
    (by_pair,) = compare(systems[:1], systems[1], rating, pair)
    (by_row,) = compare(systems[:1], systems[1], rating, np.arange(240))
    assert interval_width(by_pair["spearman"]) > 1.5 * interval_width(by_row["spearman"])


def test_error_shared_by_candidate_and_baseline_cancels():
    similar, rating, pair = simulate_rows(100, [0.3, 0.3], common=2.0)
    different, *_ = simulate_rows(100, [2.0, 2.0], common=0.3)
    (close,), (far,) = (
        compare(systems[:1], systems[1], rating, pair) for systems in (similar, different)
    )
    # All systems are about equally good; they differ only in how much error they share.
    assert interval_width(close["spearman"]) < 0.4 * interval_width(far["spearman"])
    sampled = bootstrap_metrics(similar, rating, pair).sampled[0]
    assert np.corrcoef(sampled)[0, 1] > 0.9


def test_equal_predictions_do_not_differ():
    (baseline,), rating, pair = simulate_rows(50, [1.0])
    monotone = baseline**3
    three_seeds = np.repeat(baseline, 3, axis=0)
    for differences in compare([baseline, monotone, three_seeds], baseline, rating, pair):
        for difference in (differences["spearman"], differences["accuracy"]):
            assert abs(difference.value) < 1e-12
            assert difference.p == pytest.approx(1)
            assert difference.verdict == "no evidence"
            # Fifty sentence pairs cannot prove that there is no difference at all.
            assert difference.minimum > 0.01


@pytest.mark.parametrize(("n_pairs", "verdict"), [(3, "no evidence"), (100, "better")])
def test_perfect_accuracy_beats_chance_only_with_enough_pairs(n_pairs, verdict):
    pair = np.repeat(np.arange(n_pairs), 2)
    rating = np.tile([1.0, 5.0], n_pairs)
    blind = pair[None].astype(float)
    (differences,) = compare([rating[None]], blind, rating, pair)
    assert differences["accuracy"].value == pytest.approx(0.5)
    assert differences["accuracy"].verdict == verdict


def test_tied_predictions_count_one_half():
    _, rating, pair = simulate_rows(30, [])
    blind = pair[None].astype(np.float32)
    assert bootstrap_metrics([blind], rating, pair, [METRICS["accuracy"]], 0).values[0, 0] == 0.5


def test_holm_correction():
    # In ascending order: 0.005 x 4, 0.01 x 3, 0.03 x 2, 0.04 x 1, without any decrease.
    np.testing.assert_allclose(holm(np.array([0.01, 0.04, 0.03, 0.005])), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm(np.array([0.9, 0.6])), [1, 1])
    np.testing.assert_allclose(holm(np.array([0.02])), [0.02])
    np.testing.assert_allclose(holm(np.array([nan, 0.02, 0.5])), [nan, 0.06, 1])
    assert holm(np.array([])).shape == (0,)


def test_holm_family_is_all_candidates_per_metric():
    (baseline, *candidates), rating, pair = simulate_rows(80, [1.0, 0.2, 0.6, 0.9, 1.2, 2.0])
    results = compare(candidates, baseline, rating, pair)
    for metric_name in METRIC_NAMES:
        differences = [result[metric_name] for result in results]
        expected = holm(np.array([difference.p for difference in differences]))
        assert [difference.p_holm for difference in differences] == expected.tolist()
    alone = [compare([result], baseline, rating, pair)[0]["spearman"] for result in candidates]
    assert [result["spearman"].p for result in results] == [result.p for result in alone]
    assert all(result["spearman"].p_holm >= result["spearman"].p for result in results)
    assert any(result["spearman"].p_holm > result["spearman"].p for result in results)


def test_order_of_candidates_does_not_matter():
    (baseline, *candidates), rating, pair = simulate_rows(40, [1.0, 0.2, 0.6, 0.9])
    results = compare(candidates, baseline, rating, pair)
    assert compare(candidates[::-1], baseline, rating, pair) == results[::-1]


def test_row_order_and_pair_numbers_do_not_matter():
    systems, rating, pair = simulate_rows(40, [0.5, 1.0])
    (original,) = compare(systems[:1], systems[1], rating, pair)
    order = np.random.default_rng(0).permutation(len(pair))
    systems = [system[:, order] for system in systems]
    (shuffled,) = compare(systems[:1], systems[1], rating[order], (1_000 * pair - 7)[order])
    for metric_name in METRIC_NAMES:
        expected, actual = original[metric_name], shuffled[metric_name]
        assert (actual.value, actual.low, actual.p) == pytest.approx(
            (expected.value, expected.low, expected.p)
        )


def test_verdicts_of_better_equal_and_worse_candidates():
    (baseline, good, same, bad), rating, pair = simulate_rows(150, [1.0, 0.3, 1.0, 4.0])
    verdicts = [
        differences["spearman"].verdict
        for differences in compare([good, same, bad], baseline, rating, pair)
    ]
    assert verdicts == ["better", "no evidence", "worse"]


def test_verdict_uses_corrected_p():
    (baseline, candidate, *others), rating, pair = simulate_rows(
        60, [1.5, 1.1, *[1.5] * 40], seed=2
    )
    (alone,) = compare([candidate], baseline, rating, pair)
    among = compare([candidate, *others], baseline, rating, pair)[0]
    assert (alone["spearman"].p, alone["spearman"].verdict) == (among["spearman"].p, "better")
    assert (among["spearman"].p_holm > 0.05, among["spearman"].verdict) == (True, "no evidence")


def test_swapping_candidate_and_baseline_negates_difference():
    (first, second), rating, pair = simulate_rows(60, [0.5, 1.0])
    (forward,), (backward,) = (
        compare([first], second, rating, pair),
        compare([second], first, rating, pair),
    )
    for metric_name in METRIC_NAMES:
        a, b = forward[metric_name], backward[metric_name]
        assert (b.value, b.low, b.high, b.p) == pytest.approx((-a.value, -a.high, -a.low, a.p))


def test_interval_excludes_zero_exactly_if_p_is_significant():
    (baseline, *candidates), rating, pair = simulate_rows(40, [1.0, *np.linspace(0.1, 3, 60)])
    results = compare(candidates, baseline, rating, pair, resamples=200)
    differences = [one[metric_name] for one in results for metric_name in METRIC_NAMES]
    excluded = [one.low > 0 or one.high < 0 for one in differences]
    assert excluded == [one.p <= 0.05 for one in differences]
    assert 10 < sum(excluded) < len(excluded) - 10


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


def test_baseline_can_have_several_seeds():
    (candidate, *fits), rating, pair = simulate_rows(60, [1.0, 0.5, 0.8])
    baseline = np.concatenate(fits)
    (differences,) = compare([candidate], baseline, rating, pair)
    values = [compare([candidate], fit, rating, pair)[0]["spearman"].value for fit in fits]
    assert differences["spearman"].value == pytest.approx(np.mean(values))


def test_comparison_is_reproducible_by_seed():
    (candidate, baseline), rating, pair = simulate_rows(30, [0.5, 1.0])
    first, repeated, with_other_seed = (
        compare([candidate], baseline, rating, pair, resamples=100, seed=seed) for seed in (4, 4, 5)
    )
    assert first == repeated
    assert first[0]["spearman"].value == with_other_seed[0]["spearman"].value
    assert first[0]["spearman"].low != with_other_seed[0]["spearman"].low


def assert_undefined(difference, value=True):
    figures = (difference.low, difference.high, difference.p, difference.p_holm, difference.minimum)
    assert all(map(isnan, figures))
    assert isnan(difference.value) is value
    assert difference.verdict == "no evidence"


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


def test_constant_predictions_of_many_rows_have_no_spearman():
    # The cube of this number of rows is not exact in float64.
    n = 208_585
    constant = np.zeros((1, n))
    result = bootstrap_metrics([constant], np.arange(n) % 5.0, np.arange(n), resamples=0)
    assert isnan(result.values[0, 0])


@pytest.mark.filterwarnings("error")
def test_one_constant_seed_leaves_spearman_undefined():
    (baseline, fit), rating, pair = simulate_rows(30, [1.0, 0.5])
    seeds = np.concatenate([fit, np.zeros((1, 60))])
    (differences,) = compare([seeds], baseline, rating, pair, resamples=50)
    assert_undefined(differences["spearman"])
    assert isnan(bootstrap_metrics([seeds], rating, pair, resamples=0).deviations(0)["spearman"])


@pytest.mark.filterwarnings("error")
def test_equal_ratings_leave_everything_undefined():
    systems, rating, pair = simulate_rows(20, [0.5, 1.0])
    (differences,) = compare(systems[:1], systems[1], np.ones_like(rating), pair, resamples=50)
    assert_undefined(differences["spearman"])
    assert_undefined(differences["accuracy"])


@pytest.mark.filterwarnings("error")
def test_single_conditions_leave_accuracy_undefined():
    systems, rating, _ = simulate_rows(30, [0.5, 1.0])
    (differences,) = compare(systems[:1], systems[1], rating, np.arange(60), resamples=50)
    assert_undefined(differences["accuracy"])
    assert (
        differences["spearman"].low < differences["spearman"].value < differences["spearman"].high
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("n_pairs", "resamples"), [(1, 50), (20, 0), (20, 1)])
def test_one_pair_or_no_resampling_gives_values_only(n_pairs, resamples):
    systems, rating, pair = simulate_rows(n_pairs, [0.5, 1.0], conditions=4)
    (differences,) = compare(systems[:1], systems[1], rating, pair, resamples=resamples)
    assert_undefined(differences["spearman"], value=False)
    assert_undefined(differences["accuracy"], value=False)


@pytest.mark.filterwarnings("error")
def test_two_pairs_give_no_evidence():
    systems, rating, pair = simulate_rows(2, [0.1, 3.0])
    (differences,) = compare(systems[:1], systems[1], rating, pair)
    assert differences["spearman"].verdict == "no evidence"


def test_no_candidates_give_no_comparisons():
    (baseline,), rating, pair = simulate_rows(20, [1.0])
    assert compare([], baseline, rating, pair, resamples=10) == []


def test_intervals_have_nominal_coverage():
    systems, rating, pair = simulate_rows(50_000, [1.0, 1.5], seed=1)
    truth = np.subtract(*bootstrap_metrics(systems, rating, pair, resamples=0).values.T)
    covered = {metric_name: [] for metric_name in METRIC_NAMES}
    for seed in range(300):
        systems, rating, pair = simulate_rows(40, [1.0, 1.5], seed=100 + seed)
        (differences,) = compare(systems[:1], systems[1], rating, pair, resamples=150, seed=seed)
        for metric_name, true in zip(METRIC_NAMES, truth, strict=True):
            difference = differences[metric_name]
            covered[metric_name].append(difference.low <= true <= difference.high)
    for metric_name in METRIC_NAMES:
        assert 0.9 <= np.mean(covered[metric_name]) <= 0.99


def test_false_positives_are_rare():
    false_positives = []
    for seed in range(200):
        (baseline, *candidates), rating, pair = simulate_rows(40, [1.0] * 6, seed=500 + seed)
        results = compare(candidates, baseline, rating, pair, resamples=150, seed=seed)
        false_positives.append(
            [any(result[m].verdict != "no evidence" for result in results) for m in METRIC_NAMES]
        )
    # The level of 0.05 plus three standard errors of two hundred trials.
    assert (np.mean(false_positives, axis=0) <= 0.1).all()


def test_minimum_difference_is_detected_with_80_percent_power():
    errors = [0.8, 1.75]
    systems, rating, pair = simulate_rows(50_000, errors, seed=1)
    truth = np.subtract(*bootstrap_metrics(systems, rating, pair, resamples=0).values[0])
    results = []
    for seed in range(200):
        systems, rating, pair = simulate_rows(60, errors, seed=1_000 + seed)
        results += compare(systems[:1], systems[1], rating, pair, resamples=150, seed=seed)
    # The sizes of the errors were chosen so that the true difference is the minimum.
    assert np.mean([result["spearman"].minimum for result in results]) == pytest.approx(
        truth, rel=0.05
    )
    assert 0.7 <= np.mean([result["spearman"].p <= 0.05 for result in results]) <= 0.9


# -- seeds, single systems, and several baselines ----------------------------------------------


def simulate_fits(rng, truth, quality, n_seeds, spread):
    """Return predictions of several fits that are not equally good."""
    errors = quality + spread * rng.standard_normal(n_seeds)
    noise = rng.standard_normal(len(truth))
    return np.array([truth + error * noise for error in errors])


def simulate_seeds(spread, n_seeds=3, n_pairs=200):
    rng = np.random.default_rng(7)
    pair = np.repeat(np.arange(n_pairs), 2)
    truth = rng.standard_normal(2 * n_pairs)
    rating = np.round(truth * 2) / 2
    systems = [simulate_fits(rng, truth, 1.0, n_seeds, spread) for i in range(5)]
    return systems, rating, pair


def test_seed_error_is_pooled_and_added():
    systems, rating, pair = simulate_seeds(0.1)
    results = compare(systems[1:], systems[0], rating, pair)
    scores = np.array([[spearmanr(fit, rating).statistic for fit in system] for system in systems])
    pooled = scores.var(axis=1, ddof=1).mean()  # 5 systems of 3 seeds: 10 degrees of freedom
    sampled = bootstrap_metrics(systems, rating, pair).sampled[0]
    for i, result in enumerate(results, start=1):
        rows = (sampled[i] - sampled[0]).var(ddof=1) * 200 / 199
        seeds = 2 * pooled / 3
        assert result["spearman"].seed_error == pytest.approx(np.sqrt(seeds))
        freedom = (rows + seeds) ** 2 / (rows**2 / 199 + seeds**2 / 10)
        half = student.ppf(0.975, freedom) * np.sqrt(rows + seeds)
        assert result["spearman"].high - result["spearman"].value == pytest.approx(half)
        assert result["spearman"].value - result["spearman"].low == pytest.approx(half)
        assert result["accuracy"].seed_error > 0


def test_identical_seeds_add_no_error():
    systems, rating, pair = simulate_seeds(0.1, n_seeds=1)
    tripled = [np.repeat(system, 3, axis=0) for system in systems]
    single = compare(systems[1:], systems[0], rating, pair)
    repeated = compare(tripled[1:], tripled[0], rating, pair)
    for expected, actual in zip(single, repeated, strict=True):
        assert expected["spearman"].seed_error == 0
        assert actual["spearman"].p == pytest.approx(expected["spearman"].p)
        assert actual["spearman"].low == pytest.approx(expected["spearman"].low)


def test_estimates_have_intervals_over_rows_and_seeds():
    systems, rating, pair = simulate_seeds(0.1)
    result = bootstrap_metrics(systems, rating, pair)
    for i, system in enumerate(systems):
        estimates = result.estimates(i)
        spearman, accuracy = estimates["spearman"], estimates["accuracy"]
        scores = [spearmanr(fit, rating).statistic for fit in system]
        assert spearman.value == pytest.approx(np.mean(scores))
        rows = result.sampled[0, i].var(ddof=1) * 200 / 199
        seeds = np.var(scores, ddof=1) / len(scores)
        freedom = (rows + seeds) ** 2 / (rows**2 / 199 + seeds**2 / (len(scores) - 1))
        half = student.ppf(0.975, freedom) * np.sqrt(rows + seeds)
        assert spearman.high - spearman.value == pytest.approx(half)
        assert accuracy.low < accuracy.value < accuracy.high
    two_seeds = bootstrap_metrics([system[:2] for system in systems], rating, pair)
    assert np.isnan(
        [two_seeds.estimates(0)["spearman"].low, two_seeds.estimates(0)["spearman"].high]
    ).all()
    estimates = bootstrap_metrics([np.ones((2, len(rating)))], rating, pair).estimates(0)
    spearman = estimates["spearman"]
    assert np.isnan([spearman.value, spearman.low, spearman.high]).all()
    assert estimates["accuracy"].value == 0.5


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


def test_several_baselines_share_one_holm_family():
    systems, rating, pair = simulate_seeds(0.0, n_seeds=1)
    result = bootstrap_metrics(systems, rating, pair)
    family = paired_differences(result, {0: [1, 2], 4: [3]})
    alone = {**paired_differences(result, {0: [1, 2]}), **paired_differences(result, {4: [3]})}
    assert list(family) == list(alone) == [1, 2, 3]
    for metric_name in ("spearman", "accuracy"):
        differences = [difference[metric_name] for difference in family.values()]
        assert [difference.p for difference in differences] == [
            difference[metric_name].p for difference in alone.values()
        ]
        assert [difference.p_holm for difference in differences] == holm(
            np.array([difference.p for difference in differences])
        ).tolist()
        for difference in differences:
            assert (difference.verdict == "no evidence") == (difference.p_holm > 0.05)
    assert paired_differences(result, {}) == {}


def test_controls_form_another_family():
    systems, rating, pair = simulate_seeds(0.0, n_seeds=1)
    result = bootstrap_metrics(systems, rating, pair)
    together = paired_differences(result, {0: [1, 2, 3, 4]}, controls=[2, 4])
    for family in ([1, 3], [2, 4]):
        p = np.array([together[i]["spearman"].p for i in family])
        corrected = [together[i]["spearman"].p_holm for i in family]
        assert corrected == holm(p).tolist()


# -- crossed clusters ---------------------------------------------------------------------------


def simulate_queries(seed, n=400, n_heads=40, n_tails=25):
    """Return ranks of two systems, (1, n) each, whose difficulty depends on head and tail."""
    rng = np.random.default_rng(seed)
    heads, tails = rng.integers(n_heads, size=n), rng.integers(n_tails, size=n)
    systems = []
    for _ in range(2):
        by_head, by_tail = rng.standard_normal(n_heads), rng.standard_normal(n_tails)
        noise = by_head[heads] + by_tail[tails] + rng.standard_normal(n)
        systems.append(np.ceil(np.exp(1 + noise))[None])
    return systems, heads, tails


def test_variance_of_crossed_clusters_is_that_of_both_kinds_minus_that_of_rows():
    systems, heads, tails = simulate_queries(0)
    n = len(heads)
    data, mrr = (np.zeros(n), np.arange(n)), [METRICS["mrr"]]
    crossed = bootstrap_metrics(systems, *data, mrr, crossed=(heads, tails))
    rows = bootstrap_metrics(systems, *data, mrr)
    by_head, by_tail = (bootstrap_metrics(systems, data[0], ids, mrr) for ids in (heads, tails))
    expected = by_head.row_variance(0, 1, 0) + by_tail.row_variance(0, 1, 0)
    expected -= rows.row_variance(0, 1, 0)
    assert crossed.row_variance(0, 1, 0) == pytest.approx(expected)
    assert crossed.n_clusters(0) == 25
    (narrow,), (wide,) = (paired_differences(r, {0: [1]}).values() for r in (rows, crossed))
    assert wide["mrr"].value == narrow["mrr"].value
    half = student.ppf(0.975, 24) * np.sqrt(expected)
    assert wide["mrr"].high - wide["mrr"].value == pytest.approx(half)
    wide_estimate, narrow_estimate = (r.estimates(1)["mrr"] for r in (crossed, rows))
    assert wide_estimate.low < narrow_estimate.low < narrow_estimate.high < wide_estimate.high


def test_few_false_positives_with_crossed_clusters():
    alarms = {"rows": 0, "crossed": 0}
    for seed in range(100):
        systems, heads, tails = simulate_queries(seed)
        data = (np.zeros(len(heads)), np.arange(len(heads)), [METRICS["mrr"]], 100)
        for name, clusters in (("rows", ()), ("crossed", (heads, tails))):
            result = bootstrap_metrics(systems, *data, crossed=clusters)
            alarms[name] += paired_differences(result, {0: [1]})[1]["mrr"].p <= 0.05
    # The level of 0.05 plus three standard errors of one hundred trials.
    assert alarms["crossed"] <= 12
    assert alarms["rows"] > 40


def test_independent_rows_have_no_smaller_error_with_crossed_clusters():
    systems, *_ = simulate_queries(3)
    n = systems[0].shape[1]
    data = (np.zeros(n), np.arange(n), [METRICS["mrr"]])
    rows = np.arange(n)
    crossed = bootstrap_metrics(systems, *data, crossed=(rows, rows))
    assert crossed.row_variance(0, 0) >= bootstrap_metrics(systems, *data).row_variance(0, 0)
