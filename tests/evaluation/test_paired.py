"""Comparisons: equal to the slow way, honest about pairs, seeds, ties and what is undefined."""

import json
import subprocess
import sys
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
MEASURES = ("spearman", "pearson", "accuracy")


def compare(candidates, baseline, *data, **options):
    found = bootstrap_metrics([baseline, *candidates], *data, **options)
    return list(paired_differences(found, {0: range(1, 1 + len(candidates))}).values())


def rows(n_pairs, errors, seed=0, common=1.0, conditions=2):
    """Ratings 1 to 5, and predictions with errors of these sizes beside one that all share."""
    rng = np.random.default_rng(seed)
    n = conditions * n_pairs
    rating = rng.integers(1, 6, size=n).astype(float)
    shared = common * rng.standard_normal(n)
    ways = [(rating + shared + error * rng.standard_normal(n))[None] for error in errors]
    return ways, rating, np.repeat(np.arange(n_pairs), conditions)


def slow_accuracy(predicted, rating, pair):
    right = [
        (np.sign((predicted[i] - predicted[j]) * (rating[i] - rating[j])) + 1) / 2
        for i, j in combinations(range(len(pair)), 2)
        if pair[i] == pair[j] and rating[i] != rating[j]
    ]
    return np.mean(right) if right else nan


def slow(similarity, rating, pair, count):
    """Measure one way with the rows of each sentence pair written out as often as counted."""
    _, dense = np.unique(pair, return_inverse=True)
    times = count.astype(int)[dense]
    expanded = np.repeat(np.arange(len(pair)), times)
    # A copy of a sentence pair is a sentence pair of its own.
    copy = np.concatenate([np.arange(k) for k in times])
    own = dense[expanded] * (1 + int(count.max())) + copy
    return np.mean(
        [
            (
                spearmanr(one[expanded], rating[expanded]).statistic,
                pearsonr(one[expanded], rating[expanded]).statistic,
                slow_accuracy(one[expanded], rating[expanded], own),
            )
            for one in similarity
        ],
        axis=0,
    )


# Few distinct values, so that most examples have ties; sentence pairs of any size and order.
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
def test_measures_of_draws_equal_the_slow_way(example):
    similarity, rating, pair = map(np.array, example)
    found = bootstrap_metrics([similarity], rating, pair, resamples=5, seed=3)
    n_pairs = len(np.unique(pair))
    expected = slow(similarity, rating, pair, np.ones(n_pairs))
    np.testing.assert_allclose(found.values[:, 0], expected, atol=1e-12)
    (counts,) = paired._sample_pairs(n_pairs, len(pair), 5, seed=3)
    expected = np.array([slow(similarity, rating, pair, count) for count in counts])
    np.testing.assert_allclose(found.sampled[:, 0], expected.T, atol=1e-12)


@pytest.mark.parametrize("decimals", [0, 9])
def test_a_difference_equals_the_slow_way(decimals):
    ways, rating, pair = rows(25, [0.5, 2.0], conditions=3)
    ways = [np.round(way, decimals) for way in ways]
    (found,) = compare(ways[:1], ways[1], rating, pair, resamples=60, seed=5)
    (counts,) = paired._sample_pairs(25, 75, 60, seed=5)
    once, drawn = (
        np.array([np.subtract(*(slow(w, rating, pair, c) for w in ways)) for c in times])
        for times in (np.ones((1, 25)), counts)
    )
    compared = sum(len(set(rating[pair == one])) > 1 for one in range(25))
    assert compared == 23  # two sentence pairs have three equal ratings
    for measure, value, sampled, k in zip(
        MEASURES, once[0], drawn.T, (25, 25, compared), strict=True
    ):
        difference = found[measure]
        error = sampled.std(ddof=1) * np.sqrt(k / (k - 1))
        reach = student.ppf(0.975, k - 1) * error
        np.testing.assert_allclose(
            [difference.value, difference.low, difference.high, difference.p],
            [value, value - reach, value + reach, 2 * student.sf(abs(value) / error, k - 1)],
        )
        power = student.ppf(0.8, k - 1) * error
        assert difference.minimum == pytest.approx(reach + power)
        assert difference.p_holm == difference.p


def test_draws_take_as_many_sentence_pairs_as_there_are():
    counts = np.concatenate(list(paired._sample_pairs(40, 80, 3_000, seed=0)))
    assert counts.shape == (3_000, 40)
    assert (counts.sum(axis=1) == 40).all()
    np.testing.assert_allclose(counts.mean(axis=0), 1, atol=0.1)
    np.testing.assert_allclose(counts.var(axis=0), 1 - 1 / 40, atol=0.15)


