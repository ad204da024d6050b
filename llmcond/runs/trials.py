"""Trials: fits of one recipe on one view of features, identified by a digest of all inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import LlmcondError, UserError, format_count
from llmcond.evaluation.results import Result
from llmcond.features.view import FeatureView
from llmcond.files import check_writable, digest_text, read_json, write_json
from llmcond.heads import Recipe
from llmcond.heads.held_out import HeldOut
from llmcond.heads.pairs import OnEpoch
from llmcond.heads.storage import FitRecord
from llmcond.log import log
from llmcond.metrics import Metric, choose_metrics, finite_or_none, get_metric
from llmcond.progress import FitBar
from llmcond.records import RECORD, check_record
from llmcond.run_log import RunLog, log_path, send_log
from llmcond.runs import AnyRun, RunHead, dev_score, head_name, open_any_run
from llmcond.runs.examples import load_examples
from llmcond.runs.pool import count_cores, run_in_pool
from llmcond.runs.predictors import score_predictors
from llmcond.system import choose_device, provenance

R = TypeVar("R", bound=Result)

#: The format of the files that trials are saved in. A trial in another format is fitted again.
_FORMAT = 2
#: The limit without --workers, because each worker holds the features in memory.
_MAX_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Trial:
    """One fit of a grid.

    Attributes:
        recipe: The recipe with the settings of this trial, not yet sized to the features.
        dim: The size of the embeddings, if the grid varies it.
        view: The features that the head is fitted on.
        seed: The random seed.
        varied: The settings that the grid varies, with their values in this trial.
    """

    recipe: Recipe
    dim: int | None
    view: FeatureView
    seed: int
    varied: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of its head in results."""
        return head_name(self.recipe.name, self.view)

    @property
    def label(self) -> str:
        """Its name, settings and seed, for messages."""
        settings = [f"{key}={value}" for key, value in self.varied.items()]
        return " ".join([self.name, *settings, f"seed={self.seed}"])

    def config(self, run: AnyRun, recipe: Recipe) -> dict[str, Any]:
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

    def digest(self, run: AnyRun, split: str) -> str:
        """Return the digest of everything that determines its result."""
        parts = {
            "format": _FORMAT,
            "recipe": [self.recipe.name, self.recipe.kind, self.dim],
            "settings": asdict(self.recipe.settings),
            "prompts": [prompt.digest for prompt in self.view.prompts],
            "view": [self.view.subtract, self.view.features, self.view.conditioned],
            "features": [run.identity.fingerprint, run.manifest["store_dtype"]],
            "data": run.manifest["data"]["digest"],
            "split": split,
            "seed": self.seed,
            "versions": provenance()["versions"],
        }
        return digest_text(json.dumps(parts, sort_keys=True))


@dataclass(frozen=True)
class _HeldOutRecord:
    predictions: Sequence[float]
    scores: Sequence[float | None]


@dataclass(frozen=True)
class _TrialRecord:
    """The schema of a trial's file, with its metrics in one field."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    dim: int
    fit: FitRecord
    metrics: Mapping[str, float | None]
    similarity: Sequence[float]
    held_out: _HeldOutRecord | None = None


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The outcome of a trial.

    Attributes:
        metrics: The metrics on the scored split by name; NaN where undefined.
        dim: The size of the embeddings.
        fit: The record of the fit.
        dev: The score on dev; None if it is undefined.
        similarity: (n,) predictions, or ranks, of all rows.
        held_out: The held-out predictions of dev; None if dev did not choose the epoch, or an older
            version saved the outcome.
    """

    metrics: Mapping[str, float]
    dim: int
    fit: Mapping[str, Any]
    dev: float | None
    similarity: NDArray[np.float32]
    held_out: HeldOut | None = None

    @classmethod
    def read(
        cls,
        path: Path,
        metrics: Sequence[Metric],
        n: int,
        dev_metric: str,
        curve_split: str | None = None,
    ) -> TrialOutcome | None:
        """Read an outcome from a file; None if it does not exist or lacks requested values.

        The file must have ``n`` predictions, the score by the run's ``dev_metric``, and a learning
        curve with the score on ``curve_split`` wherever it has the score on dev. A damaged file is
        treated as missing, with a warning, so that the fit is repeated.
        """
        if not path.is_file():
            return None
        try:
            record = read_json(path)
            names = [metric.name for metric in metrics]
            # If this dev score is missing, another metric may have chosen the epoch.
            if not {*names, f"dev_{dev_metric}", "similarity"} <= set(record):
                return None
            figures = {name: record[name] for name in names}
            check_record({**record, "metrics": figures}, _TrialRecord, str(path))
            if curve_split and not _has_scores(record["fit"].get("curve", ()), curve_split):
                return None
        except LlmcondError as error:
            log.warning(f"{error} The fit is repeated.")
            return None
        figures = {name: math.nan if figure is None else figure for name, figure in figures.items()}
        similarity = np.array(record["similarity"], dtype=np.float32)
        if len(similarity) != n:
            return None
        held_out = record.get("held_out")
        if held_out is not None:
            scores = [math.nan if score is None else score for score in held_out["scores"]]
            predictions = np.array(held_out["predictions"], dtype=np.float32)
            held_out = HeldOut(predictions, np.array(scores))
        dev = dev_score(record, dev_metric)
        return cls(figures, record["dim"], record["fit"], dev, similarity, held_out)


