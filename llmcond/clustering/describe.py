"""What a cluster is about: the terms that set it apart from the others, and typical texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llmcond.clustering.methods import NOISE, Labels, Vectors

#: Of a cluster's name; typical texts that are shown.
_TERMS, _TYPICAL = 4, 3


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster, or what is in none (number -1).

    Attributes:
        cluster: its number; 0 is the largest.
        name: the terms that set it apart, by commas; empty where none do.
        typical: texts nearest to its centre; none of what is in no cluster.
    """

    cluster: int
    size: int
    name: str
    typical: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        return {**asdict(self), "typical": list(self.typical)}


def describe(texts: Sequence[str], vectors: Vectors, labels: Labels) -> list[Cluster]:
    """Return the clusters of n texts, the largest first, what is in none last.

    Args:
        texts: (n,).
        vectors: (n, d) what was clustered.
        labels: (n,) the number of each one's cluster.
    """
    numbers = [*range(int(labels.max()) + 1), *([NOISE] if NOISE in labels else [])]
    names = _names(texts, labels, numbers)
    found = []
    for number in numbers:
        inside = np.flatnonzero(labels == number)
        typical: tuple[str, ...] = ()
        if number != NOISE:
            centre = vectors[inside].mean(axis=0)
            nearest = inside[np.argsort(((vectors[inside] - centre) ** 2).sum(axis=1))]
            typical = tuple(dict.fromkeys(texts[i] for i in nearest[: 10 * _TYPICAL].tolist()))
        found.append(Cluster(number, len(inside), names[number], typical[:_TYPICAL]))
    return found


def _names(texts: Sequence[str], labels: Labels, numbers: Sequence[int]) -> dict[int, str]:
    """Return terms whose mean TF-IDF in a cluster is most above that in all other texts."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(stop_words="english", sublinear_tf=True, max_features=50_000)
    try:
        weights = vectorizer.fit_transform(texts)
    except ValueError:  # no text has a word: all are signs, or words of one letter
        return dict.fromkeys(numbers, "")
    terms, total = vectorizer.get_feature_names_out(), np.asarray(weights.sum(axis=0))[0]
    names = {}
    for number in numbers:
        inside = labels == number
        own, n = np.asarray(weights[inside].sum(axis=0))[0], int(inside.sum())
        apart = own / n - (total - own) / max(len(texts) - n, 1)
        best = [i for i in np.argsort(-apart, kind="stable")[:_TERMS].tolist() if apart[i] > 0]
        names[number] = "" if number == NOISE else ", ".join(terms[best])
    return names
