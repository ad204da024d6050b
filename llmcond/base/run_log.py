"""The log of a fit or training: JSON lines in the run, and trackers such as TensorBoard.

Every fit and training reports through a `RunLog`. Its records are those of the learning curve in
the head's or the training's record, with the time, and in a training those of single steps.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal, Self

from llmcond.base.errors import UserError, first_line, raise_disk_error
from llmcond.base.files import as_json, replace_atomically
from llmcond.base.output import log
from llmcond.base.system import is_installed, provenance

Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]
Event = Literal["start", "resume", "step", "evaluation", "end"]
Record = dict[str, Any]

#: The folder of the logs within a run, and the name of a training's log.
LOGS, TRAINING = "logs", "training"
#: The packages that trackers need, besides accelerate. Any one of them suffices.
_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX")}
#: The project in trackers that have projects.
_PROJECT = "llmcond"


def log_path(run: Path, name: str) -> Path:
    """Return the path of a log within a run's folder."""
    return run / LOGS / f"{name}.jsonl"


def check_trackers(names: Sequence[str]) -> None:
    """Raise a UserError if a package that a tracker needs is not installed."""
    for name in names:
        packages = _PACKAGES.get(name, (name,))
        missing = [] if is_installed("accelerate") else ["accelerate"]
        missing += [] if any(map(is_installed, packages)) else [packages[0]]
        if missing:
            raise UserError(
                f"--log {name} needs {' and '.join(missing)}, which "
                f"{'is' if len(missing) == 1 else 'are'} not installed. Install: pip install "
                f"{' '.join(missing)}. Without --log, the run has the same records as JSON lines."
            )


class RunLog:
    """The log of one fit or training, a context manager.

    The first line of the file describes the fit. Every further line is one record, written as soon
    as it is known. With its first record, a fit replaces the log of an earlier one with the same
    name, and a training that resumes after a step continues its log there.

    Args:
        path: file of the log; None: nothing is written or sent, as in the other processes of a
            distributed training.
        name: name of the fit in trackers.
        config: settings of the fit, for the first line and for trackers.
        trackers: names of trackers that get the records too. They get those before the step again,
            so that their run is complete.
        step: step after which the training resumes; 0: the fit begins.

    Raises:
        UserError: a tracker cannot be started.
    """

    def __init__(
        self,
        path: Path | None,
        name: str,
        config: Mapping[str, Any],
        trackers: Sequence[str] = (),
        step: int = 0,
    ) -> None:
        self._path, self._step = path, step
        self._name, self._config, self._names = name, config, trackers
        self._stream: IO[str] | None = None
        self._start: Sequence[Record] = ()
        self._trackers: _Trackers | None = None

    def __enter__(self) -> Self:
        if self._path is None:
            return self
        records = read_log(self._path) if self._step else []
        if not records:
            description = {"name": self._name, "config": self._config}
            versions = provenance()["versions"]
            records = [{"event": "start", "time": _now(), **description, "versions": versions}]
        self._start = records
        try:
            if self._names:
                self._trackers = _Trackers(self._names, self._path, records[0])
            if self._step:
                self.resume(self._step)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._trackers is not None:
            self._trackers.close()

    def _rewrite(self, records: Sequence[Record]) -> IO[str]:
        assert self._path is not None  # noqa: S101 - only called with a file
        if self._stream is not None:
            self._stream.close()
        with replace_atomically(self._path) as temporary:
            temporary.write_text("".join(map(_line, records)), encoding="utf-8", newline="\n")
        self._stream = self._path.open("a", encoding="utf-8", newline="\n")
        return self._stream

    def resume(self, step: int, stage: str = "") -> None:
        """Remove the records of a stage after a step, which the training repeats.

        Args:
            step: last step of the checkpoint that the training resumes from; 0: the stage begins.
            stage: name of a stage, such as ``then``; empty: the main training.
        """
        if self._path is None:
            return
        stages: dict[bool, list[Record]] = {True: [], False: []}
        records = []
        for record in self._start if self._stream is None else read_log(self._path):
            in_stage = record.get("stage", "") == stage and record["event"] != "start"
            if record["event"] != "end" and (not in_stage or record.get("step", 0) <= step):
                records.append(record)
                stages[in_stage].append(record)
        self._rewrite(records)
        if self._trackers is not None:
            for record in stages[True]:
                self._trackers.log(record)
        if step:
            self.write("resume", {"step": step, "versions": provenance()["versions"]}, stage)

    def write(self, event: Event, fields: Mapping[str, Any], stage: str = "") -> None:
        """Write one record, and send it to the trackers.

        Args:
            event: kind of the record.
            fields: its fields; numbers that are not finite are written as null.
            stage: name of the part of the fit, such as ``then`` or ``member-0``; empty: all of it.
        """
        if self._path is None:
            return
        # A fit that fails at once leaves the log of an earlier one as it is.
        stream = self._stream or self._rewrite(self._start)
        record = {"event": event, "time": _now(), **({"stage": stage} if stage else {})}
        record |= as_json(fields)
        try:
            stream.write(_line(record))
            stream.flush()
        except OSError as error:
            raise_disk_error(error, self._path, "the lines in it are complete")
            raise
        if self._trackers is not None:
            self._trackers.log(record)

    def on_epoch(
        self, show: Callable[[float, int, Mapping[str, Any] | None], None]
    ) -> Callable[[float, int, Mapping[str, Any] | None], None]:
        """Return a function for fits of heads that shows the progress and writes each epoch."""

        def report(epoch: float, epochs: int, entry: Mapping[str, Any] | None) -> None:
            show(epoch, epochs, entry)
            if entry is not None:
                stage = str(entry.get("stage", ""))
                fields = {key: value for key, value in entry.items() if key != "stage"}
                self.write("evaluation", fields, stage)

        return report

    def on_step(
        self, show: Callable[[Any, int, Mapping[str, Any]], None], stage: str = ""
    ) -> Callable[[Any, int, Mapping[str, Any]], None]:
        """Return a function for trainings that shows the progress and writes each step.

        An evaluation is the entry of the learning curve in the progress.
        """

        def report(progress: Any, steps: int, entry: Mapping[str, Any]) -> None:
            show(progress, steps, entry)
            self.write("step", entry, stage)
            if progress.curve and progress.curve[-1]["step"] == entry["step"]:
                self.write("evaluation", progress.curve[-1], stage)

        return report


