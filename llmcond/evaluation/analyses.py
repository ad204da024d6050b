"""Analyses of vectors and predictions: isotropy, clusters, subsets, agreement and conditions."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import EqualByValue
from llmcond.base.errors import UserError
from llmcond.base.files import as_json
from llmcond.base.metrics import (
    DEFAULT_METRICS,
    Estimate,
    Floats,
    Metric,
    estimates_json,
    spearman,
)
from llmcond.data.rows import Rows
from llmcond.evaluation.paired import RESAMPLES, bootstrap_metrics
from llmcond.evaluation.results import Subset, score_subset

#: The number of random directions of the partition ratio: k of CASE, appendix B.
DIRECTIONS = 1_000

#: The largest number of vectors that are measured; more do not change the digits that are shown.
MAX_VECTORS = 100_000

#: The number of vectors that are read together, so that memory does not grow with all vectors.
_BLOCK = 8_192

# A mean shorter than this fraction of the vectors' mean length is rounding and has no direction.
_NO_MEAN = 1e-12


def isotropy(
    vectors: NDArray[Any], directions: int = DIRECTIONS, seed: int = 0
) -> tuple[dict[str, float], NDArray[np.float64]]:
    """Measure the isotropy of vectors by the two measures of CASE, appendix B.

    The partition ratio of Mu et al. (2018) is over the eigenvectors of the vectors' second moment.
    CASE (appendix B) and this function use random directions instead. In d dimensions random
    directions have a cosine of at most about 3 / sqrt(d) with a vector, so the ratio is never near
    0 for large d: n equal vectors have a ratio of about 0.45 for d = 64, 0.77 for 512 and 0.91 for
    4096. Compare it only between vectors of the same size, with the same seed and number of
    directions.

    Args:
        vectors: (n, d) in any float type. They are read in blocks of rows, so a memory map works.
        directions: The number of random directions.
        seed: The random seed of the directions.

    Returns:
        ``mean_cosine`` and ``std_cosine``, the mean and the standard deviation of the vectors'
        cosines with the mean vector (table 4): near 1, all vectors have a similar direction.
        ``partition_ratio``: min F(u) / max F(u) over random unit directions u, where F(u) is the
        sum of exp(e . u) over the vectors e, each scaled to unit length (equation 10, table 5); 1
        is isotropic. ``n``, the number of vectors. Besides, (n,) the cosines (figures 5 and 6),
        which are 0 if the vectors cancel out, so that there is no mean direction.

    Raises:
        UserError: There are no vectors, values are not finite, or vectors are zero.
    """
    n, dim = check_shape(vectors)
    norms, mean_direction = _norms_and_mean_direction(vectors)
    # Directions are uniform on the sphere. The number of directions is part of the seed, so that
    # they differ from vectors that were themselves sampled with this seed.
    random_directions = np.random.default_rng((seed, directions)).standard_normal((directions, dim))
    random_directions /= np.linalg.norm(random_directions, axis=1, keepdims=True)
    directions_by_column = np.ascontiguousarray(random_directions.T, dtype=np.float32)
    cosines, partition = np.empty(n), np.zeros(directions)
    for part in _blocks(n):
        unit = np.asarray(vectors[part], dtype=np.float64) / norms[part, None]
        cosines[part] = unit @ mean_direction
        # The product of two unit vectors is at most 1, so exp neither overflows nor underflows.
        exponent = unit.astype(np.float32) @ directions_by_column
        partition += np.exp(exponent, out=exponent).sum(axis=0, dtype=np.float64)
    figures = {
        "mean_cosine": float(cosines.mean()),
        "partition_ratio": float(partition.min() / partition.max()),
        "n": n,
        "std_cosine": float(cosines.std()),
    }
    return figures, cosines


def _norms_and_mean_direction(
    vectors: NDArray[Any],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the norms, (n,), of checked vectors, and the unit vector, (d,), of their mean."""
    n, dim = check_shape(vectors)
    total, norms = np.zeros(dim), np.empty(n)
    for part in _blocks(n):
        # float64, because the squares of float16 and float32 numbers may overflow.
        block = np.asarray(vectors[part], dtype=np.float64)
        total += block.sum(axis=0)
        norms[part] = np.linalg.norm(block, axis=1)
    _check_finite(norms, "vectors")
    if not norms.all():
        raise UserError(f"the vector at position {norms.argmin()} is zero. Leave it out.")
    mean = total / n
    length = float(np.linalg.norm(mean))
    return norms, mean / length if length > _NO_MEAN * norms.mean() else np.zeros(dim)