def _has_scores(curve: Sequence[Mapping[str, Any]], split: str) -> bool:
    """Return whether the epochs of a learning curve that were scored on dev were so on a split."""
    scored_on_dev = (key for epoch in curve for key in epoch if key.startswith("dev_"))
    keys = {split + key.removeprefix("dev") for key in scored_on_dev}
    return all(key in epoch for epoch in curve for key in keys)


def aggregate_seeds(
    kind: type[R], fits: Sequence[tuple[Trial, TrialOutcome]], split: str, task: str, **further: Any
) -> tuple[R, NDArray[np.float32]]:
    """Return the result, without figures, of trials that differ only in their seeds.

    ``further`` are fields of that kind of result. The predictions, (seeds, n), are returned with
    it.
    """
    trial, first = fits[0]
    result = kind(
        name=trial.name,
        head=trial.recipe.name,
        prompts=tuple(prompt.name for prompt in trial.view.prompts),
        subtract=trial.view.subtracts,
        split=split,
        task=task,
        dim=first.dim,
        seeds=tuple(seeded_trial.seed for seeded_trial, _ in fits),
        fits=tuple(outcome.fit for _, outcome in fits),
        **further,
    )
    return result, np.stack([outcome.similarity for _, outcome in fits])


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


@dataclass(frozen=True, slots=True)
class _TrialSettings:
    """The settings that all trials of a command share. Worker processes are started with them."""

    folder: Path
    split: str
    metrics: Sequence[str]
    device: str
    curve_split: str | None
    #: The folder of the trials in the run, and within its logs.
    name: str


def run_trials(
    run: AnyRun,
    split: str,
    trials: Iterable[Trial],
    folder: str,
    workers: int | None,
    metrics: Sequence[str] = (),
    device: str = "auto",
    curve_split: str | None = None,
    trackers: Sequence[str] = (),
) -> tuple[dict[str, tuple[Trial, TrialOutcome]], list[str]]:
    """Run the trials that have no saved outcome yet. Equal trials are run once.

    Outcomes are saved in ``folder`` of the run. They hold the task's metrics and further
    ``metrics`` on ``split``, and the prediction of each row. ``workers`` is the number of parallel
    fits; None: one per core, at most eight. Learning curves have the score on dev, and that on
    ``curve_split`` if it is named; outcomes that lack the latter are computed again. ``trackers``
    get the log of each fit when it has finished.

    Returns:
        The trials with their outcomes by digest, in the order of the trials, and one line for each
        trial that failed.

    Raises:
        LlmcondError: Every fit failed, or a worker process was killed.
    """
    by_digest = {trial.digest(run, split): trial for trial in trials}
    computed = choose_metrics(run.task.metrics, metrics)
    paths = {digest: run.folder / folder / f"{digest}.json" for digest in by_digest}
    n = len(load_examples(run).scored_rows(split).rated)

    def read_outcome(digest: str) -> TrialOutcome | None:
        return TrialOutcome.read(paths[digest], computed, n, run.dev_metric, curve_split)

    outcomes = {
        digest: previous for digest in by_digest if (previous := read_outcome(digest)) is not None
    }
    missing = {digest: trial for digest, trial in by_digest.items() if digest not in outcomes}
    if by_digest:
        log.info(f"{format_count(len(by_digest), 'fit')}, {len(outcomes):,} of them already done")
    if missing:
        check_writable(next(iter(paths.values())))
    failures = []
    job = _TrialSettings(run.folder, split, metrics, choose_device(device), curve_split, folder)
    # Closed explicitly: after an interrupt, the traceback would keep the generator, and with it the
    # worker processes, alive.
    with closing(_run_missing(job, missing, workers)) as records:
        for count, (digest, record) in enumerate(records, start=1):
            if isinstance(record, str):
                failures.append(f"{by_digest[digest].label}: {record}")
                log.info(f"failed: {failures[-1]}")
                continue
            label = f"{run.folder.name}/{by_digest[digest].label}"
            # Before the fit is saved, because a saved fit is not sent again.
            send_log(log_path(run.folder, f"{folder}/{digest}"), label, trackers)
            write_json(paths[digest], record)
            outcome = read_outcome(digest)
            assert outcome is not None  # noqa: S101 - the file was written in the previous line
            outcomes[digest] = outcome
            metric, name = computed[0], f"{count:,}/{len(missing):,} {by_digest[digest].label}"
            figure = metric.format(outcome.metrics[metric.name])
            log.info(f"{name}: {metric.heading} {figure} on {split}")
    if failures and not outcomes:
        raise LlmcondError(f"every fit failed. The first failure: {failures[0]}")
    return {d: (by_digest[d], outcomes[d]) for d in by_digest if d in outcomes}, failures


