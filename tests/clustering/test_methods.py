"""Clusters of vectors: how many, which, what they are called, and how they are scored and drawn."""

from itertools import pairwise

import numpy as np
import pytest
from scipy.linalg import orthogonal_procrustes
from sklearn.metrics import adjusted_rand_score, v_measure_score

from llmcond.clustering.describe import describe_clusters
from llmcond.clustering.maps import compute_maps
from llmcond.clustering.methods import (
    CLEAR_SILHOUETTE,
    NOISE,
    SAMPLE_SIZE,
    choose_k,
    hdbscan,
    kmeans,
    number_by_size,
    sample_indices,
)
from llmcond.clustering.scores import score_clusters


def blobs(sizes, apart=6.0, dim=8, seed=0):
    """Points around centres, the first so many around the first, and whose they are."""
    random = np.random.default_rng(seed)
    centres = apart * np.eye(max(dim, len(sizes)))[: len(sizes), :]
    truth = np.repeat(np.arange(len(sizes)), sizes)
    points = centres[truth] + random.normal(size=(len(truth), centres.shape[1]))
    return points.astype(np.float32), truth


@pytest.mark.parametrize("k", [2, 3, 5, 15])
def test_k_is_that_of_clusters_that_are_apart(k):
    points, truth = blobs([40] * k, apart=12, dim=16)
    chosen, scores = choose_k(points, 0)
    assert chosen == k
    assert scores[k] > CLEAR_SILHOUETTE
    assert v_measure_score(truth, kmeans(points, k, 0)) == pytest.approx(1)


def test_two_halves_of_a_cloud_are_not_taken_for_clusters():
    points = np.random.default_rng(0).normal(size=(300, 20)).astype(np.float32)
    points[:, 0] *= 2
    chosen, scores = choose_k(points, 0)
    assert max(scores, key=scores.get) == 2
    assert scores[2] < CLEAR_SILHOUETTE
    assert chosen > 2


def test_few_points_have_few_clusters():
    assert choose_k(np.eye(2, dtype=np.float32), 0) == (2, {2: 0.0})
    repeated = np.repeat(np.eye(3, dtype=np.float32), 20, axis=0)
    assert choose_k(repeated, 0)[0] == 2


def test_the_same_seed_gives_the_same_clusters_the_largest_first():
    points, _ = blobs([20, 50, 30], apart=2)
    first, again = kmeans(points, 3, 7), kmeans(points, 3, 7)
    assert first.tolist() == again.tolist()
    assert np.bincount(first).tolist() == sorted(np.bincount(first), reverse=True)
    assert number_by_size(np.array([5, NOISE, NOISE, NOISE, 2, 2])).tolist() == [
        1,
        -1,
        -1,
        -1,
        0,
        0,
    ]


def test_hdbscan_leaves_out_what_is_in_none():
    points, truth = blobs([40, 60], apart=12)
    far = np.full((1, points.shape[1]), 99, np.float32)
    labels = hdbscan(np.concatenate([points, far]), 10)
    assert labels[-1] == NOISE
    assert adjusted_rand_score(truth, labels[:-1]) > 0.9
    assert hdbscan(np.random.default_rng(0).uniform(size=(20, 8)), 15).tolist() == [NOISE] * 20


def test_a_sample_is_drawn_where_there_are_many():
    assert sample_indices(5, 9, 0).tolist() == [0, 1, 2, 3, 4]
    drawn = sample_indices(5 * SAMPLE_SIZE, SAMPLE_SIZE, 1)
    assert len(set(drawn.tolist())) == SAMPLE_SIZE
    assert (
        drawn.tolist() == sorted(drawn) == sample_indices(5 * SAMPLE_SIZE, SAMPLE_SIZE, 1).tolist()
    )


def test_names_are_what_sets_a_cluster_apart():
    texts = ["the dog ran in the park", "a dog barks in the park", "a cat sleeps in the park"] * 4
    texts += ["the cat purrs in the park"]
    labels = np.array([0, 0, 1] * 4 + [1])
    vectors = np.eye(2, dtype=np.float32)[labels] + np.arange(13)[:, None] * [0.001, 0]
    first, second = describe_clusters(texts, vectors, labels)
    assert first.name.startswith("dog, ")
    assert second.name.startswith("cat, ")
    assert not any(one.name.startswith(("park", "the")) for one in (first, second))
    assert (first.size, second.size) == (8, 5)
    # The one in the middle of its cluster, and each text once.
    assert second.typical[0] == "a cat sleeps in the park"
    assert len(second.typical) == 2


def test_what_is_in_no_cluster_comes_last_and_has_no_name():
    found = describe_clusters(["a b", "? !", "…"], np.eye(3), np.array([NOISE, 0, 0]))
    assert [one.cluster for one in found] == [0, NOISE]
    assert [one.name for one in found] == ["", ""]
    assert (found[1].size, found[1].typical) == (1, ())


