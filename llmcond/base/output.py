"""What users see while and after a command runs: messages, progress bars and tables.

Messages are printed by the command line and in interactive sessions and notebooks of Python. The
level of the logger decides what is shown: at WARNING or above, neither notes nor progress.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from html import escape
from importlib.util import find_spec
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from typing_extensions import override

from llmcond.base.errors import (
    LlmcondError,
    escape_control_characters,
    format_count,
    shortened_repr,
)
from llmcond.base.files import fields_as_json
from llmcond.base.system import local_rank

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

#: The logger of all messages. Applications can set its level and handlers.
log = logging.getLogger("llmcond")


@cache
def console() -> Console:
    """Return the console for standard error; of processes launched together, only one prints."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True, quiet=local_rank() > 0)


class _TerminalHandler(logging.Handler):
    """Handler that prints messages on standard error, as plain text."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        level = "warning: " if record.levelno >= logging.WARNING else ""
        console().print(
            f"{level}{escape_control_characters(record.getMessage())}", markup=False, emoji=False
        )


def log_to_terminal() -> None:
    """Print the package's messages on standard error, and keep a level that the user has set."""
    if not any(isinstance(handler, _TerminalHandler) for handler in log.handlers):
        log.addHandler(_TerminalHandler())
        log.setLevel(log.level or logging.INFO)
        log.propagate = False


def shows_bars() -> bool:
    """Return whether to show progress bars: in terminals and notebooks, unless silenced."""
    in_notebook = console().is_jupyter and find_spec("ipywidgets") is not None
    return log.level <= logging.INFO and (console().is_terminal or in_notebook)


if hasattr(sys, "ps1"):  # Python runs interactively, or in a notebook.
    log_to_terminal()


T = TypeVar("T")

#: Interval of the lines if there is no bar. The first line is printed as soon as at least this much
#: time is left.
EVERY_SECONDS = 30
#: Interval of updates within an epoch, whose steps may take a millisecond each.
_WITHIN_EPOCH_SECONDS = 0.5
#: Number of rows that are read between two updates.
_SHOWN_ROWS = 20_000


def format_duration(seconds: float) -> str:
    """Format a duration in one or two units."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


class ProgressBar:
    """A progress bar, as a context manager; prints lines if standard error is not a terminal.

    Args:
        name: name of the work.
        visible: whether to show the bar before the first progress.
    """

    def __init__(self, name: str, visible: bool = True) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._name, self._items = name, 0
        self._last_line, self._has_lines = time.monotonic(), False
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console(),
            transient=True,
            get_time=time.monotonic,
            # A chunk of a large model takes minutes, and the default only considers the last 30 s.
            speed_estimate_period=600,
            disable=not shows_bars(),
        )
        self._task = self._progress.add_task(name, total=None, visible=visible, detail="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_item(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` items are completed."""
        self._show(f"{done:,} of {total:,}", completed=done, total=total)

    def count(self, rows: Iterable[T]) -> Iterator[T]:
        """Yield rows as they are read, and show their number."""
        for row in rows:
            self.add(1)
            yield row

    def add(self, rows: int) -> None:
        """Show that more rows were read, if there are many."""
        n_updates = self._items // _SHOWN_ROWS
        self._items += rows
        if self._items // _SHOWN_ROWS > n_updates:
            self._show(f"{self._items:,} rows", visible=True)

    def _show(self, detail: str, estimate: str = "about", **changes: Any) -> None:
        """Show the progress and the time left.

        Args:
            detail: text of the progress.
            estimate: the words before the estimate of the time left.
            changes: attributes of the bar's task to update.
        """
        self._progress.update(self._task, **changes)
        seconds_left = self._seconds_left()
        if seconds_left:
            detail += f", {estimate} {format_duration(seconds_left)} left"
        self._progress.update(self._task, detail=detail)
        now = time.monotonic()
        is_due = now - self._last_line >= EVERY_SECONDS
        is_long = not self._has_lines and seconds_left is not None and seconds_left >= EVERY_SECONDS
        if self._progress.disable and (is_due or is_long):
            self._last_line, self._has_lines = now, True
            log.info(f"{self._name}: {detail}")

    def _seconds_left(self) -> float | None:
        """Estimate the time left from the measured speed; None before the first measurement."""
        return self._progress.tasks[self._task].time_remaining