def test_the_size_of_blocks_changes_nothing(monkeypatch):
    ways, rating, pair = rows(30, [0.5, 1.0])
    whole = compare(ways[:1], ways[1], rating, pair, resamples=50)
    monkeypatch.setattr(paired, "BLOCK", 60 * 7)
    assert compare(ways[:1], ways[1], rating, pair, resamples=50) == whole


def test_values_are_those_of_the_metrics():
    (one, other), rating, pair = rows(60, [0.5, 2.0])
    (found,) = compare([one], other, rating, pair, resamples=20)
    for metric in DEFAULT_METRICS:
        values = [metric(system[0], rating, pair) for system in (one, other)]
        assert found[metric.name].value == np.subtract(*values)


def test_any_metric_is_resampled_by_the_same_draws():
    """The fast paths equal the metrics on the rows of each draw, and so do a user's own."""
    ways, rating, pair = rows(20, [0.5, 2.0], conditions=3)
    ways = [np.round(way) for way in ways]
    own = [
        Metric(metric.name, lambda *rows, metric=metric: metric.function(*rows))
        for metric in DEFAULT_METRICS
    ]
    fast = bootstrap_metrics(ways, rating, pair, resamples=30)
    general = bootstrap_metrics(ways, rating, pair, own, resamples=30)
    np.testing.assert_array_equal(general.values, fast.values)
    np.testing.assert_allclose(general.sampled, fast.sampled, rtol=0, atol=1e-12)


def test_less_may_be_better():
    (good, bad), rating, pair = rows(100, [0.1, 3.0])
    error = Metric("mae", lambda p, r, g: np.abs(p - r).mean(), higher_is_better=False)
    (found,) = compare([good], bad, rating, pair, [error], resamples=50)
    assert (found["mae"].value < 0, found["mae"].verdict) == (True, "better")


def width(difference):
    return difference.high - difference.low


def test_rows_doubled_within_their_sentence_pairs_are_no_evidence():
    ways, rating, pair = rows(40, [0.5, 1.0])
    (once,) = compare(ways[:1], ways[1], rating, pair)
    tiled = [np.tile(way, 4) for way in ways]
    (doubled,) = compare(tiled[:1], tiled[1], np.tile(rating, 4), np.tile(pair, 4))
    # Drawing rows takes the copies for evidence: half the width for four times the rows.
    (by_row,) = compare(tiled[:1], tiled[1], np.tile(rating, 4), np.arange(4 * len(pair)))
    assert width(doubled["spearman"]) == pytest.approx(width(once["spearman"]), rel=0.01)
    assert doubled["spearman"].p == pytest.approx(once["spearman"].p, rel=0.05)
    assert width(by_row["spearman"]) < 0.65 * width(once["spearman"])


def test_an_error_that_the_conditions_of_a_sentence_pair_share_widens_the_interval():
    rng = np.random.default_rng(0)
    pair = np.repeat(np.arange(60), 4)
    rating = rng.integers(1, 6, size=60)[pair].astype(float) + rng.integers(0, 2, size=240)
    ways = [(rating + 2 * rng.standard_normal(60)[pair])[None] for n in "ab"]
    (by_pair,) = compare(ways[:1], ways[1], rating, pair)
    (by_row,) = compare(ways[:1], ways[1], rating, np.arange(240))
    assert width(by_pair["spearman"]) > 1.5 * width(by_row["spearman"])


def test_what_candidate_and_baseline_share_cancels():
    alike, rating, pair = rows(100, [0.3, 0.3], common=2.0)
    apart, *_ = rows(100, [2.0, 2.0], common=0.3)
    (close,), (far,) = (compare(ways[:1], ways[1], rating, pair) for ways in (alike, apart))
    # Each is about as good as the others; only what they have in common is not the same.
    assert width(close["spearman"]) < 0.4 * width(far["spearman"])
    drawn = bootstrap_metrics(alike, rating, pair).sampled[0]
    assert np.corrcoef(drawn)[0, 1] > 0.9


