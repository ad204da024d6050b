"""Tables and figures of the analyses of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from llmcond.errors import escape_control_characters
from llmcond.metrics import Estimate, Metric, get_metric
from llmcond.report.figures import plot_histograms
from llmcond.report.format import estimate_text, factors_text
from llmcond.report.terminal import plain_text, print_table, titled_table

JsonRows = Sequence[Mapping[str, Any]]


def show_analyses(result: Mapping[str, Any], run: object, form: str = "table") -> None:
    """Print a table for every analysis in ``result``.

    Args:
        result: the analyses as JSON.
        run: the name of the run, for the titles.
        form: the format of the tables, one of ``FORMATS``.
    """
    scope = f"{run}, {result['split']}, {result['n']:,} rated rows"
    _show_analyses_of_heads(result, scope, form)
    if "similarity" in result:
        print_table(_similarity_table(result["similarity"], run, result), form)
    if "turns" in result:
        print_table(_turns_table(result["turns"], run, result["split"]), form)
    for head in result.get("answers", ()):
        print_table(_answers_table(head), form)
    for head in result.get("examples", ()):
        for side in ("better", "worse"):
            if head[side]:
                print_table(_examples_table(head, side), form)


def _show_analyses_of_heads(result: Mapping[str, Any], scope: str, form: str) -> None:
    """Print the tables of analyses that have one row for each head."""
    if "isotropy" in result:
        title = f"Isotropy of the embeddings of {scope} (CASE, appendix B)"
        columns = ("mean_cosine", "std_cosine", "partition_ratio", "n_zero")
        print_table(_figures_table(title, result["isotropy"], columns), form)
    if "clusters" in result:
        print_table(_clusters_table(result["clusters"], scope), form)
    if "conditions" in result:
        print_table(_conditions_table(result["conditions"], scope), form)
    if result.get("norms"):
        title = "Norm of W_c over the distinct conditions (Hyper-CL, section 5.4.1)"
        columns = ("n", "mean_norm", "raw", "normalised")
        print_table(_figures_table(title, result["norms"], columns), form)


def plot_isotropy(rows: JsonRows, path: Path) -> None:
    """Plot the distributions of the cosines to the mean vector (CASE, figures 5 and 6).

    There is one panel for each head and prompt, which compares the vectors with and without
    subtraction. No file is written if all vectors are zero.

    Args:
        rows: name, head, prompt, subtract and ``cosines`` (n,) of each set of vectors.
        path: the .png, .svg or .pdf file to write.
    """
    panels: dict[str, dict[str, NDArray[np.floating]]] = {}
    for row in rows:
        if not len(row["cosines"]):
            continue
        title, series = f"{row['head']}@{row['prompt']}", "minus c" if row["subtract"] else "with c"
        # Fitted heads of the same recipe and prompt have distinct names.
        title = row["name"] if series in panels.get(title, ()) else title
        panels.setdefault(title, {})[series] = row["cosines"]
    if panels:
        caption = "minus c: the unconditional vector is subtracted; dashed line: mean"
        plot_histograms(panels, path, "cosine to the mean vector", "vectors", caption)


def _answers_table(head: Mapping[str, Any]) -> Table:
    title = (
        f"Similarity before ({head['before']}) and after ({head['name']}) of sentences and of "
        "answers (CASE, tables 3 and 8)"
    )
    table = _make_table(title, ("text 1", "text 2", "condition"), ("before", "after"))
    for row in head["rows"]:
        texts = (row["text1"], row["text2"], row["condition"] or "–")
        figures = ("–" if row[key] is None else f"{row[key]:.4f}" for key in ("before", "after"))
        table.add_row(*map(plain_text, texts), *figures)
    return table


def _names_table(title: str, figures: Sequence[str]) -> Table:
    """Return an empty table with the columns that identify an analysed head."""
    table = titled_table(title, "name", "minus c")
    _add_figure_columns(table, figures)
    return table


def _name_cells(row: Mapping[str, Any]) -> tuple[Text, str]:
    return plain_text(row["name"]), "yes" if row["subtract"] else "no"


def _figures_table(title: str, rows: JsonRows, columns: Sequence[str]) -> Table:
    table = _names_table(title, columns)
    for row in rows:
        values = (row[column] for column in columns)
        figures = (
            "–" if v is None else f"{v:,}" if isinstance(v, int) else f"{v:.4g}" for v in values
        )
        table.add_row(*_name_cells(row), *figures)
    return table


def _similarity_table(rows: JsonRows, run: object, result: Mapping[str, Any]) -> Table:
    title = (
        f"Mean cosine of contexts with other candidates (random) and with the answer (correct) of "
        f"{run}, {result['split']}, {result['n']:,} next turns (Triple-Encoders, table 6)"
    )
    table = _make_table(title, ("name", "score"), ("random", "correct", "difference"))
    for row in rows:
        figures = (f"{row[key]:.3f}" for key in ("random", "correct"))
        table.add_row(
            plain_text(row["name"]), row["score"], *figures, _format_difference(row, interval=True)
        )
    return table


def _turns_table(rows: JsonRows, run: object, split: str) -> Table:
    first = rows[0]
    title = (
        f"Cosine with the answer minus mean cosine with other candidates, by turn of the context, "
        f"of {run}, {split}, {first['n']:,} contexts of {first['history']} turns "
        "(Triple-Encoders, figure 8)"
    )
    table = _make_table(title, ("name", "score"), [str(turn["turn"]) for turn in first["turns"]])
    for row in rows:
        figures = (_format_difference(turn) for turn in row["turns"])
        table.add_row(plain_text(row["name"]), row["score"], *figures)
    return table


def _format_difference(row: Mapping[str, Any], interval: bool = False) -> str:
    low, high = row["difference_ci"]
    text = f"{row['difference']:.3f}"
    return f"{text} [{low:.3f}, {high:.3f}]" if interval and low is not None else text


def _clusters_table(rows: JsonRows, scope: str) -> Table:
    conditions = rows[0]["conditions"]
    title = (
        f"K-means of the sentences of {scope}, under {len(conditions)} conditions: impurity (0 if "
        "every condition has its own cluster; Hyper-CL, section 5.2), before and after the head, "
        "and sentences per cluster"
    )
    table = _names_table(title, ("before", "impurity", *map(escape_control_characters, conditions)))
    for row in rows:
        counts = ("/".join(str(count) for count in counts) for counts in row["counts"])
        before = f"{row['impurity_before']:.3f}" if "impurity_before" in row else "–"
        table.add_row(*_name_cells(row), before, f"{row['impurity']:.3f}", *counts)
    return table


def _conditions_table(rows: JsonRows, scope: str) -> Table:
    first = rows[0]
    metric = get_metric(first["metric"])
    title = (
        f"Conditions seen and unseen in training, {scope} (Hyper-CL, section 5.3): "
        f"{metric.heading}, 95 % confidence intervals over sentence pairs. "
        f"{factors_text([metric])}{first['n_seen_conditions']:,} conditions "
        f"({first['n_seen']:,} rows) are seen, {first['n_unseen_conditions']:,} "
        f"({first['n_unseen']:,} rows) are unseen"
    )
    kinds = ("overall", "seen", "unseen")
    table = _names_table(title, kinds)
    for row in rows:
        table.add_row(*_name_cells(row), *(_format_score(metric, row, key) for key in kinds))
    return table


def _format_score(metric: Metric, row: Mapping[str, Any], key: str) -> str:
    if row[key] is None:
        return "–"
    return estimate_text(metric, Estimate.from_json(row[key], row[f"{key}_ci"]))


def _examples_table(head: Mapping[str, Any], side: str) -> Table:
    n = head[f"n_{side}"]
    title = (
        f"Similarity before ({head['before']}) and after ({head['name']}): rows that changed most "
        f"for the {side}, of {n:,} {side} rows. Ratings from 0 to 1 (CASE, tables 3 and 8)"
    )
    table = _make_table(
        title, ("sentence 1", "sentence 2", "condition"), ("rating", "before", "after")
    )
    for row in head[side]:
        texts = (plain_text(row[key]) for key in ("sentence1", "sentence2", "condition"))
        figures = (f"{row[key]:.2f}" for key in ("rating", "before", "after"))
        table.add_row(*texts, *figures)
    return table


def _make_table(title: str, texts: Sequence[str], figures: Sequence[str]) -> Table:
    table = titled_table(title, *texts)
    _add_figure_columns(table, figures)
    return table


def _add_figure_columns(table: Table, headings: Sequence[str]) -> None:
    for heading in headings:
        table.add_column(plain_text(heading.replace("_", " ")), justify="right")
