"""Confidence intervals of metrics, and paired differences of systems, by a cluster bootstrap.

The rows of a sentence pair share their sentences and differ in the condition, so the bootstrap
resamples sentence pairs. Systems that are compared share the bootstrap samples, so effects that
they have in common (difficult rows, unusual ratings) cancel in their difference.

Triples of a graph share head entities with some triples, and tail entities with others. Their
variance is that of two-way clusters (Cameron, Gelbach and Miller 2011): the variance of a bootstrap
over heads, plus that over tails, minus that over triples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from llmcond.base.metrics import (
    DEFAULT_METRICS,
    Estimate,
    Floats,
    Metric,
    MetricFunction,
    accuracy,
    comparisons,
    pearson,
    spearman,
)

#: The default number of bootstrap samples.
RESAMPLES = 2_000
#: Fewer sentence pairs have no interval, because their standard deviation is too uncertain.
MIN_PAIRS = 5
#: The significance level of tests; intervals have the confidence 1 - LEVEL.
LEVEL = 0.05
#: The power of a test at the smallest detectable difference.
POWER = 0.8

# The number of bootstrap samples times rows that are processed at once; such an array takes 1 MB.
BLOCK = 2**17

# Far below the effect of a single row, and far above rounding errors.
ROUNDING = 1e-10


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The difference of a system to its baseline in one metric; figures are NaN if undefined.

    Attributes:
        value: The mean over the system's seeds minus the mean over the baseline's seeds.
        low: The lower end of the 95 % interval of this single difference. The interval covers the
            error of sampling rows and of seeds.
        high: The upper end of the interval.
        seed_error: The part of the standard error that is due to seeds; 0 for single fits.
        p: The two-sided p-value of no true difference. It is at most 0.05 exactly if the interval
            excludes 0.
        p_holm: ``p`` corrected for the number of compared systems (Holm).
        minimum: The smallest true difference that would be detected (``p`` at most 0.05) in 80 % of
            samples of such rows. With the correction, it would have to be larger.
        verdict: "better" or "worse", by the metric's direction, if ``p_holm`` is at most 0.05,
            otherwise "no evidence".
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
class BootstrapMetrics:
    """Metrics of systems on all rows, and on the same bootstrap samples of sentence pairs.

    Attributes:
        metrics: The metrics.
        values: (metrics, systems) means over seeds on all rows.
        sampled: (metrics, systems, samples) means over seeds on each bootstrap sample.
        n_pairs: (metrics,) the number of sentence pairs that each metric is computed from.
        by_seed: For each metric and system, the values by seed, (seeds,), on all rows.
        crossed: The same metrics on bootstrap samples of each kind of crossed clusters, such as
            head and tail entities; empty if sentence pairs are independent.
    """

    metrics: Sequence[Metric]
    values: Floats
    sampled: Floats
    n_pairs: Sequence[int]
    by_seed: Sequence[Sequence[Floats]]
    crossed: Sequence[BootstrapMetrics] = ()

    def n_clusters(self, m: int) -> int:
        """Return the number of independent clusters of a metric, which gives its freedom."""
        return min(part.n_pairs[m] for part in (self, *self.crossed))

    def row_variance(self, m: int, i: int, baseline: int | None = None) -> float:
        """Return the variance of a system's value, or of its difference, by sampling of rows."""
        parts = [self, *self.crossed]
        variances = []
        for part in parts:
            sampled = part.sampled[m, i]
            if baseline is not None:
                sampled = sampled - part.sampled[m, baseline]
            variances.append(_standard_error(sampled, part.n_pairs[m]) ** 2)
        # The sum may be below its parts by chance. NaN stays NaN.
        return float(np.max([*variances, sum(variances[1:]) - (len(parts) - 2) * variances[0]]))

    def estimates(self, i: int) -> dict[str, Estimate]:
        """Return a system's means over seeds with 95 % intervals, limited to the metric's range.

        As in ``paired_differences``, intervals cover the error of sampling rows and, with several
        seeds, of seeds. There is no interval for fewer than ``MIN_PAIRS`` sentence pairs, nor for
        two seeds, whose standard deviation is too uncertain.
        """
        from scipy.stats import t as student

        estimates = {}
        for m, metric in enumerate(self.metrics):
            value, seed_values, n_pairs = (
                float(self.values[m, i]),
                self.by_seed[m][i],
                self.n_clusters(m),
            )
            low = high = math.nan
            if n_pairs >= MIN_PAIRS and len(seed_values) != 2:
                row_variance = np.array(self.row_variance(m, i))
                seed_variance = np.array(
                    seed_values.var(ddof=1) / len(seed_values) if len(seed_values) > 1 else 0.0
                )
                error, freedom = combine_errors(
                    row_variance, n_pairs, seed_variance, len(seed_values) - 1
                )
                half = float(student.ppf(1 - LEVEL / 2, freedom) * error)
                low, high = max(value - half, metric.least), min(value + half, metric.most)
            estimates[metric.name] = Estimate(value, low, high)
        return estimates

    def deviations(self, i: int) -> dict[str, float | None]:
        """Return a system's standard deviations over seeds; None for a single seed."""
        by_metric = zip(self.metrics, (by_system[i] for by_system in self.by_seed), strict=True)
        return {
            metric.name: float(seed_values.std(ddof=1)) if len(seed_values) > 1 else None
            for metric, seed_values in by_metric
        }


