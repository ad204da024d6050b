"""Groups of vectors: K-means with K given or chosen, and HDBSCAN."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

Vectors = NDArray[np.float32]
Labels = NDArray[np.int64]

#: The label of what HDBSCAN puts into no cluster.
NOISE = -1
#: Texts that K is chosen on; the silhouette takes every pair of them.
SAMPLE = 2_000
#: A mean silhouette up to which there is no substantial structure (Kaufman and Rousseeuw, 1990).
CLEAR = 0.25
#: K-means is started so often, and the tightest clustering kept; fewer times where K is chosen.
STARTS, _STARTS_OF_CHOICE = 10, 2
#: Principal components that HDBSCAN works on.
_KEPT = 5
#: So few vectors are clustered by one thread: see :mod:`llmcond.evaluation.clusters`.
_FEW = 2_000


def kmeans(vectors: Vectors, k: int, seed: int, starts: int = STARTS) -> Labels:
    """Return (n,) the cluster of each of n vectors, by K-means; the largest is 0."""
    from sklearn.cluster import KMeans

    with threadpool_limits(1 if len(vectors) <= _FEW else None):
        found = KMeans(n_clusters=k, n_init=starts, random_state=seed).fit_predict(vectors)
    return by_size(found)


def choose_k(vectors: Vectors, seed: int) -> tuple[int, dict[int, float]]:
    """Return the K with the highest mean silhouette, and the silhouettes of all that were tried.

    K is 2 to 12, then in steps of a quarter up to 100, as far as there are ten vectors a cluster;
    on ``SAMPLE`` vectors that the seed draws. 2 is taken only where its silhouette is above
    ``CLEAR``: of what has no clear clusters, the two halves have the highest all the same.
    """
    from sklearn.metrics import silhouette_score

    points = np.unique(vectors[sample(len(vectors), SAMPLE, seed)], axis=0)
    tried = [k for k in _candidates() if k == 2 or 10 * k <= len(points)]
    scores = {}
    for k in tried:
        # Two points are two clusters, whose silhouette is not defined.
        labels = kmeans(points, k, seed, _STARTS_OF_CHOICE) if len(points) > k else None
        scores[k] = 0.0 if labels is None else float(silhouette_score(points, labels))
    legal = [k for k in tried if k > 2 or scores[k] > CLEAR] or tried
    return max(legal, key=lambda k: scores[k]), scores


def silhouette(vectors: Vectors, labels: Labels, seed: int) -> float | None:
    """Return the mean silhouette of clusters, on ``SAMPLE`` vectors that the seed draws.

    None where it is undefined: of one cluster, or where each vector is one.
    """
    from sklearn.metrics import silhouette_score

    sampled = sample(len(vectors), SAMPLE, seed)
    sampled = sampled[labels[sampled] != NOISE]
    if not 1 < len(np.unique(labels[sampled])) < len(sampled):
        return None
    return float(silhouette_score(vectors[sampled], labels[sampled]))


def _candidates() -> list[int]:
    found = list(range(2, 13))
    while found[-1] <= 80:
        found.append(found[-1] * 5 // 4)
    return found


def hdbscan(vectors: Vectors, least: int) -> Labels:
    """Return (n,) the cluster of each of n vectors by HDBSCAN, ``NOISE`` where it is in none.

    It works on ``_KEPT`` principal components: in hundreds of dimensions hardly anything is dense,
    so that most texts are in no cluster, and 10,000 take a minute.

    Args:
        vectors: (n, d).
        least: vectors that make a cluster.
    """
    from sklearn.cluster import HDBSCAN
    from sklearn.decomposition import PCA

    kept = min(_KEPT, *vectors.shape)
    with np.errstate(invalid="ignore"):  # of equal vectors no component explains a share
        points = PCA(kept, random_state=0).fit_transform(vectors)
    return by_size(HDBSCAN(min_cluster_size=least, copy=True).fit_predict(points))


def by_size(labels: NDArray[Any]) -> Labels:
    """Return labels numbered from the largest cluster, 0, on; ``NOISE`` stays so."""
    values, place, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(np.where(values == NOISE, 0, -counts), kind="stable")
    order = order[values[order] != NOISE]
    number = np.full(len(values), NOISE)
    number[order] = np.arange(len(order))
    return np.asarray(number[place], dtype=np.int64)


def sample(n: int, most: int, seed: int) -> NDArray[np.int64]:
    """Return the places of ``most`` of n at most, in their order."""
    if n <= most:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).choice(n, most, replace=False))
