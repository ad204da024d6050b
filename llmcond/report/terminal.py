"""Tables in the terminal, and the same tables as Markdown or LaTeX."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from llmcond.errors import escape_control_characters
from llmcond.evaluation.results import Result
from llmcond.log import log
from llmcond.metrics import get_metric
from llmcond.report.format import (
    estimate_text,
    factors_text,
    held_out_text,
    interval_notes,
    new_sentences_heading,
    sentences_text,
)

#: Format of a printed table -> its name in tabulate.
_TABULATE_FORMATS = {"markdown": "github", "latex": "latex_booktabs"}
FORMATS = ("table", *_TABULATE_FORMATS)
#: The maximum length of a line of prose, in characters.
_PROSE_WIDTH = 100
#: The minimum and the maximum width of a table that no terminal limits, in characters.
_MIN_PIPED_WIDTH, _MAX_PIPED_WIDTH = 160, 1_000_000
#: The minimum width of a column of prose, the same where figures need the space, and the length up
#: to which a word is never cut.
_MIN_PROSE_COLUMN, _NARROW, _LONG_WORD = 24, 12, 40
_NUMBER = re.compile(r"[+-]?[\d,]*\.?\d+(e[+-]?\d+)?|nan|–")
#: A unit that is not cut. CJK characters count singly, because such texts have no spaces.
_WORD = re.compile(r"[^\s\u2e80-\uffef]+")


def results_table(results: Sequence[Result], run: object) -> Table:
    """Return a table of the evaluation results of one split, with one row per result.

    The title says what all results have in common: the rows scored, dropped and tied.
    """
    first = results[0]
    metrics = [get_metric(name) for name in first.metrics]
    title = (
        f"{run}, {first.split}: {first.counts.details}. {sentences_text(first)}"
        f"{factors_text(metrics)}{interval_notes(results)}"
    )
    table = identity_table(title)
    add_figure_columns(table, *(metric.heading for metric in metrics))
    has_held_out = any(result.held_out for result in results)
    if has_held_out:
        add_figure_columns(table, f"{first.primary.heading}, held-out")
    has_conditions = any(result.by_condition for result in results)
    if has_conditions:
        add_figure_columns(table, f"{first.primary.heading} by condition: seen / unseen")
    if first.new_sentences is not None:
        add_figure_columns(table, new_sentences_heading(first), "shared sentences")
    for result in results:
        cells = [estimate_text(metric, result.metrics[metric.name]) for metric in metrics]
        if has_held_out:
            cells.append(held_out_text(result))
        if has_conditions:
            scores = [first.primary.format(p.score.value) for p in result.by_condition.values()]
            cells.append(" / ".join(scores))
        for part in (result.new_sentences, result.shared_sentences):
            if part is not None:
                cells.append(estimate_text(result.primary, part.main))
        table.add_row(*identity_cells(result, result.title), *cells)
    return table


def plain_text(text: object) -> Text:
    """Return a text for a cell or title, without markup and terminal control characters."""
    return Text(escape_control_characters(str(text)))


def titled_table(title: str, *texts: str) -> Table:
    """Return an empty table with a title and text columns, without markup."""
    table = Table(title=plain_text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for heading in texts:
        table.add_column(heading, overflow="fold")
    return table


def identity_table(title: str, subtracts: bool = True) -> Table:
    """Return an empty table with the columns that identify a result: head and prompt.

    ``subtracts`` adds a column that says whether the unconditional vector is subtracted.
    """
    table = titled_table(title, "head", "prompt")
    if subtracts:
        table.add_column("minus c", no_wrap=True)
    return table


def add_figure_columns(table: Table, *headings: str) -> None:
    """Add right-aligned columns of figures, which are not wrapped."""
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def identity_cells(result: Result, head: str, remark: str = "") -> tuple[Text, Text, str]:
    """Return the cells of a result for the columns of ``identity_table``."""
    return plain_text(head), plain_text(result.prompt + remark), "yes" if result.subtract else "no"


def rows_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> Table:
    """Return rows that share their keys as a table.

    Args:
        rows: the rows.
        columns: the keys to show; empty: all.
    """
    columns = columns or list(rows[0] if rows else ())
    table = Table(box=box.SIMPLE_HEAD)
    for key in columns:
        table.add_column(key.replace("_", " "), overflow="fold", no_wrap=key == "name")
    formats = {key: _float_format([row[key] for row in rows]) for key in columns}
    for row in rows:
        table.add_row(*(_format_cell(row[key], formats[key]) for key in columns))
    return table


def _float_format(values: Sequence[object]) -> str:
    """Return a format with four digits for the largest value, and equal decimals for all."""
    floats = [abs(value) for value in values if isinstance(value, float) and isfinite(value)]
    largest = max(floats, default=0)
    if not 0.01 <= largest < 1e4:
        return ".4g"
    # Cosines, also those that rounding makes slightly larger than 1, have four decimals.
    return f".{4 if largest < 1.00005 else 4 - len(str(int(largest)))}f"


def _format_cell(value: object, float_format: str) -> Text:
    if isinstance(value, bool):
        return plain_text("yes" if value else "no")
    if isinstance(value, float):
        return plain_text(f"{value:{float_format}}")
    return plain_text("" if value is None else value)


def print_table(table: Table, form: str = "table") -> None:
    """Print a table on standard output in one of ``FORMATS``.

    In a terminal, or if ``COLUMNS`` gives the line width, the format ``table`` wraps cells between
    words and leaves out the columns that still do not fit; a message names them. Otherwise nothing
    is wrapped.
    """
    if form == "table":
        room = line_limit()
        left_out = fit_columns(table, room) if room else []
        width_needed = max(_MIN_PIPED_WIDTH, Console(width=_MAX_PIPED_WIDTH).measure(table).maximum)
        Console(highlight=False, width=room or width_needed).print(table)
        if left_out:
            log.info(
                f"columns left out, because a line has only {room} characters: "
                f"{', '.join(left_out)} (--json or a wider terminal shows them)"
            )
        return
    from tabulate import tabulate

    columns = [[_escape_cell(str(cell), form) for cell in column.cells] for column in table.columns]
    headings = [str(column.header) for column in table.columns]
    rows = list(zip(*columns, strict=True))
    alignment = ["right" if _has_figures(column) else "left" for column in table.columns]
    text = tabulate(
        rows,
        headings,
        _TABULATE_FORMATS[form],
        disable_numparse=True,
        colalign=alignment if form == "latex" else None,
    )
    title = str(table.title or "")
    prefix = {"markdown": f"{title}\n\n", "latex": f"% {title}\n"}[form] if title else ""
    sys.stdout.write(f"{prefix}{text}\n")


def _has_figures(column: Column) -> bool:
    """Return whether a column is right-aligned, or has numbers in all cells that are not empty."""
    cells = [str(cell) for cell in column.cells if str(cell)]
    return column.justify == "right" or bool(cells and all(map(_NUMBER.fullmatch, cells)))


def _escape_cell(cell: str, form: str) -> str:
    """Return a cell's text on one line, escaped so that it cannot end the cell."""
    line = " ".join(cell.split())
    return line.replace("|", r"\|") if form == "markdown" else line


