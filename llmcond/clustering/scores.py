"""How well clusters agree with labels that are known: V-measure and adjusted Rand index."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from llmcond.clustering.methods import Labels
from llmcond.data.candidates import is_missing
from llmcond.evaluation.paired import LEAST_PAIRS, LEVEL, ROUNDING
from llmcond.metrics import Estimate, Floats, Indices, Metric, estimates_json

# Both metrics depend on sums over the counts of a contingency table, so that the figures without
# each text in turn, which intervals rest on, need no loop over texts.


def _v_measure(n: int, cells: Floats, clusters: Floats, labels: Floats) -> Floats:
    """Return the V-measure of n texts from sums of x log x over cells, clusters and labels."""
    both, of_clusters, of_labels = (np.log(n) - part / n for part in (cells, clusters, labels))
    total = of_clusters + of_labels
    value = np.divide(2 * (total - both), total, out=np.ones_like(total), where=total > ROUNDING)
    return np.asarray(np.maximum(value, 0.0))


def _rand(n: int, cells: Floats, clusters: Floats, labels: Floats) -> Floats:
    """Return the adjusted Rand index of n texts from sums of x (x - 1)."""
    chance, most = clusters * labels / max(n * (n - 1), 1), (clusters + labels) / 2
    room = most - chance
    return np.divide(cells - chance, room, out=np.ones_like(room), where=room > ROUNDING)


_Term = Callable[[Floats], Floats]
_Figure = Callable[[int, Floats, Floats, Floats], Floats]


def _agreement(term: _Term, figure: _Figure, counts: Floats) -> float:
    """Return a metric of a contingency table."""
    sides = counts, counts.sum(axis=1), counts.sum(axis=0)
    return float(figure(int(counts.sum()), *(np.atleast_1d(term(one).sum()) for one in sides))[0])


def _without_each(term: _Term, figure: _Figure, counts: Floats, cells: Indices) -> Floats:
    """Return (n,) a metric without each of n texts, whose places in the table ``cells`` are."""
    row, column = np.unravel_index(cells, counts.shape)
    sides = counts, counts.sum(axis=1), counts.sum(axis=0)
    each = counts[row, column], sides[1][row], sides[2][column]
    sums = (
        term(side).sum() - term(own) + term(own - 1) for side, own in zip(sides, each, strict=True)
    )
    return figure(len(cells) - 1, *sums)


def _entropy_term(x: Floats) -> Floats:
    """Return x log x, 0 of 0."""
    from scipy.special import xlogy

    return np.asarray(xlogy(x, x))


_PARTS: Mapping[str, tuple[_Term, _Figure]] = {
    "v_measure": (_entropy_term, _v_measure),
    "ari": (lambda x: x * (x - 1), _rand),
}


def _metric(name: str, label: str, least: float) -> Metric:
    def function(clusters: Floats, labels: Floats, _: Indices) -> float:
        return _agreement(*_PARTS[name], _table(clusters, labels)[0])

    return Metric(name, function, label, least=least, most=1.0)


METRICS = (_metric("v_measure", "V-measure", 0.0), _metric("ari", "ARI", -0.5))


def _table(clusters: Any, labels: Any) -> tuple[Floats, Indices]:
    """Return (clusters, labels) how many texts each two share, and each text's place in there."""
    (names, rows), (classes, columns) = (
        np.unique(one, return_inverse=True) for one in (clusters, labels)
    )
    shape = len(names), len(classes)
    cells = np.asarray(rows * shape[1] + columns, dtype=np.int64)
    counts = np.bincount(cells, minlength=math.prod(shape)).reshape(shape)
    return counts.astype(np.float64), cells


