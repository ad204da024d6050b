"""``llmcond cluster``: group texts under conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import REUSES_VECTORS, Command, verb
from llmcond.workflows.options.texts import ClusterOptions

if TYPE_CHECKING:
    from llmcond.clustering.result import ClusterResult


@dataclass(frozen=True, kw_only=True)
class Cluster(ClusterOptions, Command):
    """Group texts under a condition, or under several, side by side."""

    position = 160
    example = (
        "llmcond cluster texts.csv --condition 'the topic' --out clusters.csv --report map.html"
    )
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> ClusterResult:
        """Cluster."""
        from llmcond.workflows.cluster import cluster

        return cluster(self)

    def show(self, result: ClusterResult, form: str) -> None:
        """Print the clusters, and how well they agree with known labels."""
        from llmcond.clustering.tables import show_clusters

        show_clusters(result, form)


cluster = verb(Cluster)
