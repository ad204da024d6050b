"""Clusters as one self-contained HTML file: a map of the texts, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from llmcond.clustering.describe import ClusterSummary
from llmcond.clustering.maps import MapPositions, compute_maps
from llmcond.clustering.methods import NOISE, Vectors, sample_indices
from llmcond.clustering.result import Clustering, ClusterResult
from llmcond.clustering.scores import METRICS, LabelAgreement
from llmcond.clustering.tables import quality_text, starts_text
from llmcond.conditions import Condition
from llmcond.log import log
from llmcond.report.figures import MapPanel, plot_maps
from llmcond.report.page.render import write_html
from llmcond.report.page.tables import with_minus_signs
from llmcond.report.tables import factors_text, head_text, range_text
from llmcond.text import shorten
from llmcond.version import __version__

_FOLDER = Path(__file__).parent
_METHODS = {"kmeans": "K-means", "hdbscan": "HDBSCAN"}
#: Maximal number of texts on the map: t-SNE of more takes minutes.
_MAX_TEXTS = 5_000
#: Maximal number of characters of a text on the map.
_MAX_CHARACTERS = 1_000
#: Resolution of the page's map: number of steps from one side to the other.
_STEPS = 2_000


class ClusterMap:
    """A map: clusterings of the same texts, which are sampled if there are many.

    Attributes:
        texts: the texts on the map.
        clusterings: the clusterings, in the order in which they are displayed.
    """

    def __init__(self, texts: Sequence[str], seed: int) -> None:
        self._sampled, self._seed = sample_indices(len(texts), _MAX_TEXTS, seed), seed
        self.texts = [shorten(texts[i], _MAX_CHARACTERS) for i in self._sampled.tolist()]
        self.clusterings: list[Clustering] = []
        self._vectors: list[Vectors] = []

    def add(self, clustering: Clustering, vectors: Vectors) -> None:
        """Add a clustering of all texts, and the vectors, (n, d), that were clustered."""
        self.clusterings.append(clustering)
        self._vectors.append(vectors[self._sampled])

    def page_data(self) -> dict[str, Any]:
        """Return the data that the page's script needs, as JSON values."""
        return {
            "texts": self.texts,
            "shown": [
                {
                    "title": clustering.title,
                    "places": np.rint(_STEPS * points).astype(int).ravel().tolist(),
                    "labels": clustering.labels[self._sampled].tolist(),
                    "clusters": [[c.cluster, c.name, c.size] for c in clustering.clusters],
                }
                for clustering, points in zip(self.clusterings, self._positions, strict=True)
            ],
            "steps": _STEPS,
        }

    def plot(self, path: Path) -> None:
        """Draw the map of each clustering as a picture; see ``plot_maps``."""
        panels = [
            MapPanel(
                clustering.title,
                points,
                clustering.labels[self._sampled],
                {cluster.cluster: _legend_text(cluster) for cluster in clustering.clusters},
            )
            for clustering, points in zip(self.clusterings, self._positions, strict=True)
        ]
        caption = (
            "Similar texts lie close together (t-SNE). Distances between groups, and directions, "
            "mean little."
        )
        plot_maps(panels, self.texts, path, caption)

    @cached_property
    def _positions(self) -> list[MapPositions]:
        log.info(f"drawing a map of {len(self.texts):,} texts")
        return compute_maps(self._vectors, self._seed)


def _legend_text(cluster: ClusterSummary) -> str:
    number = "in no cluster" if cluster.cluster == NOISE else str(cluster.cluster)
    name = f"  {cluster.name}" if cluster.name else ""
    return f"{number}{name} ({cluster.size:,})"


def write_cluster_page(
    result: ClusterResult, drawing: ClusterMap, path: Path, verdicts: Mapping[str, str]
) -> None:
    """Write the page of a result.

    Args:
        result: the result.
        drawing: the map of the texts.
        path: the file to write.
        verdicts: the check of each condition in words, by title of a clustering.
    """
    scored = [(c.title, c.scores) for c in result.clusterings if c.scores is not None]
    values: dict[str, Any] = {
        "result": result,
        "shown": drawing.clusterings,
        "drawn": len(drawing.texts),
        "labelled": sum(sum((c.guide or {}).values()) for c in result.clusterings),
        "noise": NOISE,
        "cross_tables": [_cross_table(a, b) for a, b in combinations(drawing.clusterings, 2)],
        "qualities": [quality_text(c, result.method) for c in drawing.clusterings],
        "verdicts": verdicts,
        "method": _METHODS[result.method],
        "scores": [(title, scores, _agreement_figures(scores)) for title, scores in scored],
        "metrics": METRICS,
        "base": scored[0][1].base_name if scored else "",
        "starts": starts_text(result),
        "factors": factors_text(METRICS),
        "provenance": _describe_provenance(result),
        "shorten": shorten,
    }
    script, style = (
        (_FOLDER / f"clusters.{suffix}").read_text("utf-8") for suffix in ("js", "css")
    )
    write_html(path, _FOLDER / "clusters.html.j2", [script], style, drawing.page_data(), **values)


def _agreement_figures(scores: LabelAgreement) -> list[tuple[str, str]]:
    """Return each metric of the clusters, of the base's clusters, and the difference.

    Each is a text, and its interval as a text.
    """
    figures = []
    for metric in METRICS:
        difference = scores.difference[metric.name]
        for figure in (scores.own[metric.name], scores.base[metric.name], difference):
            signed = figure is difference
            text = metric.format(figure.value, signed)
            interval = range_text(metric, figure.low, figure.high, signed)
            figures.append((with_minus_signs(text), with_minus_signs(interval)))
    return figures


def _cross_table(first: Clustering, second: Clustering) -> tuple[Clustering, Clustering, list[Any]]:
    """Return two clusterings, with the number of texts that each pair of their clusters shares.

    Rows and columns are in the order of the clusters.
    """
    rows, columns = ([c.cluster for c in clustering.clusters] for clustering in (first, second))
    counts = np.zeros((len(rows), len(columns)), dtype=np.int64)
    # The label -1 of texts in no cluster indexes the last row or column, which is theirs.
    np.add.at(counts, (first.labels, second.labels), 1)
    return first, second, counts.tolist()


def _describe_provenance(result: ClusterResult) -> dict[str, str]:
    """Return how the page was made, as labelled texts."""
    conditions = [clustering.condition for clustering in result.clusterings]
    values = {
        f"values of {condition.text}": ", ".join(condition.values)
        for condition in conditions
        if isinstance(condition, Condition) and condition.values
    }
    guides = {
        f"guide of {c.title}": ", ".join(f"{name}: {n:,}" for name, n in c.guide.items())
        for c in result.clusterings
        if c.guide
    }
    return {
        "texts": f"{result.file}: {result.texts:,} texts, {result.distinct:,} of them distinct",
        **values,
        "encoder": result.encoder,
        "prompt": result.prompt,
        "head": head_text(result.head),
        "method": _METHODS[result.method],
        **(guides or {"guide": "none"}),
        "seed": str(result.seed),
        "llmcond": __version__,
    }