@dataclass(frozen=True, slots=True)
class _Measured:
    """A metric of clusters, and what its interval is made of.

    Attributes:
        corrected: the metric less what it would be by chance, which is more than 0 for the
            V-measure of few texts in many clusters.
        influence: (n,) how much each text brings, by the jackknife.
        astray: what one more text in a wrong cluster would cost: perhaps none was sampled.
    """

    value: float
    corrected: float
    influence: Floats
    astray: float

    @classmethod
    def of(cls, metric: Metric, clusters: Labels, labels: Indices) -> _Measured:
        from sklearn.metrics import adjusted_mutual_info_score

        parts, (counts, cells) = _PARTS[metric.name], _table(clusters, labels)
        value = _agreement(*parts, counts)
        # Adjusted mutual information is the V-measure with chance taken out of it.
        adjusts = metric.name == "v_measure"
        corrected = float(adjusted_mutual_info_score(labels, clusters)) if adjusts else value
        influence = (len(labels) - 1) * (value - _without_each(*parts, counts, cells))
        moved = np.vstack([counts, np.zeros(counts.shape[1])])
        row, column = np.unravel_index(np.argmax(counts), counts.shape)
        moved[row, column] -= 1
        moved[(row + 1) % len(moved), column] += 1
        return cls(value, corrected, influence, abs(value - _agreement(*parts, moved)))

    def minus(self, other: _Measured) -> _Measured:
        """Return the difference to other clusters of the same texts; exactly 0 of equal ones."""
        influence = self.influence - other.influence
        is_equal = np.abs(influence).max() < ROUNDING
        return _Measured(
            self.value - other.value,
            self.corrected - other.corrected,
            influence,
            0.0 if is_equal else max(self.astray, other.astray),
        )

    def estimate(self, least: float, most: float) -> Estimate:
        """Return the figure with its 95 % interval, from ``least`` to ``most`` at the outside."""
        n = len(self.influence)
        if not self.astray and not self.influence.any():
            return Estimate(self.value, self.value, self.value)
        if n < LEAST_PAIRS:
            return Estimate(self.value)
        from scipy.stats import t as student

        error = math.sqrt(float(self.influence.var(ddof=1)) / n + self.astray**2)
        half = float(student.ppf(1 - LEVEL / 2, n - 1)) * error
        ends = sorted((self.value, self.corrected))
        return Estimate(self.value, max(ends[0] - half, least), min(ends[1] + half, most))


@dataclass(frozen=True)
class Scores:
    """Clusters beside known labels.

    Attributes:
        column: where the labels are.
        n: texts that have one.
        classes: different labels.
        own: metric -> the figure of the clusters, with a 95 % interval over texts.
        base_name: whose vectors the clusters are compared with, such as ``minilm, no condition``.
        base: the same of clusters of those vectors, by the same method and as many.
        difference: metric -> own minus base, on the same texts.
    """

    column: str
    n: int
    classes: int
    own: Mapping[str, Estimate]
    base_name: str
    base: Mapping[str, Estimate]
    difference: Mapping[str, Estimate]

    def to_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        values: dict[str, Any] = {"column": self.column, "n": self.n, "classes": self.classes}
        values["base"] = self.base_name
        kinds = {"": self.own, "base_": self.base, "minus_base_": self.difference}
        for name, (prefix, estimates) in product(self.own, kinds.items()):
            values |= estimates_json({f"{prefix}{name}": estimates[name]})
        return values


def score(
    clusters: Labels, base: Labels, labels: Sequence[Any], column: str, base_name: str
) -> Scores:
    """Compare two clusterings of n texts with known labels; texts in no cluster count as one.

    Intervals are Student's, with the jackknife's standard error, to which one more text in a wrong
    cluster is added. Those of the V-measure reach down to the figure without chance.

    Args:
        clusters: (n,) under a condition.
        base: (n,) of the vectors that it is compared with.
        labels: (n,) known ones; texts without a label (None, NaN) are left out.
        column: where those are.
        base_name: what the vectors that it is compared with are called.
    """
    known = np.array([not is_missing(label) for label in labels])
    classes, truth = np.unique(
        np.array([str(label) for label in labels if not is_missing(label)]), return_inverse=True
    )
    own, other, difference = {}, {}, {}
    for metric in METRICS:
        first, second = (
            _Measured.of(metric, labelled[known], truth) for labelled in (clusters, base)
        )
        own[metric.name] = first.estimate(metric.least, metric.most)
        other[metric.name] = second.estimate(metric.least, metric.most)
        width = metric.most - metric.least
        difference[metric.name] = first.minus(second).estimate(-width, width)
    return Scores(column, len(truth), len(classes), own, base_name, other, difference)
