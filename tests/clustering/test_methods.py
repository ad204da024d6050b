"""Clustering of vectors: methods, number of clusters, descriptions, scores and maps."""

from itertools import pairwise

import numpy as np
import pytest
from scipy.linalg import orthogonal_procrustes
from sklearn.metrics import adjusted_rand_score, v_measure_score

from llmcond.clustering.describe import describe_clusters
from llmcond.clustering.methods import (
    CLEAR_SILHOUETTE,
    NOISE,
    SAMPLE_SIZE,
    choose_k,
    compute_maps,
    hdbscan,
    kmeans,
    number_by_size,
    sample_indices,
    score_clusters,
)


def blobs(sizes, distance=6.0, dim=8, seed=0):
    """Return Gaussian points, ``sizes[i]`` of them around centre ``i``, and each point's centre."""
    random = np.random.default_rng(seed)
    centres = distance * np.eye(max(dim, len(sizes)))[: len(sizes), :]
    truth = np.repeat(np.arange(len(sizes)), sizes)
    points = centres[truth] + random.normal(size=(len(truth), centres.shape[1]))
    return points.astype(np.float32), truth


@pytest.mark.parametrize("k", [2, 3, 5, 15])
def test_choose_k_finds_number_of_separate_clusters(k):
    points, truth = blobs([40] * k, distance=12, dim=16)
    best_k, scores = choose_k(points, 0)
    assert best_k == k
    assert scores[k] > CLEAR_SILHOUETTE
    assert v_measure_score(truth, kmeans(points, k, 0)) == pytest.approx(1)


def test_choose_k_does_not_split_one_cloud_in_two():
    points = np.random.default_rng(0).normal(size=(300, 20)).astype(np.float32)
    points[:, 0] *= 2
    best_k, scores = choose_k(points, 0)
    assert max(scores, key=scores.get) == 2
    assert scores[2] < CLEAR_SILHOUETTE
    assert best_k > 2


def test_few_points_have_few_clusters():
    assert choose_k(np.eye(2, dtype=np.float32), 0) == (2, {2: 0.0})
    repeated = np.repeat(np.eye(3, dtype=np.float32), 20, axis=0)
    assert choose_k(repeated, 0)[0] == 2


def test_same_seed_gives_same_clusters_largest_first():
    points, _ = blobs([20, 50, 30], distance=2)
    labels, repeated_labels = kmeans(points, 3, 7), kmeans(points, 3, 7)
    assert labels.tolist() == repeated_labels.tolist()
    assert np.bincount(labels).tolist() == sorted(np.bincount(labels), reverse=True)
    assert number_by_size(np.array([5, NOISE, NOISE, NOISE, 2, 2])).tolist() == [
        1,
        -1,
        -1,
        -1,
        0,
        0,
    ]


def test_hdbscan_labels_outliers_as_noise():
    points, truth = blobs([40, 60], distance=12)
    outlier = np.full((1, points.shape[1]), 99, np.float32)
    labels = hdbscan(np.concatenate([points, outlier]), 10)
    assert labels[-1] == NOISE
    assert adjusted_rand_score(truth, labels[:-1]) > 0.9
    assert hdbscan(np.random.default_rng(0).uniform(size=(20, 8)), 15).tolist() == [NOISE] * 20


def test_sample_indices_are_limited_to_sample_size():
    assert sample_indices(5, 9, 0).tolist() == [0, 1, 2, 3, 4]
    indices = sample_indices(5 * SAMPLE_SIZE, SAMPLE_SIZE, 1)
    assert len(set(indices.tolist())) == SAMPLE_SIZE
    assert (
        indices.tolist()
        == sorted(indices)
        == sample_indices(5 * SAMPLE_SIZE, SAMPLE_SIZE, 1).tolist()
    )


def test_cluster_names_are_distinctive_words():
    texts = ["the dog ran in the park", "a dog barks in the park", "a cat sleeps in the park"] * 4
    texts += ["the cat purrs in the park"]
    labels = np.array([0, 0, 1] * 4 + [1])
    vectors = np.eye(2, dtype=np.float32)[labels] + np.arange(13)[:, None] * [0.001, 0]
    first, second = describe_clusters(texts, vectors, labels)
    assert first.name.startswith("dog, ")
    assert second.name.startswith("cat, ")
    assert not any(cluster.name.startswith(("park", "the")) for cluster in (first, second))
    assert (first.size, second.size) == (8, 5)
    # The most central text comes first, and each text occurs once.
    assert second.typical[0] == "a cat sleeps in the park"
    assert len(second.typical) == 2


def test_noise_comes_last_and_has_no_name():
    clusters = describe_clusters(["a b", "? !", "…"], np.eye(3), np.array([NOISE, 0, 0]))
    assert [cluster.cluster for cluster in clusters] == [0, NOISE]
    assert [cluster.name for cluster in clusters] == ["", ""]
    assert (clusters[1].size, clusters[1].typical) == (1, ())