def test_the_same_predictions_do_not_differ():
    (other,), rating, pair = rows(50, [1.0])
    monotone = other**3
    three = np.repeat(other, 3, axis=0)
    for found in compare([other, monotone, three], other, rating, pair):
        for difference in (found["spearman"], found["accuracy"]):
            assert abs(difference.value) < 1e-12
            assert difference.p == pytest.approx(1)
            assert difference.verdict == "no evidence"
            # Fifty sentence pairs do not show that there is no difference anywhere.
            assert difference.minimum > 0.01


@pytest.mark.parametrize(("n_pairs", "verdict"), [(3, "no evidence"), (100, "better")])
def test_always_right_is_better_than_blind_once_there_are_sentence_pairs_enough(n_pairs, verdict):
    pair = np.repeat(np.arange(n_pairs), 2)
    rating = np.tile([1.0, 5.0], n_pairs)
    blind = pair[None].astype(float)
    (found,) = compare([rating[None]], blind, rating, pair)
    assert found["accuracy"].value == pytest.approx(0.5)
    assert found["accuracy"].verdict == verdict


def test_equal_predictions_count_one_half():
    _, rating, pair = rows(30, [])
    blind = pair[None].astype(np.float32)
    assert bootstrap_metrics([blind], rating, pair, [METRICS["accuracy"]], 0).values[0, 0] == 0.5


def test_holm_by_hand():
    # In rising order 0.005 x 4, 0.01 x 3, 0.03 x 2, 0.04 x 1, and never below the one before.
    np.testing.assert_allclose(holm(np.array([0.01, 0.04, 0.03, 0.005])), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm(np.array([0.9, 0.6])), [1, 1])
    np.testing.assert_allclose(holm(np.array([0.02])), [0.02])
    np.testing.assert_allclose(holm(np.array([nan, 0.02, 0.5])), [nan, 0.06, 1])
    assert holm(np.array([])).shape == (0,)


def test_the_family_is_all_candidates_for_each_measure_by_itself():
    (baseline, *candidates), rating, pair = rows(80, [1.0, 0.2, 0.6, 0.9, 1.2, 2.0])
    found = compare(candidates, baseline, rating, pair)
    for measure in MEASURES:
        differences = [one[measure] for one in found]
        expected = holm(np.array([difference.p for difference in differences]))
        assert [difference.p_holm for difference in differences] == expected.tolist()
    by_itself = [compare([one], baseline, rating, pair)[0]["spearman"] for one in candidates]
    assert [one["spearman"].p for one in found] == [one.p for one in by_itself]
    assert all(one["spearman"].p_holm >= one["spearman"].p for one in found)
    assert any(one["spearman"].p_holm > one["spearman"].p for one in found)


def test_the_order_of_candidates_is_irrelevant():
    (baseline, *candidates), rating, pair = rows(40, [1.0, 0.2, 0.6, 0.9])
    found = compare(candidates, baseline, rating, pair)
    assert compare(candidates[::-1], baseline, rating, pair) == found[::-1]


def test_the_order_and_the_numbers_of_rows_are_irrelevant():
    ways, rating, pair = rows(40, [0.5, 1.0])
    (found,) = compare(ways[:1], ways[1], rating, pair)
    order = np.random.default_rng(0).permutation(len(pair))
    ways = [way[:, order] for way in ways]
    (shuffled,) = compare(ways[:1], ways[1], rating[order], (1_000 * pair - 7)[order])
    for measure in MEASURES:
        one, other = found[measure], shuffled[measure]
        assert (other.value, other.low, other.p) == pytest.approx((one.value, one.low, one.p))


def test_verdicts():
    (baseline, good, same, bad), rating, pair = rows(150, [1.0, 0.3, 1.0, 4.0])
    verdicts = [
        one["spearman"].verdict for one in compare([good, same, bad], baseline, rating, pair)
    ]
    assert verdicts == ["better", "no evidence", "worse"]


def test_a_verdict_is_by_the_corrected_p():
    (baseline, candidate, *others), rating, pair = rows(60, [1.5, 1.1, *[1.5] * 40], seed=2)
    (alone,) = compare([candidate], baseline, rating, pair)
    among = compare([candidate, *others], baseline, rating, pair)[0]
    assert (alone["spearman"].p, alone["spearman"].verdict) == (among["spearman"].p, "better")
    assert (among["spearman"].p_holm > 0.05, among["spearman"].verdict) == (True, "no evidence")


