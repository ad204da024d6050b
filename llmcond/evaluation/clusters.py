"""Whether vectors group by condition: K-means impurity (Hyper-CL, 5.2), and a plane to draw on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import xlogy

from llmcond.errors import UserError
from llmcond.evaluation.isotropy import shape_of

Method = Literal["pca", "tsne"]

#: K-means is started so often, and the tightest clustering kept.
_STARTS = 10

#: scikit-learn's default perplexity of t-SNE, lowered where there are fewer points.
_PERPLEXITY = 30.0

#: So few vectors are not worth a second thread.
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
        labels: (n,) the condition of each.
        seed: of K-means.

    Raises:
        UserError: no vectors, values that are not finite, a single condition, or fewer distinct
            vectors than conditions.
    """
    from sklearn.cluster import KMeans

    points = _points(vectors)
    if len(labels) != len(points):
        raise UserError(f"{len(points)} vectors came with {len(labels)} labels; give each one.")
    conditions = tuple(dict.fromkeys(labels))
    k = len(conditions)
    if k < 2:
        raise UserError(
            f"all {len(points)} vectors are under the condition {conditions[0]!r}; impurity "
            "compares two conditions at least."
        )
    # With fewer, K-means leaves clusters empty, and equal vectors would seem well separated.
    distinct = len(np.unique(points, axis=0))
    if distinct < k:
        raise UserError(
            f"the {len(points)} vectors under {k} conditions have {distinct} distinct values; "
            f"{k} clusters need {k} at least. Give more sentences, or fewer conditions."
        )
    # Lloyd's algorithm ends in a minimum near its start, hence several.
    with _threads(len(points)):
        clusters = KMeans(n_clusters=k, n_init=_STARTS, random_state=seed).fit_predict(points)
    place = {condition: i for i, condition in enumerate(conditions)}
    counts = np.zeros((k, k), dtype=np.int64)
    np.add.at(counts, ([place[label] for label in labels], clusters), 1)
    return Impurity(impurity_of(counts), conditions, tuple(map(tuple, counts.tolist())), k)


def impurity_of(counts: NDArray[np.int64]) -> float:
    """Return I of Hyper-CL, section 5.2, in nats.

    Args:
        counts: (conditions, clusters), how many of each condition are in each cluster.
    """
    size = counts.sum(axis=1, keepdims=True)
    # A condition without vectors weighs nothing.
    share = counts / np.maximum(size, 1)
    # Not minus, which makes 0 negative: the sum is never above 0.
    return float(abs(xlogy(size / size.sum() * share, share).sum()))


def project_2d(vectors: NDArray[Any], method: Method = "pca", seed: int = 0) -> NDArray[np.float64]:
    """Return a plane picture of vectors, (n, 2).

    PCA keeps distances as far as two dimensions can. t-SNE keeps who is near whom, and invents the
    rest: neither the size of its groups nor the space between them means anything.

    Args:
        vectors: (n, d) in any float type.
        method: ``pca`` or ``tsne``.
        seed: of t-SNE, and of PCA where it is approximated.

    Raises:
        UserError: fewer than three vectors or two dimensions, all vectors equal, values that are
            not finite, or another method.
    """
    points = _points(vectors)
    n, dim = points.shape
    if n < 3 or dim < 2:
        raise UserError(
            f"vectors of shape {(n, dim)} have no picture in a plane; three vectors of two "
            "dimensions are the least."
        )
    if not np.ptp(points, axis=0).any():
        raise UserError(f"all {n} vectors are equal; a picture would show a single point.")
    if method == "pca":
        from sklearn.decomposition import PCA

        placed = PCA(n_components=2, random_state=seed).fit_transform(points)
    elif method == "tsne":
        from sklearn.manifold import TSNE

        # It has to be below the number of points.
        perplexity = min(_PERPLEXITY, (n - 1) / 3)
        model = TSNE(perplexity=perplexity, init="pca", random_state=seed)
        with _threads(n):
            placed = model.fit_transform(points)
    else:
        raise UserError(f"unknown projection {method!r}. Known: pca, tsne.")
    return np.asarray(placed, dtype=np.float64)


def _threads(n: int) -> AbstractContextManager[Any]:
    """Return a context in which few vectors are worked on by a single thread.

    The threads of OpenMP spin while they wait for each other. On cores that others use as well,
    t-SNE of 45 points took 44 s by two threads, and 0.06 s by one.
    """
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[Any] = threadpool_limits(1 if n <= _FEW else None)
    return limits


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
