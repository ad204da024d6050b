"""Clustering of vectors by condition: K-means impurity (Hyper-CL, 5.2), and a 2D projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import xlogy

from llmcond.errors import UserError
from llmcond.evaluation.isotropy import check_shape

#: The number of K-means starts, of which the tightest clustering is used.
_N_INIT = 10

#: Up to this number of vectors, K-means uses one thread. OpenMP threads spin while they wait for
#: each other, which takes longer than the work if other processes use the same cores.
_MAX_SINGLE_THREADED = 2_000


@dataclass(frozen=True, slots=True)
class Impurity:
    """How K-means clusters split the vectors of each condition.

    Attributes:
        value: The impurity I of Hyper-CL, section 5.2, in nats: 0 if each condition lies in one
            cluster, at most ln(n_clusters).
        conditions: The distinct labels, in the order in which they first occur.
        counts: The number of vectors of each condition in each cluster.
        n_clusters: K, the number of conditions.
    """

    value: float
    conditions: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    n_clusters: int


def impurity(vectors: NDArray[Any], labels: Sequence[str], seed: int = 0) -> Impurity:
    """Cluster the embeddings of sentences under several conditions, and compare with these.

    The method is that of Hyper-CL, section 5.2: K-means with K the number of conditions, then
    I = sum over conditions i of |C_i| / |S| times the entropy of the distribution of C_i, the
    vectors under condition i, over the clusters. The logarithm is natural. The vectors are
    clustered by Euclidean distance without normalisation; to cluster by cosine, scale them to unit
    length first.

    I measures clusters within conditions, not the reverse, so two conditions that share one cluster
    do not increase it. Look at ``counts`` as well.

    Args:
        vectors: (n, d) in any float type.
        labels: (n,) the condition of each vector, at least two different ones.
        seed: The random seed of K-means.

    Raises:
        UserError: There are no vectors, values are not finite, or there are fewer distinct vectors
            than conditions.
    """
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    points = _as_points(vectors)
    conditions = tuple(dict.fromkeys(labels))
    k = len(conditions)
    # With fewer, K-means leaves clusters empty, and equal vectors would seem well separated.
    distinct = len(np.unique(points, axis=0))
    if distinct < k:
        raise UserError(
            f"the {len(points)} vectors under {k} conditions have {distinct} distinct values, but "
            f"{k} clusters need at least {k}. Give more sentences, or fewer conditions."
        )
    # Lloyd's algorithm ends in a local minimum near its start, hence several starts.
    with threadpool_limits(1 if len(points) <= _MAX_SINGLE_THREADED else None):
        clusters = KMeans(n_clusters=k, n_init=_N_INIT, random_state=seed).fit_predict(points)
    index_of = {condition: i for i, condition in enumerate(conditions)}
    counts = np.zeros((k, k), dtype=np.int64)
    np.add.at(counts, ([index_of[label] for label in labels], clusters), 1)
    return Impurity(impurity_from_counts(counts), conditions, tuple(map(tuple, counts.tolist())), k)


def impurity_from_counts(counts: NDArray[np.int64]) -> float:
    """Return I in nats from counts, (conditions, clusters), of vectors."""
    size = counts.sum(axis=1, keepdims=True)
    # The weight of a condition without vectors is 0.
    share = counts / np.maximum(size, 1)
    # The sum is never above 0. abs is used because a minus sign would turn 0 into -0.
    return float(abs(xlogy(size / size.sum() * share, share).sum()))


def project_2d(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """Project vectors, (n, d) in any float type, to their first two principal components, (n, 2).

    Raises:
        UserError: There are fewer than three vectors or two dimensions, or values are not finite.
    """
    from sklearn.decomposition import PCA

    points = _as_points(vectors)
    n, dim = points.shape
    if n < 3 or dim < 2:
        raise UserError(
            f"vectors of shape {(n, dim)} cannot be projected to a plane. Give at least three "
            "vectors of at least two dimensions."
        )
    return np.asarray(PCA(n_components=2, random_state=0).fit_transform(points), np.float64)


def _as_points(vectors: NDArray[Any]) -> NDArray[np.floating]:
    """Check that vectors, (n, d), are finite, and return them in float64 or else float32."""
    check_shape(vectors)
    points = np.asarray(vectors)
    if points.dtype != np.float64:
        points = points.astype(np.float32)
    bad = ~np.isfinite(points).all(axis=1)
    if bad.any():
        raise UserError(
            f"{int(bad.sum()):,} of {len(points):,} vectors are NaN or infinite, the first at "
            f"position {int(bad.argmax())}. Leave them out."
        )
    return points
