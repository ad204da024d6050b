"""How well clusters agree with labels that are known: V-measure and adjusted Rand index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcond.clustering.methods import Labels
from llmcond.evaluation.paired import Difference, differences, resample
from llmcond.metrics import Estimate, Floats, Indices, Metric, finite

#: Bootstrap samples of the texts.
_RESAMPLES = 500


def _v_measure(clusters: Floats, labels: Floats, _: Indices) -> float:
    from sklearn.metrics import v_measure_score

    return float(v_measure_score(labels.astype(int), clusters.astype(int)))


def _rand(clusters: Floats, labels: Floats, _: Indices) -> float:
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(labels.astype(int), clusters.astype(int)))


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
    drawn = resample(systems, truth.astype(np.float64), np.arange(len(truth)), METRICS, _RESAMPLES)
    own, other = drawn.estimates(0), drawn.estimates(1)
    return Scores(column, len(truth), len(classes), own, other, differences(drawn, {1: [0]})[0])
