"""Spearman, Pearson and CASE's accuracy, each with an interval over sentence pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

Floats = NDArray[np.float64]

RESAMPLES = 1_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its interval; NaN where undefined (constant scores, nothing to compare)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Scores:
    """How well predicted similarities fit the ratings of rows.

    Attributes:
        n: rated rows, all of which count in both correlations.
        n_pairs: distinct sentence pairs among them: what the intervals resample.
        spearman, pearson: times 1, not times 100.
        accuracy: CASE, equation 9.
        n_compared: comparisons of two conditions on one sentence pair that accuracy counts.
        n_tied: comparisons left out of it, their ratings being equal.
    """

    n: int
    n_pairs: int
    spearman: Estimate
    pearson: Estimate
    accuracy: Estimate
    n_compared: int
    n_tied: int


def pearson(first: Floats, second: Floats) -> float:
    """Return the Pearson correlation; NaN where one side is constant."""
    a, b = first - first.mean(), second - second.mean()
    scale = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale > 0 else float("nan")


def spearman(first: Floats, second: Floats) -> float:
    """Return the Spearman rank correlation, ties at their mean rank; NaN where undefined."""
    return pearson(rankdata(first), rankdata(second))


def score(
    similarity: NDArray[np.floating],
    rating: Floats,
    pair: NDArray[np.int64],
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Scores:
    """Score predictions.

    The two conditions of one sentence pair share their sentences, so rows are not independent:
    the bootstrap draws sentence pairs and takes all rows of each.

    Args:
        similarity: (n,) predicted.
        rating: (n,) on any scale, no NaN.
        pair: (n,) number of each row's sentence pair.
        resamples: bootstrap samples; 0 leaves the intervals NaN.
        seed: of the bootstrap.
    """
    predicted = similarity.astype(np.float64)
    _, pair_index = np.unique(pair, return_inverse=True)
    order = np.argsort(pair_index, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(pair_index))[:-1])
    comparisons = np.array([_compare(predicted[g], rating[g]) for g in groups])
    correct, compared, tied = comparisons.T
    draws = np.random.default_rng(seed).integers(len(groups), size=(resamples, len(groups)))

    def correlate(measure: Callable[[Floats, Floats], float]) -> Estimate:
        sampled = []
        for draw in draws:
            rows = np.concatenate([groups[i] for i in draw])
            sampled.append(measure(predicted[rows], rating[rows]))
        return _estimate(measure(predicted, rating), np.array(sampled))

    with np.errstate(invalid="ignore"):
        drawn = correct[draws].sum(axis=1) / compared[draws].sum(axis=1)
        share = float(correct.sum() / compared.sum()) if compared.sum() else float("nan")
    return Scores(
        n=len(rating),
        n_pairs=len(groups),
        spearman=correlate(spearman),
        pearson=correlate(pearson),
        accuracy=_estimate(share, drawn),
        n_compared=int(compared.sum()),
        n_tied=int(tied.sum()),
    )


def _compare(similarity: Floats, rating: Floats) -> tuple[int, int, int]:
    """Count, over all twos of a pair's conditions, the correct, the compared and the tied.

    Correct is (sim1 - sim2)(y1 - y2) > 0 (CASE, equation 8): an equal prediction is wrong.
    """
    i, j = np.triu_indices(len(rating), k=1)
    gap = rating[i] - rating[j]
    correct = (similarity[i] - similarity[j]) * gap > 0
    tied = gap == 0
    return int(correct.sum()), int((~tied).sum()), int(tied.sum())


def _estimate(value: float, sampled: Floats) -> Estimate:
    defined = sampled[~np.isnan(sampled)]
    if len(defined) == 0:
        return Estimate(value, float("nan"), float("nan"))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(defined, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))
