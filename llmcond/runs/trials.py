"""Grids of trials: fits or trainings, run once each in processes, and recorded by their digests."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base import package as plugins
from llmcond.base.errors import LlmcondError, UserError, format_count
from llmcond.base.files import check_writable, digest_text, write_json
from llmcond.base.metrics import Metric, choose_metrics, finite_or_none, get_metric
from llmcond.base.output import EVERY_SECONDS, FitBar, log
from llmcond.base.records import check_record, read_record
from llmcond.base.run_log import RunLog, log_path, send_log
from llmcond.base.system import choose_device, follow_parent, process_context, provenance
from llmcond.evaluation.results import Result, format_settings
from llmcond.features.view import FeatureView
from llmcond.heads import Recipe
from llmcond.heads.numpy_heads import HeldOut
from llmcond.heads.storage import FitRecord
from llmcond.runs import Run, RunHead, head_name, open_any_run
from llmcond.runs.examples import load_examples, score_predictors

T = TypeVar("T")
J = TypeVar("J", bound="AnyTrial")

#: The limit without --workers, because each worker holds the features in memory.
_MAX_WORKERS = 8


@dataclass(frozen=True)
class AnyTrial:
    """A fit or a training of a grid.

    Attributes:
        recipe: The recipe of the head.
        seed: The random seed.
        settings: The settings that the grid varies, with their values in this trial.
    """

    recipe: Recipe
    seed: int
    settings: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Its settings and seed, for messages."""
        return format_settings({**self.settings, "seed": self.seed})


@dataclass(frozen=True)
class _HeldOutRecord:
    predictions: Sequence[float]
    scores: Sequence[float | None]


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """The record of a trial that has finished.

    Attributes:
        scores: the result on each scored split, as JSON.
        predictions: the predictions, or ranks, of all rows of each scored split.
        recipe: the recipe of the head, sized to the features.
        fit: the record of the fit.
        dev_score: the score on dev by the run's metric; None if it is undefined.
        held_out: the held-out predictions of dev; None if dev did not choose the epoch.
        training: the summary of the training; empty for a fit on frozen features.
        training_sha256: the digest of the file of that training, by which its folder is recognised.
    """

    scores: Sequence[Mapping[str, Any]]
    predictions: Mapping[str, Sequence[float]]
    recipe: Mapping[str, Any]
    fit: Mapping[str, Any]
    dev_score: float | None
    held_out: _HeldOutRecord | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    training_sha256: str = ""

    def score(self, split: str) -> Mapping[str, Any]:
        """Return the result on a split, as JSON."""
        return next(row for row in self.scores if row["split"] == split)

    @property
    def held_out_arrays(self) -> HeldOut | None:
        """The held-out predictions of dev as arrays, with NaN for undefined scores."""
        if self.held_out is None:
            return None
        scores = [math.nan if score is None else score for score in self.held_out.scores]
        return HeldOut(np.array(self.held_out.predictions, dtype=np.float32), np.array(scores))


def _read_record(path: Path, noun: str) -> TrialRecord | None:
    """Read the record of a trial. A damaged file is treated as missing, with a warning."""
    if not path.is_file():
        return None
    try:
        record = read_record(path, TrialRecord)
        check_record(record.fit, FitRecord, str(path))
    except LlmcondError as error:
        log.warning(f"{error} The {noun} is repeated.")
        return None
    return record


def combine_seeds(
    trials: Sequence[tuple[AnyTrial, TrialRecord]],
    split: str,
    about: Mapping[str, Any] | None = None,
) -> tuple[Result, NDArray[np.float32]]:
    """Return the result, without figures, of trials that differ only in their seeds.

    ``about`` are further facts about it; None: the varied settings, and the course of each fit.
    The predictions, (seeds, n), are returned with it.
    """
    records = [record for _, record in trials]
    row, fits = records[0].score(split), tuple(record.fit for record in records)
    if about is None:
        about = {
            "settings": dict(trials[0][0].settings),
            "best_epochs": [fit.get("best_epoch") for fit in fits],
            "curves": [fit.get("curve") for fit in fits],
            "steps_per_epoch": fits[0].get("steps_per_epoch"),
        }
    result = Result(
        **{key: row[key] for key in ("name", "head", "subtract", "split", "task", "dim")},
        prompts=tuple(row["prompt"].split("+")),
        seeds=tuple(trial.seed for trial, _ in trials),
        fits=fits,
        about=about,
    )
    predictions = [record.predictions[split] for record in records]
    return result, np.array(predictions, dtype=np.float32)