def _blocks(n: int) -> list[slice]:
    return [slice(start, start + _BLOCK) for start in range(0, n, _BLOCK)]


def check_shape(vectors: NDArray[Any]) -> tuple[int, int]:
    """Return the shape (n, d) of vectors.

    Raises:
        UserError: There are no vectors, or the shape is not (n, d).
    """
    shape = vectors.shape
    if len(shape) != 2 or 0 in shape:
        raise UserError(
            f"the vectors have the shape {shape}; expected (n, d) with n and d at least 1."
        )
    return int(shape[0]), int(shape[1])


def measure_isotropy(
    name: str, vectors: NDArray[Any], seed: int = 0
) -> tuple[dict[str, Any], NDArray[np.float64]]:
    """Measure the isotropy of vectors for results. Zero vectors are counted and left out.

    Returns:
        The figures for JSON, and the cosines of the vectors that are not zero to their mean.
    """
    nonzero = vectors[np.linalg.norm(vectors, axis=1) > 0]
    if not len(nonzero):
        nothing = dict.fromkeys(("mean_cosine", "std_cosine", "partition_ratio"))
        return {"name": name, **nothing, "n": 0, "n_zero": len(vectors)}, np.empty(0)
    figures, cosines = isotropy(nonzero, seed=seed)
    return {"name": name, **figures, "n_zero": len(vectors) - len(nonzero)}, cosines


#: The number of K-means starts, of which the tightest clustering is used, because Lloyd's algorithm
#: ends in a local minimum near its start.
STARTS = 10

#: Up to this number of vectors, K-means uses one thread. OpenMP threads spin while they wait for
#: each other, which takes longer than the work if other processes use the same cores.
_MAX_SINGLE_THREADED = 2_000


def kmeans(
    points: NDArray[np.floating], k: int, seed: int, starts: int = STARTS
) -> NDArray[np.int64]:
    """Cluster n points, (n, d), with K-means; return (n,) the number of each point's cluster."""
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1 if len(points) <= _MAX_SINGLE_THREADED else None):
        clusters = KMeans(n_clusters=k, n_init=starts, random_state=seed).fit_predict(points)
    return np.asarray(clusters, dtype=np.int64)