def test_baseline_and_candidate_changed_over_mirror_the_difference():
    (one, other), rating, pair = rows(60, [0.5, 1.0])
    (there,), (back,) = compare([one], other, rating, pair), compare([other], one, rating, pair)
    for measure in MEASURES:
        a, b = there[measure], back[measure]
        assert (b.value, b.low, b.high, b.p) == pytest.approx((-a.value, -a.high, -a.low, a.p))


def test_an_interval_excludes_zero_exactly_where_p_says_so():
    (baseline, *candidates), rating, pair = rows(40, [1.0, *np.linspace(0.1, 3, 60)])
    found = compare(candidates, baseline, rating, pair, resamples=200)
    differences = [one[measure] for one in found for measure in MEASURES]
    excluded = [one.low > 0 or one.high < 0 for one in differences]
    assert excluded == [one.p <= 0.05 for one in differences]
    assert 10 < sum(excluded) < len(excluded) - 10


def test_seeds_are_averaged_and_their_spread_is_told_apart():
    (baseline, *fits), rating, pair = rows(60, [1.0, 0.5, 0.8, 1.5])
    seeds = np.concatenate(fits)
    (found,) = compare([seeds], baseline, rating, pair)
    apart = compare(fits, baseline, rating, pair)
    for measure in MEASURES:
        mean = np.mean([one[measure].value for one in apart])
        assert found[measure].value == pytest.approx(mean)
    own = [spearmanr(fit[0], rating).statistic for fit in fits]
    measured = bootstrap_metrics([seeds, *fits], rating, pair, resamples=0)
    deviations = [measured.deviations(i)["spearman"] for i in range(4)]
    assert deviations == [pytest.approx(np.std(own, ddof=1)), None, None, None]


def test_a_baseline_may_have_seeds():
    (candidate, *fits), rating, pair = rows(60, [1.0, 0.5, 0.8])
    baseline = np.concatenate(fits)
    (found,) = compare([candidate], baseline, rating, pair)
    apart = [compare([candidate], fit, rating, pair)[0]["spearman"].value for fit in fits]
    assert found["spearman"].value == pytest.approx(np.mean(apart))


def test_comparisons_are_a_function_of_the_seed():
    (one, other), rating, pair = rows(30, [0.5, 1.0])
    first, again, another = (
        compare([one], other, rating, pair, resamples=100, seed=seed) for seed in (4, 4, 5)
    )
    assert first == again
    assert first[0]["spearman"].value == another[0]["spearman"].value
    assert first[0]["spearman"].low != another[0]["spearman"].low


def undefined(difference, value=True):
    figures = (difference.low, difference.high, difference.p, difference.p_holm, difference.minimum)
    assert all(map(isnan, figures))
    assert isnan(difference.value) is value
    assert difference.verdict == "no evidence"


@pytest.mark.filterwarnings("error")
def test_constant_predictions_have_no_spearman_and_are_at_chance():
    (baseline, good), rating, pair = rows(60, [0.5, 0.1])
    constant = np.full((1, 120), 0.7, dtype=np.float32)
    found = compare([constant, good], baseline, rating, pair, resamples=50)
    undefined(found[0]["spearman"])
    assert found[0]["accuracy"].verdict == "worse"
    # It counts in the family all the same.
    assert found[1]["spearman"].p_holm == pytest.approx(2 * found[1]["spearman"].p)
    (found,) = compare([good], constant, rating, pair, resamples=50)
    undefined(found["spearman"])
    assert found["accuracy"].verdict == "better"


def test_constant_predictions_of_many_rows_have_no_spearman():
    # The cube of this many rows is no double.
    n = 208_585
    constant = np.zeros((1, n))
    found = bootstrap_metrics([constant], np.arange(n) % 5.0, np.arange(n), resamples=0)
    assert isnan(found.values[0, 0])


@pytest.mark.filterwarnings("error")
def test_one_constant_seed_leaves_spearman_undefined():
    (baseline, fit), rating, pair = rows(30, [1.0, 0.5])
    seeds = np.concatenate([fit, np.zeros((1, 60))])
    (found,) = compare([seeds], baseline, rating, pair, resamples=50)
    undefined(found["spearman"])
    assert isnan(bootstrap_metrics([seeds], rating, pair, resamples=0).deviations(0)["spearman"])


@pytest.mark.filterwarnings("error")
def test_equal_ratings_leave_everything_undefined():
    ways, rating, pair = rows(20, [0.5, 1.0])
    (found,) = compare(ways[:1], ways[1], np.ones_like(rating), pair, resamples=50)
    undefined(found["spearman"])
    undefined(found["accuracy"])


