"""Clusters as tables for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from llmcond.clustering.methods import CLEAR_SILHOUETTE, NOISE, STARTS
from llmcond.clustering.result import Clustering, ClusterResult
from llmcond.clustering.scores import METRICS, LabelAgreement
from llmcond.errors import format_count
from llmcond.report.format import INTERVAL_NOTE, estimate_text, factors_text, range_text
from llmcond.report.terminal import add_figure_columns, plain_text, print_table
from llmcond.text import shorten

#: Maximal number of clusters in a table; ``--json`` has all.
_MAX_CLUSTERS = 20


def show_clusters(result: ClusterResult, form: str = "table") -> None:
    """Print the clusters under each condition, and their agreement with known labels."""
    for clustering in result.clusterings:
        print_table(_cluster_table(clustering), form)
    scored = [(c.title, c.scores) for c in result.clusterings if c.scores is not None]
    if scored:
        print_table(_score_table(scored, starts_text(result)), form)


def _cluster_table(clustering: Clustering) -> Table:
    shown = clustering.clusters[:_MAX_CLUSTERS]
    n = len(clustering.clusters)
    note = f", the {len(shown)} largest of {n} shown" if len(shown) < n else ""
    title = plain_text(f"{clustering.title}: {clustering.k} clusters{note}")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    add_figure_columns(table, "cluster", "texts")
    table.add_column("name", overflow="fold")
    if clustering.guided:
        table.add_column("guide labels", overflow="fold")
    table.add_column("a typical text", overflow="fold")
    for cluster in shown:
        number = "none" if cluster.cluster == NOISE else str(cluster.cluster)
        text = shorten("".join(cluster.typical[:1]))
        cells = [plain_text(cluster.name)]
        if clustering.guided:
            counts = clustering.guided.get(cluster.cluster, {}).items()
            cells.append(plain_text(", ".join(f"{label} {n:,}" for label, n in counts)))
        table.add_row(number, f"{cluster.size:,}", *cells, plain_text(text))
    return table


def _score_table(scored: list[tuple[str, LabelAgreement]], starts: str) -> Table:
    intervals = INTERVAL_NOTE.format(groups="texts").replace(
        " and, with several fits, over seeds", ""
    )
    title = f"Agreement with known labels. {factors_text(METRICS)}{intervals}{starts}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("condition", "labels"):
        table.add_column(heading, overflow="fold")
    add_figure_columns(table, "texts", *agreement_headings(scored[0][1].base_name))
    for name, scores in scored:
        table.add_row(
            plain_text(name), plain_text(scores.column), f"{scores.n:,}", *agreement_texts(scores)
        )
    return table


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