def test_scores_match_scikit_learn_and_have_intervals():
    random = np.random.default_rng(0)
    truth = random.integers(4, size=300)
    good = np.where(random.random(300) < 0.8, truth, random.integers(4, size=300))
    bad = random.integers(4, size=300)
    labels = [None if i < 20 else f"l{label}" for i, label in enumerate(truth)]
    scores = score_clusters(good, bad, labels, "topic", "minilm, no condition")
    assert (scores.n, scores.classes) == (280, 4)
    v_measure = scores.own["v_measure"]
    assert v_measure.value == pytest.approx(v_measure_score(truth[20:], good[20:]))
    assert scores.own["ari"].value == pytest.approx(adjusted_rand_score(truth[20:], good[20:]))
    assert v_measure.low < v_measure.value < v_measure.high < v_measure.value + 0.15
    assert scores.difference["v_measure"].low > 0.2
    values = scores.to_json()
    assert values["base"] == "minilm, no condition"
    assert values["base_ari"] == pytest.approx(adjusted_rand_score(truth[20:], bad[20:]))
    assert values["minus_base_ari"] == pytest.approx(values["ari"] - values["base_ari"])


@pytest.mark.parametrize("n", [3, 60])
def test_equal_clusterings_have_zero_difference(n):
    truth, clusters = np.arange(n) % 3, np.where(np.arange(n) % 7, np.arange(n) % 3, 0)
    renamed = np.array([2, 0, 1])[clusters]
    scores = score_clusters(clusters, renamed, [str(label) for label in truth], "topic", "base")
    for name in ("v_measure", "ari"):
        difference = scores.difference[name]
        assert (difference.value, difference.low, difference.high) == pytest.approx((0, 0, 0))


def test_interval_of_perfect_score_extends_below_one():
    truth = np.arange(30) % 3
    estimates = score_clusters(truth, truth, [str(label) for label in truth], "topic", "base").own
    for estimate in estimates.values():
        assert (estimate.value, estimate.high) == pytest.approx((1, 1))
        assert 0.6 < estimate.low < 0.95


def test_texts_without_label_are_left_out():
    labels = ["a", "b", None, float("nan"), np.nan, " "]
    scores = score_clusters(
        np.array([0, 1, 0, 1, 0, 1]), np.zeros(6, np.int64), labels, "topic", "base"
    )
    assert (scores.n, scores.classes) == (2, 2)


def test_intervals_cover_truth_at_nominal_rate():
    # Texts have three labels; 80 % lie in their label's cluster, and the others in a random one.
    random = np.random.default_rng(0)
    expected = {"v_measure": 0.5580, "ari": 0.6400}
    n_covered = dict.fromkeys(expected, 0)
    for _ in range(200):
        labels = random.integers(3, size=60)
        clusters = np.where(random.random(60) < 0.8, labels, random.integers(3, size=60))
        estimates = score_clusters(
            clusters, clusters, labels.astype(str).tolist(), "topic", "base"
        ).own
        for name, value in expected.items():
            n_covered[name] += estimates[name].low <= value <= estimates[name].high
    assert min(n_covered.values()) >= 180


def spread(points):
    return np.linalg.norm(points - points.mean(axis=0), axis=1).mean()


def relative_shift(first, second):
    """Return the mean distance that points moved, relative to their spread."""
    return np.linalg.norm(first - second, axis=1).mean() / spread(first)


def test_map_keeps_clusters_separate():
    points, truth = blobs([25, 25], distance=12)
    (positions,) = compute_maps([points], 0)
    assert positions.min() >= 0
    assert positions.max() <= 1
    centres = [positions[truth == i].mean(axis=0) for i in (0, 1)]
    assert np.linalg.norm(centres[0] - centres[1]) > 3 * max(
        spread(positions[truth == i]) for i in (0, 1)
    )


@pytest.mark.parametrize("seed", range(3))
def test_map_starts_from_previous_map(seed):
    # The noise stands in for the rounding differences of another processor.
    points, _ = blobs([25, 15, 20, 30], distance=12, seed=seed)
    random = np.random.default_rng(seed)
    noisy_points = (points + random.normal(scale=1e-6, size=points.shape)).astype(np.float32)
    first_map, similar_map, other_map = compute_maps(
        [points, noisy_points, random.permutation(points)], seed
    )
    assert relative_shift(first_map, similar_map) < 0.2
    assert relative_shift(similar_map, other_map) > 0.6


def test_map_is_aligned_with_previous_map():
    random = np.random.default_rng(0)
    shared = random.normal(size=(60, 2))
    # The vectors share two dimensions, so that their maps differ and are still comparable.
    vector_sets = [np.hstack([shared, 3 * random.normal(size=(60, 6))]) for _ in range(4)]
    maps = compute_maps([vectors.astype(np.float32) for vectors in vector_sets], 0)
    for before, after in pairwise(maps):
        centred = [points - points.mean(axis=0) for points in (after, before)]
        rotation, _ = orthogonal_procrustes(*centred)
        np.testing.assert_allclose(rotation, np.eye(2), atol=1e-6)
        np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0), atol=1e-6)
        assert np.linalg.norm(centred[0]) == pytest.approx(np.linalg.norm(centred[1]))
    assert min(points.min() for points in maps) == pytest.approx(0)
    assert max(points.max() for points in maps) == pytest.approx(1)


@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (4, 1), (6, 3)])
def test_map_of_few_points_is_finite(shape):
    positions = compute_maps([np.random.default_rng(0).normal(size=shape).astype(np.float32)], 0)[0]
    assert positions.shape == (shape[0], 2)
    assert np.isfinite(positions).all()
    assert len(np.unique(positions, axis=0)) == shape[0]


def test_equal_vectors_have_finite_map():
    positions = compute_maps([np.ones((8, 3), np.float32)], 0)[0]
    assert np.isfinite(positions).all()