class Grid(Generic[J]):
    """Trials by digest, with the records of those that have finished.

    Attributes:
        groups: the trials by digest; those of a group differ only in their seeds.
        trials: the trials of all groups. Equal trials have the same digest, and are run once.
        records: the records by digest; ``run`` adds those of the other trials.
        failures: a line for each trial that failed, by digest.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, J]],
        folder: Path,
        metric: Metric,
        split: str,
        noun: str,
        is_complete: Callable[[TrialRecord], bool] = lambda _: True,
    ) -> None:
        """Read the records in ``folder``, each in a file named by its digest.

        Args:
            groups: the trials by digest, one group for each combination of settings. Combinations
                that amount to the same trials are one group.
            folder: the folder of the records.
            metric: the metric that messages show.
            split: the split that it is computed on.
            noun: what a trial is, in messages.
            is_complete: says whether a record has everything; otherwise its trial is repeated.
        """
        self.groups = list({next(iter(group)): group for group in groups}.values())
        self.trials = {digest: trial for group in self.groups for digest, trial in group.items()}
        self._folder, self._noun, self._metric, self._split = folder, noun, metric, split
        records = {digest: _read_record(self._path(digest), noun) for digest in self.trials}
        self.records = {d: r for d, r in records.items() if r is not None and is_complete(r)}
        self.failures: dict[str, str] = {}

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.json"

    def finished(self) -> list[list[tuple[J, TrialRecord]]]:
        """Return the trials of each group that have records, with these; no group is empty."""
        groups = (
            [(trial, self.records[d]) for d, trial in group.items() if d in self.records]
            for group in self.groups
        )
        return [group for group in groups if group]

    def save(self, digest: str, record: TrialRecord) -> None:
        """Save the record of a trial."""
        self.records[digest] = record
        write_json(self._path(digest), {**asdict(record), **provenance()})

    def run(
        self,
        n_processes: int,
        make_worker: Callable[..., Worker[J]],
        *arguments: Any,
        preload: str,
        on_success: Callable[[str], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the trials that have no record yet.

        Args:
            n_processes: the number of processes.
            make_worker: a function of a module; it returns what runs a trial, in each process.
            arguments: the arguments of ``make_worker``. A queue gives each process another item.
            preload: the module that the server of the processes imports once for all of them.
            on_success: gets the digest of each successful trial before its record is saved,
                because a saved trial is not sent to trackers again.
            on_end: is called after each trial.

        Raises:
            LlmcondError: every trial failed, or a worker process was killed.
        """
        missing = {d: trial for d, trial in self.trials.items() if d not in self.records}
        if not missing:
            return
        check_writable(self._path(next(iter(missing))))
        if any(trial.recipe.family.__module__ == "__main__" for trial in missing.values()):
            n_processes = 1  # other processes cannot import a class that the main module defined
        n_processes = min(n_processes, len(missing))
        if n_processes == 1:
            worker = make_worker(*arguments)
            outcomes = (
                _run(worker, digest, trial, f"{number:,} of {len(missing):,}")
                for number, (digest, trial) in enumerate(missing.items(), start=1)
            )
        else:
            prepare = (make_worker, arguments)
            outcomes = _run_in_pool(missing, n_processes, prepare, preload, f"{self._noun}s")
        # Closed explicitly: after an interrupt, the traceback would keep the generator, and with it
        # the worker processes, alive.
        with closing(outcomes):
            for count, (digest, outcome) in enumerate(outcomes, start=1):
                label = self.trials[digest].label
                if isinstance(outcome, str):
                    self.failures[digest] = f"{label}: {outcome}"
                    log.info(f"failed: {self.failures[digest]}")
                else:
                    on_success(digest)
                    self.save(digest, outcome)
                    score = self._metric.format(outcome.score(self._split)[self._metric.name])
                    log.info(
                        f"{count:,}/{len(missing):,} {label}: {self._metric.heading} {score} on "
                        f"{self._split}"
                    )
                on_end()
        if self.failures and not self.records:
            first = next(iter(self.failures.values()))
            raise LlmcondError(f"every {self._noun} failed. The first failure: {first}")


#: Runs a trial, whose digest is the first argument. The last one is the position of the trial among
#: all of them, such as "1 of 4", if this process runs all; otherwise it is empty.
Worker = Callable[[str, J, str], TrialRecord]
#: The record of a trial, or the reason why the trial failed.
Outcome = TrialRecord | str


def _run(worker: Worker[J], digest: str, trial: J, position: str = "") -> tuple[str, Outcome]:
    try:
        return digest, worker(digest, trial, position)
    except LlmcondError as error:
        return digest, str(error)
    except (RuntimeError, MemoryError) as error:  # for example out of memory
        return digest, f"{type(error).__name__}: {error}"


