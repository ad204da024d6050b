"""Metrics: equal to scipy's and to tables made by hand, with intervals over sentence pairs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import pearsonr, spearmanr

from llmcond.metrics import pearson, score, spearman

# Few distinct values, so that most examples have ties.
PAIRED = st.integers(3, 40).flatmap(
    lambda n: arrays(np.float64, (2, n), elements=st.integers(-5, 5).map(float))
)


def rows(n_pairs, seed=0, noise=1.0):
    """Two rows a pair, with ratings 1 to 5 that predictions follow more or less."""
    rng = np.random.default_rng(seed)
    rating = rng.integers(1, 6, size=2 * n_pairs).astype(float)
    similarity = (rating + noise * rng.normal(size=2 * n_pairs)).astype(np.float32)
    return similarity, rating, np.repeat(np.arange(n_pairs), 2)


@given(PAIRED)
@pytest.mark.filterwarnings("ignore::scipy.stats.ConstantInputWarning")
def test_correlations_equal_those_of_scipy(values):
    first, second = values
    for ours, theirs in ((spearman, spearmanr), (pearson, pearsonr)):
        expected = theirs(first, second).statistic
        assert ours(first, second) == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_scores_carry_the_correlations_of_all_rows():
    similarity, rating, pair = rows(50)
    scores = score(similarity, rating, pair, resamples=0)
    assert scores.spearman.value == pytest.approx(spearmanr(similarity, rating).statistic)
    assert scores.pearson.value == pytest.approx(pearsonr(similarity, rating).statistic)
    assert (scores.n, scores.n_pairs) == (100, 50)


# One line a sentence pair: its (similarity, rating) under each condition, then how many
# comparisons are correct, counted and tied.
ACCURACY = [
    ([(0.9, 5), (0.1, 1)], (1, 1, 0)),
    ([(0.1, 5), (0.9, 1)], (0, 1, 0)),
    ([(0.1, 1), (0.9, 5)], (1, 1, 0)),
    ([(0.5, 2), (0.5, 4)], (0, 1, 0)),  # an equal prediction is wrong
    ([(0.2, 3), (0.8, 3)], (0, 0, 1)),  # equal ratings are left out
    ([(0.5, 3), (0.5, 3)], (0, 0, 1)),
    ([(0.9, 5), (0.5, 3), (0.1, 1)], (3, 3, 0)),
    ([(0.9, 5), (0.1, 3), (0.5, 3)], (2, 2, 1)),
    ([(0.9, 1), (0.5, 3), (0.7, 5)], (1, 3, 0)),
    ([(0.4, 2)], (0, 0, 0)),  # a single condition has nothing to be compared with
]


@pytest.mark.parametrize(("conditions", "expected"), ACCURACY)
def test_accuracy_of_one_pair(conditions, expected):
    correct, compared, tied = expected
    similarity, rating = np.array(conditions, dtype=np.float64).T
    scores = score(similarity, rating, np.zeros(len(rating), dtype=np.int64), resamples=0)
    assert (scores.n_compared, scores.n_tied) == (compared, tied)
    share = correct / compared if compared else float("nan")
    assert scores.accuracy.value == pytest.approx(share, nan_ok=True)


def test_accuracy_over_pairs_counts_comparisons_whatever_the_order_of_rows():
    table = [(s, r, i) for i, (conditions, _) in enumerate(ACCURACY) for s, r in conditions]
    np.random.default_rng(0).shuffle(table)
    similarity, rating, pair = np.array(table).T
    scores = score(similarity, rating, pair.astype(np.int64), resamples=0)
    assert (scores.n_compared, scores.n_tied, scores.n_pairs) == (12, 3, 10)
    assert scores.accuracy.value == pytest.approx(8 / 12)


def test_pair_numbers_need_not_be_dense():
    similarity, rating, pair = rows(20)
    assert score(similarity, rating, pair * 1_000 + 7) == score(similarity, rating, pair)


def widths(scores):
    estimates = (scores.spearman, scores.pearson, scores.accuracy)
    return np.array([estimate.high - estimate.low for estimate in estimates])


def test_rows_doubled_within_their_pairs_do_not_narrow_the_intervals():
    similarity, rating, pair = rows(40)
    once = score(similarity, rating, pair)
    doubled = score(np.tile(similarity, 4), np.tile(rating, 4), np.tile(pair, 4))
    np.testing.assert_allclose(widths(doubled)[:2], widths(once)[:2], rtol=0.01)
    # A bootstrap over rows takes the copies for evidence: half the width for four times the rows.
    by_row = score(np.tile(similarity, 4), np.tile(rating, 4), np.arange(4 * len(pair)))
    assert (widths(by_row)[:2] < 0.65 * widths(once)[:2]).all()


def test_more_pairs_narrow_the_intervals():
    assert (widths(score(*rows(640))) < 0.5 * widths(score(*rows(40)))).all()


def test_intervals_hold_their_value():
    scores = score(*rows(60))
    for estimate in (scores.spearman, scores.pearson, scores.accuracy):
        assert estimate.low < estimate.value < estimate.high


def test_intervals_cover_the_truth_as_often_as_they_say():
    truth = score(*rows(50_000, seed=1, noise=2.0), resamples=0).pearson.value
    estimates = [
        score(*rows(60, seed=seed, noise=2.0), resamples=200).pearson for seed in range(100, 180)
    ]
    covered = np.mean([estimate.low <= truth <= estimate.high for estimate in estimates])
    assert covered >= 0.85


def test_intervals_are_a_function_of_the_seed():
    assert score(*rows(30), seed=4) == score(*rows(30), seed=4)
    assert score(*rows(30), seed=4).spearman != score(*rows(30), seed=5).spearman


def test_no_resamples_leave_the_intervals_open():
    scores = score(*rows(30), resamples=0)
    assert np.isnan(widths(scores)).all()
    assert np.isfinite(scores.spearman.value)


@pytest.mark.filterwarnings("error")
def test_constant_predictions_have_no_correlation_and_no_correct_comparison():
    _, rating, pair = rows(30)
    scores = score(np.full(60, 0.7, dtype=np.float32), rating, pair)
    for estimate in (scores.spearman, scores.pearson):
        assert np.isnan([estimate.value, estimate.low, estimate.high]).all()
    assert (scores.accuracy.value, scores.accuracy.high) == (0, 0)


@pytest.mark.filterwarnings("error")
def test_a_single_row_has_no_scores():
    scores = score(np.array([0.5]), np.array([3.0]), np.array([0]))
    assert np.isnan([scores.spearman.value, scores.pearson.value, scores.accuracy.value]).all()
    assert (scores.n, scores.n_pairs, scores.n_compared) == (1, 1, 0)
