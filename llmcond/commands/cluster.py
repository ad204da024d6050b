"""``llmcond cluster``: group texts under conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from llmcond.commands.base import REUSES_VECTORS, verb
from llmcond.commands.shared import (
    CHECK_HELP,
    TEXT_HELP,
    WithConditions,
    WithEmbedder,
    WithGuide,
    check_source,
)
from llmcond.data.readers import TEXT_FILES
from llmcond.options import option

if TYPE_CHECKING:
    from llmcond.clustering.result import ClusterResult


def _clusters(text: str) -> int | str:
    """Return a number as one; what the others mean is for the work to say."""
    return int(text) if text.isdecimal() else text


@dataclass(frozen=True, kw_only=True)
class Cluster(WithGuide, WithConditions, WithEmbedder):
    """Group texts under a condition, or under several, side by side."""

    example: ClassVar[str] = (
        "llmcond cluster texts.csv --condition 'the topic' --out clusters.csv --report map.html"
    )
    formats: ClassVar[bool] = True
    if_interrupted: ClassVar[str] = REUSES_VECTORS

    texts: Any = option(
        flag="",
        metavar="TEXTS",
        help=f"{TEXT_FILES} (from Python also a list of texts, or a table)",
    )
    out: str | Path | None = option(
        None,
        metavar="FILE",
        help=".parquet or .csv to write each text with its clusters to (default: clusters are "
        "printed only)",
    )
    condition: Sequence[str] = option(
        (), metavar="TEXT", repeat=True, help="what texts are compared by; may be repeated"
    )
    text: str | None = option(None, metavar="COL", help=TEXT_HELP)
    keep: Sequence[str] = option((), metavar="COL", help="further columns to write, such as an id")
    clusters: int | Literal["auto"] = option(
        "auto",
        metavar="K",
        parse=_clusters,
        help="how many by K-means; auto: as many as give the highest silhouette, or as the guide "
        "has labels",
    )
    method: Literal["kmeans", "hdbscan"] = option(
        "kmeans", help="hdbscan finds how many there are, and leaves out what is in none"
    )
    min_cluster_size: int | None = option(
        None, metavar="N", help="of hdbscan (default: one text in 100, and 5 at least)"
    )
    labels: Sequence[str] = option(
        (),
        metavar="COL",
        help="known labels, which clusters are scored against, beside those of the base encoder's "
        "vectors without a condition: a column, or one for each condition",
    )
    report: str | Path | None = option(
        None, metavar="FILE.html", help="a page with a map of the texts, to look around in"
    )
    check: bool = option(True, help=f"{CHECK_HELP}; not with --guide")
    seed: int = option(0, metavar="S", help="random seed of K-means, sampling and the map")

    def execute(self) -> ClusterResult:
        """Cluster."""
        check_source(self.texts, TEXT_FILES)
        self.check_guide()
        from llmcond.workflows.cluster import cluster

        return self.call(cluster, run_folder=self.folder(), condition=self.conditions())

    def show(self, result: ClusterResult, form: str) -> None:
        """Print the clusters, and how well they agree with known labels."""
        from llmcond.clustering.tables import show_clusters

        show_clusters(result, form)


cluster = verb(Cluster)