def bootstrap_metrics(
    systems: Sequence[NDArray[np.floating]],
    rating: NDArray[np.floating],
    pair: NDArray[np.integer],
    metrics: Sequence[Metric] = DEFAULT_METRICS,
    resamples: int = RESAMPLES,
    seed: int = 0,
    crossed: Sequence[NDArray[np.integer]] = (),
) -> BootstrapMetrics:
    """Compute metrics of systems on the same bootstrap samples of sentence pairs.

    Args:
        systems: Finite predictions, (seeds, n), of each system; (1, n) without randomness.
        rating: (n,) finite ratings on any scale; n at least 1.
        pair: (n,) the id of each row's sentence pair.
        metrics: The metrics.
        resamples: The number of bootstrap samples; with fewer than 2 all intervals are NaN.
        seed: The random seed of the bootstrap.
        crossed: Two kinds of clusters to which each row belongs as well, (n,) each, such as the
            head and the tail entity of its triple; empty: sentence pairs are independent.
    """
    rows = _RatedRows(rating, pair)
    predictions = [list(system.astype(np.float64)) for system in systems]
    by_seed = [
        [
            np.array([metric(p, rows.rating, rows.pair) for p in seed_predictions])
            for seed_predictions in predictions
        ]
        for metric in metrics
    ]
    sampled = np.empty((len(metrics), len(systems), resamples))
    if resamples:
        samplers = [
            [_choose_sampler(metric)(rows, seed_predictions) for seed_predictions in predictions]
            for metric in metrics
        ]
        begin = 0
        for pairs in _sample_pairs(rows.n_pairs, len(rating), resamples, seed):
            weighted = _WeightedRows(rows, pairs)
            for m, by_system in enumerate(samplers):
                for i, sampler in enumerate(by_system):
                    sampled[m, i, begin : begin + len(pairs)] = sampler(weighted)
            begin += len(pairs)
    return BootstrapMetrics(
        metrics=metrics,
        values=np.array(
            [[seed_predictions.mean() for seed_predictions in by_system] for by_system in by_seed]
        ),
        sampled=sampled,
        n_pairs=[
            len(np.unique(rows.pair[rows.higher])) if metric.function is accuracy else rows.n_pairs
            for metric in metrics
        ],
        by_seed=by_seed,
        crossed=[
            bootstrap_metrics(systems, rating, cluster, metrics, resamples, seed)
            for cluster in crossed
        ],
    )


