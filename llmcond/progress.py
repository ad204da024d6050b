"""Progress on standard error: a bar in a terminal, otherwise a line every half minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar

from typing_extensions import override

from llmcond.log import console, log, shows_bars

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
        clock: function that returns the time in seconds.
        visible: whether to show the bar before the first progress.
    """

    def __init__(
        self, name: str, clock: Callable[[], float] = time.monotonic, visible: bool = True
    ) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._name, self._clock, self._items = name, clock, 0
        self._last_line, self._has_lines = clock(), False
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console(),
            transient=True,
            get_time=clock,
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
        now = self._clock()
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
        clock: function that returns the time in seconds.
        processes: number of processes that work on the same inputs.
        stored: with several processes, a function that returns how many inputs all of them have
            stored. The rate is that of this process.
        name: name of the bar.
        noun: name of the inputs.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        processes: int = 1,
        stored: Callable[[], int] | None = None,
        name: str = "encoding",
        noun: str = "inputs",
    ) -> None:
        super().__init__(name, clock, visible=False)
        self._total, self._noun, self._processes, self._stored = "?", noun, processes, stored
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
        # This assumes that the inputs of other processes are as long as those of this one.
        share = self._done() / (self._items or 1)
        self._show(self._detail(), completed=self._characters * share)

    def _done(self) -> int:
        return max(self._items, self._stored() if self._stored else 0)

    def _detail(self) -> str:
        if not self._items:
            return f"{self._total} {self._noun}, starting"
        rate = self._tokens / (self._seconds or 1e-9)
        share = f" in each of {self._processes} processes" if self._processes > 1 else ""
        return f"{self._done():,}/{self._total} {self._noun}, {rate:,.0f} tokens/s{share}"

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
        clock: function that returns the time in seconds.
        name: name of the bar.
    """

    def __init__(
        self,
        key: str | None,
        score: str,
        show: Callable[[float], str],
        clock: Callable[[], float] = time.monotonic,
        name: str = "fitting",
    ) -> None:
        super().__init__(name, clock)
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
        now = self._clock()
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