#: The content of a trial's file, or the reason why the trial failed.
_Record = dict[str, Any] | str


class _Worker:
    """Fits heads on a run's examples; each process has one."""

    def __init__(self, job: _TrialSettings) -> None:
        self._job = job
        self._run = open_any_run(job.folder)
        self._metrics = choose_metrics(self._run.task.metrics, job.metrics)
        self._examples = load_examples(self._run)
        #: The metric that chooses the epoch, and its name in the progress bar.
        self.metric = get_metric(self._run.dev_metric)
        self.epoch_score = self._examples.epoch_score
        self.epoch_score_key = self._examples.epoch_score_key

    def fit(
        self, digest: str, trial: Trial, on_epoch: OnEpoch = lambda *_: None
    ) -> tuple[str, _Record]:
        try:
            return digest, self._fit(digest, trial, on_epoch)
        except UserError as error:
            return digest, str(error)
        except (RuntimeError, MemoryError) as error:  # for example out of memory
            return digest, f"{type(error).__name__}: {error}"

    def _fit(self, digest: str, trial: Trial, on_epoch: OnEpoch) -> dict[str, Any]:
        split, examples, view = self._job.split, self._examples, trial.view
        recipe = size_recipe(trial.recipe, trial.dim, examples.dim(view), quiet=True)
        name, config = f"{self._job.name}/{digest}", trial.config(self._run, recipe)
        with RunLog(log_path(self._run.folder, name), trial.label, config) as run_log:
            on_epoch, curve_split = run_log.on_epoch(on_epoch), self._job.curve_split
            device = self._job.device
            head = examples.fit(recipe, view, trial.seed, on_epoch, device, curve_split=curve_split)
            dev_score = examples.score_on_dev(head, view)
            run_log.write("end", {f"dev_{self.metric.name}": dev_score})
        saved = RunHead(trial.name, head, view, {"recipe": recipe.to_json()})
        predicted = examples.predict(saved, split)
        rows, task = examples.scored_rows(split), self._run.task.name
        (result,) = score_predictors([saved], [predicted], rows, split, self._metrics, 0, task)
        held_out = head.fit.held_out
        return {
            **result.to_json(),
            "similarity": predicted.tolist(),
            "held_out": held_out
            and {
                "predictions": held_out.predictions.tolist(),
                "scores": [finite_or_none(score) for score in held_out.scores],
            },
            "recipe": recipe.to_json(),
            "fit": dict(head.fit.record),
            f"dev_{self._run.dev_metric}": finite_or_none(dev_score),
            **provenance(),
        }


def _run_missing(
    job: _TrialSettings, trials: Mapping[str, Trial], workers: int | None
) -> Generator[tuple[str, _Record]]:
    """Run trials, and yield the digest and the record of each one when it is done."""
    if not trials:
        return
    default_count = 1 if job.device != "cpu" else min(count_cores(), _MAX_WORKERS)
    count = min(workers or default_count, len(trials))
    if any(trial.recipe.family.__module__ == "__main__" for trial in trials.values()):
        count = 1  # other processes cannot import a class that the main module defined
    if count == 1:
        worker = _Worker(job)
        for digest, trial in trials.items():
            with FitBar(worker.epoch_score_key, worker.epoch_score, worker.metric.format) as bar:
                fitted = worker.fit(digest, trial, bar.on_epoch)
            yield fitted
        return
    yield from run_in_pool(
        _fit_trial, trials.items(), count, _prepare_worker, job, preload="llmcond.heads"
    )


_worker: _Worker | None = None


def _prepare_worker(job: _TrialSettings) -> None:
    global _worker  # noqa: PLW0603 - the only state that tasks of a pool's process can share
    _worker = _Worker(job)


def _fit_trial(digest: str, trial: Trial) -> tuple[str, _Record]:
    assert _worker is not None  # noqa: S101 - the pool's initializer has set it
    return _worker.fit(digest, trial)