def paired_differences(
    resampled: BootstrapMetrics,
    groups: Mapping[int, Sequence[int]],
    metrics: Sequence[Metric] | None = None,
    controls: Collection[int] = (),
) -> dict[int, dict[str, PairedDifference]]:
    """Compare systems with baselines on the same rows.

    Intervals and p-values are those of Student's t. The standard error of rows is the bootstrap
    standard error times sqrt(k / (k - 1)), with k - 1 degrees of freedom, where k is the number of
    sentence pairs (for accuracy, of those with a comparison). The variance of seeds is pooled over
    a baseline and the systems compared with it, because they are fitted in the same way, and
    divided by the number of seeds. The two variances are added, with Welch's degrees of freedom.

    In simulations (docs/comparing.md) the rate of false positives stays at 5 %,
    and from 20 pairs up the intervals have about their nominal coverage. Percentiles of the same
    bootstrap samples have too many false positives: with few pairs they are too narrow, and a
    correction for many systems depends on the outermost of them. For single fits there is no
    variance of seeds: "better" then refers to these fits only.

    Args:
        resampled: Systems on the same bootstrap samples.
        groups: A baseline's position -> the positions of the systems compared with it. For each
            metric, the systems of all groups form the family of Holm's correction.
        metrics: The metrics to compare; None: all.
        controls: The positions of controls, which form another family: they are expected to
            be worse, and must not cost the other systems power.

    Returns:
        The position of each compared system -> its differences by the metric's name. With fewer
        than two sentence pairs, all figures except the values are NaN. All figures are NaN for a
        correlation if the predictions of any seed are constant, and if all ratings are equal.
    """
    compared: dict[int, dict[str, PairedDifference]] = {
        i: {} for others in groups.values() for i in others
    }
    for m, metric in enumerate(resampled.metrics):
        if metrics is not None and metric not in metrics:
            continue
        parts = [
            _compute_differences(resampled, m, base, list(others))
            for base, others in groups.items()
        ]
        figures = np.concatenate([np.empty((6, 0)), *parts], axis=1)
        corrected = np.empty(figures.shape[1])
        is_control = np.array([i in controls for i in compared], dtype=np.bool_)
        for family in (is_control, ~is_control):
            corrected[family] = holm(figures[-2][family])
        for by_metric, system_figures, p_holm in zip(
            compared.values(), figures.T, corrected, strict=True
        ):
            value, low, high, seed_error, p, minimum = system_figures.tolist()
            verdict = "no evidence"
            if p_holm <= LEVEL:
                verdict = "better" if (value > 0) == metric.higher_is_better else "worse"
            by_metric[metric.name] = PairedDifference(
                value, low, high, seed_error, p, float(p_holm), minimum, verdict
            )
    return compared


def _compute_differences(
    resampled: BootstrapMetrics, m: int, baseline: int, others: list[int]
) -> Floats:
    """Return the figures, (6, systems), of differences in a metric, before Holm's correction."""
    from scipy.stats import t as student

    values = resampled.values[m][others] - resampled.values[m, baseline]
    by_seed = [resampled.by_seed[m][i] for i in (baseline, *others)]
    repeated = [
        seed_values
        for seed_values in by_seed
        if len(seed_values) > 1 and not np.isnan(seed_values).any()
    ]
    seed_freedom = sum(len(seed_values) - 1 for seed_values in repeated)
    squares = sum(
        float(((seed_values - seed_values.mean()) ** 2).sum()) for seed_values in repeated
    )
    pooled = squares / seed_freedom if seed_freedom else 0.0
    seed_variances = np.array(
        [pooled / len(seed_values) if len(seed_values) > 1 else 0.0 for seed_values in by_seed]
    )
    seed_variances = seed_variances[1:] + seed_variances[0]
    row_variances = np.array([resampled.row_variance(m, i, baseline) for i in others])
    row_variances[np.isnan(values)] = np.nan
    errors, freedom = combine_errors(
        row_variances, resampled.n_clusters(m), seed_variances, seed_freedom
    )
    critical, powerful = (student.ppf(share, freedom) for share in (1 - LEVEL / 2, POWER))
    with np.errstate(invalid="ignore"):
        p = 2 * student.sf(np.abs(values) / errors, freedom)
    low, high = values - critical * errors, values + critical * errors
    return np.stack([values, low, high, np.sqrt(seed_variances), p, (critical + powerful) * errors])