class ExtractionBar(ProgressBar):
    """A progress bar for extraction: inputs, tokens per second, time left.

    The rate and the time left are computed from the time of encoding, without loading. The time
    left is estimated by characters, because inputs are not encoded in the order of their length.

    Args:
        processes: number of processes that work on the same inputs. The rate is that of this one.
        name: name of the bar.
        noun: name of the inputs.
    """

    def __init__(self, processes: int = 1, name: str = "encoding", noun: str = "inputs") -> None:
        super().__init__(name, visible=False)
        self._total, self._noun, self._processes = "?", noun, processes
        self._characters = self._tokens = 0
        self._seconds = 0.0

    def start(self, inputs: int | None, characters: int | None) -> None:
        """Show the bar.

        Args:
            inputs: total number of inputs; None if it is unknown.
            characters: total number of characters; None if it is unknown.
        """
        if inputs is not None:
            self._total = f"{inputs:,}"
        self._show(self._detail(), total=characters, visible=True)

    def advance(self, inputs: int, characters: int, tokens: int, seconds: float) -> None:
        """Show that more inputs are stored.

        Args:
            inputs: number of inputs.
            characters: number of their characters.
            tokens: number of their tokens.
            seconds: encoding time in one thread or actor, divided by the number of threads or
                actors.
        """
        self._items += inputs
        self._characters += characters
        self._tokens += tokens
        self._seconds += seconds
        self._show(self._detail(), completed=self._characters)

    def _detail(self) -> str:
        if not self._items:
            return f"{self._total} {self._noun}, starting"
        rate = self._tokens / (self._seconds or 1e-9)
        share = f" in each of {self._processes} processes" if self._processes > 1 else ""
        return f"{self._items:,}/{self._total} {self._noun}, {rate:,.0f} tokens/s{share}"

    @override
    def _seconds_left(self) -> float | None:
        task = self._progress.tasks[self._task]
        if not self._characters or task.remaining is None:
            return None
        return max(task.remaining, 0) * self._seconds / self._characters / self._processes


class FitBar(ProgressBar):
    """A progress bar for a fit in epochs, or a training in steps, with its last or best dev score.

    Args:
        key: key of the score in the entries of learning curves; None: nothing is scored.
        score: name of the score.
        show: function that formats a score.
        name: name of the bar.
    """

    def __init__(
        self, key: str | None, score: str, show: Callable[[float], str], name: str = "fitting"
    ) -> None:
        super().__init__(name)
        self._key, self._score, self._format_score = key, score, show
        self._last_score, self._last_shown, self._n_logged = "", -math.inf, 0

    def on_epoch(self, epoch: float, epochs: int, entry: Mapping[str, Any] | None) -> None:
        """Show the progress after an epoch, or within one.

        Args:
            epoch: number of completed epochs, with a fraction within an epoch.
            epochs: total number of epochs.
            entry: entry of the learning curve after an epoch; None within one, which is not always
                shown.
        """
        now = time.monotonic()
        if entry is not None:
            score = entry.get(self._key) if self._key else None
            if score is not None:
                self._last_score = f", dev {self._score} {self._format_score(score)}"
            detail = f"epoch {epoch:,.0f} of {epochs:,}"
        elif now - self._last_shown < _WITHIN_EPOCH_SECONDS:
            return
        else:
            part, number = math.modf(epoch)
            detail = f"epoch {number + 1:,.0f} of {epochs:,} ({part:.0%} done)"
        self._last_shown = now
        # A fit that no longer improves stops early.
        self._show(detail + self._last_score, "at most", completed=epoch, total=epochs)

    def on_step(self, done: Any, steps: int, entry: Mapping[str, Any]) -> None:
        """Show the progress after a step, and log each evaluation.

        Args:
            done: state of the training, with ``step``, ``curve`` and ``best_score``.
            steps: total number of steps.
            entry: loss and other figures of the step.
        """
        best = ""
        if done.best_score is not None:
            best = f", best dev {self._format_score(done.best_score)}"
        detail = f"step {done.step:,} of {steps:,}, loss {entry['loss']:.4f}{best}"
        self._show(detail, completed=done.step, total=steps)
        for point in done.curve[self._n_logged :]:
            if point["step"] == done.step:
                line = f"step {point['step']:,}, epoch {point['epoch']}: loss {point['loss']:.4f}"
                if self._key is not None:
                    score = point[self._key]
                    score_text = "undefined" if score is None else self._format_score(score)
                    line += f", dev {self._score} {score_text}"
                log.info(line)
        self._n_logged = len(done.curve)


