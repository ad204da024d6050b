"""Results as tables for people and as JSON for machines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmcond.errors import printable
from llmcond.evaluation.results import Result
from llmcond.metrics import METRICS, metric_of
from llmcond.report.format import caveats, estimate_text, factors_text

#: How tables are printed -> what tabulate calls it.
_FORMS = {"markdown": "github", "latex": "latex_booktabs"}
FORMATS = ("table", *_FORMS)
#: Characters of a line of prose.
_READABLE = 100


def results_table(results: Sequence[Result], run: object) -> Table:
    """Return evaluation results of one split, a row each.

    What is the same for every row (the rows scored, dropped and tied) stands in the title.
    """
    first, counts = results[0], results[0].counts
    metrics = [metric_of(name) for name in first.metrics]
    title = (
        f"{run}, {first.split}: {counts.n:,} rows of {counts.n_pairs:,} sentence pairs, "
        f"{counts.n_dropped:,} unrated dropped; accuracy over {counts.n_compared:,} comparisons, "
        f"{counts.n_tied:,} tied left out. {factors_text(metrics)}{caveats(results)}"
    )
    table = identity_table(title)
    add_figures(table, *(metric.heading for metric in metrics))
    apart = any(result.by_condition for result in results)
    if apart:
        add_figures(table, "Spearman by condition: seen / unseen")
    for result in results:
        cells = [estimate_text(metric, result.metrics[metric.name]) for metric in metrics]
        if apart:
            parts = [
                METRICS["spearman"].show(p.spearman.value) for p in result.by_condition.values()
            ]
            cells.append(" / ".join(parts))
        table.add_row(*identity_cells(result, result.title), *cells)
    return table


def plain(text: object) -> Text:
    """Return a text for a cell or title: no markup, and nothing that steers a terminal."""
    return Text(printable(str(text)))


def identity_table(title: str, subtracts: bool = True) -> Table:
    """Return a table with the columns that say what a result is of.

    ``subtracts`` is whether anything can be subtracted; there is a column of it then.
    """
    table = Table(title=plain(title), title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("head", "prompt"):
        table.add_column(heading, overflow="fold")
    if subtracts:
        table.add_column("minus c", no_wrap=True)
    return table


def add_figures(table: Table, *headings: str) -> None:
    """Add columns of figures, whose lines are not broken."""
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def identity_cells(result: Result, head: str, remark: str = "") -> tuple[Text, Text, str]:
    """Return the cells of those columns."""
    return plain(head), plain(result.prompt + remark), "yes" if result.subtract else "no"


def listing(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> Table:
    """Return rows of like keys as a table, of some columns or all; texts are shown as they are."""
    columns = columns or list(rows[0] if rows else ())
    table = Table(box=box.SIMPLE_HEAD)
    for key in columns:
        table.add_column(key.replace("_", " "), overflow="fold", no_wrap=key == "name")
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in columns))
    return table


def _cell(value: object) -> Text:
    if isinstance(value, bool):
        return plain("yes" if value else "no")
    if isinstance(value, float):
        return plain(f"{value:.4g}")
    return plain("" if value is None else value)


def show(table: Table, form: str = "table") -> None:
    """Print a table on standard output in one of :data:`FORMATS`, all but ``table`` for documents.

    Where that is no terminal, it is wide enough for all.
    """
    if form == "table":
        Console(highlight=False, width=width()).print(table)
        return
    from tabulate import tabulate

    columns = [[_escaped(str(cell), form) for cell in column.cells] for column in table.columns]
    headings = [str(column.header) for column in table.columns]
    rows = list(zip(*columns, strict=True))
    text = tabulate(rows, headings, _FORMS[form], disable_numparse=True)
    title = str(table.title or "")
    before = {"markdown": f"{title}\n\n", "latex": f"% {title}\n"}[form] if title else ""
    sys.stdout.write(f"{before}{text}\n")


def _escaped(cell: str, form: str) -> str:
    """Return a cell's text on one line, and such that it does not end the cell."""
    line = " ".join(cell.split())
    return line.replace("|", r"\|") if form == "markdown" else line


def say(sentences: Sequence[str], form: str = "table") -> None:
    """Print sentences on standard output, before a table for people."""
    if form == "table":
        console = Console(highlight=False, width=min(width(), _READABLE))
        for sentence in sentences:
            console.print(plain(sentence))


def width() -> int:
    """Return how many characters a line of standard output has room for."""
    console = Console()
    return console.width if console.is_terminal else 160
