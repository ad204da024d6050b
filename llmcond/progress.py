"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from llmcond.log import console, log


def duration(seconds: float) -> str:
    """Return a span of time in words, of one or two units."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


class ExtractionBar:
    """A progress bar for extraction: inputs, tokens a second, time left.

    Time left is reckoned by characters, since inputs are not encoded in the order of their length.
    It is quiet where standard
    error is not a terminal.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("encoding", total=None, visible=False, detail="")
        self._total = "?"
        self._done = self._tokens = 0

    def start(self, inputs: int | None, characters: int | None) -> None:
        """Show the bar for so many inputs still to encode; None where nobody knows how many."""
        self._total = "?" if inputs is None else f"{inputs:,}"
        self._progress.update(
            self._task, total=characters, visible=True, detail=f"{self._total} inputs, loading"
        )

    def advance(self, inputs: int, characters: int, tokens: int) -> None:
        """Show that so many more inputs are stored."""
        self._done += inputs
        self._tokens += tokens
        elapsed = self._progress.tasks[self._task].elapsed or 1e-9
        detail = f"{self._done:,}/{self._total} inputs, {self._tokens / elapsed:,.0f} tokens/s"
        self._progress.update(self._task, advance=characters, detail=detail)


class FitBar:
    """A progress bar for fitting: epochs and the score on dev."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("fitting", total=None, detail="")

    def on_epoch(self, epoch: int, epochs: int, score: float) -> None:
        """Show the epoch that is done."""
        detail = f"epoch {epoch}, dev Spearman {100 * score:.1f}"
        self._progress.update(self._task, completed=epoch, total=epochs, detail=detail)


class Training(Protocol):
    """How far a training is."""

    @property
    def step(self) -> int:
        """Return the steps done."""
        ...

    @property
    def curve(self) -> Sequence[Mapping[str, Any]]:
        """Return an entry for each evaluation."""
        ...

    @property
    def best_score(self) -> float | None:
        """Return the best on dev."""
        ...


class TrainBar:
    """A progress bar for training: steps, the loss, and the best score on dev."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("training", total=None, detail="")
        self._shown = 0

    def on_step(self, done: Training, steps: int, loss: float) -> None:
        """Show the step that is done; an evaluation in a line of its own, which stays."""
        best = "" if done.best_score is None else f", best dev {100 * done.best_score:.1f}"
        detail = f"step {done.step:,} of {steps:,}, loss {loss:.4f}{best}"
        self._progress.update(self._task, completed=done.step, total=steps, detail=detail)
        for entry in done.curve[self._shown :]:
            if entry["step"] == done.step:
                score = entry["dev_spearman"]
                shown = "undefined" if score is None else f"{100 * score:.1f}"
                log.info(
                    f"step {entry['step']:,}, epoch {entry['epoch']}: loss {entry['loss']:.4f}, "
                    f"dev Spearman {shown}"
                )
        self._shown = len(done.curve)


@contextmanager
def train_bar() -> Iterator[TrainBar]:
    """Show a bar for one training."""
    with _progress() as progress:
        yield TrainBar(progress)


@contextmanager
def extraction_bar() -> Iterator[ExtractionBar]:
    """Show a bar for one extraction."""
    with _progress() as progress:
        yield ExtractionBar(progress)


@contextmanager
def fit_bar() -> Iterator[FitBar]:
    """Show a bar for one fit."""
    with _progress() as progress:
        yield FitBar(progress)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(),
        console=console(),
        transient=True,
        disable=not console().is_terminal,
    )
