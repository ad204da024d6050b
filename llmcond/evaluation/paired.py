"""Which way of predicting is better on the same rows, and how sure is that?

Every candidate is compared with one baseline, by Spearman and by accuracy. Rows come in sentence
pairs, whose conditions share their sentences, so what can vary is which sentence pairs were drawn:
the error is that of a bootstrap over pairs, with the same draws for candidate and baseline. What
the two share (hard rows, odd ratings) then cancels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from llmcond.metrics import Estimate

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

RESAMPLES = 2_000
LEVEL = 0.05
POWER = 0.8

# Draws times rows that are worked on at once: an array of them is one megabyte.
BLOCK = 2**17

# Far below what one row can change, far above what rounding can.
ROUNDING = 1e-10


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way of predicting.

    Attributes:
        name: what it is called in results.
        similarity: (seeds, n) predictions, one row per seed of the fit; (1, n) where nothing is
            random.
    """

    name: str
    similarity: NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Difference:
    """Candidate minus baseline in one measure; figures are NaN where undefined.

    Attributes:
        value: mean over the candidate's seeds, minus mean over the baseline's.
        low, high: 95 % interval of this difference taken by itself; it holds the error of the rows
            drawn and of the seeds.
        seed_error: the part of the standard error that is of the seeds; 0 for single fits.
        p: two-sided, of no true difference; at most 0.05 exactly where the interval excludes 0.
        p_holm: ``p`` corrected for the number of candidates (Holm).
        minimum: the true difference that rows like these would show in 80 % of samples, by ``p``
            at most 0.05; with the correction it takes a larger one.
        verdict: "better" or "worse" where ``p_holm`` is at most 0.05, else "no evidence".
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
class Compared:
    """A candidate against the baseline.

    Attributes:
        name: the candidate's.
        spearman: times 1, not times 100.
        accuracy: as :func:`compare` defines it.
        seed_sd: standard deviation of the candidate's own Spearman over its seeds, on these rows;
            None for a single seed.
    """

    name: str
    spearman: Difference
    accuracy: Difference
    seed_sd: float | None


def compare(
    candidates: Sequence[Candidate],
    baseline: Candidate,
    rating: NDArray[np.floating],
    pair: NDArray[np.integer],
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Compared]:
    """Compare candidates with a baseline on the same rows.

    Accuracy is the share, over all twos of conditions on one sentence pair whose ratings differ, of
    those that predictions order as ratings do. Equal predictions count one half, so that
    predictions that do not see the condition are at chance; in
    :func:`llmcond.metrics.score`, which follows CASE (equation 8), they are wrong.

    Intervals and p-values are those of Student's t. Of the rows: the bootstrap standard error times
    sqrt(k / (k - 1)), on k - 1 degrees of freedom, where k is the number of sentence pairs (for
    accuracy, of those with something to compare). Of the seeds: the variance over seeds, pooled
    over all candidates and the baseline, as they are fitted alike, divided by how many seeds there
    are. The two add up, with Welch's degrees of freedom. In simulations
    (``scripts/simulate_comparison.py``) this keeps to 5 % of false alarms, and its intervals hold
    the truth about as often as they say, from 30 pairs up. Without the seeds' part they would
    be more wherever seeds differ. Percentiles of the same draws give too many as
    well: at few pairs they are too narrow, and a correction for many candidates rests on the
    outermost of them. Single fits are taken as they are: "better" is then said of these fits.

    Args:
        candidates: what is compared; all of them are the family of Holm's correction, for each
            measure by itself.
        baseline: what each is compared with; not itself a candidate.
        rating: (n,) on any scale.
        pair: (n,) number of each row's sentence pair.
        resamples: bootstrap samples; fewer than 2 leave all but the values NaN.
        seed: of the bootstrap.

    Returns:
        A comparison per candidate, in their order. Fewer than two sentence pairs leave all but
        the values NaN, and so do, with the values, constant predictions for Spearman (of any one
        seed) and ratings without a difference.

    Raises:
        ValueError: an array has another shape, is empty, or is not finite.
    """
    found = resample((baseline, *candidates), rating, pair, resamples, seed)
    spearman, accuracy = (
        _differences(values[1:] - values[0], drawn[1:] - drawn[0], n_pairs, _Seeds.of(seeds))
        for values, drawn, n_pairs, seeds in zip(
            found.values, found.drawn, found.n_pairs, found.by_seed, strict=True
        )
    )
    return [
        Compared(
            name=candidate.name,
            spearman=spearman[index],
            accuracy=accuracy[index],
            seed_sd=_spread_over_seeds(found.by_seed[0][index + 1]),
        )
        for index, candidate in enumerate(candidates)
    ]


def corrected(family: Sequence[Compared]) -> list[Compared]:
    """Return comparisons with several baselines as one family of Holm's correction."""
    found = list(family)
    for measure in ("spearman", "accuracy"):
        before: list[Difference] = [getattr(one, measure) for one in found]
        p_holm = holm(np.array([one.p for one in before]))
        after = [
            replace(one, p_holm=float(p), verdict=_verdict(one.value, float(p)))
            for one, p in zip(before, p_holm, strict=True)
        ]
        changes: list[dict[str, Any]] = [{measure: own} for own in after]
        found = [replace(one, **own) for one, own in zip(found, changes, strict=True)]
    return found


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of predicting by itself.

    Attributes:
        spearman, accuracy: means over its seeds, as :func:`compare` has them, with 95 % intervals
            over rows that do not hold the seeds' error.
        seed_sd: standard deviation of Spearman over its seeds; None for a single seed.
    """

    spearman: Estimate
    accuracy: Estimate
    seed_sd: float | None


def estimate(
    ways: Sequence[Candidate],
    rating: NDArray[np.floating],
    pair: NDArray[np.integer],
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Measured]:
    """Measure ways of predicting, each by itself; arguments and errors as in :func:`compare`."""
    found = resample(ways, rating, pair, resamples, seed)
    measured = []
    for index in range(len(ways)):
        spearman, accuracy = (
            _interval(values[index], drawn[index], n_pairs)
            for values, drawn, n_pairs in zip(found.values, found.drawn, found.n_pairs, strict=True)
        )
        spread = _spread_over_seeds(found.by_seed[0][index])
        measured.append(Measured(spearman, accuracy, spread))
    return measured


def _interval(value: float, drawn: Floats, n_pairs: int) -> Estimate:
    critical = student.ppf(1 - LEVEL / 2, max(n_pairs - 1, 1))
    half = float("nan") if np.isnan(value) else float(critical * _standard_error(drawn, n_pairs))
    return Estimate(float(value), float(value) - half, float(value) + half)


def _spread_over_seeds(values: Floats) -> float | None:
    return float(values.std(ddof=1)) if len(values) > 1 else None


@dataclass(frozen=True, slots=True)
class _Seeds:
    """What seeds add to the variance of each difference.

    Attributes:
        variance: (candidates,) of the difference.
        freedom: its degrees of freedom.
    """

    variance: Floats
    freedom: int

    @classmethod
    def of(cls, by_seed: Sequence[Floats]) -> _Seeds:
        """Pool the variance over the baseline, which comes first, and the candidates."""
        several = [values for values in by_seed if len(values) > 1 and not np.isnan(values).any()]
        freedom = sum(len(values) - 1 for values in several)
        squares = sum(float(((values - values.mean()) ** 2).sum()) for values in several)
        pooled = squares / freedom if freedom else 0.0
        own = np.array([pooled / len(values) if len(values) > 1 else 0.0 for values in by_seed])
        return cls(own[1:] + own[0], freedom)


@dataclass(frozen=True, slots=True)
class Resampled:
    """Measures of ways of predicting, on all rows and on the same draws of sentence pairs.

    Attributes:
        values: (2, ways) Spearman and accuracy, means over seeds.
        drawn: (2, ways, draws) the same on each draw.
        n_pairs: sentence pairs that each measure rests on.
        by_seed: the same on all rows, for each measure and way, (seeds,).
    """

    values: Floats
    drawn: Floats
    n_pairs: tuple[int, int]
    by_seed: tuple[list[Floats], list[Floats]]


def resample(
    ways: Sequence[Candidate],
    rating: NDArray[np.floating],
    pair: NDArray[np.integer],
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Resampled:
    """Measure ways of predicting on draws of sentence pairs; arguments as in :func:`compare`."""
    rows = _Rows(rating, pair)
    prepared = [_Way(way, rows) for way in ways]
    once = rows.weigh(np.ones((1, rows.n_pairs)))
    drawn = np.empty((2, len(ways), resamples))
    begin = 0
    for pairs in _draws(rows.n_pairs, len(rating), resamples, seed):
        weighted = rows.weigh(pairs)
        for index, way in enumerate(prepared):
            drawn[:, index, begin : begin + len(pairs)] = way.measure(weighted)
        begin += len(pairs)
    return Resampled(
        values=np.stack([way.measure(once)[:, 0] for way in prepared], axis=1),
        drawn=drawn,
        n_pairs=(rows.n_pairs, rows.n_pairs_compared),
        by_seed=(
            [way.spearman_by_seed(once)[:, 0] for way in prepared],
            [way.accuracy_by_seed() for way in prepared],
        ),
    )


def holm(p: Floats) -> Floats:
    """Return p-values corrected for their number, by Holm's method.

    Args:
        p: (m,) of the family; one that is NaN stays so, and counts.

    Returns:
        (m,) in the same order.
    """
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

    def level(self) -> Indices:
        """Return (n,) which of the distinct values each row has."""
        level = np.zeros(len(self.order), dtype=np.intp)
        level[self.order[self.starts[1:]]] = 1
        level[self.order] = np.cumsum(level[self.order])
        return level


@dataclass(frozen=True, slots=True)
class _Weighted:
    """What a block of b draws makes of the rows, before any predictions.

    Attributes:
        pairs: (b, pairs) how often each sentence pair was drawn.
        rows: (b, n) how often each row was.
        ranked: (b, n) the same times the row's centred rank by rating.
        rating_spread: (b,) 12 times the sum of squares of those ranks.
        half, spread: (b,) what takes the place of sums over equal predictions where none are equal:
            it is the same for every order of the rows.
    """

    pairs: Floats
    rows: Floats
    ranked: Floats
    rating_spread: Floats
    half: Floats
    spread: Floats

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
    dot: Floats = np.einsum("bi,bi->b", first, second)
    return dot


def _spread(count: Floats) -> Floats:
    """Return 12 times the sum of squares of centred ranks, from (b, distinct) how many are equal.

    NaN where all are equal.
    """
    whole = count.sum(axis=1) ** 3
    spread = whole - np.einsum("bi,bi,bi->b", count, count, count)
    # Cubes of large counts are rounded, so that what should be 0 is not.
    return np.where(spread > ROUNDING * whole, spread, np.nan)


class _Rows:
    """Ratings, the sentence pairs they belong to, and what accuracy compares."""

    def __init__(self, rating: NDArray[np.floating], pair: NDArray[np.integer]) -> None:
        if rating.ndim != 1 or rating.shape != pair.shape or not len(rating):
            message = f"ratings {rating.shape} and pairs {pair.shape}, expected (n,) of both"
            raise ValueError(message)
        if not np.isfinite(rating).all():
            raise ValueError("ratings are not finite")
        self.rating = rating.astype(np.float64)
        distinct, self.pair = np.unique(pair, return_inverse=True)
        self.n_pairs = len(distinct)
        self._ranking = _Ranking(self.rating)
        self._level = self._ranking.level()
        self._first, self._second = self._comparisons()
        compared = np.bincount(self.pair[self._first], minlength=self.n_pairs)
        self.compared = compared.astype(np.float64)
        self.n_pairs_compared = int((self.compared > 0).sum())

    def _comparisons(self) -> tuple[Indices, Indices]:
        """Return the rows of all comparisons, the one with the higher rating first."""
        order = np.argsort(self.pair, kind="stable")
        twos = [np.empty((2, 0), dtype=np.intp)]
        for step in range(1, int(np.bincount(self.pair).max())):
            one, other = order[:-step], order[step:]
            twos.append(np.stack([one, other])[:, self.pair[one] == self.pair[other]])
        one, other = np.concatenate(twos, axis=1)
        rises, falls = self.rating[one] < self.rating[other], self.rating[one] > self.rating[other]
        first = np.concatenate([one[falls], other[rises]])
        return first, np.concatenate([other[falls], one[rises]])

    def correct(self, predicted: Floats) -> Floats:
        """Return (pairs,) how many comparisons of each sentence pair are right; equal is half."""
        sign = np.sign(predicted[self._first] - predicted[self._second])
        right = np.bincount(self.pair[self._first], (sign + 1) / 2, minlength=self.n_pairs)
        return right.astype(np.float64)

    def weigh(self, pairs: Floats) -> _Weighted:
        """Return the rows weighted by (b, pairs) how often each sentence pair was drawn."""
        rows = pairs[:, self.pair]
        count = self._ranking.by_value(rows)
        middle = np.cumsum(count, axis=1) - (count + count.sum(axis=1, keepdims=True)) / 2
        ranked = rows * middle.take(self._level, axis=1)
        return _Weighted(pairs, rows, ranked, _spread(count), _dot(ranked, rows) / 2, _spread(rows))


class _Way:
    """A candidate's or the baseline's predictions, sorted and compared once for all draws."""

    def __init__(self, way: Candidate, rows: _Rows) -> None:
        predicted = way.similarity
        if predicted.ndim != 2 or predicted.shape[1] != len(rows.rating) or not len(predicted):
            message = f"{way.name}: {predicted.shape}, expected (seeds, {len(rows.rating)})"
            raise ValueError(message)
        if not np.isfinite(predicted).all():
            raise ValueError(f"{way.name}: predictions are not finite")
        by_seed = [one.astype(np.float64) for one in predicted]
        self._rankings = [_Ranking(one) for one in by_seed]
        self._correct_by_seed = np.array([rows.correct(one) for one in by_seed])
        self._correct = self._correct_by_seed.mean(axis=0)
        self._compared = rows.compared

    def spearman_by_seed(self, weighted: _Weighted) -> Floats:
        """Return (seeds, b)."""
        return np.array([weighted.spearman(ranking) for ranking in self._rankings])

    def accuracy_by_seed(self) -> Floats:
        """Return (seeds,)."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self._correct_by_seed.sum(axis=1) / self._compared.sum())

    def measure(self, weighted: _Weighted) -> Floats:
        """Return (2, b), Spearman and accuracy, means over seeds."""
        spearman = self.spearman_by_seed(weighted).mean(axis=0)
        with np.errstate(invalid="ignore"):
            share = (weighted.pairs @ self._correct) / (weighted.pairs @ self._compared)
        return np.stack([spearman, share])


