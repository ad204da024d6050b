"""Clusters as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from llmcond.clustering.methods import CLEAR_SILHOUETTE, NOISE, STARTS
from llmcond.clustering.result import Clustering, ClusterResult
from llmcond.clustering.scores import METRICS, LabelAgreement
from llmcond.display import Column, Table
from llmcond.errors import format_count
from llmcond.report.tables import INTERVAL_NOTE, estimate_text, factors_text, range_text
from llmcond.text import shorten

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
