"""How well clusters agree with labels that are known: V-measure and adjusted Rand index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import xlogy

from llmcond.clustering.methods import Labels
from llmcond.evaluation.paired import Difference, differences, resample
from llmcond.metrics import Estimate, Floats, Indices, Metric, finite


def _counts(clusters: Floats, labels: Floats) -> Floats:
    """Return (clusters, labels) how many texts each two share; clusters count from -1."""
    rows, columns = clusters.astype(np.int64) + 1, labels.astype(np.int64)
    shape = int(rows.max()) + 1, int(columns.max()) + 1
    counts = np.bincount(rows * shape[1] + columns, minlength=shape[0] * shape[1])
    return counts.reshape(shape).astype(np.float64)


# As scikit-learn's functions of these names, which take a millisecond to check their input: too
# long where texts are drawn again and again.


def _v_measure(clusters: Floats, labels: Floats, _: Indices) -> float:
    share = _counts(clusters, labels) / len(labels)
    parts = (share, share.sum(axis=0), share.sum(axis=1))
    both, of_labels, of_clusters = (-float(xlogy(part, part).sum()) for part in parts)
    total = of_labels + of_clusters
    return max(0.0, 2 * (total - both) / total) if total else 1.0


def _rand(clusters: Floats, labels: Floats, _: Indices) -> float:
    counts = _counts(clusters, labels)
    parts = (counts, counts.sum(axis=0), counts.sum(axis=1), np.array(len(labels)))
    both, of_labels, of_clusters, pairs = (float((part * (part - 1)).sum()) for part in parts)
    chance = of_labels * of_clusters / pairs if pairs else 0.0
    most = (of_labels + of_clusters) / 2
    return (both - chance) / (most - chance) if most != chance else 1.0


METRICS = (
    Metric("v_measure", _v_measure, "V-measure", least=0.0, most=1.0),
    Metric("ari", _rand, "ARI", least=-0.5, most=1.0),
)


@dataclass(frozen=True)
class Scores:
    """Clusters beside known labels.

    Attributes:
        column: where the labels are.
        n: texts that have one.
        classes: different labels.
        own: metric -> the figure of the clusters, with a 95 % interval over texts.
        plain: the same of clusters of plain embeddings, by the same method and as many.
        difference: metric -> own minus plain, on the same draws of texts.
    """

    column: str
    n: int
    classes: int
    own: Mapping[str, Estimate]
    plain: Mapping[str, Estimate]
    difference: Mapping[str, Difference]

    def to_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        values: dict[str, Any] = {"column": self.column, "n": self.n, "classes": self.classes}
        for metric in METRICS:
            found: Sequence[tuple[str, Any]] = (
                ("", self.own[metric.name]),
                ("plain_", self.plain[metric.name]),
                ("minus_plain_", self.difference[metric.name]),
            )
            for before, one in found:
                interval = [finite(one.low), finite(one.high)]
                values |= {f"{before}{metric.name}": finite(one.value)}
                values |= {f"{before}{metric.name}_ci": interval}
        return values


def score(clusters: Labels, plain: Labels, labels: Sequence[Any], column: str) -> Scores:
    """Compare two clusterings of n texts with known labels; texts in no cluster count as one.

    Args:
        clusters: (n,) under a condition.
        plain: (n,) of plain embeddings.
        labels: (n,) known ones; texts whose label is None are left out.
        column: where those are.
    """
    known = np.array([label is not None for label in labels])
    classes, truth = np.unique(
        np.array([str(label) for label in labels if label is not None]), return_inverse=True
    )
    systems = [one[known].astype(np.float64)[None] for one in (clusters, plain)]
    drawn = resample(systems, truth.astype(np.float64), np.arange(len(truth)), METRICS)
    own, other = drawn.estimates(0), drawn.estimates(1)
    return Scores(column, len(truth), len(classes), own, other, differences(drawn, {1: [0]})[0])
