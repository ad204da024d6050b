"""Analyses of heads as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from llmcond.errors import printable
from llmcond.metrics import Estimate, Metric, metric_of
from llmcond.report.format import estimate_text, factors_text
from llmcond.report.terminal import plain, show, titled_table

Rows = Sequence[Mapping[str, Any]]


def show_analyses(result: Mapping[str, Any], run: object, form: str = "table") -> None:
    """Print every analysis that there is, a table each, on standard output."""
    where = f"{run}, {result['split']}, {result['n']:,} rated rows"
    if "isotropy" in result:
        title = f"Isotropy of the embeddings of {where} (CASE, appendix B)"
        columns = ("mean_cosine", "std_cosine", "partition_ratio", "n_zero")
        show(_figures(title, result["isotropy"], columns), form)
    if "clusters" in result:
        show(_clusters(result["clusters"], where), form)
    if "conditions" in result:
        show(_conditions(result["conditions"], where), form)
    if result.get("norms"):
        title = "Norm of W_c over the distinct conditions (Hyper-CL, section 5.4.1)"
        columns = ("n", "mean_norm", "raw", "normalised")
        show(_figures(title, result["norms"], columns), form)
    for head in result.get("examples", ()):
        for side in ("better", "worse"):
            if head[side]:
                show(_examples(head, side), form)


def _figures(title: str, rows: Rows, columns: Sequence[str]) -> Table:
    table = _table(title, ("name",), columns)
    for row in rows:
        values = (row[column] for column in columns)
        figures = (
            "–" if v is None else f"{v:,}" if isinstance(v, int) else f"{v:.4g}" for v in values
        )
        table.add_row(plain(row["name"]), *figures)
    return table


def _clusters(rows: Rows, where: str) -> Table:
    conditions = rows[0]["conditions"]
    title = (
        f"K-means of sentences of {where}, under {len(conditions)} conditions: impurity 0 where "
        "every condition has a cluster (Hyper-CL, section 5.2), and the sentences in each cluster"
    )
    table = _table(title, ("name",), ("impurity", *(printable(text) for text in conditions)))
    for row in rows:
        counts = ("/".join(str(count) for count in counts) for counts in row["counts"])
        table.add_row(plain(row["name"]), f"{row['impurity']:.3f}", *counts)
    return table


def _conditions(rows: Rows, where: str) -> Table:
    first = rows[0]
    metric = metric_of(first["metric"])
    title = (
        f"Conditions that train has and has not, {where} (Hyper-CL, section 5.3): "
        f"{metric.heading}, 95 % intervals over pairs. {factors_text([metric])}"
        f"{first['n_seen_conditions']:,} conditions of {first['n_seen']:,} rows are seen, "
        f"{first['n_unseen_conditions']:,} of {first['n_unseen']:,} are not"
    )
    kinds = ("overall", "seen", "unseen")
    table = _table(title, ("name",), kinds)
    for row in rows:
        table.add_row(plain(row["name"]), *(_score(metric, row, key) for key in kinds))
    return table


def _score(metric: Metric, row: Mapping[str, Any], key: str) -> str:
    if row[key] is None:
        return "–"
    return estimate_text(metric, Estimate.of_json(row[key], row[f"{key}_ci"]))


def _examples(head: Mapping[str, Any], side: str) -> Table:
    n = head[f"n_{side}"]
    title = (
        f"Similarity before ({head['before']}) and after ({head['name']}), where it changed most "
        f"for the {side}; {n:,} rows are {side} in all. Ratings on 0 to 1 (CASE, tables 3 and 8)"
    )
    table = _table(title, ("sentence 1", "sentence 2", "condition"), ("rating", "before", "after"))
    for row in head[side]:
        texts = (plain(row[key]) for key in ("sentence1", "sentence2", "condition"))
        figures = (f"{row[key]:.2f}" for key in ("rating", "before", "after"))
        table.add_row(*texts, *figures)
    return table


def _table(title: str, texts: Sequence[str], figures: Sequence[str]) -> Table:
    table = titled_table(title, *texts)
    for heading in figures:
        table.add_column(plain(heading.replace("_", " ")), justify="right")
    return table