def _draws(n_pairs: int, n_rows: int, resamples: int, seed: int) -> Iterator[Floats]:
    """Yield, a block at a time, (b, pairs) how often each draw takes each sentence pair."""
    rng = np.random.default_rng(seed)
    at_once = max(1, BLOCK // n_rows)
    for begin in range(0, resamples, at_once):
        size = min(at_once, resamples - begin)
        drawn = rng.integers(n_pairs, size=(size, n_pairs))
        drawn += n_pairs * np.arange(size)[:, None]
        count = np.bincount(drawn.ravel(), minlength=size * n_pairs)
        yield count.reshape(size, n_pairs).astype(np.float64)


def _differences(values: Floats, sampled: Floats, n_pairs: int, seeds: _Seeds) -> list[Difference]:
    """Return what is known of each candidate's difference.

    Args:
        values: (candidates,) differences.
        sampled: (candidates, draws) the same in each draw; NaN where undefined.
        n_pairs: sentence pairs that they rest on.
        seeds: what seeds add.
    """
    rows = np.array([_standard_error(one, n_pairs) for one in sampled]) ** 2
    rows[np.isnan(values)] = np.nan
    errors = np.sqrt(rows + seeds.variance)
    # Welch and Satterthwaite; without seeds it is the pairs' own.
    own = rows**2 / max(n_pairs - 1, 1) + seeds.variance**2 / max(seeds.freedom, 1)
    freedom = errors**4 / own
    critical, powerful = (student.ppf(share, freedom) for share in (1 - LEVEL / 2, POWER))
    with np.errstate(invalid="ignore"):
        p = 2 * student.sf(np.abs(values) / errors, freedom)
    return [
        Difference(
            value=float(value),
            low=float(value - far * error),
            high=float(value + far * error),
            seed_error=float(np.sqrt(variance)),
            p=float(own_p),
            p_holm=float(own_holm),
            minimum=float((far + strong) * error),
            verdict=_verdict(float(value), float(own_holm)),
        )
        for value, error, far, strong, variance, own_p, own_holm in zip(
            values, errors, critical, powerful, seeds.variance, p, holm(p), strict=True
        )
    ]


def _standard_error(sampled: Floats, n_pairs: int) -> float:
    defined = sampled[~np.isnan(sampled)]
    if n_pairs < 2 or len(defined) < 2:
        return float("nan")
    error = float(defined.std(ddof=1)) * np.sqrt(n_pairs / (n_pairs - 1))
    # Nothing varies where all sentence pairs are alike, say where both order all rows the same way.
    # That does not show that others would be: the error is then as if one of them were not.
    return float(error) if error > ROUNDING else 1 / n_pairs


def _verdict(value: float, p: float) -> str:
    if not p <= LEVEL:
        return "no evidence"
    return "better" if value > 0 else "worse"
