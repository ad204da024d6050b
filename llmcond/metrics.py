"""Metrics by name: how well predicted similarities agree with ratings, or how right answers rank.

A metric is one function and one entry in ``METRICS``; results, tables, pages and comparisons take
whatever metrics a result has. A user's own function is named as ``my_metrics.py:kendall``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond import plugins
from llmcond.errors import UserError, first_line

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

#: From predictions (n,), ratings (n,) and group ids (n,) to a figure; NaN where it is undefined.
#: Of queries, the right answers' ranks take the place of predictions, and the number of each
#: query's stratum (its history length, where there is one) that of ratings.
MetricFunction = Callable[[Floats, Floats, Indices], float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval; NaN where undefined, or where there is no interval."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def of_json(cls, value: float | None, interval: Sequence[float | None]) -> Estimate:
        """Return the figure that results have as JSON, where null is undefined."""
        return cls(*(math.nan if one is None else one for one in (value, *interval)))

    def times(self, factor: float) -> Estimate:
        """Return it in another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def finite(value: float | None) -> float | None:
    """Return a figure as JSON has it: None for NaN and infinity."""
    return float(value) if value is not None and math.isfinite(value) else None


def estimates_json(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    """Return figures by name as JSON has them, each with its interval as ``NAME_ci``."""
    found: dict[str, Any] = {}
    for name, one in estimates.items():
        found |= {name: finite(one.value), f"{name}_ci": [finite(one.low), finite(one.high)]}
    return found


def number(value: float | None, decimals: int, signed: bool = False) -> str:
    """Return a figure as text: a dash where it is undefined, no sign before what is shown as 0."""
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:.{decimals}f}"
    if not any(digit in text for digit in "123456789"):
        return text.lstrip("-")
    return f"+{text}" if signed and value > 0 else text


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, and how its figures are shown.

    Attributes:
        name: its key in results.
        function: what computes it; the rows of one group are a sentence pair's.
        label: heading in tables; empty: the name.
        description: one line.
        higher_is_better: whether more is better.
        factor: what shown figures are multiplied by.
        decimals: of shown figures.
        secondary: whether tables with little room leave it out.
        least, most: what it can be.
        by_row: of a metric that is a mean over rows, from predictions (n,) to its values (n,).
        by_stratum: whether it is the mean over strata of the means over their rows.
    """

    name: str
    function: MetricFunction
    label: str = ""
    description: str = ""
    higher_is_better: bool = True
    factor: float = 100.0
    decimals: int = 1
    secondary: bool = False
    least: float = -math.inf
    most: float = math.inf
    by_row: Callable[[Floats], Floats] | None = None
    by_stratum: bool = False

    @property
    def heading(self) -> str:
        """Return what tables call it."""
        return self.label or self.name

    @property
    def best(self) -> Callable[..., Any]:
        """Return what takes the best of figures: ``max``, or ``min`` where less is better."""
        return max if self.higher_is_better else min

    def scaled(self, value: float | None) -> float | None:
        """Return a figure in the unit that it is shown in; None where it is undefined."""
        defined = finite(value)
        return None if defined is None else self.factor * defined

    def show(self, value: float | None, signed: bool = False) -> str:
        """Return a figure as tables have it."""
        return number(self.scaled(value), self.decimals, signed)

    def __call__(self, prediction: Floats, rating: Floats, group: Indices) -> float:
        """Return the figure of some rows; a UserError where a user's own function fails."""
        try:
            return float(self.function(prediction, rating, group))
        except Exception as error:  # whatever a user's code raises
            raise UserError(f"the metric {self.name} failed: {first_line(error)}.") from error


# -- the metrics -------------------------------------------------------------------------------


def pearson(prediction: Floats, rating: Floats, group: Indices | None = None) -> float:
    """Return the Pearson correlation; NaN for fewer than 2 rows, or where one side is constant."""
    if len(prediction) < 2 or not np.ptp(prediction) or not np.ptp(rating):
        return math.nan
    a, b = prediction - prediction.mean(), rating - rating.mean()
    scale = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale > 0 else math.nan


def spearman(prediction: Floats, rating: Floats, group: Indices | None = None) -> float:
    """Return the Spearman rank correlation; ties share their mean rank, NaN as :func:`pearson`."""
    from scipy.stats import rankdata

    return pearson(rankdata(prediction), rankdata(rating))


def accuracy(prediction: Floats, rating: Floats, group: Indices) -> float:
    """Return the share of comparisons that predictions order as ratings do (CASE, equation 9).

    Compared are any two rows of a group whose ratings differ. Equal predictions count one half
    (in CASE, equation 8, they are wrong), so that predictions which ignore the condition are at
    chance. NaN where there is nothing to compare.
    """
    higher, lower = comparisons(rating, group)
    if not len(higher):
        return math.nan
    return float((np.sign(prediction[higher] - prediction[lower]) + 1).mean() / 2)