def test_scores_are_those_of_scikit_learn_with_intervals_around_them():
    random = np.random.default_rng(0)
    truth = random.integers(4, size=300)
    good = np.where(random.random(300) < 0.8, truth, random.integers(4, size=300))
    bad = random.integers(4, size=300)
    labels = [None if i < 20 else f"l{label}" for i, label in enumerate(truth)]
    found = score_clusters(good, bad, labels, "topic", "minilm, no condition")
    assert (found.n, found.classes) == (280, 4)
    own = found.own["v_measure"]
    assert own.value == pytest.approx(v_measure_score(truth[20:], good[20:]))
    assert found.own["ari"].value == pytest.approx(adjusted_rand_score(truth[20:], good[20:]))
    assert own.low < own.value < own.high < own.value + 0.15
    assert found.difference["v_measure"].low > 0.2
    values = found.to_json()
    assert values["base"] == "minilm, no condition"
    assert values["base_ari"] == pytest.approx(adjusted_rand_score(truth[20:], bad[20:]))
    assert values["minus_base_ari"] == pytest.approx(values["ari"] - values["base_ari"])


@pytest.mark.parametrize("n", [3, 60])
def test_equal_clusterings_differ_by_nothing(n):
    truth, clusters = np.arange(n) % 3, np.where(np.arange(n) % 7, np.arange(n) % 3, 0)
    renamed = np.array([2, 0, 1])[clusters]
    found = score_clusters(clusters, renamed, [str(one) for one in truth], "topic", "base")
    for name in ("v_measure", "ari"):
        difference = found.difference[name]
        assert (difference.value, difference.low, difference.high) == pytest.approx((0, 0, 0))


def test_clusters_without_a_fault_in_a_sample_may_have_some_beyond_it():
    truth = np.arange(30) % 3
    own = score_clusters(truth, truth, [str(one) for one in truth], "topic", "base").own
    for estimate in own.values():
        assert (estimate.value, estimate.high) == pytest.approx((1, 1))
        assert 0.6 < estimate.low < 0.95


def test_texts_without_a_label_are_left_out():
    labels = ["a", "b", None, float("nan"), np.nan, " "]
    found = score_clusters(
        np.array([0, 1, 0, 1, 0, 1]), np.zeros(6, np.int64), labels, "topic", "base"
    )
    assert (found.n, found.classes) == (2, 2)


def test_intervals_hold_the_truth_as_often_as_they_say():
    # Of texts with three labels, 80 % lie in their label's cluster, the others anywhere.
    random = np.random.default_rng(0)
    expected = {"v_measure": 0.5580, "ari": 0.6400}
    held = dict.fromkeys(expected, 0)
    for _ in range(200):
        labels = random.integers(3, size=60)
        own = np.where(random.random(60) < 0.8, labels, random.integers(3, size=60))
        found = score_clusters(own, own, labels.astype(str).tolist(), "topic", "base").own
        for name, value in expected.items():
            held[name] += found[name].low <= value <= found[name].high
    assert min(held.values()) >= 180


def spread(points):
    return np.linalg.norm(points - points.mean(axis=0), axis=1).mean()


def moved(first, second):
    """How far points are from where they were, as a share of how far they are from the centre."""
    return np.linalg.norm(first - second, axis=1).mean() / spread(first)


def test_a_map_keeps_neighbours():
    points, truth = blobs([25, 25], apart=12)
    (found,) = compute_maps([points], 0)
    assert found.min() >= 0
    assert found.max() <= 1
    centres = [found[truth == i].mean(axis=0) for i in (0, 1)]
    assert np.linalg.norm(centres[0] - centres[1]) > 3 * max(
        spread(found[truth == i]) for i in (0, 1)
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_map_continues_from_the_one_before(seed):
    # What another processor's rounding changes, a little noise changes as well.
    points, _ = blobs([25, 15, 20, 30], apart=12, seed=seed)
    random = np.random.default_rng(seed)
    near = (points + random.normal(scale=1e-6, size=points.shape)).astype(np.float32)
    first, again, other = compute_maps([points, near, random.permutation(points)], seed)
    assert moved(first, again) < 0.2
    assert moved(again, other) > 0.6


def test_a_map_is_turned_mirrored_and_scaled_onto_the_one_before():
    random = np.random.default_rng(0)
    shared = random.normal(size=(60, 2))
    # Two conditions that have a little in common, so that maps differ and are still comparable.
    systems = [np.hstack([shared, 3 * random.normal(size=(60, 6))]) for _ in range(4)]
    maps = compute_maps([one.astype(np.float32) for one in systems], 0)
    for before, after in pairwise(maps):
        centred = [one - one.mean(axis=0) for one in (after, before)]
        rotation, _ = orthogonal_procrustes(*centred)
        np.testing.assert_allclose(rotation, np.eye(2), atol=1e-6)
        np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0), atol=1e-6)
        assert np.linalg.norm(centred[0]) == pytest.approx(np.linalg.norm(centred[1]))
    assert min(one.min() for one in maps) == pytest.approx(0)
    assert max(one.max() for one in maps) == pytest.approx(1)


@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (4, 1), (6, 3)])
def test_a_map_of_little_is_a_map(shape):
    found = compute_maps([np.random.default_rng(0).normal(size=shape).astype(np.float32)], 0)[0]
    assert found.shape == (shape[0], 2)
    assert np.isfinite(found).all()
    assert len(np.unique(found, axis=0)) == shape[0]


def test_equal_vectors_have_a_map():
    found = compute_maps([np.ones((8, 3), np.float32)], 0)[0]
    assert np.isfinite(found).all()
