"""Metrics: the agreement of predicted similarities with ratings, and the ranks of right answers.

A metric is one function and one entry in ``METRICS``. Results, tables, reports and comparisons
handle any metric. A custom metric is named as ``my_metrics.py:kendall``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.base import package as plugins
from llmcond.base.errors import UserError, first_line

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

#: A function of predictions (n,), ratings (n,) and group ids (n,) that returns the value of the
#: metric, NaN if it is undefined. For queries, the first argument is the ranks of the right
#: answers, and the second one the number of each query's stratum (its history length, if any).
MetricFunction = Callable[[Floats, Floats, Indices], float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % confidence interval.

    Attributes:
        value: the value; NaN if it is undefined.
        low: lower end of the interval; NaN if there is no interval.
        high: upper end of the interval; NaN if there is no interval.

    Examples:
        >>> import llmcond
        >>> llmcond.Estimate(0.5, 0.4, 0.6).times(100)
        Estimate(value=50.0, low=40.0, high=60.0)
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def from_json(cls, value: float | None, interval: Sequence[float | None]) -> Estimate:
        """Create an estimate from the JSON of results.

        Args:
            value: the value; None if it is undefined.
            interval: lower and upper end of the interval; None if undefined.

        Returns:
            The estimate, with NaN instead of None.
        """
        return cls(*(math.nan if number is None else number for number in (value, *interval)))

    def times(self, factor: float) -> Estimate:
        """Convert the estimate to another unit.

        Args:
            factor: factor of the value and of both ends of the interval.

        Returns:
            The converted estimate.
        """
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def finite_or_none(value: float | None) -> float | None:
    """Return a value for JSON, with None instead of NaN and infinity."""
    return float(value) if value is not None and math.isfinite(value) else None


def estimates_json(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    """Return estimates as a JSON object with the keys ``NAME`` and ``NAME_ci`` for each."""
    values: dict[str, Any] = {}
    for name, estimate in estimates.items():
        interval = [finite_or_none(estimate.low), finite_or_none(estimate.high)]
        values |= {name: finite_or_none(estimate.value), f"{name}_ci": interval}
    return values


def format_number(value: float | None, decimals: int, signed: bool = False) -> str:
    """Format a value: a dash if it is undefined, and no sign if it is shown as 0."""
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:.{decimals}f}"
    if not any(digit in text for digit in "123456789"):
        return text.lstrip("-")
    return f"+{text}" if signed and value > 0 else text


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, and the format of its values.

    Attributes:
        name: key of the metric in results.
        function: function that computes the metric; a group has the rows of one sentence pair.
        label: heading in tables; empty: the name.
        description: description in one line.
        higher_is_better: whether higher values are better.
        factor: factor of shown values.
        decimals: number of decimals of shown values.
        secondary: whether narrow tables leave the metric out.
        least, most: smallest and largest possible value.
        by_row: for a metric that is a mean over rows, the function from predictions (n,) to the
            values of the rows (n,).
        by_stratum: whether the metric is the mean over strata of the means over their rows.
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
        """Heading of the metric in tables."""
        return self.label or self.name

    @property
    def best(self) -> Callable[..., Any]:
        """Function that selects the best of several values: ``max`` or ``min``."""
        return max if self.higher_is_better else min

    def in_display_unit(self, value: float | None) -> float | None:
        """Return a value in the unit that it is shown in; None if it is undefined."""
        defined = finite_or_none(value)
        return None if defined is None else self.factor * defined

    def format(self, value: float | None, signed: bool = False) -> str:
        """Format a value for tables."""
        return format_number(self.in_display_unit(value), self.decimals, signed)

    def __call__(self, prediction: Floats, rating: Floats, group: Indices) -> float:
        """Compute the metric on some rows.

        Raises:
            UserError: a custom function fails.
        """
        try:
            return float(self.function(prediction, rating, group))
        except Exception as error:  # A user's code can raise anything.
            raise UserError(f"the metric {self.name} failed: {first_line(error)}.") from error


# -- the metrics -------------------------------------------------------------------------------


def pearson(prediction: Floats, rating: Floats, group: Indices | None = None) -> float:
    """Return the Pearson correlation; NaN for fewer than 2 rows, or if one side is constant."""
    if len(prediction) < 2 or not np.ptp(prediction) or not np.ptp(rating):
        return math.nan
    a, b = (values - values.mean() for values in (prediction, rating))
    # Scaling by powers of two is exact, and no square overflows or underflows.
    a, b = (np.ldexp(values, -np.frexp(np.abs(values).max())[1]) for values in (a, b))
    scale = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale > 0 else math.nan


def spearman(prediction: Floats, rating: Floats, group: Indices | None = None) -> float:
    """Return the Spearman rank correlation; ties have their mean rank. NaN as in ``pearson``."""
    from scipy.stats import rankdata

    return pearson(rankdata(prediction), rankdata(rating))


def accuracy(prediction: Floats, rating: Floats, group: Indices) -> float:
    """Return the share of comparisons that predictions order like the ratings (CASE, equation 9).

    Any two rows of a group with different ratings are compared. Equal predictions count as one half
    (in CASE, equation 8, they are wrong), so that predictions that ignore the condition are at
    chance. The result is NaN if there is nothing to compare.
    """
    higher, lower = comparisons(rating, group)
    if not len(higher):
        return math.nan
    return float((np.sign(prediction[higher] - prediction[lower]) + 1).mean() / 2)


def comparisons(rating: Floats, group: Indices) -> tuple[Indices, Indices]:
    """Return all comparisons within groups, as the rows rated higher and those rated lower."""
    order = np.argsort(group, kind="stable")
    largest = int(np.unique(group, return_counts=True)[1].max(initial=0))
    pairs = [np.empty((2, 0), dtype=np.int64)]
    for step in range(1, largest):
        first, second = order[:-step], order[step:]
        pairs.append(np.stack([first, second])[:, group[first] == group[second]])
    first, second = np.concatenate(pairs, axis=1)
    rises, falls = rating[first] < rating[second], rating[first] > rating[second]
    higher = np.concatenate([first[falls], second[rises]])
    return higher, np.concatenate([second[falls], first[rises]])


# -- metrics of right answers' ranks, which are passed as predictions ---------------------------


def _mean_of(name: str, by_row: Callable[[Floats], Floats], **settings: Any) -> Metric:
    """Return a metric that is a mean over rows; NaN if there are none."""

    def function(rank: Floats, _: Floats, __: Indices) -> float:
        return float(by_row(rank).mean()) if len(rank) else math.nan

    return Metric(name, function, by_row=by_row, **settings)


def mean_over_strata(metric: Metric, **changes: Any) -> Metric:
    """Return a metric that is the mean over strata of a mean over rows.

    Each stratum has the same weight, however many rows it has.

    Args:
        metric: a metric that is a mean over rows.
        changes: other attributes of the new metric.
    """
    by_row = metric.by_row
    if by_row is None:
        raise TypeError(f"{metric.name} is not a mean over rows")

    def function(rank: Floats, stratum: Floats, _: Indices) -> float:
        if not len(rank):
            return math.nan
        _, numbers = np.unique(stratum, return_inverse=True)
        return float((np.bincount(numbers, by_row(rank)) / np.bincount(numbers)).mean())

    return replace(metric, function=function, by_stratum=True, **changes)


def _hits(k: int) -> Metric:
    """Return Hits@k. The mean rank of ties is not rounded: 1.5 is not within the first 1."""
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

RANKING_METRICS: tuple[Metric, ...] = (
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
    mean_over_strata(
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

#: The default metrics of a ranking; the first is the main one.
RANKING_NAMES = ("mrr", "hits@1", "hits@3", "hits@10", "mean_rank")

#: All metrics by name; custom metrics are added when they are first named.
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
            "similar",
            least=0,
            most=1,
        ),
        *RANKING_METRICS,
    )
}

#: The default metrics of rated pairs; the first decides which result is best.
DEFAULT_METRICS: tuple[Metric, ...] = tuple(
    METRICS[name] for name in ("spearman", "pearson", "accuracy")
)
_BUNDLED = frozenset(METRICS)


def get_metric(name: str) -> Metric:
    """Return a metric by the name that results have."""
    return METRICS[name]


def choose_metrics(task: Sequence[str], further: Sequence[str] = ()) -> tuple[Metric, ...]:
    """Return the metrics of a task, the most important first, followed by further metrics.

    Args:
        task: names of the task's metrics.
        further: names of further metrics. A name is that of a known metric, or of code, such as
            ``my_metrics.py:kendall``: a ``Metric``, or a function from predictions, ratings and
            group ids to a number. Installed packages add metrics by entry points
            ``llmcond.base.metrics``.

    Raises:
        UserError: there is no such metric or code, or its name is that of a bundled metric.
    """
    metrics: dict[Metric, None] = {}
    for name in (*task, *further):
        if plugins.is_plugin(name):
            metrics[_register_metric(name, plugins.load(name))] = None
        elif name in METRICS:
            metrics[METRICS[name]] = None
        else:
            names = dict.fromkeys(METRICS, "")
            metrics[
                _register_metric(name, plugins.find_plugin(name, names, "metrics", "metric"))
            ] = None
    return tuple(metrics)


def _register_metric(name: str, loaded: Any) -> Metric:
    metric = loaded if isinstance(loaded, Metric) else Metric(name.rpartition(":")[2], loaded)
    if not callable(metric.function):
        raise UserError(
            f"{name} is not a metric; expected a function from predictions, ratings and groups to "
            "a number."
        )
    if metric.name in _BUNDLED:
        raise UserError(
            f"{name} has the name of the bundled metric {metric.name}. Give it another name."
        )
    METRICS[metric.name] = metric
    return metric
