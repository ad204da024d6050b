"""Breakdowns of prediction errors: small examples, and properties of rank errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcond.evaluation.analyses import (
    by_condition,
    calibration,
    chance_error,
    rank_error,
    rank_share,
    rating_span,
)

RATINGS = st.lists(st.integers(1, 5), min_size=1, max_size=40)


def test_rank_share_gives_ties_their_mean_rank():
    assert rank_share(np.array([0.3, -1.0, 0.9])).tolist() == [0.5, 0.0, 1.0]
    assert rank_share(np.array([2.0, 2.0])).tolist() == [0.5, 0.5]
    assert rank_share(np.array([7.0])).tolist() == [0.5]
    assert rank_share(np.array([])).tolist() == []


def test_rows_of_equal_rating_share_a_span():
    first, last = rating_span(np.array([1.0, 2.0, 2.0, 2.0, 3.0]))
    assert first.tolist() == [0.0, 0.25, 0.25, 0.25, 1.0]
    assert last.tolist() == [0.0, 0.75, 0.75, 0.75, 1.0]


def test_rank_error_is_signed_distance_to_rating_span():
    rating = np.array([1.0, 1.0, 2.0, 2.0, 3.0])
    assert rank_error(np.array([0.1, 0.2, 0.4, 0.3, 0.9]), rating).tolist() == [0] * 5
    swapped = rank_error(np.array([0.9, 0.2, 0.4, 0.3, 0.1]), rating)
    assert swapped.tolist() == [0.75, 0.0, 0.0, 0.0, -1.0]


@given(RATINGS, st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_order_that_agrees_with_ratings_has_no_error(ratings, random):
    rating = np.array(ratings, dtype=float)
    offsets = np.array([random.random() * 0.9 for _ in ratings])
    assert np.abs(rank_error(rating + offsets, rating)).max() < 1e-12


@given(RATINGS)
@settings(max_examples=50, deadline=None)
def test_errors_do_not_depend_on_scale_of_predictions(ratings):
    rating = np.array(ratings, dtype=float)
    similarity = np.random.default_rng(len(ratings)).normal(size=len(rating))
    np.testing.assert_allclose(
        rank_error(similarity, rating), rank_error(np.exp(3 * similarity), rating / 4)
    )


def test_chance_error_is_mean_over_random_orders():
    rating = np.array([1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 5.0])
    random = np.random.default_rng(0)
    errors = [np.abs(rank_error(random.permutation(7).astype(float), rating)) for _ in range(4_000)]
    np.testing.assert_allclose(chance_error(rating), np.mean(errors, axis=0), atol=0.015)
    assert chance_error(np.array([2.0])).tolist() == [0.0]
    assert chance_error(np.array([2.0, 2.0])).tolist() == [0.0, 0.0]


def test_conditions_are_grouped_ignoring_case_spaces_and_full_stop():
    groups = by_condition(["The sport.", "the age", "the  sport", "The Sport", "the age"])
    assert groups.label == ("The sport.", "the age")
    assert groups.index.tolist() == [0, 1, 0, 0, 1]
    assert groups.count.tolist() == [3, 2]


def test_means_by_condition_ignore_nan():
    groups = by_condition(["a", "a", "b", "c"])
    means = groups.mean(np.array([1.0, 3.0, np.nan, 5.0]))
    assert means[[0, 2]].tolist() == [2.0, 5.0]
    assert np.isnan(means[1])


def test_calibration_has_one_level_per_rating_with_quartiles():
    low, high = calibration(
        np.array([0.0, 0.2, 0.4, 0.6, 0.8, 9.0]), np.array([1.0, 1, 1, 1, 1, 5])
    )
    assert (low.rating, low.n, high.rating, high.n) == (1.0, 5, 5.0, 1)
    assert [low.mean, low.low, low.median, low.high] == pytest.approx([0.4, 0.2, 0.4, 0.6])
    assert (high.mean, high.low, high.median, high.high) == (9.0, 9.0, 9.0, 9.0)


def test_calibration_groups_many_ratings_without_losing_rows():
    rating = np.linspace(0, 1, 500)
    levels = calibration(rating**2, rating)
    assert len(levels) == 10
    assert sum(level.n for level in levels) == 500
    assert [level.mean for level in levels] == sorted(level.mean for level in levels)


def test_calibration_of_no_rows_is_empty():
    assert calibration(np.array([]), np.array([])) == []
