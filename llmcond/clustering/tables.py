"""Clusters as tables for people."""

from __future__ import annotations

from rich import box
from rich.table import Table

from llmcond.clustering.methods import NOISE, STARTS
from llmcond.clustering.result import Clustering, ClusterResult
from llmcond.clustering.scores import METRICS, Scores
from llmcond.report.format import INTERVALS, estimate_text, factors_text, range_text
from llmcond.report.terminal import add_figures, plain, show

#: Clusters of a condition that are shown, and characters of a typical text; ``--json`` has all.
_SHOWN, _CHARACTERS = 20, 80


def show_clusters(result: ClusterResult, form: str = "table") -> None:
    """Print the clusters under each condition, and how they agree with known labels."""
    for one in result.clusterings:
        show(_clusters(one), form)
    scored = [(one.title, one.scores) for one in result.clusterings if one.scores is not None]
    if scored:
        show(_scores(scored, starts_text(result)), form)


def _clusters(found: Clustering) -> Table:
    shown = found.clusters[:_SHOWN]
    n = len(found.clusters)
    cut = f", {len(shown)} of {n} shown" if len(shown) < n else ""
    title = plain(f"{found.title}: {found.k} clusters{cut}")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    add_figures(table, "cluster", "texts")
    table.add_column("name", overflow="fold")
    table.add_column("a typical text", overflow="fold")
    for one in shown:
        number = "none" if one.cluster == NOISE else str(one.cluster)
        text = " ".join(next(iter(one.typical), "").split())
        text = text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}…"
        table.add_row(number, f"{one.size:,}", plain(one.name), plain(text))
    return table


def _scores(found: list[tuple[str, Scores]], starts: str) -> Table:
    intervals = INTERVALS.format(groups="texts").replace(" and, of several fits, seeds", "")
    title = f"Clusters beside known labels. {factors_text(METRICS)}{intervals}{starts}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("condition", "labels"):
        table.add_column(heading, overflow="fold")
    add_figures(table, "texts", *headings(found[0][1].base_name))
    for name, scores in found:
        table.add_row(plain(name), plain(scores.column), f"{scores.n:,}", *figures(scores))
    return table


def headings(base_name: str) -> list[str]:
    """Return the headings of what :func:`figures` gives, beside vectors of this name."""
    return [text for metric in METRICS for text in (metric.heading, base_name, "difference")]


def starts_text(result: ClusterResult) -> str:
    """Return what a title says of the starts that figures of K-means depend on."""
    if result.method != "kmeans":
        return ""
    return f" K-means, best of {STARTS} starts, seed {result.seed}; other seeds give other figures."


def figures(scores: Scores) -> list[str]:
    """Return each metric of clusters, of those of the base's vectors, and their difference."""
    texts = []
    for metric in METRICS:
        found = scores.difference[metric.name]
        between = range_text(metric, found.low, found.high, signed=True)
        texts += [
            estimate_text(metric, scores.own[metric.name]),
            estimate_text(metric, scores.base[metric.name]),
            metric.show(found.value, signed=True) + (f" ({between})" if between else ""),
        ]
    return texts