#: Largest numbers of characters of a value (in a line or a cell), and of a line in a terminal.
_VALUE, _LINE = 60, 240
#: Largest number of rows of a table in a notebook.
_ROWS = 20
#: Format of a printed table -> its name in tabulate.
_DOCUMENTS = {"markdown": "github", "latex": "latex_booktabs"}
#: The maximum length of a line of prose, in characters.
_PROSE_WIDTH = 100
#: The minimum width of a table that no terminal limits, in characters.
_MIN_PIPED_WIDTH = 160
#: The minimum width of a column of text whose lines are longer, and the length up to which a word
#: is never cut, in characters.
_MIN_PROSE_COLUMN, _LONG_WORD = 14, 32
#: A unit that is not cut. CJK characters count singly, because such texts have no spaces.
_WORD = re.compile(r"[^\s\u2e80-\uffef]+")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        heading: the heading.
        cells: a value for each row, which is shown as its ``str``.
        kind: text, which is wrapped; a word, which is not; or figures, right-aligned.
        hint: an explanation of the heading, for pages.
        detail: a smaller text below the heading, for pages.
    """

    heading: str
    cells: Sequence[Any]
    kind: Literal["text", "word", "figures"] = "text"
    hint: str = ""
    detail: str = ""

    @property
    def texts(self) -> list[str]:
        """The cells as texts that cannot control a terminal."""
        return [escape_control_characters(str(cell)) for cell in self.cells]

    @property
    def widths(self) -> tuple[int, int]:
        """The smallest useful width and that of all lines, in characters; only text is wrapped."""
        from rich.cells import cell_len

        lines = [line for text in self.texts for line in text.splitlines()]
        longest = least = max(map(cell_len, lines), default=0)
        if self.kind == "text":
            words = (cell_len(word) for line in lines for word in _WORD.findall(line))
            longest_word = min(max(words, default=0), _LONG_WORD)
            least = min(longest, max(longest_word, _MIN_PROSE_COLUMN))
        least = max(least, *map(cell_len, self.heading.split()), 1)
        return least, max(longest, cell_len(self.heading), 1)


@dataclass(frozen=True, slots=True)
class Table:
    """A table, in every form that results are shown in.

    Attributes:
        columns: the columns.
        note: the text above the table.
    """

    columns: Sequence[Column]
    note: str = ""

    @classmethod
    def of_rows(
        cls, rows: Sequence[Mapping[str, Any]], keys: Sequence[str] = (), note: str = ""
    ) -> Table:
        """Return rows as a table, with columns of numbers right-aligned.

        Args:
            rows: the rows.
            keys: the keys to show; empty: all.
            note: the text above the table.
        """
        columns = []
        for key in keys or dict.fromkeys(key for row in rows for key in row):
            values = [row.get(key) for row in rows]
            form = _float_format(values)
            cells = [_format_value(value, form) for value in values]
            kind: Literal["text", "word", "figures"] = "word" if key == "name" else "text"
            if any(cells) and all(map(_is_number, values)):
                kind = "figures"
                cells = [cell or "–" for cell in cells]
            columns.append(Column(key.replace("_", " "), cells, kind))
        return cls(columns, note)

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """The cells of each row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))

    def print(self, form: str = "table") -> None:
        """Print the table on standard output, as ``table``, ``markdown`` or ``latex``.

        In a terminal, or if ``COLUMNS`` gives the line width, the format ``table`` wraps cells
        between words and leaves out the columns that still do not fit; a message names them.
        Otherwise nothing is wrapped.
        """
        if form != "table":
            sys.stdout.write(f"{self.document(form)}\n")
            return
        from rich.console import Console

        room = line_limit()
        table, left_out = self.terminal(room)
        width = max(_MIN_PIPED_WIDTH, Console(width=1_000_000).measure(table).maximum)
        Console(highlight=False, width=room or width).print(table)
        if left_out:
            log.info(
                f"columns left out, because a line has only {room} characters: "
                f"{', '.join(left_out)} (--json or a wider terminal shows them)"
            )

    def terminal(self, room: int | None = None) -> tuple[RichTable, list[str]]:
        """Return the table for lines of ``room`` characters, and the headings that do not fit.

        Cells are wrapped between words. If that is not enough, columns are left out from the right,
        except the first one.
        """
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        title = Text(escape_control_characters(self.note)) if self.note else None
        table = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        sizes = [column.widths for column in self.columns]
        # Each column has a space on both sides and a separator before it; the last has one after.
        while room and len(sizes) > 1 and sum(least + 3 for least, _ in sizes) + 1 > room:
            sizes.pop()
        shown, widths = self.columns[: len(sizes)], [least for least, _ in sizes]
        is_narrow = room is not None and sum(most + 3 for _, most in sizes) + 1 > room
        if room is not None and is_narrow:  # columns of text share the room that is left
            spare = max(room - sum(widths) - 3 * len(widths) - 1, 0)
            growth = {i: sizes[i][1] - sizes[i][0] for i, c in enumerate(shown) if c.kind == "text"}
            for rank, i in enumerate(sorted(growth, key=growth.__getitem__)):
                added = min(growth[i], spare // (len(growth) - rank))
                widths[i], spare = widths[i] + added, spare - added
        for column, width in zip(shown, widths, strict=True):
            table.add_column(
                Text(escape_control_characters(column.heading)),
                justify="right" if column.kind == "figures" else "left",
                overflow="fold",
                no_wrap=not is_narrow and column.kind != "text",
                width=width if is_narrow else None,
            )
        for row in zip(*(column.texts for column in shown), strict=True):
            table.add_row(*map(Text, row))
        return table, [column.heading for column in self.columns[len(sizes) :]]

    def document(self, form: str) -> str:
        """Return the table as Markdown, LaTeX or HTML, with its note above it."""
        from tabulate import tabulate

        headings = [escape_control_characters(column.heading) for column in self.columns]
        cells = [[_escape_cell(text, form) for text in column.texts] for column in self.columns]
        alignment = ["right" if c.kind == "figures" else "left" for c in self.columns]
        text = tabulate(
            list(zip(*cells, strict=True)),
            [_escape_cell(heading, form) for heading in headings],
            _DOCUMENTS.get(form, form),
            disable_numparse=True,
            colalign=alignment if form == "latex" else None,
        )
        note = escape_control_characters(self.note)
        if not note:
            return text
        return f"% {note}\n{text}" if form == "latex" else f"{note}\n\n{text}"


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _escape_cell(text: str, form: str) -> str:
    """Return a cell's text on one line, escaped so that it cannot end the cell or be HTML."""
    line = " ".join(text.split())
    if form == "markdown":
        for character, escaped in (("\\", r"\\"), ("&", "&amp;"), ("<", "&lt;"), ("|", r"\|")):
            line = line.replace(character, escaped)
    return line


def _float_format(values: Sequence[object]) -> str:
    """Return a format with four digits for the largest value, and equal decimals for all."""
    floats = [abs(value) for value in values if isinstance(value, float) and isfinite(value)]
    largest = max(floats, default=0)
    if not 0.01 <= largest < 1e4:
        return ".4g"
    # Cosines, also those that rounding makes slightly larger than 1, have four decimals.
    return f".{4 if largest < 1.00005 else 4 - len(str(int(largest)))}f"


def _format_value(value: object, float_format: str = ".4g") -> str:
    """Return a value as text on one line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:{float_format}}"
    if isinstance(value, Mapping):
        items = (f"{key}: {_format_value(inner)}" for key, inner in value.items())
        return ", ".join(items)[: 2 * _VALUE]
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_format_value, value))[: 2 * _VALUE]
    return "" if value is None else str(value)


def print_sentences(sentences: Sequence[str], form: str = "table") -> None:
    """Print sentences on standard output, unless ``form`` is a format for documents."""
    if form == "table":
        from rich.console import Console

        console = Console(highlight=False, width=min(line_width(), _PROSE_WIDTH))
        for sentence in sentences:
            console.print(escape_control_characters(sentence), markup=False, emoji=False)


def line_limit() -> int | None:
    """Return the line width of standard output in characters; None if it is unlimited.

    ``COLUMNS`` takes precedence over the width of the terminal.
    """
    from rich.console import Console

    console = Console()
    is_limited = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console.width if is_limited else None


def line_width() -> int:
    """Return the line width to format output for, in characters."""
    return line_limit() or _MIN_PIPED_WIDTH


class Displayed:
    """A base class of results that displays the values of ``_displayed``."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Prevent ``dataclass`` from generating __repr__, and __eq__, which fails for arrays."""
        super().__init_subclass__()
        cls.__repr__ = Displayed.__repr__  # type: ignore[method-assign]
        if not issubclass(cls, dict):
            cls.__eq__ = are_equal  # type: ignore[method-assign]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that ``--json`` prints: the fields and their values."""
        return fields_as_json(self)

    def _displayed(self) -> Mapping[str, Any]:
        """Return the displayed values and tables by name; a table is a sequence of rows."""
        return self.to_json()

    def __repr__(self) -> str:
        """Return the values, and the sizes of the tables, in one line."""
        facts, tables = _split(self._displayed())
        parts = [f"{name}={shortened_repr(value, _VALUE)}" for name, value in facts.items()]
        parts += [f"{name}=<{format_count(len(rows), 'row')}>" for name, rows in tables.items()]
        while parts[1:] and len(", ".join(parts)) > _LINE:
            parts = [*parts[: -2 if parts[-1] == "…" else -1], "…"]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Return the values in a line and the tables below it, for notebooks."""
        facts, tables = _split(self._displayed())
        line = ", ".join(f"{name} {_format_value(value)}" for name, value in facts.items())
        title = type(self).__name__
        parts = [f"<p><b>{title}</b> {escape(line)}</p>"]
        for name, rows in tables.items():
            n = format_count(len(rows), "row")
            more = f" (the first {_ROWS} of {n})" if len(rows) > _ROWS else ""
            # The only table of Results needs no caption "results".
            caption = f"{'' if name == title.lower() else name}{more}"
            parts += [f"<p>{escape(caption)}</p>"] * bool(caption)
            parts.append(Table.of_rows(rows[:_ROWS]).document("html"))
        return "".join(parts)


class DisplayedDict(Displayed, dict[str, Any]):
    """A result that is itself the dictionary that ``--json`` prints."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that ``--json`` prints."""
        return dict(self)


def make_frame(data: Any) -> Any:
    """Return a ``pandas.DataFrame`` of columns by name, or of rows.

    Raises:
        LlmcondError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise LlmcondError("to_pandas() needs pandas: pip install pandas") from error
    return pd.DataFrame(data)


def are_equal(first: Any, second: Any) -> bool:
    """Compare results and their values, also if they contain arrays, in which NaN equals NaN."""
    if first is second:
        return True
    if hasattr(first, "dtype") and hasattr(second, "dtype"):
        import numpy as np

        both_floats = first.dtype.kind == second.dtype.kind == "f"
        return np.array_equal(first, second, equal_nan=both_floats)
    if is_dataclass(first) and type(first) is type(second):
        names = [field.name for field in fields(first) if field.compare]
        return all(are_equal(getattr(first, name), getattr(second, name)) for name in names)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            are_equal(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, (list, tuple)) and type(first) is type(second):
        return len(first) == len(second) and all(map(are_equal, first, second))
    return not is_dataclass(first) and bool(first == second)


def _split(
    values: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Sequence[Mapping[str, Any]]]]:
    """Split displayed values into single values and tables, and drop empty values.

    A mapping whose values are rows becomes a table with the column ``name``.
    """
    facts: dict[str, Any] = {}
    tables: dict[str, Sequence[Mapping[str, Any]]] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and _all_rows(value.values()):
            tables[name] = [{"name": key, **row} for key, row in value.items()]
        elif isinstance(value, Sequence) and _all_rows(value):
            tables[name] = value
        elif value is not None and value != "":
            facts[name] = value
    return facts, tables


def _all_rows(values: Any) -> bool:
    return bool(values) and all(isinstance(value, Mapping) for value in values)
