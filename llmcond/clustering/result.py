"""What clustering found, as programs read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmcond.clustering.describe import Cluster
from llmcond.clustering.methods import NOISE, Labels
from llmcond.clustering.scores import Scores
from llmcond.conditions import condition_json, condition_text
from llmcond.display import Displayed
from llmcond.metrics import finite


def without_condition(encoder: str) -> str:
    """Return what an encoder's vectors of texts by themselves are called; a folder by its name."""
    return f"{Path(encoder).name}, no condition"


@dataclass(frozen=True)
class Clustering(Displayed):
    """Clusters of texts under one condition.

    Attributes:
        encoder: whose vectors were clustered.
        condition: None: of the texts by themselves.
        labels: (n,) the number of each text's cluster, -1: in none.
        clusters: the largest first, what is in none last.
        silhouette: the mean of the clusters', on at most 2,000 texts; None: undefined.
        silhouettes: of every K that was tried, where K was chosen by them.
        scores: beside known labels, where some were given.
        guide: label -> how many labelled texts of the guide have it; None: there is no guide.
    """

    encoder: str
    condition: str | None
    labels: Labels
    clusters: Sequence[Cluster]
    silhouette: float | None = None
    silhouettes: Mapping[int, float] = field(default_factory=dict)
    scores: Scores | None = None
    guide: Mapping[str, int] | None = None

    @property
    def title(self) -> str:
        """Return what tables and the page call it."""
        condition = self.condition
        return without_condition(self.encoder) if condition is None else condition_text(condition)

    @property
    def k(self) -> int:
        """Return how many clusters there are, less what is in none."""
        return sum(one.cluster != NOISE for one in self.clusters)

    def to_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it, without the label of each text."""
        return {
            **condition_json(self.condition),
            "k": self.k,
            "noise": int((self.labels == NOISE).sum()),
            "clusters": [one.to_json() for one in self.clusters],
            "silhouette": finite(self.silhouette),
            "silhouettes": {str(k): round(score, 4) for k, score in self.silhouettes.items()},
            "scores": None if self.scores is None else self.scores.to_json(),
            "guide": None if self.guide is None else dict(self.guide),
        }


@dataclass(frozen=True)
class ClusterResult(Displayed):
    """Clusters of texts under each condition, and what made them.

    Attributes:
        out: the table that was written; None: there is none.
        file: where the texts are from.
        texts, distinct: how many, and how many of them differ.
        clusterings: one for each condition.
    """

    out: Path | None
    report: Path | None
    file: str
    texts: int
    distinct: int
    encoder: str
    prompt: str
    head: str
    method: str
    seed: int
    clusterings: Sequence[Clustering]

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints; the labels of texts too, where no file has them."""
        values = super().to_json()
        if self.out is None:
            for one, own in zip(self.clusterings, values["clusterings"], strict=True):
                own["labels"] = one.labels.tolist()
        return values

    def _displayed(self) -> Mapping[str, Any]:
        """Return the texts, the model and the clusters under each condition."""
        made = {name: getattr(self, name) for name in ("file", "texts", "encoder", "head", "out")}
        clusters = {
            f"clusters: {one.title}": [
                {"cluster": own.cluster, "texts": own.size, "name": own.name, "typical": text}
                for own in one.clusters
                for text in own.typical[:1] or ("",)
            ]
            for one in self.clusterings
        }
        return made | clusters