@pytest.mark.filterwarnings("error")
def test_single_conditions_leave_accuracy_undefined():
    ways, rating, _ = rows(30, [0.5, 1.0])
    (found,) = compare(ways[:1], ways[1], rating, np.arange(60), resamples=50)
    undefined(found["accuracy"])
    assert found["spearman"].low < found["spearman"].value < found["spearman"].high


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("n_pairs", "resamples"), [(1, 50), (20, 0), (20, 1)])
def test_one_sentence_pair_or_no_draws_leave_values_only(n_pairs, resamples):
    ways, rating, pair = rows(n_pairs, [0.5, 1.0], conditions=4)
    (found,) = compare(ways[:1], ways[1], rating, pair, resamples=resamples)
    undefined(found["spearman"], value=False)
    undefined(found["accuracy"], value=False)


@pytest.mark.filterwarnings("error")
def test_two_sentence_pairs_say_little():
    ways, rating, pair = rows(2, [0.1, 3.0])
    (found,) = compare(ways[:1], ways[1], rating, pair)
    assert found["spearman"].verdict == "no evidence"


def test_no_candidates_are_no_comparisons():
    (baseline,), rating, pair = rows(20, [1.0])
    assert compare([], baseline, rating, pair, resamples=10) == []


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    ways, rating, pair = rows(50_000, [1.0, 1.5], seed=1)
    truth = np.subtract(*bootstrap_metrics(ways, rating, pair, resamples=0).values.T)
    held = {measure: [] for measure in MEASURES}
    for seed in range(300):
        ways, rating, pair = rows(40, [1.0, 1.5], seed=100 + seed)
        (found,) = compare(ways[:1], ways[1], rating, pair, resamples=150, seed=seed)
        for measure, true in zip(MEASURES, truth, strict=True):
            difference = found[measure]
            held[measure].append(difference.low <= true <= difference.high)
    for measure in MEASURES:
        assert 0.9 <= np.mean(held[measure]) <= 0.99


def test_false_alarms_are_few():
    alarms = []
    for seed in range(200):
        (baseline, *candidates), rating, pair = rows(40, [1.0] * 6, seed=500 + seed)
        found = compare(candidates, baseline, rating, pair, resamples=150, seed=seed)
        alarms.append([any(one[m].verdict != "no evidence" for one in found) for m in MEASURES])
    # Five in a hundred, with three standard errors of two hundred trials.
    assert (np.mean(alarms, axis=0) <= 0.1).all()


def test_a_true_difference_of_the_minimum_is_seen_in_four_of_five_samples():
    errors = [0.8, 1.75]
    ways, rating, pair = rows(50_000, errors, seed=1)
    truth = np.subtract(*bootstrap_metrics(ways, rating, pair, resamples=0).values[0])
    found = []
    for seed in range(200):
        ways, rating, pair = rows(60, errors, seed=1_000 + seed)
        found += compare(ways[:1], ways[1], rating, pair, resamples=150, seed=seed)
    # The errors were chosen for this.
    assert np.mean([one["spearman"].minimum for one in found]) == pytest.approx(truth, rel=0.05)
    assert 0.7 <= np.mean([one["spearman"].p <= 0.05 for one in found]) <= 0.9


def test_the_simulation_runs():
    script = [sys.executable, ROOT / "scripts" / "simulate_comparison.py"]
    small = ["--trials", "3", "--pairs", "20", "--resamples", "20", "--percentiles", "--json"]
    small += ["--truth", "50_000"]
    done = subprocess.run([*script, *small], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["results"]) == 4
    assert result["true_difference"]["spearman"] == pytest.approx(0.043, abs=0.01)


# -- seeds, single ways, and several baselines -------------------------------------------------


def fits(rng, truth, quality, n_seeds, spread):
    """Predictions of several fits that are not equally good."""
    errors = quality + spread * rng.standard_normal(n_seeds)
    own = rng.standard_normal(len(truth))
    return np.array([truth + error * own for error in errors])


def seeded(spread, n_seeds=3, n_pairs=200):
    rng = np.random.default_rng(7)
    pair = np.repeat(np.arange(n_pairs), 2)
    truth = rng.standard_normal(2 * n_pairs)
    rating = np.round(truth * 2) / 2
    ways = [fits(rng, truth, 1.0, n_seeds, spread) for i in range(5)]
    return ways, rating, pair