def print_sentences(sentences: Sequence[str], form: str = "table") -> None:
    """Print sentences on standard output, unless ``form`` is a format for documents."""
    if form == "table":
        console = Console(highlight=False, width=min(line_width(), _PROSE_WIDTH))
        for sentence in sentences:
            console.print(plain_text(sentence))


def line_limit() -> int | None:
    """Return the line width of standard output in characters; None if it is unlimited.

    ``COLUMNS`` takes precedence over the width of the terminal.
    """
    console = Console()
    is_limited = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console.width if is_limited else None


def line_width() -> int:
    """Return the line width to format output for, in characters."""
    return line_limit() or _MIN_PIPED_WIDTH


def fit_columns(table: Table, room: int) -> list[str]:
    """Fit a table into lines of ``room`` characters without cutting a word or a number.

    Cells are wrapped between words. If that is not enough, words of more than ``_LONG_WORD``
    characters, such as URLs, are cut, then columns of prose become narrow if the table has figures,
    and then columns are removed from the right, except the first one.

    Returns:
        The headings of the removed columns.
    """
    # Each column has a space on both sides and a separator before it; the last has one after it.
    room -= 1 + 3 * len(table.columns)
    widths = [_measure_column(column) for column in table.columns]
    if sum(minimum for minimum, _ in widths) > room:
        widths = [_measure_column(column, _LONG_WORD) for column in table.columns]
    has_figures = any(column.justify == "right" for column in table.columns)
    if has_figures and sum(minimum for minimum, _ in widths) > room:
        widths = [_measure_column(column, _LONG_WORD, _NARROW) for column in table.columns]
    left_out: list[str] = []
    while len(widths) > 1 and sum(minimum for minimum, _ in widths) > room:
        widths.pop()
        left_out.insert(0, str(table.columns.pop().header))
        room += 3
    spare = room - sum(minimum for minimum, _ in widths)
    by_demand = sorted(range(len(widths)), key=lambda i: widths[i][1] - widths[i][0])
    for rank, index in enumerate(by_demand):
        minimum, maximum = widths[index]
        added = max(min(maximum - minimum, spare // (len(by_demand) - rank)), 0)
        table.columns[index].width = max(min(minimum + added, room), 1)
        table.columns[index].no_wrap = False
        spare -= added
    return left_out


def _measure_column(
    column: Column, longest_word: int | None = None, min_prose: int = _MIN_PROSE_COLUMN
) -> tuple[int, int]:
    """Return the minimum and the maximum useful width of a column, in characters."""
    lines = [line for cell in column.cells for line in str(cell).splitlines()]
    words = [word for line in lines for word in _WORD.findall(line)]
    maximum = max(map(cell_len, (str(column.header), *lines)), default=0)
    heading = max(map(cell_len, str(column.header).split()), default=0)
    minimum = max(map(cell_len, lines if column.no_wrap else words), default=0)
    if not column.no_wrap:
        minimum = max(min(minimum, longest_word or minimum), min(min_prose, maximum))
    return max(heading, minimum), maximum
