"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

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


class _Bar:
    """A progress bar, as a context; quiet where standard error is not a terminal."""

    def __init__(self, name: str, visible: bool = True) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeRemainingColumn(),
            console=console(),
            transient=True,
            disable=not console().is_terminal,
        )
        self._task = self._progress.add_task(name, total=None, visible=visible, detail="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class ExtractionBar(_Bar):
    """A progress bar for extraction: inputs, tokens a second, time left.

    Time left is reckoned by characters, since inputs are not encoded in the order of their length.
    """

    def __init__(self) -> None:
        super().__init__("encoding", visible=False)
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


class FitBar(_Bar):
    """A progress bar for fitting: epochs and the score on dev."""

    def __init__(self) -> None:
        super().__init__("fitting")

    def on_epoch(self, epoch: int, epochs: int, score: float) -> None:
        """Show the epoch that is done."""
        detail = f"epoch {epoch}, dev Spearman {100 * score:.1f}"
        self._progress.update(self._task, completed=epoch, total=epochs, detail=detail)


class _Training(Protocol):
    """How far a training is: steps done, an entry for each evaluation, and the best on dev."""

    @property
    def step(self) -> int: ...

    @property
    def curve(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def best_score(self) -> float | None: ...


class TrainBar(_Bar):
    """A progress bar for training: steps, the loss, and the best score on dev."""

    def __init__(self) -> None:
        super().__init__("training")
        self._shown = 0

    def on_step(self, done: _Training, steps: int, loss: float) -> None:
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