def combine_errors(
    row_variances: Floats, n_pairs: float, seed_variances: Floats, seed_freedom: int
) -> tuple[Floats, Floats]:
    """Return standard errors from variances of rows and seeds, and Welch's degrees of freedom.

    Without a variance of seeds, the degrees of freedom are those of the pairs.
    """
    errors = np.sqrt(row_variances + seed_variances)
    denominator = row_variances**2 / max(n_pairs - 1, 1) + seed_variances**2 / max(seed_freedom, 1)
    return errors, errors**4 / denominator


def _standard_error(sampled: Floats, n_pairs: int) -> float:
    defined = sampled[~np.isnan(sampled)]
    if n_pairs < 2 or len(defined) < 2:
        return math.nan
    error = float(defined.std(ddof=1)) * math.sqrt(n_pairs / (n_pairs - 1))
    # There is no variation if all sentence pairs behave alike, for example if both systems order
    # all rows in the same way. Other pairs may still differ, so the error is that of one deviating
    # pair.
    return error if error > ROUNDING else 1 / n_pairs


def holm(p: Floats) -> Floats:
    """Return p-values, (m,), with Holm's correction. NaN stays NaN, but counts as a test."""
    order = np.argsort(p)
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(stepped, 1)
    return corrected


class _Ranking:
    """The order of values, from which ranks are computed for weighted rows.

    A row of weight w counts as w rows, and equal values get their mean rank.
    """

    def __init__(self, values: Floats) -> None:
        self.order = np.argsort(values, kind="stable")
        rising = values[self.order]
        self.starts = np.flatnonzero(np.append(True, rising[1:] != rising[:-1]))
        self.tied = len(self.starts) < len(values)

    def by_value(self, by_row: Floats) -> Floats:
        """Sum (b, n) over equal values: (b, distinct values), in ascending order."""
        rising = by_row.take(self.order, axis=1)
        return np.add.reduceat(rising, self.starts, axis=1) if self.tied else rising


class _WeightedRows:
    """Rows weighted by a block of b bootstrap samples; attributes are computed lazily.

    They do not depend on predictions.

    Attributes:
        pairs: (b, pairs) how often each sentence pair was sampled.
        rows: (b, n) how often each row was sampled.
        ranked: (b, n) ``rows`` times the row's centred rank by rating.
        rating_spread: (b,) 12 times the sum of squares of these ranks.
        half, spread: (b,) the sums over equal predictions for predictions without ties. They are
            the same for every order of the rows.
    """

    def __init__(self, rows: _RatedRows, pairs: Floats) -> None:
        self._source, self.pairs = rows, pairs

    @cached_property
    def rows(self) -> Floats:
        return self.pairs[:, self._source.pair]

    @cached_property
    def _count(self) -> Floats:
        return self._source.ranking.by_value(self.rows)

    @cached_property
    def ranked(self) -> Floats:
        count = self._count
        middle = np.cumsum(count, axis=1) - (count + count.sum(axis=1, keepdims=True)) / 2
        return np.asarray(self.rows * middle.take(self._source.level, axis=1))

    @cached_property
    def rating_spread(self) -> Floats:
        return _rank_spread(self._count)

    @cached_property
    def half(self) -> Floats:
        return _row_dot(self.ranked, self.rows) / 2

    @cached_property
    def spread(self) -> Floats:
        return _rank_spread(self.rows)

    def spearman(self, predicted: _Ranking) -> Floats:
        """Return the correlations, (b,), of ranks by prediction with ranks by rating."""
        count, ranked = predicted.by_value(self.rows), predicted.by_value(self.ranked)
        half = _row_dot(ranked, count) / 2 if predicted.tied else self.half
        spread = _rank_spread(count) if predicted.tied else self.spread
        # A mean rank is the count of lower values plus half the count of equal values. It need not
        # be centred, because the ranks by rating are.
        product = _row_dot(ranked, np.cumsum(count, axis=1)) - half
        with np.errstate(invalid="ignore"):
            return 12 * product / np.sqrt(spread * self.rating_spread)


