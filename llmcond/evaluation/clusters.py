"""Whether vectors group by condition: K-means impurity (Hyper-CL, 5.2), and a plane to draw on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import xlogy

from llmcond.errors import UserError
from llmcond.evaluation.isotropy import shape_of

#: K-means is started so often, and the tightest clustering kept.
_STARTS = 10

#: So few vectors are clustered by one thread: those of OpenMP spin while they wait for each other,
#: which takes longer than the work where others use the same cores.
_FEW = 2_000


@dataclass(frozen=True, slots=True)
class Impurity:
    """How K-means clusters scatter the vectors of each condition.

    Attributes:
        value: I of Hyper-CL, section 5.2, in nats: 0 where each condition lies in one cluster, at
            most ln(n_clusters).
        conditions: the distinct labels, in the order in which they first occur.
        counts: for each condition, how many of its vectors are in each cluster.
        n_clusters: K, the number of conditions.
    """

    value: float
    conditions: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    n_clusters: int


def impurity(vectors: NDArray[Any], labels: Sequence[str], seed: int = 0) -> Impurity:
    """Cluster the embeddings of sentences under several conditions, and compare with these.

    Hyper-CL, section 5.2: K-means with K the number of conditions, then
    I = sum over conditions i of |C_i| / |S| times the entropy of how C_i, the vectors under
    condition i, divide into clusters. The logarithm is natural. The vectors are clustered as they
    are, by Euclidean distance; scale them to unit length first to cluster by cosine.

    I is of clusters within conditions, not the reverse, so two conditions that share one cluster
    add nothing to it: read ``counts`` beside it.

    Args:
        vectors: (n, d) in any float type.
        labels: (n,) the condition of each, two at least.
        seed: of K-means.

    Raises:
        UserError: no vectors, values that are not finite, or fewer distinct vectors than
            conditions.
    """
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    points = _points(vectors)
    conditions = tuple(dict.fromkeys(labels))
    k = len(conditions)
    # With fewer, K-means leaves clusters empty, and equal vectors would seem well separated.
    distinct = len(np.unique(points, axis=0))
    if distinct < k:
        raise UserError(
            f"the {len(points)} vectors under {k} conditions have {distinct} distinct values; "
            f"{k} clusters need {k} at least. Give more sentences, or fewer conditions."
        )
    # Lloyd's algorithm ends in a minimum near its start, hence several.
    with threadpool_limits(1 if len(points) <= _FEW else None):
        clusters = KMeans(n_clusters=k, n_init=_STARTS, random_state=seed).fit_predict(points)
    place = {condition: i for i, condition in enumerate(conditions)}
    counts = np.zeros((k, k), dtype=np.int64)
    np.add.at(counts, ([place[label] for label in labels], clusters), 1)
    return Impurity(impurity_of(counts), conditions, tuple(map(tuple, counts.tolist())), k)


def impurity_of(counts: NDArray[np.int64]) -> float:
    """Return I in nats, from (conditions, clusters) how many of a condition are in a cluster."""
    size = counts.sum(axis=1, keepdims=True)
    # A condition without vectors weighs nothing.
    share = counts / np.maximum(size, 1)
    # Not minus, which makes 0 negative: the sum is never above 0.
    return float(abs(xlogy(size / size.sum() * share, share).sum()))


def project_2d(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """Return the two principal components of vectors (n, d) in any float type, (n, 2).

    Raises:
        UserError: fewer than three vectors or two dimensions, or values that are not finite.
    """
    from sklearn.decomposition import PCA

    points = _points(vectors)
    n, dim = points.shape
    if n < 3 or dim < 2:
        raise UserError(
            f"vectors of shape {(n, dim)} have no picture in a plane; three vectors of two "
            "dimensions are the least."
        )
    return np.asarray(PCA(n_components=2, random_state=0).fit_transform(points), np.float64)


def _points(vectors: NDArray[Any]) -> NDArray[np.floating]:
    """Return (n, d) in float32, or float64 as it was, finite."""
    shape_of(vectors)
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