def comparisons(rating: Floats, group: Indices) -> tuple[Indices, Indices]:
    """Return all comparisons within groups, as the rows rated higher and those rated lower."""
    order = np.argsort(group, kind="stable")
    largest = int(np.unique(group, return_counts=True)[1].max(initial=0))
    found = [np.empty((2, 0), dtype=np.int64)]
    for step in range(1, largest):
        one, other = order[:-step], order[step:]
        found.append(np.stack([one, other])[:, group[one] == group[other]])
    one, other = np.concatenate(found, axis=1)
    rises, falls = rating[one] < rating[other], rating[one] > rating[other]
    higher = np.concatenate([one[falls], other[rises]])
    return higher, np.concatenate([other[falls], one[rises]])


# -- ranks of right answers, which take the place of predictions --------------------------------


def _mean_of(name: str, by_row: Callable[[Floats], Floats], **settings: Any) -> Metric:
    """Return a metric that is a mean over rows; NaN without any."""

    def function(rank: Floats, _: Floats, __: Indices) -> float:
        return float(by_row(rank).mean()) if len(rank) else math.nan

    return Metric(name, function, by_row=by_row, **settings)


def over_strata(metric: Metric, **changes: Any) -> Metric:
    """Return the metric that is the mean over strata of a mean over rows, with further changes.

    Each stratum counts the same, however many rows it has.
    """
    by_row = metric.by_row
    if by_row is None:
        raise TypeError(f"{metric.name} is no mean over rows")

    def function(rank: Floats, stratum: Floats, _: Indices) -> float:
        if not len(rank):
            return math.nan
        _, which = np.unique(stratum, return_inverse=True)
        return float((np.bincount(which, by_row(rank)) / np.bincount(which)).mean())

    return replace(metric, function=function, by_stratum=True, **changes)


def _hits(k: int) -> Metric:
    """Return Hits@k. A mean rank of ties counts as it is: 1.5 is not within the first 1."""
    return _mean_of(
        f"hits@{k}",
        lambda rank: (rank <= k).astype(np.float64),
        label=f"Hits@{k}",
        description=f"how often the right answer is among the first {k}",
        secondary=k == 3,
        least=0,
        most=1,
    )


_MEAN_RANK = _mean_of(
    "mean_rank",
    lambda rank: rank,
    label="mean rank",
    description="mean rank of the right answer",
    higher_is_better=False,
    factor=1,
    secondary=True,
    least=1,
)

RANKING: tuple[Metric, ...] = (
    _mean_of(
        "mrr",
        lambda rank: 1 / rank,
        label="MRR",
        description="mean of 1 / rank of the right answer",
        least=0,
        most=1,
    ),
    *map(_hits, (1, 3, 5, 10, 25, 50)),
    _MEAN_RANK,
    over_strata(
        _MEAN_RANK,
        name="average_rank",
        label="average rank",
        description="mean over history lengths of the mean rank of the right answer",
        secondary=False,
    ),
    replace(
        _MEAN_RANK,
        name="average_rank_micro",
        label="average rank (micro)",
        description="mean rank of the right answer over all queries, whatever their history",
    ),
)

#: The metrics of a ranking unless others are asked for; the first is the main one.
RANKING_NAMES = ("mrr", "hits@1", "hits@3", "hits@10", "mean_rank")

#: Every metric by its name, those of users once they were named.
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "spearman",
            spearman,
            "Spearman",
            "rank correlation of predictions and ratings",
            least=-1,
            most=1,
        ),
        Metric(
            "pearson",
            pearson,
            "Pearson",
            "linear correlation of predictions and ratings",
            secondary=True,
            least=-1,
            most=1,
        ),
        Metric(
            "accuracy",
            accuracy,
            description="how often the right one of a pair's two conditions is predicted more "
            "alike",
            least=0,
            most=1,
        ),
        *RANKING,
    )
}

#: Of rated pairs, what is computed unless more is asked for; the first decides which is best.
DEFAULT: tuple[Metric, ...] = tuple(METRICS[name] for name in ("spearman", "pearson", "accuracy"))
_BUNDLED = frozenset(METRICS)


def metric_of(name: str) -> Metric:
    """Return the metric of a result's figure, for how it is shown."""
    return METRICS[name]


def choose_metrics(task: Sequence[str], further: Sequence[str] = ()) -> tuple[Metric, ...]:
    """Return the metrics of a task, the most important first, and those named in addition.

    A name is of a metric, or of code: ``my_metrics.py:kendall``, a function from predictions,
    ratings and group ids to a number, or a :class:`Metric`. An installed package adds either by an
    entry point ``llmcond.metrics``.

    Raises:
        UserError: no such metric or code, or another metric has its name.
    """
    found: dict[Metric, None] = {}
    for name in (*task, *further):
        if plugins.is_plugin(name):
            found[_registered(name, plugins.load(name))] = None
        elif name in METRICS:
            found[METRICS[name]] = None
        else:
            names = dict.fromkeys(METRICS, "")
            found[_registered(name, plugins.find(name, names, "metrics", "metric"))] = None
    return tuple(found)


def _registered(name: str, loaded: Any) -> Metric:
    metric = loaded if isinstance(loaded, Metric) else Metric(name.rpartition(":")[2], loaded)
    if not callable(metric.function):
        raise UserError(f"{name} is no function from predictions, ratings and groups to a number.")
    if metric.name in _BUNDLED:
        raise UserError(f"{name}: there is a metric {metric.name} already; name it otherwise.")
    METRICS[metric.name] = metric
    return metric