def _row_dot(first: Floats, second: Floats) -> Floats:
    return np.asarray(np.einsum("bi,bi->b", first, second))


def _rank_spread(count: Floats) -> Floats:
    """Return 12 times the sum of squares of centred ranks, (b,), from counts, (b, distinct).

    It is NaN if all values are equal.
    """
    total = count.sum(axis=1) ** 3
    spread = total - np.einsum("bi,bi,bi->b", count, count, count)
    # Cubes of large counts are rounded, so a spread of 0 may be computed as a small number.
    return np.where(spread > ROUNDING * total, spread, np.nan)


class _RatedRows:
    """Ratings with their sentence pairs, and the comparisons of accuracy."""

    def __init__(self, rating: NDArray[np.floating], pair: NDArray[np.integer]) -> None:
        self.rating = rating.astype(np.float64)
        distinct, self.pair = np.unique(pair, return_inverse=True)
        self.n_pairs = len(distinct)
        self.sizes = np.bincount(self.pair)
        self.ranking = _Ranking(self.rating)
        # The index of each row's rating among the distinct ratings.
        self.level = np.unique(self.rating, return_inverse=True)[1]
        self.higher, self.lower = comparisons(self.rating, self.pair)


#: Maps weighted rows to a system's metric on each bootstrap sample, (b,), as mean over its seeds.
_Sampler = Callable[[_WeightedRows], Floats]


def _make_spearman_sampler(rows: _RatedRows, predictions: Sequence[Floats]) -> _Sampler:
    rankings = [_Ranking(ranking) for ranking in predictions]
    return lambda weighted: np.mean([weighted.spearman(ranking) for ranking in rankings], axis=0)


def _make_pearson_sampler(rows: _RatedRows, predictions: Sequence[Floats]) -> _Sampler:
    def sums(x: Floats) -> Floats:
        products = (np.ones_like(x), x, x * x, x * y, y, y * y)
        columns = [np.bincount(rows.pair, values, minlength=rows.n_pairs) for values in products]
        return np.stack(columns, axis=1)

    def correlate(by_pair: Floats, weighted: _WeightedRows) -> Floats:
        n, x, xx, xy, y, yy = (weighted.pairs @ by_pair).T
        spreads = []
        for total, squares in ((x, xx), (y, yy)):
            spread = squares - total**2 / n
            # If all sampled values are equal, rounding may leave a small spread.
            spreads.append(np.where(spread > ROUNDING * squares, spread, np.nan))
        return np.asarray((xy - x * y / n) / np.sqrt(spreads[0] * spreads[1]))

    y = _centre(rows.rating)
    by_pair = [sums(_centre(values)) for values in predictions]
    return lambda weighted: np.mean([correlate(values, weighted) for values in by_pair], axis=0)


def _centre(values: Floats) -> Floats:
    """Centre values and scale them to -1 to 1, so that sums of squares lose no digits."""
    if not np.ptp(values):
        return np.zeros_like(values)
    centred = values - values.mean()
    return np.asarray(centred / np.abs(centred).max())


def _make_accuracy_sampler(rows: _RatedRows, predictions: Sequence[Floats]) -> _Sampler:
    def correct_by_pair(predicted: Floats) -> Floats:
        """Count the correct comparisons of each sentence pair, (pairs,); ties count half."""
        share = (np.sign(predicted[rows.higher] - predicted[rows.lower]) + 1) / 2
        right = np.bincount(rows.pair[rows.higher], share, minlength=rows.n_pairs)
        return right.astype(np.float64)

    compared = np.bincount(rows.pair[rows.higher], minlength=rows.n_pairs).astype(np.float64)
    correct = np.mean([correct_by_pair(predicted) for predicted in predictions], axis=0)

    def share(weighted: _WeightedRows) -> Floats:
        with np.errstate(invalid="ignore"):
            return np.asarray((weighted.pairs @ correct) / (weighted.pairs @ compared))

    return share


