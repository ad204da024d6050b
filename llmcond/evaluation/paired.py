"""Intervals of metrics, and differences between systems on the same rows: a cluster bootstrap.

Rows come in sentence pairs, whose conditions share their sentences, so sentence pairs are what is
resampled. Systems that are compared share the draws, so what they have in common (hard rows, odd
ratings) cancels in their difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from llmcond.metrics import (
    DEFAULT,
    Estimate,
    Floats,
    Metric,
    MetricFunction,
    accuracy,
    comparisons,
    pearson,
    spearman,
)

RESAMPLES = 2_000
#: Fewer sentence pairs have no interval: a deviation of so few says too little.
LEAST_PAIRS = 5
LEVEL = 0.05
POWER = 0.8

# Draws times rows that are worked on at once: an array of them is one megabyte.
BLOCK = 2**17

# Far below what one row can change, far above what rounding can.
ROUNDING = 1e-10


@dataclass(frozen=True, slots=True)
class Difference:
    """A system minus its baseline in one metric; figures are NaN where undefined.

    Attributes:
        value: mean over the system's seeds, minus mean over the baseline's.
        low, high: 95 % interval of this difference taken by itself; it holds the error of the rows
            sampled and of the seeds.
        seed_error: the part of the standard error that is of the seeds; 0 for single fits.
        p: two-sided, of no true difference; at most 0.05 exactly where the interval excludes 0.
        p_holm: ``p`` corrected for the number of systems compared (Holm).
        minimum: the true difference that rows like these would show in 80 % of samples, by ``p``
            at most 0.05; with the correction it takes a larger one.
        verdict: "better" or "worse", by the metric's direction, where ``p_holm`` is at most 0.05,
            else "no evidence".
    """

    value: float
    low: float
    high: float
    seed_error: float
    p: float
    p_holm: float
    minimum: float
    verdict: str


@dataclass(frozen=True, slots=True)
class Resampled:
    """Metrics of systems, on all rows and on the same draws of sentence pairs.

    Attributes:
        metrics: what was computed.
        values: (metrics, systems) means over seeds.
        sampled: (metrics, systems, draws) the same on each draw.
        n_pairs: (metrics,) sentence pairs that each metric rests on.
        by_seed: for each metric and system, (seeds,) on all rows.
    """

    metrics: Sequence[Metric]
    values: Floats
    sampled: Floats
    n_pairs: Sequence[int]
    by_seed: Sequence[Sequence[Floats]]

    def estimates(self, i: int) -> dict[str, Estimate]:
        """Return a system's means over seeds with 95 % intervals, cut to the metric's range.

        They hold the error of the rows sampled and, of several seeds, that of the seeds, as those
        of :func:`differences` do. There is none for fewer than ``LEAST_PAIRS`` sentence pairs, nor
        for two seeds, whose deviation says next to nothing.
        """
        from scipy.stats import t as student

        found = {}
        for m, metric in enumerate(self.metrics):
            value, own, n_pairs = float(self.values[m, i]), self.by_seed[m][i], self.n_pairs[m]
            low = high = math.nan
            if n_pairs >= LEAST_PAIRS and len(own) != 2:
                of_rows = np.array(_standard_error(self.sampled[m, i], n_pairs) ** 2)
                of_seeds = np.array(own.var(ddof=1) / len(own) if len(own) > 1 else 0.0)
                error, freedom = _combined(of_rows, n_pairs, of_seeds, len(own) - 1)
                half = float(student.ppf(1 - LEVEL / 2, freedom) * error)
                low, high = max(value - half, metric.least), min(value + half, metric.most)
            found[metric.name] = Estimate(value, low, high)
        return found

    def deviations(self, i: int) -> dict[str, float | None]:
        """Return a system's standard deviations over seeds; None for a single seed."""
        by_metric = zip(self.metrics, (by_system[i] for by_system in self.by_seed), strict=True)
        return {
            metric.name: float(own.std(ddof=1)) if len(own) > 1 else None
            for metric, own in by_metric
        }


