"""Results as tables for people and as JSON for machines."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from llmcond.errors import printable
from llmcond.evaluation.results import Result
from llmcond.log import log
from llmcond.metrics import metric_of
from llmcond.report.format import (
    caveats,
    estimate_text,
    factors_text,
    new_sentences_heading,
    sentences_text,
)

#: How tables are printed -> what tabulate calls it.
_FORMS = {"markdown": "github", "latex": "latex_booktabs"}
FORMATS = ("table", *_FORMS)
#: Characters of a line of prose.
_READABLE = 100
#: Characters of a line that no terminal limits: at least, and at most.
_PIPED, _UNLIMITED = 160, 1_000_000
#: Characters that a column of prose has at least, and of the longest word that is never cut.
_PROSE, _LONG_WORD = 24, 40
#: What is not cut; texts of Chinese and the like have no spaces.
_WORD = re.compile(r"[^\s\u2e80-\uffef]+")


def results_table(results: Sequence[Result], run: object) -> Table:
    """Return evaluation results of one split, a row each.

    What is the same for every row (the rows scored, dropped and tied) stands in the title.
    """
    first = results[0]
    metrics = [metric_of(name) for name in first.metrics]
    title = (
        f"{run}, {first.split}: {first.counts.details}. {sentences_text(first)}"
        f"{factors_text(metrics)}{caveats(results)}"
    )
    table = identity_table(title)
    add_figures(table, *(metric.heading for metric in metrics))
    apart = any(result.by_condition for result in results)
    if apart:
        add_figures(table, f"{first.primary.heading} by condition: seen / unseen")
    if first.new_sentences is not None:
        add_figures(table, new_sentences_heading(first))
    for result in results:
        cells = [estimate_text(metric, result.metrics[metric.name]) for metric in metrics]
        if apart:
            parts = [first.primary.show(p.score.value) for p in result.by_condition.values()]
            cells.append(" / ".join(parts))
        if result.new_sentences is not None:
            cells.append(estimate_text(result.primary, result.new_sentences.main))
        table.add_row(*identity_cells(result, result.title), *cells)
    return table


def plain(text: object) -> Text:
    """Return a text for a cell or title: no markup, and nothing that steers a terminal."""
    return Text(printable(str(text)))


def titled_table(title: str, *texts: str) -> Table:
    """Return a table with a title and columns of texts, without markup."""
    table = Table(title=plain(title), title_justify="left", box=box.SIMPLE_HEAD)
    for heading in texts:
        table.add_column(heading, overflow="fold")
    return table


def identity_table(title: str, subtracts: bool = True) -> Table:
    """Return a table with the columns that say what a result is of.

    ``subtracts`` is whether anything can be subtracted; there is a column of it then.
    """
    table = titled_table(title, "head", "prompt")
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

    In a terminal, and where ``COLUMNS`` says how wide a line is, cells are wrapped between words,
    and columns that still have no room are left out, which a message says. Elsewhere nothing is
    wrapped.
    """
    if form == "table":
        room = line_limit()
        left_out = fit_columns(table, room) if room else []
        widest = max(_PIPED, Console(width=_UNLIMITED).measure(table).maximum)
        Console(highlight=False, width=room or widest).print(table)
        if left_out:
            log.info(
                f"columns left out, as a line has {room} characters: {', '.join(left_out)} (--json "
                "or a wider terminal shows them)"
            )
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


def line_limit() -> int | None:
    """Return how many characters a line of standard output has room for; None: any number.

    ``COLUMNS`` says it, else the terminal.
    """
    console = Console()
    is_limited = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console.width if is_limited else None


def width() -> int:
    """Return how many characters to lay a line of standard output out for."""
    return line_limit() or _PIPED


def fit_columns(table: Table, room: int) -> list[str]:
    """Lay a table out in lines of ``room`` characters, such that no word and no number is cut.

    Cells are wrapped between words. Where that is not enough, words of more than
    ``_LONG_WORD`` characters are cut, such as addresses, and columns are left out from the right,
    but never the first one. The headings of these are returned.
    """
    # Each column has a space on both sides and one character before it, and the last one after it.
    room -= 1 + 3 * len(table.columns)
    widths = [_widths(column) for column in table.columns]
    if sum(least for least, _ in widths) > room:
        widths = [_widths(column, _LONG_WORD) for column in table.columns]
    left_out: list[str] = []
    while len(widths) > 1 and sum(least for least, _ in widths) > room:
        widths.pop()
        left_out.insert(0, str(table.columns.pop().header))
        room += 3
    spare = room - sum(least for least, _ in widths)
    wanting = sorted(range(len(widths)), key=lambda i: widths[i][1] - widths[i][0])
    for place, index in enumerate(wanting):
        least, most = widths[index]
        added = max(min(most - least, spare // (len(wanting) - place)), 0)
        table.columns[index].width = max(min(least + added, room), 1)
        table.columns[index].no_wrap = False
        spare -= added
    return left_out


def _widths(column: Column, longest_word: int | None = None) -> tuple[int, int]:
    """Return the least and the most characters that a column has use for."""
    lines = [line for cell in column.cells for line in str(cell).splitlines()]
    words = [word for line in lines for word in _WORD.findall(line)]
    most = max(map(cell_len, (str(column.header), *lines)), default=0)
    heading = max(map(cell_len, str(column.header).split()), default=0)
    least = max(map(cell_len, lines if column.no_wrap else words), default=0)
    if not column.no_wrap:
        least = max(min(least, longest_word or least), min(_PROSE, most))
    return max(heading, least), most
