"""``llmcond cluster``: cluster texts under conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import REUSES_VECTORS, Command, as_function
from llmcond.workflows.options.texts import ClusterOptions

if TYPE_CHECKING:
    from llmcond.clustering.page import ClusterResult


@dataclass(frozen=True, kw_only=True)
class Cluster(ClusterOptions, Command):
    """Cluster texts under one or more conditions."""

    position = 160
    example = (
        "llmcond cluster texts.csv --condition 'the topic' --out clusters.csv --report map.html"
    )
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> ClusterResult:
        """Cluster the texts.

        Returns:
            A ``ClusterResult`` with one ``Clustering`` for each condition: the cluster of each
            text, and the keywords and examples of each cluster.

        Raises:
            UserError: an option is invalid, or the texts, labels or guide cannot be read.
            LlmcondError: the encoder fails.

        Examples:
            >>> import llmcond
            >>> texts = ["A dog runs.", "A dog sleeps.", "A horse runs.", "A horse sleeps."]
            >>> result = llmcond.cluster(texts=texts, condition="the animal", clusters=2)
            >>> result.clusterings[0].labels.shape
            (4,)
        """
        from llmcond.workflows.cluster import cluster

        return cluster(self)

    def show(self, result: ClusterResult, form: str) -> None:
        """Print the clusters, and their agreement with known labels."""
        from llmcond.clustering.page import cluster_tables

        for table in cluster_tables(result):
            table.print(form)


cluster = as_function(Cluster)
