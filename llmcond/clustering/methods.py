"""Clustering methods: K-means with a given or chosen K, and HDBSCAN."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

Vectors = NDArray[np.float32]
Labels = NDArray[np.int64]

#: Label of texts that HDBSCAN assigns to no cluster.
NOISE = -1
#: Number of texts that K is chosen on; computing the silhouette takes every pair of them.
SAMPLE_SIZE = 2_000
#: Mean silhouette up to which there is no substantial structure (Kaufman and Rousseeuw, 1990).
CLEAR_SILHOUETTE = 0.25
#: Number of starts of K-means, of which the tightest clustering is used; fewer when choosing K.
STARTS, _STARTS_OF_CHOICE = 10, 2
#: Number of principal components that HDBSCAN works on.
_COMPONENTS = 5
#: Up to this many vectors are clustered on one thread; ``llmcond.evaluation.analyses`` says why.
_SINGLE_THREAD_ROWS = 2_000


def kmeans(vectors: Vectors, k: int, seed: int, starts: int = STARTS) -> Labels:
    """Cluster n vectors with K-means; return (n,) cluster numbers, 0 for the largest cluster."""
    from sklearn.cluster import KMeans

    with threadpool_limits(1 if len(vectors) <= _SINGLE_THREAD_ROWS else None):
        labels = KMeans(n_clusters=k, n_init=starts, random_state=seed).fit_predict(vectors)
    return number_by_size(labels)


def distinct_vectors(vectors: Vectors) -> Vectors:
    """Return the (m, d) distinct ones of unit vectors, which differ in five decimals."""
    return np.unique(vectors.round(5), axis=0)


def choose_k(vectors: Vectors, seed: int) -> tuple[int, dict[int, float]]:
    """Return the K with the highest mean silhouette, and the silhouettes of all candidates.

    Candidates are 2 to 12, then in steps of a quarter up to 100, as long as there are ten vectors
    per cluster. They are compared on ``SAMPLE_SIZE`` vectors that are sampled with the seed. 2 is
    chosen only if its silhouette is above ``CLEAR_SILHOUETTE``, because for data without clear
    clusters two halves still have the highest silhouette.
    """
    from sklearn.metrics import silhouette_score

    points = distinct_vectors(vectors[sample_indices(len(vectors), SAMPLE_SIZE, seed)])
    candidates = [k for k in _candidate_ks() if k == 2 or 10 * k <= len(points)]
    scores = {}
    for k in candidates:
        # Two points form two clusters, whose silhouette is undefined.
        labels = kmeans(points, k, seed, _STARTS_OF_CHOICE) if len(points) > k else None
        scores[k] = 0.0 if labels is None else float(silhouette_score(points, labels))
    eligible = [k for k in candidates if k > 2 or scores[k] > CLEAR_SILHOUETTE] or candidates
    return max(eligible, key=lambda k: scores[k]), scores


def silhouette(vectors: Vectors, labels: Labels, seed: int) -> float | None:
    """Return the mean silhouette of clusters, on a sample of ``SAMPLE_SIZE`` vectors.

    It is None where it is undefined: for a single cluster, or if each vector is its own cluster.
    """
    from sklearn.metrics import silhouette_score

    sampled = sample_indices(len(vectors), SAMPLE_SIZE, seed)
    sampled = sampled[labels[sampled] != NOISE]
    if not 1 < len(np.unique(labels[sampled])) < len(sampled):
        return None
    return float(silhouette_score(vectors[sampled], labels[sampled]))


def _candidate_ks() -> list[int]:
    candidates = list(range(2, 13))
    while candidates[-1] <= 80:
        candidates.append(candidates[-1] * 5 // 4)
    return candidates


def hdbscan(vectors: Vectors, min_cluster_size: int) -> Labels:
    """Cluster n vectors with HDBSCAN; return (n,) cluster numbers, ``NOISE`` for vectors in none.

    It works on ``_COMPONENTS`` principal components: in hundreds of dimensions hardly any region is
    dense, so that most texts are in no cluster, and 10,000 texts take a minute.

    Args:
        vectors: (n, d).
        min_cluster_size: minimal number of vectors in a cluster.
    """
    from sklearn.cluster import HDBSCAN
    from sklearn.decomposition import PCA

    n_components = min(_COMPONENTS, *vectors.shape)
    with np.errstate(invalid="ignore"):  # equal vectors have no variance to explain
        points = PCA(n_components, random_state=0).fit_transform(vectors)
    return number_by_size(HDBSCAN(min_cluster_size=min_cluster_size, copy=True).fit_predict(points))


def number_by_size(labels: NDArray[Any]) -> Labels:
    """Renumber labels by the size of their clusters, from 0 for the largest; ``NOISE`` remains."""
    values, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(np.where(values == NOISE, 0, -counts), kind="stable")
    order = order[values[order] != NOISE]
    new_labels = np.full(len(values), NOISE)
    new_labels[order] = np.arange(len(order))
    return np.asarray(new_labels[inverse], dtype=np.int64)


def sample_indices(n: int, most: int, seed: int) -> NDArray[np.int64]:
    """Sample at most ``most`` of n indices without replacement; return them in ascending order."""
    if n <= most:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).choice(n, most, replace=False))