def impurity(vectors: NDArray[Any], labels: Sequence[str], seed: int = 0) -> dict[str, Any]:
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

    Returns:
        ``value``, I in nats: 0 if each condition lies in one cluster, at most ln(n_clusters).
        ``conditions``, the distinct labels in the order in which they first occur; ``counts``, the
        number of vectors of each condition in each cluster; ``n_clusters``, their number K.

    Raises:
        UserError: There are no vectors, values are not finite, or there are fewer distinct vectors
            than conditions.
    """
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
    clusters = kmeans(points, k, seed)
    index_of = {condition: i for i, condition in enumerate(conditions)}
    counts = np.zeros((k, k), dtype=np.int64)
    np.add.at(counts, (np.array([index_of[label] for label in labels]), clusters), 1)
    return {
        "value": impurity_from_counts(counts),
        "conditions": conditions,
        "counts": counts.tolist(),
        "n_clusters": k,
    }


def impurity_from_counts(counts: NDArray[np.int64]) -> float:
    """Return I in nats from counts, (conditions, clusters), of vectors."""
    from scipy.special import xlogy

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
    _check_finite(points, "vectors")
    return points


#: Up to this number of distinct ratings, each is shown; more are grouped into classes of equal
#: width.
_FEW_RATINGS = 11
_CLASSES = 10


def rank_share(values: NDArray[np.floating]) -> Floats:
    """Return each value's relative rank, (n,): 0 for the least value, 1 for the greatest.

    Ties get their mean rank, and a single value gets 0.5. Values are (n,), finite.
    """
    from scipy.stats import rankdata

    n = len(values)

    return (rankdata(values) - 1) / (n - 1) if n > 1 else np.full(n, 0.5)


def rating_span(rating: Floats) -> tuple[Floats, Floats]:
    """Return the lowest and the highest relative rank (0 to 1) of the rows with each row's rating.

    Few distinct ratings are shared by many rows, so a rating does not determine a single rank: in a
    perfect order, the rows of one rating can have any rank in their span.
    """
    from scipy.stats import rankdata

    n = len(rating)
    if n < 2:
        return np.full(n, 0.5), np.full(n, 0.5)

    first, last = (rankdata(rating, method=method) - 1 for method in ("min", "max"))
    return first / (n - 1), last / (n - 1)


def rank_error(similarity: NDArray[np.floating], rating: Floats) -> Floats:
    """Return the rank error of each row, (n,): the distance of its rank to its rating's span.

    The error is a signed fraction of all ranks. Above 0, the predicted similarity is higher than
    the rating. If all errors are 0, the order is perfect. Unlike the difference of prediction and
    rating, it does not depend on the range of predictions, and unlike a correlation it describes a
    single row.
    """
    share = rank_share(similarity)
    first, last = rating_span(rating)
    return np.maximum(share - last, 0) - np.maximum(first - share, 0)


def chance_error(rating: Floats) -> Floats:
    """Return the mean absolute rank error of each row, (n,), over all random orders.

    By chance, rows of the lowest and the highest rating have larger errors than those in the
    middle, so an error has to be compared with this value.
    """
    n = len(rating)
    if n < 2:
        return np.zeros(n)
    first, last = (bound * (n - 1) for bound in rating_span(rating))
    below, above = first * (first + 1) / 2, (n - 1 - last) * (n - last) / 2
    return np.asarray((below + above) / n / (n - 1))


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows grouped by condition, groups in the order of their first rows.

    Attributes:
        label: The condition of each group as its first row writes it.
        index: (n,) the group of each row.
        count: (groups,) the number of rows of each group.
    """

    label: tuple[str, ...]
    index: NDArray[np.int64]
    count: NDArray[np.int64]

    def mean(self, values: NDArray[np.floating]) -> Floats:
        """Return the means, (groups,), of the values (n,) of each group.

        NaN values are ignored. The mean of a group without other values is NaN.
        """
        known = ~np.isnan(values)
        total = np.bincount(self.index[known], values[known], minlength=len(self.label))
        counted = np.bincount(self.index[known], minlength=len(self.label))
        with np.errstate(invalid="ignore"):
            return np.asarray(total / counted)


def by_condition(condition: Sequence[str]) -> Groups:
    """Group rows by condition, ignoring case, white space and a final full stop."""
    keys = [" ".join(text.split()).removesuffix(".").casefold() for text in condition]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    index = np.array([numbers[key] for key in keys], dtype=np.int64)
    # Backwards, so that the first label of each key wins.
    label = dict(zip(reversed(keys), reversed(condition), strict=True))
    labels = tuple(label[key] for key in numbers)
    return Groups(labels, index, np.bincount(index, minlength=len(labels)))


@dataclass(frozen=True, slots=True)
class Level:
    """The predictions for rows of one rating, or of one class of ratings.

    Attributes:
        rating: The rating; for a class, the mean over its rows.
        n: The number of rows.
        mean: The mean prediction.
        low: The lower quartile of the predictions.
        median: The median of the predictions.
        high: The upper quartile of the predictions.
    """

    rating: float
    n: int
    mean: float
    low: float
    median: float
    high: float


def calibration(similarity: NDArray[np.floating], rating: Floats) -> list[Level]:
    """Summarise the predictions, (n,), at each rating, in ascending order of the ratings, (n,).

    More than 11 distinct ratings are grouped into 10 classes of equal width.
    """
    distinct, level = np.unique(rating, return_inverse=True)
    if len(distinct) > _FEW_RATINGS:
        edges = np.linspace(distinct[0], distinct[-1], _CLASSES + 1)
        level = np.digitize(rating, edges[1:-1])
    levels = []
    for number in np.unique(level):
        values = similarity[level == number].astype(np.float64)
        quartiles = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
        mean_rating = float(rating[level == number].mean())
        levels.append(Level(mean_rating, len(values), float(values.mean()), *quartiles))
    return levels


