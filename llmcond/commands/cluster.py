"""``llmcond cluster``: group texts under conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmcond.commands.base import REUSES_VECTORS, Command, verb
from llmcond.workflows.options.texts import ClusterOptions

if TYPE_CHECKING:
    from llmcond.clustering.result import ClusterResult


def _clusters(text: str) -> int | str:
    """Return a number as one; what the others mean is for the work to say."""
    return int(text) if text.isdecimal() else text


@dataclass(frozen=True, kw_only=True)
class Cluster(ClusterOptions, Command):
    """Group texts under a condition, or under several, side by side."""

    position: ClassVar[int] = 160
    example: ClassVar[str] = (
        "llmcond cluster texts.csv --condition 'the topic' --out clusters.csv --report map.html"
    )
    formats: ClassVar[bool] = True
    if_interrupted: ClassVar[str] = REUSES_VECTORS

    def execute(self) -> ClusterResult:
        """Cluster."""
        from llmcond.workflows.cluster import cluster

        return cluster(self)

    def show(self, result: ClusterResult, form: str) -> None:
        """Print the clusters, and how well they agree with known labels."""
        from llmcond.clustering.tables import show_clusters

        show_clusters(result, form)


cluster = verb(Cluster)
