"""Progress on standard error: a bar, or a line every half minute where it is not a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from llmcond.log import console, log, shows_bars

T = TypeVar("T")

#: Between two lines where there is no bar. The first line comes as soon as so much time is left.
EVERY_SECONDS = 30
#: Between two updates within an epoch, whose steps may take a millisecond each.
_WITHIN_EPOCH_SECONDS = 0.5
#: Rows that are read before it is shown how far it is.
_SHOWN_ROWS = 20_000


def duration(seconds: float) -> str:
    """Return a span of time in words, of one or two units."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


class _Bar:
    """A progress bar, as a context; lines where standard error is no terminal."""

    def __init__(
        self, name: str, visible: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._clock = name, clock
        self._last_line, self._has_lines = clock(), False
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console(),
            transient=True,
            get_time=clock,
            # A chunk of a large model takes minutes; the default forgets what is older than 30 s.
            speed_estimate_period=600,
            disable=not shows_bars(),
        )
        self._task = self._progress.add_task(name, total=None, visible=visible, detail="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _show(self, detail: str, **changes: Any) -> None:
        """Show how far it is, with what changes of the task, and how much time is left."""
        self._progress.update(self._task, **changes)
        left = self._seconds_left()
        if left:
            detail += f", about {duration(left)} left"
        self._progress.update(self._task, detail=detail)
        now = self._clock()
        is_due = now - self._last_line >= EVERY_SECONDS
        is_long = not self._has_lines and left is not None and left >= EVERY_SECONDS
        if self._progress.disable and (is_due or is_long):
            self._last_line, self._has_lines = now, True
            log.info(f"{self._name}: {detail}")

    def _seconds_left(self) -> float | None:
        """Return how much time is left, from what was measured; None where nothing was yet."""
        return self._progress.tasks[self._task].time_remaining


class ExtractionBar(_Bar):
    """A progress bar for extraction: inputs, tokens per second, time left.

    Rate and time left come from the time that batches took to encode, so they leave out the time
    that loading takes. The time left is estimated by characters, since inputs are not encoded in
    the order of their length.

    ``processes`` is how many work on the same inputs. With several, ``stored`` returns how many
    inputs all of them have stored, and the rate is that of this process.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        processes: int = 1,
        stored: Callable[[], int] | None = None,
        name: str = "encoding",
        noun: str = "inputs",
    ) -> None:
        super().__init__(name, visible=False, clock=clock)
        self._total, self._noun, self._processes, self._stored = "?", noun, processes, stored
        self._inputs = self._characters = self._tokens = 0
        self._seconds = 0.0

    def start(self, inputs: int | None, characters: int | None) -> None:
        """Show the bar for so many inputs; None where nobody knows how many, or not yet."""
        if inputs is not None:
            self._total = f"{inputs:,}"
        self._show(self._detail(), total=characters, visible=True)

    def advance(self, inputs: int, characters: int, tokens: int, seconds: float) -> None:
        """Show that so many more inputs are stored.

        ``seconds`` is how long one thread or actor encoded them, divided by how many there are.
        """
        self._inputs += inputs
        self._characters += characters
        self._tokens += tokens
        self._seconds += seconds
        # The inputs of other processes are taken to be as long as those of this one.
        share = self._done() / (self._inputs or 1)
        self._show(self._detail(), completed=self._characters * share)

    def _done(self) -> int:
        return max(self._inputs, self._stored() if self._stored else 0)

    def _detail(self) -> str:
        if not self._inputs:
            return f"{self._total} {self._noun}, starting"
        rate = self._tokens / (self._seconds or 1e-9)
        each = f" in each of {self._processes} processes" if self._processes > 1 else ""
        return f"{self._done():,}/{self._total} {self._noun}, {rate:,.0f} tokens/s{each}"

    def _seconds_left(self) -> float | None:
        """Return how much time is left by characters; None before the first batch is measured."""
        task = self._progress.tasks[self._task]
        if not self._characters or task.remaining is None:
            return None
        return max(task.remaining, 0) * self._seconds / self._characters / self._processes


class ReadBar(_Bar):
    """A progress bar for reading a file, shown once it has many rows."""

    def __init__(self, file: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(f"reading {file}", visible=False, clock=clock)
        self._rows = 0

    def count(self, rows: Iterable[T]) -> Iterator[T]:
        """Yield rows as they are read, and show how many there were."""
        for row in rows:
            self.add(1)
            yield row

    def add(self, rows: int) -> None:
        """Show that so many more were read."""
        shown = self._rows // _SHOWN_ROWS
        self._rows += rows
        if self._rows // _SHOWN_ROWS > shown:
            self._show(f"{self._rows:,} rows", visible=True)


class FitBar(_Bar):
    """A progress bar for fitting: epochs, how much of one is done, and the last score on dev.

    ``score`` is its name, and ``show`` writes it.
    """

    def __init__(
        self, score: str, show: Callable[[float], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__("fitting", clock=clock)
        self._score, self._written = score, show
        self._last_score, self._last_shown = "", -math.inf

    def on_epoch(self, epoch: float, epochs: int, score: float | None) -> None:
        """Show the epochs that are done; within an epoch, where ``score`` is None, now and then."""
        now = self._clock()
        if score is not None:
            self._last_score = f", dev {self._score} {self._written(score)}"
            detail = f"epoch {epoch:,.0f} of {epochs:,}"
        elif now - self._last_shown < _WITHIN_EPOCH_SECONDS:
            return
        else:
            part, number = math.modf(epoch)
            detail = f"epoch {number + 1:,.0f} of {epochs:,} ({part:.0%} done)"
        self._last_shown = now
        self._show(detail + self._last_score, completed=epoch, total=epochs)


class CountBar(_Bar):
    """A progress bar for anything that is done one by one."""

    def on_item(self, done: int, of: int) -> None:
        """Show how many are done."""
        self._show(f"{done:,} of {of:,}", completed=done, total=of)


class _Training(Protocol):
    """How far a training is: steps done, an entry for each evaluation, and the best on dev."""

    @property
    def step(self) -> int: ...

    @property
    def curve(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def best_score(self) -> float | None: ...


class TrainBar(_Bar):
    """A progress bar for training: steps, the loss, and the best score on dev.

    What the score is called in records and in words: ``key`` and ``score``; ``show`` writes it.
    Without a ``key`` nothing is scored.
    """

    def __init__(
        self,
        key: str | None,
        score: str,
        show: Callable[[float], str],
        clock: Callable[[], float] = time.monotonic,
        name: str = "training",
    ) -> None:
        super().__init__(name, clock=clock)
        self._key, self._score, self._written = key, score, show
        self._shown = 0

    def on_step(self, done: _Training, steps: int, loss: float) -> None:
        """Show the step that is done; an evaluation in a line of its own, which stays."""
        best = "" if done.best_score is None else f", best dev {self._written(done.best_score)}"
        detail = f"step {done.step:,} of {steps:,}, loss {loss:.4f}{best}"
        self._show(detail, completed=done.step, total=steps)
        for entry in done.curve[self._shown :]:
            if entry["step"] == done.step:
                said = f"step {entry['step']:,}, epoch {entry['epoch']}: loss {entry['loss']:.4f}"
                if self._key is not None:
                    score = entry[self._key]
                    shown = "undefined" if score is None else self._written(score)
                    said += f", dev {self._score} {shown}"
                log.info(said)
        self._shown = len(done.curve)