def seen_unseen(
    train_condition: Iterable[str],
    rows: Rows,
    similarity: NDArray[np.floating],
    metric: Metric,
    resamples: int = RESAMPLES,
) -> dict[str, Subset]:
    """Score rows with seen and with unseen conditions separately (Hyper-CL, section 5.3).

    A condition is seen if its exact text occurs in training: "The sport." is unseen if training has
    "The sport".

    Args:
        train_condition: The conditions of the rows that a head was fitted on, with or without
            repeats.
        rows: The n rated rows to score.
        similarity: (n,) predictions.
        metric: The metric of the score.
        resamples: The number of bootstrap samples; with 0 the intervals are NaN.

    Returns:
        The scores of ``overall``, ``seen`` and ``unseen`` rows.

    Raises:
        UserError: Predictions are not finite.
    """
    _check_finite(similarity, "predictions")
    known = frozenset(train_condition)
    is_seen = np.array([text in known for text in rows.condition], dtype=np.bool_)
    subsets = {}
    for name, mask in {"overall": is_seen | True, "seen": is_seen, "unseen": ~is_seen}.items():
        (subset,) = score_subset([similarity[None]], rows, [metric], mask, resamples)
        n_conditions = len(set(rows.take(mask).condition))
        subsets[name] = replace(subset, about={"n_conditions": n_conditions})
    return subsets


def frobenius_variance(norms: NDArray[np.floating], n_elements: int) -> dict[str, float]:
    """Compute the variance over conditions of the size of W_c (Hyper-CL, section 5.4.1).

    It is the population variance (the divisor is n); the paper does not say which one it uses.

    Args:
        norms: (n,) ||W_c||_F, one for each distinct condition.
        n_elements: The number of valid elements of a W_c: H * H, also for a product of low rank; H
            for the diagonal matrix that a Hadamard product is equivalent to.

    Returns:
        The variance of ||W_c||_F (``raw``), that of ||W_c||_F / sqrt(number of elements), which is
        comparable between matrices of different sizes (``normalised``), and ``n``.

    Raises:
        UserError: There are fewer than two conditions.
    """
    sizes = np.asarray(norms, dtype=np.float64)
    if len(sizes) < 2:
        raise UserError(
            f"the norms have the shape {sizes.shape}. A variance over conditions needs at least "
            "two conditions, with one norm for each."
        )
    raw = float(sizes.var())
    return {"raw": raw, "normalised": raw / n_elements, "n": len(sizes)}