_SAMPLERS: Mapping[MetricFunction, Callable[[_RatedRows, Sequence[Floats]], _Sampler]] = {
    spearman: _make_spearman_sampler,
    pearson: _make_pearson_sampler,
    accuracy: _make_accuracy_sampler,
}


def _choose_sampler(metric: Metric) -> Callable[[_RatedRows, Sequence[Floats]], _Sampler]:
    if metric.by_row is not None:
        return partial(
            _make_strata_sampler if metric.by_stratum else _make_mean_sampler, metric.by_row
        )
    return _SAMPLERS.get(metric.function) or partial(_make_row_sampler, metric)


def _make_mean_sampler(
    by_row: Callable[[Floats], Floats], rows: _RatedRows, predictions: Sequence[Floats]
) -> _Sampler:
    values = np.mean([by_row(seed_predictions) for seed_predictions in predictions], axis=0)
    by_pair = np.bincount(rows.pair, values, minlength=rows.n_pairs)
    return lambda weighted: np.asarray((weighted.pairs @ by_pair) / (weighted.pairs @ rows.sizes))


def _make_strata_sampler(
    by_row: Callable[[Floats], Floats], rows: _RatedRows, predictions: Sequence[Floats]
) -> _Sampler:
    """Return a sampler of the mean over the strata that occur in a bootstrap sample."""
    values = np.mean([by_row(values_by_row) for values_by_row in predictions], axis=0)
    shape = rows.n_pairs, int(rows.level.max()) + 1
    cell = rows.pair * shape[1] + rows.level
    by_pair, sizes = (
        np.bincount(cell, values_by_row, minlength=math.prod(shape)).reshape(shape)
        for values_by_row in (values, np.ones_like(values))
    )

    def mean(weighted: _WeightedRows) -> Floats:
        with np.errstate(invalid="ignore"):
            means = (weighted.pairs @ by_pair) / (weighted.pairs @ sizes)
        return np.asarray(np.nanmean(means, axis=1))

    return mean


def _make_row_sampler(metric: Metric, rows: _RatedRows, predictions: Sequence[Floats]) -> _Sampler:
    """Return a sampler that computes any metric on the rows of each bootstrap sample."""
    order, starts = np.argsort(rows.pair, kind="stable"), np.cumsum(rows.sizes) - rows.sizes

    def figures(weighted: _WeightedRows) -> Floats:
        values = []
        for count in weighted.pairs.astype(np.int64):
            # A sentence pair that is sampled twice counts as two pairs.
            sampled = np.repeat(np.arange(rows.n_pairs), count)
            sizes = rows.sizes[sampled]
            group = np.repeat(np.arange(len(sampled)), sizes)
            within = np.arange(len(group)) - (np.cumsum(sizes) - sizes)[group]
            rows_of_draw = order[starts[sampled][group] + within]
            rating = rows.rating[rows_of_draw]
            values.append(
                np.mean(
                    [
                        metric(seed_predictions[rows_of_draw], rating, group)
                        for seed_predictions in predictions
                    ]
                )
            )
        return np.array(values)

    return figures


def _sample_pairs(n_pairs: int, n_rows: int, resamples: int, seed: int) -> Iterator[Floats]:
    """Yield blocks of b bootstrap samples: how often each sentence pair is sampled, (b, pairs)."""
    rng = np.random.default_rng(seed)
    at_once = max(1, BLOCK // n_rows)
    for begin in range(0, resamples, at_once):
        size = min(at_once, resamples - begin)
        sampled = rng.integers(n_pairs, size=(size, n_pairs))
        sampled += n_pairs * np.arange(size)[:, None]
        count = np.bincount(sampled.ravel(), minlength=size * n_pairs)
        yield count.reshape(size, n_pairs).astype(np.float64)
