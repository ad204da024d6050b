"""Analyses: compared with slow reference implementations, and at extremes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmcond.evaluation.analyses as analyses_module
from llmcond.base.errors import UserError
from llmcond.base.metrics import METRICS
from llmcond.data.rows import Rows
from llmcond.evaluation.analyses import (
    by_condition,
    chance_error,
    frobenius_variance,
    impurity,
    isotropy,
    measure_isotropy,
    most_changed,
    project_2d,
    rank_error,
    rank_share,
    seen_unseen,
)
from llmcond.evaluation.paired import bootstrap_metrics


def sample_gaussians(n, dim, seed=0, shift=0.0, dtype=np.float32):
    return (np.random.default_rng(seed).normal(size=(n, dim)) + shift).astype(dtype)


# -- isotropy -----------------------------------------------------------------------------------


def compute_isotropy_slowly(vectors, directions, seed):
    """Compute isotropy literally as in appendix B of the CASE paper."""
    rows = [[float(value) for value in row] for row in vectors]
    mean = np.mean(rows, axis=0)
    cosines = [row @ mean / (np.linalg.norm(row) * np.linalg.norm(mean)) for row in np.array(rows)]
    normals = np.random.default_rng((seed, directions)).standard_normal((directions, len(mean)))
    sums = []
    for direction in normals:
        u = direction / math.sqrt(sum(value**2 for value in direction))
        sums.append(sum(math.exp(np.dot(row, u) / np.linalg.norm(row)) for row in rows))
    return np.mean(cosines), np.std(cosines), min(sums) / max(sums)


def collect_statistics(result):
    return [result[0][key] for key in ("mean_cosine", "std_cosine", "partition_ratio")]


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 20),
    dim=st.integers(1, 12),
    seed=st.integers(0, 99),
    shift=st.sampled_from([0.0, 0.3, 5.0]),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
)
def test_isotropy_matches_slow_implementation(n, dim, seed, shift, dtype):
    vectors = sample_gaussians(n, dim, seed, shift, dtype)
    result = isotropy(vectors, directions=25, seed=seed)
    assert result[0]["n"] == n
    assert collect_statistics(result) == pytest.approx(
        compute_isotropy_slowly(vectors, 25, seed), rel=1e-5, abs=1e-7
    )


def test_isotropy_depends_on_neither_blocks_nor_scale(monkeypatch, tmp_path):
    vectors = sample_gaussians(100, 8, shift=0.2)
    expected = collect_statistics(isotropy(vectors))
    scaled = (vectors * 1e4).astype(np.float16)  # the squares of these values overflow
    assert collect_statistics(isotropy(scaled)) == pytest.approx(expected, rel=1e-2, abs=1e-3)
    monkeypatch.setattr(analyses_module, "_BLOCK", 7)
    np.save(tmp_path / "vectors.npy", vectors)
    mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    assert collect_statistics(isotropy(mapped)) == pytest.approx(expected, rel=1e-6)


def test_zero_vectors_are_counted_and_left_out():
    vectors = sample_gaussians(20, 4, shift=1)
    figures, cosines = measure_isotropy("a", np.concatenate([vectors, np.zeros((3, 4))]))
    assert (figures["name"], figures["n"], figures["n_zero"]) == ("a", 20, 3)
    np.testing.assert_array_equal(cosines, isotropy(vectors)[1])
    assert figures["mean_cosine"] == pytest.approx(cosines.mean())
    figures, cosines = measure_isotropy("a", np.zeros((3, 4)))
    assert (figures["n"], figures["n_zero"], figures["mean_cosine"]) == (0, 3, None)
    assert cosines.size == 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("analyse", [isotropy, lambda x: impurity(x, "a" * len(x)), project_2d])
def test_invalid_vectors_are_rejected(analyse):
    for vectors, message in (
        (np.zeros((0, 3)), r"shape \(0, 3\)"),
        (np.ones(5), r"shape \(5,\)"),
        (np.array([[1.0, 2.0], [np.nan, 1.0]]), "1 of 2 vectors are NaN or infinite.*position 1"),
    ):
        with pytest.raises(UserError, match=message):
            analyse(vectors)


# -- clusters -----------------------------------------------------------------------------------


def make_blobs(k, per_group, dim=8, seed=0, spread=0.05):
    """Return k well-separated groups of vectors, and the group number of each vector."""
    group = np.repeat(np.arange(k), per_group)
    centres = np.eye(k, dim) * 10
    return (centres[group] + spread * sample_gaussians(k * per_group, dim, seed)).astype(
        np.float32
    ), group


def test_separated_conditions_have_impurity_0():
    vectors, group = make_blobs(3, 20)
    names = ["The sport", "The number of people", "The name of the object"]
    result = impurity(vectors.astype(np.float16), [names[i] for i in group])
    assert str(result["value"]) == "0.0"
    assert (result["n_clusters"], result["conditions"]) == (3, tuple(names))
    assert np.sort(result["counts"], axis=1).tolist() == [[0, 0, 20]] * 3


def test_shared_cluster_shows_in_counts_but_not_in_impurity():
    vectors, group = make_blobs(3, 20)
    # b and c share a cluster, and a has two clusters to itself.
    labels = [("a", "a", "b")[i] for i in group]
    labels[-10:] = ["c"] * 10
    result = impurity(vectors, labels)
    assert result["value"] == pytest.approx(40 / 60 * math.log(2))
    assert np.sort(result["counts"], axis=1).tolist() == [[0, 20, 20], [0, 0, 10], [0, 0, 10]]
    assert np.argmax(result["counts"][1]) == np.argmax(result["counts"][2])


@settings(max_examples=20, deadline=None)
@given(n=st.integers(3, 30), dim=st.integers(2, 12), seed=st.integers(0, 99))
def test_projection_equals_singular_value_decomposition(n, dim, seed):
    vectors = sample_gaussians(n, dim, seed, dtype=np.float64)
    centred = vectors - vectors.mean(axis=0)
    _, _, directions = np.linalg.svd(centred)
    expected = centred @ directions[:2].T
    np.testing.assert_allclose(np.abs(project_2d(vectors)), np.abs(expected), atol=1e-6)


# -- conditions ---------------------------------------------------------------------------------


def make_rated_rows(condition):
    """Return rows of pairs with two rows each, and predictions."""
    rng, n = np.random.default_rng(0), len(condition)
    rating = rng.integers(0, 5, size=n) / 4
    similarity = (rating + rng.normal(size=n)).astype(np.float32)
    sentences = [f"a {i // 2}" for i in range(n)], [f"b {i // 2}" for i in range(n)]
    return Rows(*sentences, condition, rating, np.arange(n), ""), similarity


@pytest.mark.parametrize("name", ["spearman", "accuracy"])
def test_seen_and_unseen_rows_are_scored_separately(name):
    rows, similarity = make_rated_rows([f"condition {i // 4 % 7}" for i in range(80)])
    train, metric = ["condition 1", "condition 4", "condition 4", "never scored"], METRICS[name]
    results = seen_unseen(train, rows, similarity, metric, resamples=50)
    seen = np.array([text in train for text in rows.condition])
    for kind, mask, n in (("overall", seen | ~seen, 7), ("seen", seen, 2), ("unseen", ~seen, 5)):
        separate = bootstrap_metrics(
            [similarity[None, mask]], rows.rating[mask], rows.pair[mask], [metric], 50
        )
        score = results[kind].main
        assert score == separate.estimates(0)[name]
        assert score.low < score.value < score.high
        assert results[kind].about["n_conditions"] == n
    assert results["overall"].n == results["seen"].n + results["unseen"].n == 80


def test_conditions_are_seen_by_exact_text():
    rows, similarity = make_rated_rows(["The sport", "The sport.", "the sport", "The sport "])
    metric = METRICS["spearman"]
    results = seen_unseen(["The sport"], rows, similarity, metric, 0)
    assert (results["seen"].n, results["unseen"].n) == (1, 3)
    results = seen_unseen(rows.condition, rows, similarity, metric, 0)
    assert (results["unseen"].n, math.isnan(results["unseen"].main.value)) == (0, True)
    assert results["seen"].main.value == results["overall"].main.value
    with pytest.raises(UserError, match="4 of 4 predictions are NaN or infinite"):
        seen_unseen(["a"], rows, np.full(4, np.inf), metric)


@given(n=st.integers(2, 8), height=st.integers(1, 6), width=st.integers(1, 6))
def test_variance_of_norms_equals_variance_of_matrices(n, height, width):
    matrices = sample_gaussians(n * height, width, dtype=np.float64).reshape(n, height, width)
    norms = np.array([math.sqrt((matrix**2).sum()) for matrix in matrices])
    result = frobenius_variance(norms, height * width)
    scaled = [math.sqrt((matrix**2).mean()) for matrix in matrices]
    assert result["n"] == n
    assert result["raw"] == pytest.approx(sum((norms - norms.mean()) ** 2) / n)
    normalised = np.mean(np.square(scaled)) - np.mean(scaled) ** 2
    assert result["normalised"] == pytest.approx(normalised)


UNIT = st.integers(0, 4).map(lambda value: value / 4)


@given(st.lists(st.tuples(UNIT, UNIT, UNIT), min_size=1, max_size=12))
def test_most_changed_matches_slow_implementation(rows):
    # Quarters are exact in floating point, so equal changes compare equal.
    result = most_changed(*np.array(rows).T)
    gain = {i: abs(before - r) - abs(after - r) for i, (r, before, after) in enumerate(rows)}
    better = sorted((i for i in gain if gain[i] > 0), key=lambda i: (-gain[i], i))
    worse = sorted((i for i in gain if gain[i] < 0), key=lambda i: (gain[i], i))
    assert result == (better, worse)


# -- errors by rank, condition and rating -------------------------------------------------------


def test_rank_error_is_signed_distance_to_rating_span():
    assert rank_share(np.array([0.3, -1.0, 0.9, 0.3])).tolist() == [0.5, 0.0, 1.0, 0.5]
    assert rank_share(np.array([7.0])).tolist() == [0.5]
    rating = np.array([1.0, 1.0, 2.0, 2.0, 3.0])
    assert rank_error(np.array([0.1, 0.2, 0.4, 0.3, 0.9]), rating).tolist() == [0] * 5
    swapped = rank_error(np.array([0.9, 0.2, 0.4, 0.3, 0.1]), rating)
    assert swapped.tolist() == [0.75, 0.0, 0.0, 0.0, -1.0]
    assert rank_error(np.array([0.4]), np.array([1.0])).tolist() == [0]


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