# -- processes ---------------------------------------------------------------------------------


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def _run_in_pool(
    trials: Mapping[str, J],
    n_processes: int,
    prepare: tuple[Callable[..., Worker[J]], Sequence[Any]],
    preload: str,
    noun: str,
) -> Generator[tuple[str, Outcome]]:
    """Run trials in processes, each with its share of the cores, and yield outcomes when done.

    The processes end when the generator is closed, even in the middle of a trial.

    Raises:
        LlmcondError: a process was killed.
    """
    context = process_context(preload)
    receiver, sender = context.Pipe(duplex=False)
    # Two processes that share cores are both several times slower. Libraries read the number of
    # threads when they are loaded, hence the environment variable.
    before, threads = os.environ.get("OMP_NUM_THREADS"), max(1, count_cores() // n_processes)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    executor = ProcessPoolExecutor(
        n_processes,
        context,
        initializer=_initialise,
        initargs=(plugins.loaded_names(), threads, receiver, *prepare),
    )
    try:
        waiting = {executor.submit(_run_in_worker, *item) for item in trials.items()}
        while waiting:
            done, waiting = wait(waiting, EVERY_SECONDS, FIRST_COMPLETED)
            if not done:
                n_done = len(trials) - len(waiting)
                log.info(f"{n_done:,} of {len(trials):,} {noun} are done")
            # If a process was killed, the other outcomes must be saved before the error is raised.
            for future in sorted(done, key=lambda future: future.exception() is not None):
                yield future.result()
        executor.shutdown()
    except BrokenProcessPool as error:
        raise LlmcondError(
            f"a worker process was killed, perhaps because memory ran out. Completed {noun} "
            "are saved. Run the same command again with fewer --workers."
        ) from error
    finally:
        sender.close()
        executor.shutdown(wait=False, cancel_futures=True)
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before


_worker: Worker[Any] | None = None


def _initialise(
    plugin_names: Sequence[str],
    threads: int,
    parent_pipe: Connection,
    make_worker: Callable[..., Worker[Any]],
    arguments: Sequence[Any],
) -> None:
    global _worker  # noqa: PLW0603 - the only state that tasks of a pool's process can share
    import torch

    follow_parent(parent_pipe)
    torch.set_num_threads(threads)
    for name in plugin_names:
        plugins.load(name)
    _worker = make_worker(*arguments)


def _run_in_worker(digest: str, trial: Any) -> tuple[str, Outcome]:
    assert _worker is not None  # noqa: S101 - the pool's initializer has set it
    return _run(_worker, digest, trial)


# -- fits on the features of a run -------------------------------------------------------------


@dataclass(frozen=True)
class Trial(AnyTrial):
    """A fit of one recipe, which is not yet sized to the features, on one view of features.

    Attributes:
        view: The features that the head is fitted on.
        dim: The size of the embeddings, if the grid varies it.
    """

    view: FeatureView
    dim: int | None = None

    @property
    def name(self) -> str:
        """The name of its head in results."""
        return head_name(self.recipe.name, self.view)

    @property
    @override
    def label(self) -> str:
        return f"{self.name} {super().label}"

    def config(self, run: Run, recipe: Recipe) -> dict[str, Any]:
        """Return the settings of a fit for its log; ``recipe`` is sized to the features."""
        return {
            "task": run.task.name,
            "encoder": run.encoder_name,
            "data": run.manifest["data"]["digest"],
            "recipe": recipe.to_json(),
            "prompts": {prompt.name: prompt.digest for prompt in self.view.prompts},
            "subtract": self.view.subtracts,
            "seed": self.seed,
        }

    def digest(self, run: Run, split: str) -> str:
        """Return the digest of everything that determines its result."""
        code = self.recipe.user_modules(run.task, get_metric(run.dev_metric).function)
        parts = {
            "recipe": [self.recipe.name, self.recipe.kind, self.dim],
            "settings": asdict(self.recipe.settings),
            "prompts": [[prompt.name, prompt.digest] for prompt in self.view.prompts],
            "view": [self.view.subtract, self.view.features, self.view.conditioned],
            "features": [run.identity.fingerprint, run.manifest["store_dtype"]],
            "data": run.manifest["data"]["digest"],
            "split": split,
            "seed": self.seed,
            "dev_metric": run.dev_metric,
            "versions": provenance()["versions"],
            **({"code": code} if code else {}),
        }
        return digest_text(json.dumps(parts, sort_keys=True))


def named_dim(recipe: Recipe, changes: Mapping[str, Any] | None) -> int | None:
    """Return the dimension that ``--set`` names, which is not limited to that of the features."""
    return recipe.dim if "dim" in (changes or {}) else None


def size_recipe(recipe: Recipe, dim: int | None, dim_in: int, quiet: bool = False) -> Recipe:
    """Return a recipe with the given dimension, or its default limited to that of the features."""
    if dim is not None:
        if recipe.dim is None:
            raise UserError(
                f"the embeddings of the head {recipe.name} have the size of the features. "
                "Leave out --dim."
            )
        return recipe.with_settings({"dim": dim}, "--dim")
    if recipe.dim is not None and recipe.dim > dim_in:
        if not quiet:
            log.info(
                f"{recipe.name}: dim {dim_in} instead of {recipe.dim}, the size of the features"
            )
        return recipe.with_settings({"dim": dim_in}, recipe.name)
    return recipe


