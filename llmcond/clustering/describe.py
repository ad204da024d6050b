"""Descriptions of clusters: characteristic terms and typical texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llmcond.clustering.methods import NOISE, Labels, Vectors
from llmcond.clustering.words import (
    clean_text,
    find_words,
    is_number,
    is_unspaced,
    select_distinct,
    word_pattern,
)
from llmcond.runs.languages import count_foreign_texts, read_frequent_words
from llmcond.text import condition_key

#: Numbers of typical texts, and of terms that a cluster's name is selected from.
_TYPICAL, _CANDIDATES = 3, 1_000


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
    frequent = read_frequent_words().greetings
    if count_foreign_texts(texts)[0]:
        frequent |= read_frequent_words().foreign
    cleaned = [clean_text(text) for text in texts]
    pattern = word_pattern(cleaned)
    words = [list(find_words(text, pattern)) for text in cleaned]
    names = _choose_names(words, labels, numbers, frequent)
    clusters = []
    for number in numbers:
        inside = np.flatnonzero(labels == number)
        typical: dict[str, str] = {}
        if number != NOISE:
            centre = vectors[inside].mean(axis=0)
            for i in inside[np.argsort(((vectors[inside] - centre) ** 2).sum(axis=1))].tolist():
                # Texts that differ in case, spaces or punctuation only are typical once.
                key = " ".join(match[0] for match in pattern.finditer(cleaned[i]))
                typical.setdefault(key or condition_key(texts[i]), texts[i])
                if len(typical) == _TYPICAL:
                    break
        summary = ClusterSummary(number, len(inside), names[number], tuple(typical.values()))
        clusters.append(summary)
    return clusters


def _choose_names(
    words: Sequence[Sequence[str]],
    labels: Labels,
    numbers: Sequence[int],
    frequent: frozenset[str],
) -> dict[int, str]:
    """Return the terms whose mean TF-IDF in a cluster exceeds that in all other texts the most.

    Numbers and ``frequent`` words are only used for a cluster without any other term, and so are
    candidates of scripts without spaces that a single text contains.
    """
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, TfidfVectorizer

    def select_terms(text_words: Sequence[str]) -> list[str]:
        return [word for word in text_words if word not in ENGLISH_STOP_WORDS]

    vectorizer = TfidfVectorizer(analyzer=select_terms, sublinear_tf=True, max_features=50_000)
    try:
        weights = vectorizer.fit_transform(words)
    except ValueError:  # no text contains a word, only punctuation or single letters
        return dict.fromkeys(numbers, "")
    terms, total = vectorizer.get_feature_names_out(), np.asarray(weights.sum(axis=0))[0]
    counts = weights.getnnz(axis=0)
    is_secondary = np.array(
        [
            term in frequent or is_number(term) or (is_unspaced(term) and count == 1)
            for term, count in zip(terms, counts, strict=True)
        ]
    )
    names = {}
    for number in numbers:
        inside = labels == number
        cluster_total, n = np.asarray(weights[inside].sum(axis=0))[0], int(inside.sum())
        excess = cluster_total / n - (total - cluster_total) / max(len(words) - n, 1)
        order = np.lexsort((-excess, is_secondary))
        order = order[excess[order] > 0]
        primary = order[~is_secondary[order]]
        best = (primary if len(primary) else order)[:_CANDIDATES]
        name_terms = [] if number == NOISE else select_distinct(terms[best].tolist(), excess[best])
        names[number] = ", ".join(name_terms)
    return names
