"""Descriptions of clusters: characteristic terms and typical texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llmcond.clustering.methods import NOISE, Labels, Vectors

#: Number of terms in a cluster's name, and number of typical texts.
_TERMS, _TYPICAL = 4, 3


@dataclass(frozen=True, slots=True)
class ClusterSummary:
    """A cluster, or the texts that are in no cluster (number -1).

    Attributes:
        cluster: number of the cluster; 0 is the largest.
        size: number of texts.
        name: the characteristic terms, separated by commas; empty if there are none.
        typical: the texts nearest to the centre; empty for texts in no cluster.
    """

    cluster: int
    size: int
    name: str
    typical: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the cluster as ``--json`` prints it."""
        return {**asdict(self), "typical": list(self.typical)}


def describe_clusters(
    texts: Sequence[str], vectors: Vectors, labels: Labels
) -> list[ClusterSummary]:
    """Describe the clusters of n texts, the largest first, texts in no cluster last.

    Args:
        texts: (n,) the texts.
        vectors: (n, d) the vectors that were clustered.
        labels: (n,) the number of each text's cluster.
    """
    numbers = [*range(int(labels.max()) + 1), *([NOISE] if NOISE in labels else [])]
    names = _choose_names(texts, labels, numbers)
    clusters = []
    for number in numbers:
        inside = np.flatnonzero(labels == number)
        typical: tuple[str, ...] = ()
        if number != NOISE:
            centre = vectors[inside].mean(axis=0)
            nearest = inside[np.argsort(((vectors[inside] - centre) ** 2).sum(axis=1))]
            typical = tuple(dict.fromkeys(texts[i] for i in nearest[: 10 * _TYPICAL].tolist()))
        clusters.append(ClusterSummary(number, len(inside), names[number], typical[:_TYPICAL]))
    return clusters


def _choose_names(texts: Sequence[str], labels: Labels, numbers: Sequence[int]) -> dict[int, str]:
    """Return the terms whose mean TF-IDF in a cluster exceeds that in all other texts the most."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(stop_words="english", sublinear_tf=True, max_features=50_000)
    try:
        weights = vectorizer.fit_transform(texts)
    except ValueError:  # no text contains a word, only punctuation or single letters
        return dict.fromkeys(numbers, "")
    terms, total = vectorizer.get_feature_names_out(), np.asarray(weights.sum(axis=0))[0]
    names = {}
    for number in numbers:
        inside = labels == number
        cluster_total, n = np.asarray(weights[inside].sum(axis=0))[0], int(inside.sum())
        excess = cluster_total / n - (total - cluster_total) / max(len(texts) - n, 1)
        best = [i for i in np.argsort(-excess, kind="stable")[:_TERMS].tolist() if excess[i] > 0]
        names[number] = "" if number == NOISE else ", ".join(terms[best])
    return names
