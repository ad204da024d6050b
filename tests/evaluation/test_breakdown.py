"""Rank errors, conditions and levels, by small examples and by what has to hold always."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcond.evaluation.breakdown import (
    by_condition,
    calibration,
    chance_error,
    rank_error,
    rank_share,
    rating_span,
)

RATINGS = st.lists(st.integers(1, 5), min_size=1, max_size=40)


def test_places_go_from_0_to_1_with_ties_in_the_middle():
    assert rank_share(np.array([0.3, -1.0, 0.9])).tolist() == [0.5, 0.0, 1.0]
    assert rank_share(np.array([2.0, 2.0])).tolist() == [0.5, 0.5]
    assert rank_share(np.array([7.0])).tolist() == [0.5]
    assert rank_share(np.array([])).tolist() == []


def test_the_rows_of_a_rating_share_a_span():
    first, last = rating_span(np.array([1.0, 2.0, 2.0, 2.0, 3.0]))
    assert first.tolist() == [0.0, 0.25, 0.25, 0.25, 1.0]
    assert last.tolist() == [0.0, 0.75, 0.75, 0.75, 1.0]


def test_a_row_within_its_ratings_span_has_no_error_and_others_have_a_sign():
    rating = np.array([1.0, 1.0, 2.0, 2.0, 3.0])
    assert rank_error(np.array([0.1, 0.2, 0.4, 0.3, 0.9]), rating).tolist() == [0] * 5
    swapped = rank_error(np.array([0.9, 0.2, 0.4, 0.3, 0.1]), rating)
    assert swapped.tolist() == [0.75, 0.0, 0.0, 0.0, -1.0]


@given(RATINGS, st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_any_order_that_agrees_with_the_ratings_has_no_error(ratings, random):
    rating = np.array(ratings, dtype=float)
    within = np.array([random.random() * 0.9 for _ in ratings])
    assert np.abs(rank_error(rating + within, rating)).max() < 1e-12


@given(RATINGS)
@settings(max_examples=50, deadline=None)
def test_errors_do_not_depend_on_the_unit_of_predictions(ratings):
    rating = np.array(ratings, dtype=float)
    similarity = np.random.default_rng(len(ratings)).normal(size=len(rating))
    np.testing.assert_allclose(
        rank_error(similarity, rating), rank_error(np.exp(3 * similarity), rating / 4)
    )


def test_chance_is_the_mean_over_random_orders():
    rating = np.array([1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 5.0])
    random = np.random.default_rng(0)
    drawn = [np.abs(rank_error(random.permutation(7).astype(float), rating)) for _ in range(4_000)]
    np.testing.assert_allclose(chance_error(rating), np.mean(drawn, axis=0), atol=0.015)
    assert chance_error(np.array([2.0])).tolist() == [0.0]
    assert chance_error(np.array([2.0, 2.0])).tolist() == [0.0, 0.0]


def test_conditions_are_grouped_whatever_their_case_white_space_and_full_stop():
    groups = by_condition(["The sport.", "the age", "the  sport", "The Sport", "the age"])
    assert groups.label == ("The sport.", "the age")
    assert groups.index.tolist() == [0, 1, 0, 0, 1]
    assert groups.count.tolist() == [3, 2]


def test_means_by_condition_leave_out_what_is_unknown():
    groups = by_condition(["a", "a", "b", "c"])
    means = groups.mean(np.array([1.0, 3.0, np.nan, 5.0]))
    assert means[[0, 2]].tolist() == [2.0, 5.0]
    assert np.isnan(means[1])


def test_each_rating_is_a_level_with_its_quartiles():
    low, high = calibration(
        np.array([0.0, 0.2, 0.4, 0.6, 0.8, 9.0]), np.array([1.0, 1, 1, 1, 1, 5])
    )
    assert (low.rating, low.n, high.rating, high.n) == (1.0, 5, 5.0, 1)
    assert [low.mean, low.low, low.median, low.high] == pytest.approx([0.4, 0.2, 0.4, 0.6])
    assert (high.mean, high.low, high.median, high.high) == (9.0, 9.0, 9.0, 9.0)


def test_many_ratings_are_put_into_classes_that_hold_every_row():
    rating = np.linspace(0, 1, 500)
    levels = calibration(rating**2, rating)
    assert len(levels) == 10
    assert sum(level.n for level in levels) == 500
    assert [level.mean for level in levels] == sorted(level.mean for level in levels)


def test_no_rows_have_no_levels():
    assert calibration(np.array([]), np.array([])) == []
