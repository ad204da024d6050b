"""Results as tables for people and as JSON for machines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def results_table(results: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return evaluation results, a row each, with intervals; correlations are times 100."""
    table = Table(title=Text(title), title_justify="left")
    for heading in ("head", "prompt", "minus c"):
        table.add_column(heading, overflow="fold")
    for heading in ("Spearman", "Pearson", "accuracy", "rows", "dropped", "tied"):
        table.add_column(heading, justify="right", overflow="fold")
    for result in results:
        table.add_row(
            Text(str(result["name"])),
            Text(str(result["prompt"])),
            "yes" if result["subtract"] else "no",
            _interval(result, "spearman"),
            _interval(result, "pearson"),
            _interval(result, "accuracy"),
            str(result["n"]),
            str(result["n_dropped"]),
            str(result["n_tied"]),
        )
    return table


def _interval(result: Mapping[str, Any], key: str) -> str:
    value, (low, high) = result[key], result[f"{key}_ci"]
    if value is None:
        return "undefined"
    return f"{_hundred(value)} [{_hundred(low)}, {_hundred(high)}]"


def _hundred(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def listing(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return rows of like keys as a table; texts are shown as they are."""
    table = Table()
    for key in rows[0] if rows else ():
        table.add_column(key, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if value is None else str(value)) for value in row.values()))
    return table


def show(table: Table) -> None:
    """Print a table on standard output, never narrower than it needs where that is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(table)


def finite(value: float) -> float | None:
    """Return a figure as JSON has it: None for NaN and infinity."""
    return float(value) if math.isfinite(value) else None