def resample(
    systems: Sequence[NDArray[np.floating]],
    rating: NDArray[np.floating],
    pair: NDArray[np.integer],
    metrics: Sequence[Metric] = DEFAULT,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Resampled:
    """Measure systems on the same draws of sentence pairs.

    Args:
        systems: (seeds, n) finite predictions of each; (1, n) where nothing is random.
        rating: (n,) on any scale, finite; n at least 1.
        pair: (n,) id of each row's sentence pair.
        metrics: what is computed.
        resamples: bootstrap samples; fewer than 2 leave all intervals NaN.
        seed: of the bootstrap.
    """
    rows = _Rows(rating, pair)
    predictions = [list(system.astype(np.float64)) for system in systems]
    by_seed = [
        [np.array([metric(p, rows.rating, rows.pair) for p in own]) for own in predictions]
        for metric in metrics
    ]
    sampled = np.empty((len(metrics), len(systems), resamples))
    if resamples:
        samplers = [[_sampler(metric)(rows, own) for own in predictions] for metric in metrics]
        begin = 0
        for pairs in _draws(rows.n_pairs, len(rating), resamples, seed):
            weighted = _Weighted(rows, pairs)
            for m, by_system in enumerate(samplers):
                for i, sampler in enumerate(by_system):
                    sampled[m, i, begin : begin + len(pairs)] = sampler(weighted)
            begin += len(pairs)
    return Resampled(
        metrics=metrics,
        values=np.array([[own.mean() for own in by_system] for by_system in by_seed]),
        sampled=sampled,
        n_pairs=[
            len(np.unique(rows.pair[rows.higher])) if metric.function is accuracy else rows.n_pairs
            for metric in metrics
        ],
        by_seed=by_seed,
    )


def differences(
    found: Resampled, groups: Mapping[int, Sequence[int]], metrics: Sequence[Metric] | None = None
) -> dict[int, dict[str, Difference]]:
    """Compare systems with baselines on the same rows.

    Intervals and p-values are those of Student's t. Of the rows: the bootstrap standard error times
    sqrt(k / (k - 1)), on k - 1 degrees of freedom, where k is the number of sentence pairs (for
    accuracy, of those with something to compare). Of the seeds: the variance over seeds, pooled
    over a baseline and what is compared with it, as they are fitted alike, divided by how many
    seeds there are. The two add up, with Welch's degrees of freedom. In simulations
    (``scripts/simulate_comparison.py``) this keeps to 5 % of false alarms, and its intervals hold
    the truth about as often as they say, from 20 pairs up. Percentiles of the same draws give too
    many: at few pairs they are too narrow, and a correction for many systems rests on the
    outermost of them. Single fits are taken as they are: "better" is then said of these fits.

    Args:
        found: systems on the same draws.
        groups: a baseline's position -> positions of the systems compared with it. The systems of
            all groups are the family of Holm's correction, for each metric by itself.
        metrics: those that are compared; None: all.

    Returns:
        Position of each system compared -> its differences by the metric's name. Fewer than two
        sentence pairs leave all but the values NaN, and so do, with the values, constant
        predictions for correlations (of any one seed) and ratings without a difference.
    """
    compared: dict[int, dict[str, Difference]] = {i: {} for own in groups.values() for i in own}
    for m, metric in enumerate(found.metrics):
        if metrics is not None and metric not in metrics:
            continue
        parts = [_differences(found, m, base, list(others)) for base, others in groups.items()]
        figures = np.concatenate([np.empty((6, 0)), *parts], axis=1)
        for own, one, p_holm in zip(compared.values(), figures.T, holm(figures[-2]), strict=True):
            value, low, high, seed_error, p, minimum = one.tolist()
            verdict = "no evidence"
            if p_holm <= LEVEL:
                verdict = "better" if (value > 0) == metric.higher_is_better else "worse"
            own[metric.name] = Difference(
                value, low, high, seed_error, p, float(p_holm), minimum, verdict
            )
    return compared


def _differences(found: Resampled, m: int, baseline: int, others: list[int]) -> Floats:
    """Return (6, systems) the figures of their differences in a metric, but for the correction."""
    from scipy.stats import t as student

    values = found.values[m][others] - found.values[m, baseline]
    sampled = found.sampled[m][others] - found.sampled[m, baseline]
    by_seed = [found.by_seed[m][i] for i in (baseline, *others)]
    several = [own for own in by_seed if len(own) > 1 and not np.isnan(own).any()]
    seed_freedom = sum(len(own) - 1 for own in several)
    squares = sum(float(((own - own.mean()) ** 2).sum()) for own in several)
    pooled = squares / seed_freedom if seed_freedom else 0.0
    of_seeds = np.array([pooled / len(own) if len(own) > 1 else 0.0 for own in by_seed])
    of_seeds = of_seeds[1:] + of_seeds[0]
    of_rows = np.array([_standard_error(one, found.n_pairs[m]) for one in sampled]) ** 2
    of_rows[np.isnan(values)] = np.nan
    errors, freedom = _combined(of_rows, found.n_pairs[m], of_seeds, seed_freedom)
    critical, powerful = (student.ppf(share, freedom) for share in (1 - LEVEL / 2, POWER))
    with np.errstate(invalid="ignore"):
        p = 2 * student.sf(np.abs(values) / errors, freedom)
    low, high = values - critical * errors, values + critical * errors
    return np.stack([values, low, high, np.sqrt(of_seeds), p, (critical + powerful) * errors])


def _combined(
    of_rows: Floats, n_pairs: int, of_seeds: Floats, seed_freedom: int
) -> tuple[Floats, Floats]:
    """Return standard errors from variances of rows and seeds, and Welch's degrees of freedom.

    Without seeds these are the pairs' own.
    """
    errors = np.sqrt(of_rows + of_seeds)
    own = of_rows**2 / max(n_pairs - 1, 1) + of_seeds**2 / max(seed_freedom, 1)
    return errors, errors**4 / own


def _standard_error(sampled: Floats, n_pairs: int) -> float:
    defined = sampled[~np.isnan(sampled)]
    if n_pairs < 2 or len(defined) < 2:
        return math.nan
    error = float(defined.std(ddof=1)) * math.sqrt(n_pairs / (n_pairs - 1))
    # Nothing varies where all sentence pairs are alike, say where both order all rows the same way.
    # That does not show that others would be: the error is then as if one of them were not.
    return error if error > ROUNDING else 1 / n_pairs


def holm(p: Floats) -> Floats:
    """Return (m,) p-values corrected for their number (Holm); NaN stays so, and counts."""
    order = np.argsort(p)
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(stepped, 1)
    return corrected


class _Ranking:
    """The order of values, for the ranks that they have once rows are weighted.

    A row of weight w stands for w rows; equal values share their mean rank.
    """

    def __init__(self, values: Floats) -> None:
        self.order = np.argsort(values, kind="stable")
        rising = values[self.order]
        self.starts = np.flatnonzero(np.append(True, rising[1:] != rising[:-1]))
        self.tied = len(self.starts) < len(values)

    def by_value(self, by_row: Floats) -> Floats:
        """Return (b, distinct values), in rising order, the sums of (b, n) over equal values."""
        rising = by_row.take(self.order, axis=1)
        return np.add.reduceat(rising, self.starts, axis=1) if self.tied else rising


class _Weighted:
    """What a block of b draws makes of the rows, before any predictions; each found when asked for.

    Attributes:
        pairs: (b, pairs) how often each sentence pair was sampled.
        rows: (b, n) how often each row was.
        ranked: (b, n) the same times the row's centred rank by rating.
        rating_spread: (b,) 12 times the sum of squares of those ranks.
        half, spread: (b,) what takes the place of sums over equal predictions where none are equal:
            it is the same for every order of the rows.
    """

    def __init__(self, of: _Rows, pairs: Floats) -> None:
        self._of, self.pairs = of, pairs

    @cached_property
    def rows(self) -> Floats:
        return self.pairs[:, self._of.pair]

    @cached_property
    def _count(self) -> Floats:
        return self._of.ranking.by_value(self.rows)

    @cached_property
    def ranked(self) -> Floats:
        count = self._count
        middle = np.cumsum(count, axis=1) - (count + count.sum(axis=1, keepdims=True)) / 2
        return np.asarray(self.rows * middle.take(self._of.level, axis=1))

    @cached_property
    def rating_spread(self) -> Floats:
        return _spread(self._count)

    @cached_property
    def half(self) -> Floats:
        return _dot(self.ranked, self.rows) / 2

    @cached_property
    def spread(self) -> Floats:
        return _spread(self.rows)

    def spearman(self, predicted: _Ranking) -> Floats:
        """Return (b,) the correlations of ranks by prediction with ranks by rating."""
        count, ranked = predicted.by_value(self.rows), predicted.by_value(self.ranked)
        half = _dot(ranked, count) / 2 if predicted.tied else self.half
        spread = _spread(count) if predicted.tied else self.spread
        # A mean rank is all that is below and half of what is equal. It need not be centred here,
        # for the ranks by rating are.
        product = _dot(ranked, np.cumsum(count, axis=1)) - half
        with np.errstate(invalid="ignore"):
            return 12 * product / np.sqrt(spread * self.rating_spread)


def _dot(first: Floats, second: Floats) -> Floats:
    return np.asarray(np.einsum("bi,bi->b", first, second))


def _spread(count: Floats) -> Floats:
    """Return 12 times the sum of squares of centred ranks, from (b, distinct) how many are equal.

    NaN where all are equal.
    """
    total = count.sum(axis=1) ** 3
    spread = total - np.einsum("bi,bi,bi->b", count, count, count)
    # Cubes of large counts are rounded, so that what should be 0 is not.
    return np.where(spread > ROUNDING * total, spread, np.nan)


class _Rows:
    """Ratings, the sentence pairs they belong to, and what accuracy compares."""

    def __init__(self, rating: NDArray[np.floating], pair: NDArray[np.integer]) -> None:
        self.rating = rating.astype(np.float64)
        distinct, self.pair = np.unique(pair, return_inverse=True)
        self.n_pairs = len(distinct)
        self.sizes = np.bincount(self.pair)
        self.ranking = _Ranking(self.rating)
        # Which of the distinct ratings each row has.
        self.level = np.unique(self.rating, return_inverse=True)[1]
        self.higher, self.lower = comparisons(self.rating, self.pair)


#: From weighted rows to (b,) a metric of one system on each draw, the mean over its seeds.
_Sampler = Callable[[_Weighted], Floats]


def _spearman_sampler(rows: _Rows, predictions: Sequence[Floats]) -> _Sampler:
    rankings = [_Ranking(own) for own in predictions]
    return lambda weighted: np.mean([weighted.spearman(own) for own in rankings], axis=0)


def _pearson_sampler(rows: _Rows, predictions: Sequence[Floats]) -> _Sampler:
    def sums(x: Floats) -> Floats:
        products = (np.ones_like(x), x, x * x, x * y, y, y * y)
        columns = [np.bincount(rows.pair, own, minlength=rows.n_pairs) for own in products]
        return np.stack(columns, axis=1)

    def correlate(by_pair: Floats, weighted: _Weighted) -> Floats:
        n, x, xx, xy, y, yy = (weighted.pairs @ by_pair).T
        spreads = []
        for total, squares in ((x, xx), (y, yy)):
            spread = squares - total**2 / n
            # Rounding leaves something where all that was sampled is equal.
            spreads.append(np.where(spread > ROUNDING * squares, spread, np.nan))
        return np.asarray((xy - x * y / n) / np.sqrt(spreads[0] * spreads[1]))

    y = _centred(rows.rating)
    by_pair = [sums(_centred(own)) for own in predictions]
    return lambda weighted: np.mean([correlate(own, weighted) for own in by_pair], axis=0)


def _centred(values: Floats) -> Floats:
    """Return values around 0 and within -1 to 1, so that sums of squares lose no digits."""
    if not np.ptp(values):
        return np.zeros_like(values)
    centred = values - values.mean()
    return np.asarray(centred / np.abs(centred).max())


def _accuracy_sampler(rows: _Rows, predictions: Sequence[Floats]) -> _Sampler:
    def correct_by_pair(own: Floats) -> Floats:
        """Return (pairs,) how many comparisons of each sentence pair are right; equal is half."""
        share = (np.sign(own[rows.higher] - own[rows.lower]) + 1) / 2
        right = np.bincount(rows.pair[rows.higher], share, minlength=rows.n_pairs)
        return right.astype(np.float64)

    compared = np.bincount(rows.pair[rows.higher], minlength=rows.n_pairs).astype(np.float64)
    correct = np.mean([correct_by_pair(own) for own in predictions], axis=0)

    def share(weighted: _Weighted) -> Floats:
        with np.errstate(invalid="ignore"):
            return np.asarray((weighted.pairs @ correct) / (weighted.pairs @ compared))

    return share


_SAMPLERS: Mapping[MetricFunction, Callable[[_Rows, Sequence[Floats]], _Sampler]] = {
    spearman: _spearman_sampler,
    pearson: _pearson_sampler,
    accuracy: _accuracy_sampler,
}


def _sampler(metric: Metric) -> Callable[[_Rows, Sequence[Floats]], _Sampler]:
    if metric.by_row is not None:
        return partial(_strata_sampler if metric.by_stratum else _mean_sampler, metric.by_row)
    return _SAMPLERS.get(metric.function) or partial(_row_sampler, metric)


def _mean_sampler(
    by_row: Callable[[Floats], Floats], rows: _Rows, predictions: Sequence[Floats]
) -> _Sampler:
    values = np.mean([by_row(own) for own in predictions], axis=0)
    by_pair = np.bincount(rows.pair, values, minlength=rows.n_pairs)
    return lambda weighted: np.asarray((weighted.pairs @ by_pair) / (weighted.pairs @ rows.sizes))


def _strata_sampler(
    by_row: Callable[[Floats], Floats], rows: _Rows, predictions: Sequence[Floats]
) -> _Sampler:
    """Return what takes the mean over those strata that a draw has rows of."""
    values = np.mean([by_row(own) for own in predictions], axis=0)
    shape = rows.n_pairs, int(rows.level.max()) + 1
    cell = rows.pair * shape[1] + rows.level
    by_pair, sizes = (
        np.bincount(cell, own, minlength=math.prod(shape)).reshape(shape)
        for own in (values, np.ones_like(values))
    )

    def mean(weighted: _Weighted) -> Floats:
        with np.errstate(invalid="ignore"):
            means = (weighted.pairs @ by_pair) / (weighted.pairs @ sizes)
        return np.asarray(np.nanmean(means, axis=1))

    return mean


def _row_sampler(metric: Metric, rows: _Rows, predictions: Sequence[Floats]) -> _Sampler:
    """Return what computes any metric, on the rows that each draw takes."""
    order, starts = np.argsort(rows.pair, kind="stable"), np.cumsum(rows.sizes) - rows.sizes

    def figures(weighted: _Weighted) -> Floats:
        found = []
        for count in weighted.pairs.astype(np.int64):
            # A sentence pair that is sampled twice counts as two.
            sampled = np.repeat(np.arange(rows.n_pairs), count)
            sizes = rows.sizes[sampled]
            group = np.repeat(np.arange(len(sampled)), sizes)
            within = np.arange(len(group)) - (np.cumsum(sizes) - sizes)[group]
            taken = order[starts[sampled][group] + within]
            rating = rows.rating[taken]
            found.append(np.mean([metric(own[taken], rating, group) for own in predictions]))
        return np.array(found)

    return figures


def _draws(n_pairs: int, n_rows: int, resamples: int, seed: int) -> Iterator[Floats]:
    """Yield, a block at a time, (b, pairs) how often each draw takes each sentence pair."""
    rng = np.random.default_rng(seed)
    at_once = max(1, BLOCK // n_rows)
    for begin in range(0, resamples, at_once):
        size = min(at_once, resamples - begin)
        sampled = rng.integers(n_pairs, size=(size, n_pairs))
        sampled += n_pairs * np.arange(size)[:, None]
        count = np.bincount(sampled.ravel(), minlength=size * n_pairs)
        yield count.reshape(size, n_pairs).astype(np.float64)