def read_log(path: Path) -> list[Record]:
    """Read the records of a log, without a last line that a crash has left incomplete."""
    if not path.is_file():
        return []
    records = []
    # A setting may contain other characters that `splitlines` takes for the end of a line.
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(record, dict) or "event" not in record:
            break
        records.append(record)
    return records


def send_log(path: Path, name: str, trackers: Sequence[str]) -> None:
    """Send a finished log to trackers under a name, such as that of a fit in another process.

    Raises:
        UserError: a tracker cannot be started.
    """
    records = read_log(path)
    if not (trackers and records):
        return
    sent = _Trackers(trackers, path, {**records[0], "name": name})
    for record in records[1:]:
        sent.log(record)
    sent.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


class _Trackers:
    """Trackers of accelerate, each with one run of the project.

    A tracker that fails later, for example because its server cannot be reached, is left out with a
    warning, because the log in the run is complete without it.

    Args:
        names: names of the trackers.
        path: file of the log; files of a tracker are written next to it.
        start: first record of the log.
    """

    def __init__(self, names: Sequence[str], path: Path, start: Record) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, PartialState

        # A later training in this process may use another device than this state would have.
        self._reset = AcceleratorState._reset_state if not PartialState._shared_state else None
        self._first_step = self._step = 0
        self._stage = ""
        self._trackers: dict[str, Any] = {}
        name = str(start["name"])
        options: dict[str, dict[str, Any]] = {
            # Hides what an interrupted training has written after its checkpoint.
            "tensorboard": {"purge_step": 0},
            "wandb": {"name": name},
            "trackio": {"name": name},
            "mlflow": {"run_name": name},
        }
        config = _flat({**start["config"], "versions": start["versions"]})
        for tracker in names:
            project = os.environ.get("WANDB_PROJECT", _PROJECT) if tracker == "wandb" else _PROJECT
            folder = path.with_suffix(f".{tracker}")
            try:
                # Standard output is for results.
                with redirect_stdout(sys.stderr):
                    accelerator = Accelerator(log_with=tracker, project_dir=folder)
                    accelerator.init_trackers(project, config, {tracker: options[tracker]})
            except Exception as error:
                self.close()
                raise UserError(
                    f"--log {tracker} cannot start: {first_line(error)} Check the settings of "
                    f"{tracker}, or leave out --log."
                ) from error
            (self._trackers[tracker],) = accelerator.trackers

    def log(self, record: Record) -> None:
        """Send the numbers of a record, under the names STAGE/EVENT/FIELD."""
        stage, event = record.get("stage", ""), record["event"]
        if stage != self._stage:  # steps of a run must not decrease
            self._stage, self._first_step = stage, self._step
        self._step = max(self._step, self._first_step + int(record.get("step") or 0))
        prefix = f"{stage}/{event}" if stage else event
        values = {
            f"{prefix}/{_name(key)}": value
            for key, value in _flat(record).items()
            if isinstance(value, int | float) and key != "step"
        }
        if values and event != "resume":
            self._call(lambda tracker: tracker.log(values, step=self._step))

    def close(self) -> None:
        """Finish the runs of the trackers."""
        self._call(lambda tracker: tracker.finish())
        if self._reset is not None:
            self._reset(reset_partial_state=True)

    def _call(self, function: Callable[[Any], None]) -> None:
        for name, tracker in [*self._trackers.items()]:
            try:
                with redirect_stdout(sys.stderr):
                    function(tracker)
            except Exception as error:
                del self._trackers[name]
                log.warning(
                    f"{name} gets no more records of this run: {first_line(error)} The JSON lines "
                    "are complete."
                )


def _name(key: str) -> str:
    """Return a name in the characters that all trackers accept."""
    return re.sub(r"[^\w.\-/ ]", "_", key)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by names such as ``settings.rank``, with lists as text."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = _name(f"{prefix}{key}")
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value if isinstance(value, str | int | float | None) else json.dumps(value)
    return flat
