"""Agreement of clusters with known labels: V-measure and adjusted Rand index."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from llmcond.clustering.methods import Labels
from llmcond.data.datasets import is_missing
from llmcond.evaluation.paired import LEVEL, MIN_PAIRS, ROUNDING
from llmcond.metrics import Estimate, Floats, Indices, Metric, estimates_json

# Both metrics depend only on sums over the counts of a contingency table. So the jackknife, which
# needs the metric without each text in turn, works without a loop over texts.


def _v_measure(n: int, cells: Floats, clusters: Floats, labels: Floats) -> Floats:
    """Return the V-measure of n texts from sums of x log x over cells, clusters and labels."""
    joint, cluster_entropy, label_entropy = (
        np.log(n) - total_log / n for total_log in (cells, clusters, labels)
    )
    total = cluster_entropy + label_entropy
    value = np.divide(2 * (total - joint), total, out=np.ones_like(total), where=total > ROUNDING)
    return np.asarray(np.maximum(value, 0.0))


def _rand(n: int, cells: Floats, clusters: Floats, labels: Floats) -> Floats:
    """Return the adjusted Rand index of n texts from sums of x (x - 1)."""
    chance, upper = clusters * labels / max(n * (n - 1), 1), (clusters + labels) / 2
    room = upper - chance
    return np.divide(cells - chance, room, out=np.ones_like(room), where=room > ROUNDING)


_Term = Callable[[Floats], Floats]
_Figure = Callable[[int, Floats, Floats, Floats], Floats]


def _compute_metric(term: _Term, figure: _Figure, counts: Floats) -> float:
    """Compute a metric of a contingency table."""
    sides = counts, counts.sum(axis=1), counts.sum(axis=0)
    return float(figure(int(counts.sum()), *(np.atleast_1d(term(side).sum()) for side in sides))[0])


def _leave_one_out(term: _Term, figure: _Figure, counts: Floats, cells: Indices) -> Floats:
    """Compute (n,) a metric without each of n texts, whose positions in the table are ``cells``."""
    row, column = np.unravel_index(cells, counts.shape)
    sides = counts, counts.sum(axis=1), counts.sum(axis=0)
    each = counts[row, column], sides[1][row], sides[2][column]
    sums = (term(side).sum() - term(x) + term(x - 1) for side, x in zip(sides, each, strict=True))
    return figure(len(cells) - 1, *sums)


def _entropy_term(x: Floats) -> Floats:
    """Return x log x, which is 0 at 0."""
    from scipy.special import xlogy

    return np.asarray(xlogy(x, x))


_PARTS: Mapping[str, tuple[_Term, _Figure]] = {
    "v_measure": (_entropy_term, _v_measure),
    "ari": (lambda x: x * (x - 1), _rand),
}


def _make_metric(name: str, label: str, least: float) -> Metric:
    def function(clusters: Floats, labels: Floats, _: Indices) -> float:
        return _compute_metric(*_PARTS[name], _contingency_table(clusters, labels)[0])

    return Metric(name, function, label, least=least, most=1.0)


#: The V-measure below which clusters are reported to agree little with labels.
_MIN_V_MEASURE = 0.5
METRICS = (_make_metric("v_measure", "V-measure", 0.0), _make_metric("ari", "ARI", -0.5))


def _contingency_table(clusters: Any, labels: Any) -> tuple[Floats, Indices]:
    """Return the contingency table, (clusters, labels), and the position of each text in it."""
    (names, rows), (classes, columns) = (
        np.unique(values, return_inverse=True) for values in (clusters, labels)
    )
    shape = len(names), len(classes)
    cells = np.asarray(rows * shape[1] + columns, dtype=np.int64)
    counts = np.bincount(cells, minlength=math.prod(shape)).reshape(shape)
    return counts.astype(np.float64), cells


@dataclass(frozen=True, slots=True)
class _MeasuredMetric:
    """A metric of clusters, and the figures that its interval is computed from.

    Attributes:
        value: the metric.
        corrected: the metric without its expected value by chance, which is above 0 for the
            V-measure of few texts in many clusters.
        influence: (n,) the influence of each text, by the jackknife.
        astray: the loss from one more text in a wrong cluster, which the sample may lack by chance.
    """

    value: float
    corrected: float
    influence: Floats
    astray: float

    @classmethod
    def of(cls, metric: Metric, clusters: Labels, labels: Indices) -> _MeasuredMetric:
        from sklearn.metrics import adjusted_mutual_info_score

        parts, (counts, cells) = _PARTS[metric.name], _contingency_table(clusters, labels)
        value = _compute_metric(*parts, counts)
        # Adjusted mutual information is the V-measure corrected for chance.
        adjusts = metric.name == "v_measure"
        corrected = float(adjusted_mutual_info_score(labels, clusters)) if adjusts else value
        influence = (len(labels) - 1) * (value - _leave_one_out(*parts, counts, cells))
        moved = np.vstack([counts, np.zeros(counts.shape[1])])
        row, column = np.unravel_index(np.argmax(counts), counts.shape)
        moved[row, column] -= 1
        moved[(row + 1) % len(moved), column] += 1
        return cls(value, corrected, influence, abs(value - _compute_metric(*parts, moved)))

    def minus(self, other: _MeasuredMetric) -> _MeasuredMetric:
        """Return the difference to other clusters of the same texts; 0 for equal clusters."""
        influence = self.influence - other.influence
        is_equal = np.abs(influence).max() < ROUNDING
        return _MeasuredMetric(
            self.value - other.value,
            self.corrected - other.corrected,
            influence,
            0.0 if is_equal else max(self.astray, other.astray),
        )

    def estimate(self, least: float, most: float) -> Estimate:
        """Return the metric with its 95 % interval, clipped to ``least`` and ``most``."""
        n = len(self.influence)
        if not self.astray and not self.influence.any():
            return Estimate(self.value, self.value, self.value)
        if n < MIN_PAIRS:
            return Estimate(self.value)
        from scipy.stats import t as student

        error = math.sqrt(float(self.influence.var(ddof=1)) / n + self.astray**2)
        half = float(student.ppf(1 - LEVEL / 2, n - 1)) * error
        ends = sorted((self.value, self.corrected))
        return Estimate(self.value, max(ends[0] - half, least), min(ends[1] + half, most))


@dataclass(frozen=True)
class LabelAgreement:
    """Agreement of clusters with known labels.

    Attributes:
        column: column of the labels.
        n: number of texts that have a label.
        classes: number of distinct labels.
        own: for each metric, its value for the clusters, with a 95 % interval over texts.
        base_name: title of the vectors to compare with, such as ``minilm, no condition``.
        base: the metrics for clusters of those vectors, found by the same method with the same
            number of clusters.
        difference: for each metric, own minus base, on the same texts.
    """

    column: str
    n: int
    classes: int
    own: Mapping[str, Estimate]
    base_name: str
    base: Mapping[str, Estimate]
    difference: Mapping[str, Estimate]

    @property
    def is_poor(self) -> bool:
        """Whether the clusters agree little with the labels."""
        return self.own["v_measure"].value < _MIN_V_MEASURE

    def to_json(self) -> dict[str, Any]:
        """Return the scores as ``--json`` prints them."""
        values: dict[str, Any] = {"column": self.column, "n": self.n, "classes": self.classes}
        values["base"] = self.base_name
        kinds = {"": self.own, "base_": self.base, "minus_base_": self.difference}
        for name, (prefix, estimates) in product(self.own, kinds.items()):
            values |= estimates_json({f"{prefix}{name}": estimates[name]})
        return values


def score_clusters(
    clusters: Labels, base: Labels, labels: Sequence[Any], column: str, base_name: str
) -> LabelAgreement:
    """Compare two clusterings of n texts with known labels.

    Texts in no cluster count as one cluster. Intervals are Student's t intervals with the
    jackknife's standard error, to which the loss from one more text in a wrong cluster is added.
    Intervals of the V-measure extend to the value corrected for chance.

    Args:
        clusters: (n,) cluster numbers under a condition.
        base: (n,) cluster numbers of the vectors to compare with.
        labels: (n,) known labels; texts without a label (None, NaN) are ignored.
        column: column of the labels.
        base_name: title of the vectors to compare with.
    """
    has_label = np.array([not is_missing(label) for label in labels])
    classes, truth = np.unique(
        np.array([str(label) for label in labels if not is_missing(label)]), return_inverse=True
    )
    estimates, base_estimates, difference = {}, {}, {}
    for metric in METRICS:
        first, second = (
            _MeasuredMetric.of(metric, assigned[has_label], truth) for assigned in (clusters, base)
        )
        estimates[metric.name] = first.estimate(metric.least, metric.most)
        base_estimates[metric.name] = second.estimate(metric.least, metric.most)
        width = metric.most - metric.least
        difference[metric.name] = first.minus(second).estimate(-width, width)
    return LabelAgreement(
        column, len(truth), len(classes), estimates, base_name, base_estimates, difference
    )