def test_the_error_of_seeds_is_pooled_and_added():
    ways, rating, pair = seeded(0.1)
    found = compare(ways[1:], ways[0], rating, pair)
    scores = np.array([[spearmanr(fit, rating).statistic for fit in way] for way in ways])
    pooled = scores.var(axis=1, ddof=1).mean()  # 5 ways of 3 seeds: 10 degrees of freedom
    drawn = bootstrap_metrics(ways, rating, pair).sampled[0]
    for i, one in enumerate(found, start=1):
        rows = (drawn[i] - drawn[0]).var(ddof=1) * 200 / 199
        seeds = 2 * pooled / 3
        assert one["spearman"].seed_error == pytest.approx(np.sqrt(seeds))
        freedom = (rows + seeds) ** 2 / (rows**2 / 199 + seeds**2 / 10)
        half = student.ppf(0.975, freedom) * np.sqrt(rows + seeds)
        assert one["spearman"].high - one["spearman"].value == pytest.approx(half)
        assert one["spearman"].value - one["spearman"].low == pytest.approx(half)
        assert one["accuracy"].seed_error > 0


def test_fits_that_are_all_alike_add_nothing():
    ways, rating, pair = seeded(0.1, n_seeds=1)
    thrice = [np.repeat(way, 3, axis=0) for way in ways]
    single = compare(ways[1:], ways[0], rating, pair)
    repeated = compare(thrice[1:], thrice[0], rating, pair)
    for one, other in zip(single, repeated, strict=True):
        assert one["spearman"].seed_error == 0
        assert other["spearman"].p == pytest.approx(one["spearman"].p)
        assert other["spearman"].low == pytest.approx(one["spearman"].low)


def test_ways_are_measured_by_themselves_with_intervals_over_rows_and_seeds():
    ways, rating, pair = seeded(0.1)
    drawn = bootstrap_metrics(ways, rating, pair)
    for i, way in enumerate(ways):
        one = drawn.estimates(i)
        spearman, accuracy = one["spearman"], one["accuracy"]
        own = [spearmanr(fit, rating).statistic for fit in way]
        assert spearman.value == pytest.approx(np.mean(own))
        rows = drawn.sampled[0, i].var(ddof=1) * 200 / 199
        seeds = np.var(own, ddof=1) / len(own)
        freedom = (rows + seeds) ** 2 / (rows**2 / 199 + seeds**2 / (len(own) - 1))
        half = student.ppf(0.975, freedom) * np.sqrt(rows + seeds)
        assert spearman.high - spearman.value == pytest.approx(half)
        assert accuracy.low < accuracy.value < accuracy.high
    two = bootstrap_metrics([way[:2] for way in ways], rating, pair)
    assert np.isnan([two.estimates(0)["spearman"].low, two.estimates(0)["spearman"].high]).all()
    one = bootstrap_metrics([np.ones((2, len(rating)))], rating, pair).estimates(0)
    spearman = one["spearman"]
    assert np.isnan([spearman.value, spearman.low, spearman.high]).all()
    assert one["accuracy"].value == 0.5


@pytest.mark.parametrize("n_pairs", [3, 4, 5, 20])
def test_few_sentence_pairs_have_no_interval_and_none_leaves_the_range(n_pairs):
    pair = np.repeat(np.arange(n_pairs), 2)
    rating = np.tile([0.0, 1.0], n_pairs)
    for one in bootstrap_metrics([rating[None]], rating, pair).estimates(0).values():
        assert one.value == pytest.approx(1)
        if n_pairs < MIN_PAIRS:
            assert np.isnan([one.low, one.high]).all()
        else:
            assert one.low < one.high == 1


def test_comparisons_with_several_baselines_are_one_family():
    ways, rating, pair = seeded(0.0, n_seeds=1)
    drawn = bootstrap_metrics(ways, rating, pair)
    family = paired_differences(drawn, {0: [1, 2], 4: [3]})
    alone = {**paired_differences(drawn, {0: [1, 2]}), **paired_differences(drawn, {4: [3]})}
    assert list(family) == list(alone) == [1, 2, 3]
    for measure in ("spearman", "accuracy"):
        after = [one[measure] for one in family.values()]
        assert [one.p for one in after] == [one[measure].p for one in alone.values()]
        assert [one.p_holm for one in after] == holm(np.array([one.p for one in after])).tolist()
        for one in after:
            assert (one.verdict == "no evidence") == (one.p_holm > 0.05)
    assert paired_differences(drawn, {}) == {}