def change_table(changes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sort rows, with the keys of ``rating`` and both sentences, as in tables 3 and 8 of CASE.

    The rows of a sentence pair stay together, with the lower rating first. Pairs keep their given
    order.
    """
    order: dict[tuple[str, str], int] = {}
    for row in changes:
        order.setdefault((row["sentence1"], row["sentence2"]), len(order))
    return sorted(
        changes, key=lambda row: (order[row["sentence1"], row["sentence2"]], row["rating"])
    )


def most_changed(
    rating: Floats, before: NDArray[np.floating], after: NDArray[np.floating]
) -> tuple[list[int], list[int]]:
    """Return the positions of rows that improved, and of rows that got worse, largest change first.

    A row's change is |before - rating| - |after - rating|, because heads are fitted to reduce the
    distance of similarity to rating (CASE, equation 2). Rows that got worse are included, since the
    improved rows alone would make any head look good. All columns are (n,), ratings on 0 to 1
    without NaN.

    Raises:
        UserError: Similarities are not finite.
    """
    _check_finite(before, "similarities before")
    _check_finite(after, "similarities after")
    gain = np.abs(np.asarray(before, np.float64) - rating)
    gain -= np.abs(np.asarray(after, np.float64) - rating)
    better = np.argsort(-gain, kind="stable")[: np.count_nonzero(gain > 0)]
    worse = np.argsort(gain, kind="stable")[: np.count_nonzero(gain < 0)]
    return better.tolist(), worse.tolist()


def _check_finite(values: NDArray[np.floating], name: str) -> None:
    bad = ~np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
    if bad.any():
        raise UserError(
            f"{bad.sum():,} of {len(values):,} {name} are NaN or infinite, the first at position "
            f"{bad.argmax()}. Leave them out."
        )


#: The number of steps of the scale that ratings are rounded to, 1 to 5.
STEPS = 5


@dataclass(frozen=True, slots=True)
class ConditionAgreement:
    """The agreement on rows of one condition that both raters rated.

    Attributes:
        condition: The condition.
        n: The number of rows.
        human: The mean rating by people, on 1 to 5, with two decimals.
        model: The mean rating by the model, on 1 to 5, with two decimals.
        spearman: Their rank correlation; NaN for a single row, or if the ratings of one rater are
            constant.
    """

    condition: str
    n: int
    human: float
    model: float
    spearman: float


@dataclass(frozen=True, eq=False)
class Agreement(EqualByValue):
    """The agreement of a model's ratings with those of people.

    Attributes:
        n: The number of rows that both rated.
        metrics: The metrics of the model's ratings as predictions by name, with 95 % intervals;
            empty if there are no such rows.
        confusion: (6, 6) the number of rows by people's rating (first axis) and the model's rating,
            both rounded to 1 to 5. The last index is for ill-defined or unrated rows.
        by_condition: The agreement by condition, the most frequent conditions first.
    """

    n: int
    metrics: Mapping[str, Estimate]
    confusion: NDArray[np.int64]
    by_condition: Sequence[ConditionAgreement]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output, with means on 1 to 5."""
        parts = {"confusion": self.confusion, "by_condition": self.by_condition}
        return {"n": self.n, **estimates_json(self.metrics), **as_json(parts)}


def agreement(rows: Rows, model: Floats) -> Agreement:
    """Compare a model's ratings with the ratings of rows.

    Args:
        rows: The rows, with ratings by people.
        model: (n,) the model's ratings on 0 to 1; NaN for a row that it considers ill-defined.
    """
    confusion = np.zeros((STEPS + 1, STEPS + 1), dtype=np.int64)
    np.add.at(confusion, (_step(rows.rating), _step(model)), 1)
    is_rated = rows.rated & ~np.isnan(model)
    rated = rows.take(is_rated)
    if not is_rated.any():
        return Agreement(0, {}, confusion, ())
    predicted = model[is_rated]
    estimates = bootstrap_metrics(
        [predicted[None]], rated.rating, rated.pair, DEFAULT_METRICS
    ).estimates(0)
    groups = by_condition(rated.condition)
    means = [groups.mean(ratings).tolist() for ratings in (rated.rating, predicted)]
    parts = []
    for i in np.argsort(-groups.count, kind="stable").tolist():
        is_member = groups.index == i
        score = spearman(predicted[is_member], rated.rating[is_member])
        human, model_mean = (round(1 + (STEPS - 1) * mean[i], 2) for mean in means)
        parts.append(
            ConditionAgreement(groups.label[i], int(groups.count[i]), human, model_mean, score)
        )
    return Agreement(len(rated), estimates, confusion, tuple(parts))


def _step(rating: Floats) -> NDArray[np.int64]:
    """Return the step, (n,), that each rating rounds to, from 0 to 4; 5 for NaN."""
    step = np.floor((STEPS - 1) * rating + 0.5)
    return np.where(np.isnan(step), STEPS, step).astype(np.int64)


#: The largest number of distinct texts that are sampled, and the smallest that is enough.
MOST_TEXTS, LEAST_TEXTS = 200, 20


def sample_texts(texts: Sequence[str], seed: int = 0) -> list[int]:
    """Sample the positions of at most MOST_TEXTS distinct texts, in ascending order."""
    # Backwards, so that the first position of each text wins.
    positions = sorted({text: i for i, text in reversed(list(enumerate(texts)))}.values())
    if len(positions) <= MOST_TEXTS:
        return positions
    return sorted(random.Random(seed).sample(positions, MOST_TEXTS))  # noqa: S311  # no secret