def fit_trials(
    run: Run,
    split: str,
    groups: Iterable[Iterable[Trial]],
    folder: str,
    workers: int | None,
    metrics: Sequence[str] = (),
    device: str = "auto",
    curve_split: str | None = None,
    trackers: Sequence[str] = (),
) -> Grid[Trial]:
    """Fit the trials that have no record yet, and return the grid with the records of all.

    The trials of a group differ only in their seeds. Records are in ``folder`` of the run. They
    hold the task's metrics and further ``metrics`` on ``split``, and the prediction of each row.
    ``workers`` is the number of parallel fits; None: one per core, at most eight. Learning curves
    have the score on dev, and that on ``curve_split`` if it is named; records that lack the latter
    are computed again. ``trackers`` get the log of each fit when it has finished.

    Raises:
        LlmcondError: Every fit failed, or a worker process was killed.
    """
    computed = choose_metrics(run.task.metrics, metrics)
    n = len(load_examples(run).scored_rows(split).rated)

    def is_complete(record: TrialRecord) -> bool:
        row, predictions = record.score(split), record.predictions[split]
        has_curve = curve_split is None or _has_scores(record.fit.get("curve", ()), curve_split)
        return has_curve and len(predictions) == n and all(m.name in row for m in computed)

    by_digest = [{trial.digest(run, split): trial for trial in group} for group in groups]
    grid = Grid(by_digest, run.folder / folder, computed[0], split, "fit", is_complete)

    def send(digest: str) -> None:
        label = f"{run.folder.name}/{grid.trials[digest].label}"
        send_log(log_path(run.folder, f"{folder}/{digest}"), label, trackers)

    if grid.trials:
        n_fits = format_count(len(grid.trials), "fit")
        log.info(f"{n_fits}, {len(grid.records):,} of them already done")
    device = choose_device(device)
    default_count = 1 if device != "cpu" else min(count_cores(), _MAX_WORKERS)
    arguments = (run.folder, split, metrics, device, curve_split, folder)
    grid.run(
        workers or default_count, _make_fitter, *arguments, preload="llmcond.heads", on_success=send
    )
    return grid


def _has_scores(curve: Sequence[Mapping[str, Any]], split: str) -> bool:
    """Return whether the epochs of a learning curve that were scored on dev were so on a split."""
    scored_on_dev = (key for epoch in curve for key in epoch if key.startswith("dev_"))
    keys = {split + key.removeprefix("dev") for key in scored_on_dev}
    return all(key in epoch for epoch in curve for key in keys)


def _make_fitter(
    folder: Path,
    split: str,
    metrics: Sequence[str],
    device: str,
    curve_split: str | None,
    log_folder: str,
) -> Worker[Trial]:
    """Return a function that fits heads on a run's examples; each process has one."""
    run = open_any_run(folder)
    examples, metric = load_examples(run), get_metric(run.dev_metric)

    def fit(digest: str, trial: Trial, position: str) -> TrialRecord:
        view = trial.view
        recipe = size_recipe(trial.recipe, trial.dim, examples.dim(view), quiet=True)
        path, config = log_path(run.folder, f"{log_folder}/{digest}"), trial.config(run, recipe)
        bar = FitBar(examples.epoch_score_key, examples.epoch_score, metric.format)
        with RunLog(path, trial.label, config) as run_log, bar if position else nullcontext():
            on_epoch = run_log.on_epoch(bar.on_epoch if position else lambda *_: None)
            head = examples.fit(recipe, view, trial.seed, on_epoch, device, curve_split=curve_split)
            dev_score = examples.score_on_dev(head, view)
            run_log.write("end", {f"dev_{metric.name}": dev_score})
        saved = RunHead(trial.name, head, view, {"recipe": recipe.to_json()})
        predicted, rows = examples.predict(saved, split), examples.scored_rows(split)
        computed, task = choose_metrics(run.task.metrics, metrics), run.task.name
        (result,) = score_predictors([saved], [predicted], rows, split, computed, 0, task)
        held_out = head.fit.held_out
        return TrialRecord(
            scores=[result.to_json()],
            predictions={split: predicted.tolist()},
            recipe=recipe.to_json(),
            fit=dict(head.fit.record),
            dev_score=finite_or_none(dev_score),
            held_out=None
            if held_out is None
            else _HeldOutRecord(
                held_out.predictions.tolist(), [finite_or_none(score) for score in held_out.scores]
            ),
        )

    return fit
