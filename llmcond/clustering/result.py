"""The results of clustering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from llmcond.clustering.describe import ClusterSummary
from llmcond.clustering.methods import NOISE, Labels
from llmcond.clustering.scores import LabelAgreement
from llmcond.conditions import condition_json, condition_text
from llmcond.display import Displayed, make_frame
from llmcond.metrics import finite_or_none
from llmcond.text import shorten


def without_condition(encoder: str) -> str:
    """Return the title of an encoder's vectors without a condition; a path is shortened."""
    return f"{Path(encoder).name}, no condition"


@dataclass(frozen=True)
class Clustering(Displayed):
    """Clusters of texts under one condition.

    Attributes:
        encoder: name of the encoder whose vectors were clustered.
        condition: the condition; None: vectors of the texts without a condition.
        labels: (n,) the number of each text's cluster; -1: in no cluster.
        clusters: the clusters, the largest first; texts in no cluster come last.
        silhouette: mean silhouette, on at most 2,000 texts; None: undefined.
        silhouettes: mean silhouette of every candidate K, if K was chosen.
        scores: agreement with known labels, if there are any.
        guide: number of labelled texts of each label in the guide; None: there is no guide.
        guided: number of texts with each label of the guide, by cluster; None: there is no guide.

    Examples:
        >>> import llmcond
        >>> texts = ["A dog runs.", "Two dogs run.", "A cat sleeps.", "Three cats sleep."]
        >>> result = llmcond.cluster(texts=texts, condition="the activity", clusters=2)
        >>> clustering = result.clusterings[0]
        >>> clustering.k, clustering.title
        (2, 'the activity')
        >>> clustering.labels.tolist()
        [..., ..., ..., ...]
    """

    encoder: str
    condition: str | None
    labels: Labels
    clusters: Sequence[ClusterSummary]
    silhouette: float | None = None
    silhouettes: Mapping[int, float] = field(default_factory=dict)
    scores: LabelAgreement | None = None
    guide: Mapping[str, int] | None = None
    guided: Mapping[int, Mapping[str, int]] | None = None

    @property
    def title(self) -> str:
        """The heading of the clustering in tables and on the page."""
        condition = self.condition
        return without_condition(self.encoder) if condition is None else condition_text(condition)

    @property
    def k(self) -> int:
        """The number of clusters, without the texts that are in none."""
        return sum(cluster.cluster != NOISE for cluster in self.clusters)

    @property
    def noise(self) -> int:
        """The number of texts in no cluster."""
        return int((self.labels == NOISE).sum())

    def to_json(self) -> dict[str, Any]:
        """Convert the clustering to the dictionary that ``--json`` prints.

        Returns:
            The condition, the number of clusters and of texts in none, the clusters, silhouettes,
            scores and guide; not the label of each text.
        """
        return {
            **condition_json(self.condition),
            "k": self.k,
            "noise": self.noise,
            "clusters": [cluster.to_json() for cluster in self.clusters],
            "silhouette": finite_or_none(self.silhouette),
            "silhouettes": {str(k): round(score, 4) for k, score in self.silhouettes.items()},
            "scores": None if self.scores is None else self.scores.to_json(),
            "guide": None if self.guide is None else dict(self.guide),
            "guided": None
            if self.guided is None
            else {str(cluster): dict(counts) for cluster, counts in self.guided.items()},
        }

    @override
    def _displayed(self) -> Mapping[str, Any]:
        # The values of a condition are a part of it, and no attribute.
        return {name: value for name, value in self.to_json().items() if name != "values"}


@dataclass(frozen=True)
class ClusterResult(Displayed):
    """Clusters of texts under each condition, with the settings that they were computed with.

    Attributes:
        out: the table that was written, or None.
        report: the HTML page that was written, or None.
        map: the picture of the map that was written, or None.
        file: source of the texts.
        texts: number of texts.
        distinct: number of distinct texts.
        encoder: name of the encoder.
        prompt: name of the prompt.
        head: name of the head.
        method: ``kmeans`` or ``hdbscan``.
        seed: random seed.
        clusterings: the clustering under each condition.
        table: the columns that ``out`` contains: the texts, the columns to keep, and the cluster
            and its name under each condition.

    Examples:
        >>> import llmcond
        >>> texts = ["A dog runs.", "Two dogs run.", "A cat sleeps.", "Three cats sleep."]
        >>> conditions = ["the animal", "the activity"]
        >>> result = llmcond.cluster(texts=texts, condition=conditions, clusters=2)
        >>> result.method, result.texts
        ('kmeans', 4)
        >>> [clustering.condition for clustering in result.clusterings]
        ['the animal', 'the activity']
        >>> list(result.to_pandas())[:3]
        ['text', 'cluster (the animal)', 'name (the animal)']
    """

    out: Path | None
    report: Path | None
    map: Path | None
    file: str
    texts: int
    distinct: int
    encoder: str
    prompt: str
    head: str
    method: str
    seed: int
    clusterings: Sequence[Clustering]
    table: Mapping[str, Sequence[Any]]

    def to_json(self) -> dict[str, Any]:
        """Convert the result to the dictionary that ``--json`` prints.

        Returns:
            The attributes but ``table`` as JSON values. The label of each text is included if no
            table was written.
        """
        values = super().to_json()
        del values["table"]
        if self.out is None:
            for clustering, record in zip(self.clusterings, values["clusterings"], strict=True):
                record["labels"] = clustering.labels.tolist()
        return values

    def to_pandas(self) -> Any:
        """Convert ``table`` to a data frame, with one row for each text in the original order.

        Returns:
            A ``pandas.DataFrame`` with the columns of ``out``.

        Raises:
            LlmcondError: pandas is not installed.
        """
        return make_frame(dict(self.table))

    @override
    def _displayed(self) -> Mapping[str, Any]:
        facts = {name: getattr(self, name) for name in ("file", "texts", "encoder", "head", "out")}
        rows = [
            {
                "condition": clustering.title,
                "cluster": cluster.cluster,
                "texts": cluster.size,
                "name": cluster.name,
                "typical": shorten("".join(cluster.typical[:1])),
            }
            for clustering in self.clusterings
            for cluster in clustering.clusters
        ]
        return {**facts, "clusterings": rows}
