"""The results of clustering, as tables and as one HTML file with a map of the texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from llmcond.clustering.describe import ClusterSummary
from llmcond.clustering.methods import (
    CLEAR_SILHOUETTE,
    METRICS,
    NOISE,
    STARTS,
    LabelAgreement,
    Labels,
    MapPositions,
    Vectors,
    compute_maps,
    sample_indices,
)
from llmcond.conditions import Condition, condition_json, condition_text
from llmcond.display import Column, Displayed, Table, make_frame
from llmcond.errors import format_count
from llmcond.log import log
from llmcond.metrics import finite_or_none
from llmcond.report.content import with_minus_signs
from llmcond.report.figures import MapPanel, plot_maps
from llmcond.report.page import write_html
from llmcond.report.tables import INTERVAL_NOTE, estimate_text, factors_text, head_text, range_text
from llmcond.text import shorten
from llmcond.version import __version__


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


#: Maximal number of clusters in a table; ``--json`` has all.
_MAX_CLUSTERS = 20


def cluster_tables(result: ClusterResult) -> list[Table]:
    """Return the clusters under each condition, and their agreement with known labels."""
    scored = [(c.title, c.scores) for c in result.clusterings if c.scores is not None]
    tables = [_cluster_table(clustering) for clustering in result.clusterings]
    return [*tables, *([_score_table(scored, starts_text(result))] if scored else [])]


def _cluster_table(clustering: Clustering) -> Table:
    shown = clustering.clusters[:_MAX_CLUSTERS]
    n = len(clustering.clusters)
    note = f", the {len(shown)} largest of {n} shown" if len(shown) < n else ""
    numbers = ["none" if c.cluster == NOISE else c.cluster for c in shown]
    columns = [
        Column("cluster", numbers, "figures"),
        Column("texts", [f"{cluster.size:,}" for cluster in shown], "figures"),
        Column("name", [cluster.name for cluster in shown]),
    ]
    if clustering.guided:
        counts = [clustering.guided.get(cluster.cluster, {}).items() for cluster in shown]
        labels = [", ".join(f"{label} {n:,}" for label, n in pairs) for pairs in counts]
        columns.append(Column("guide labels", labels))
    texts = [shorten("".join(cluster.typical[:1])) for cluster in shown]
    columns.append(Column("a typical text", texts))
    return Table(columns, f"{clustering.title}: {clustering.k} clusters{note}")


def _score_table(scored: Sequence[tuple[str, LabelAgreement]], starts: str) -> Table:
    intervals = INTERVAL_NOTE.format(groups="texts").replace(
        " and, with several fits, over seeds", ""
    )
    figures = zip(*(agreement_texts(scores) for _, scores in scored), strict=True)
    columns = [
        Column("condition", [name for name, _ in scored]),
        Column("labels", [scores.column for _, scores in scored]),
        Column("texts", [f"{scores.n:,}" for _, scores in scored], "figures"),
        *(
            Column(heading, cells, "figures")
            for heading, cells in zip(
                agreement_headings(scored[0][1].base_name), figures, strict=True
            )
        ),
    ]
    note = f"Agreement with known labels. {factors_text(METRICS)}{intervals}{starts}"
    return Table(columns, note)


def agreement_headings(base_name: str) -> list[str]:
    """Return the headings of the columns of ``agreement_texts``, for base vectors of this name."""
    return [text for metric in METRICS for text in (metric.heading, base_name, "difference")]


def quality_text(clustering: Clustering, method: str) -> str:
    """Say how many clusters there are, how well they are separated and agree with labels."""
    text = format_count(clustering.k, "cluster")
    if method == "hdbscan":
        text += f"; {clustering.noise:,} of {len(clustering.labels):,} texts are in no cluster"
    if clustering.silhouette is not None:
        unclear = ", so not clearly separated" if clustering.silhouette <= CLEAR_SILHOUETTE else ""
        text += f"; silhouette {clustering.silhouette:.2f}{unclear}"
    if clustering.scores is not None and clustering.scores.is_poor:
        text += f"; little agreement with the labels {clustering.scores.column}"
    return text


def starts_text(result: ClusterResult) -> str:
    """Return a note for titles on the random starts that K-means depends on."""
    if result.method != "kmeans":
        return ""
    return f" K-means: best of {STARTS} starts, seed {result.seed}; other seeds change the results."


def agreement_texts(scores: LabelAgreement) -> list[str]:
    """Return each metric of the clusters, of the base's clusters, and the difference."""
    texts = []
    for metric in METRICS:
        difference = scores.difference[metric.name]
        interval = range_text(metric, difference.low, difference.high, signed=True)
        texts += [
            estimate_text(metric, scores.own[metric.name]),
            estimate_text(metric, scores.base[metric.name]),
            metric.format(difference.value, signed=True) + (f" ({interval})" if interval else ""),
        ]
    return texts


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
