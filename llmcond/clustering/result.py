"""What clustering found, as programs read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmcond.clustering.describe import Cluster
from llmcond.clustering.methods import NOISE, Labels
from llmcond.clustering.scores import Scores

#: What stands for a condition where there is none.
PLAIN = "no condition"


@dataclass(frozen=True)
class Clustering:
    """Clusters of texts under one condition.

    Attributes:
        condition: None: of the texts by themselves.
        labels: (n,) the number of each text's cluster, -1: in none.
        clusters: the largest first, what is in none last.
        silhouettes: of every K that was tried, where K was chosen by them.
        scores: beside known labels, where some were given.
    """

    condition: str | None
    labels: Labels
    clusters: Sequence[Cluster]
    silhouettes: Mapping[int, float] = field(default_factory=dict)
    scores: Scores | None = None

    @property
    def title(self) -> str:
        """Return what tables and the page call it."""
        return PLAIN if self.condition is None else self.condition

    @property
    def k(self) -> int:
        """Return how many clusters there are, less what is in none."""
        return sum(one.cluster != NOISE for one in self.clusters)

    def to_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it, without the labels, which are in the file."""
        return {
            "condition": self.condition,
            "k": self.k,
            "noise": int((self.labels == NOISE).sum()),
            "clusters": [one.to_json() for one in self.clusters],
            "silhouettes": {str(k): round(score, 4) for k, score in self.silhouettes.items()},
            "scores": None if self.scores is None else self.scores.to_json(),
        }


@dataclass(frozen=True)
class Clustered:
    """What was written, and what it holds.

    Attributes:
        file: where the texts are from.
        texts, distinct: how many, and how many of them differ.
        guide: labels of the guide -> how many texts of it have each; None: there is no guide.
        clusterings: one for each condition.
    """

    out: Path
    report: Path | None
    file: str
    texts: int
    distinct: int
    encoder: str
    prompt: str
    head: str
    method: str
    seed: int
    guide: Mapping[str, int] | None
    clusterings: Sequence[Clustering]

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            **vars(self),
            "out": str(self.out),
            "report": None if self.report is None else str(self.report),
            "clusterings": [one.to_json() for one in self.clusterings],
        }
