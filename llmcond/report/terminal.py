"""Results as tables for people and as JSON for machines."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmcond.errors import printable

#: How tables are printed -> what tabulate calls it.
_FORMS = {"markdown": "github", "latex": "latex_booktabs"}
FORMATS = ("table", *_FORMS)
#: Characters of a line of prose.
_READABLE = 100


def results_table(results: Sequence[Mapping[str, Any]], run: object) -> Table:
    """Return evaluation results of one split, a row each; figures are times 100.

    What is the same for every row (the rows scored, dropped and tied) stands in the title.
    """
    first = results[0]
    title = (
        f"{run}, {first['split']}: {first['n']:,} rows of {first['n_pairs']:,} sentence pairs, "
        f"{first['n_dropped']:,} unrated dropped; accuracy over {first['n_compared']:,} "
        f"comparisons, {first['n_tied']:,} tied left out. Times 100, 95 % intervals over pairs."
    )
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("head", "prompt"):
        table.add_column(heading, overflow="fold")
    table.add_column("minus c", no_wrap=True)
    for heading in ("Spearman", "Pearson", "accuracy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            # A head's full name repeats its prompt, which has a column of its own.
            Text(str(result["name"]).removesuffix("+c").removesuffix(f"@{result['prompt']}")),
            Text(str(result["prompt"])),
            "yes" if result["subtract"] else "no",
            _interval(result, "spearman"),
            _interval(result, "pearson"),
            _interval(result, "accuracy"),
        )
    return table


def _interval(result: Mapping[str, Any], key: str) -> str:
    value, (low, high) = result[key], result[f"{key}_ci"]
    if value is None:
        return "undefined"
    return f"{hundred(value)} [{hundred(low)}, {hundred(high)}]"


def hundred(value: float | None) -> str:
    """Return a figure times 100, a dash where it is undefined."""
    return "–" if value is None else f"{100 * value:.1f}"


def best_first(results: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return results by their Spearman, undefined ones last."""
    key = "spearman"
    return sorted(results, key=lambda r: -2 if r[key] is None else r[key], reverse=True)


def listing(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return rows of like keys as a table; texts are shown as they are."""
    table = Table(box=box.SIMPLE_HEAD)
    for key in rows[0] if rows else ():
        table.add_column(key.replace("_", " "), overflow="fold", no_wrap=key == "name")
    for row in rows:
        texts = ("" if value is None else printable(str(value)) for value in row.values())
        table.add_row(*(Text(text) for text in texts))
    return table


def show(table: Table, form: str = "table") -> None:
    """Print a table on standard output; where that is no terminal, it is wide enough for all.

    Args:
        table: what to print.
        form: one of :data:`FORMATS`; all but ``table`` are for other documents.
    """
    if form == "table":
        Console(highlight=False, width=width()).print(table)
        return
    from tabulate import tabulate

    # Markup of texts is none of ours: `_plain` of a rich Text is its text.
    headings = [_plain(column.header) for column in table.columns]
    rows = list(
        zip(*([_plain(cell) for cell in column.cells] for column in table.columns), strict=True)
    )
    cells = [[_escaped(cell, form) for cell in row] for row in rows]
    text = tabulate(cells, headings, _FORMS[form], disable_numparse=True)
    title = _plain(table.title) if table.title else ""
    before = {"markdown": f"{title}\n\n", "latex": f"% {title}\n"}[form] if title else ""
    sys.stdout.write(f"{before}{text}\n")


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _escaped(cell: str, form: str) -> str:
    """Return a cell's text on one line, and such that it does not end the cell."""
    line = " ".join(cell.split())
    return line.replace("|", r"\|") if form == "markdown" else line


def say(sentences: Sequence[str], form: str = "table") -> None:
    """Print sentences on standard output, before a table for people."""
    if form == "table":
        console = Console(highlight=False, width=min(width(), _READABLE))
        for sentence in sentences:
            console.print(Text(sentence))


def width() -> int:
    """Return how many characters a line of standard output has room for."""
    console = Console()
    return console.width if console.is_terminal else 160


def finite(value: float) -> float | None:
    """Return a figure as JSON has it: None for NaN and infinity."""
    return float(value) if math.isfinite(value) else None
