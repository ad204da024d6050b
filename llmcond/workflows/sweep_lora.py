"""Sweeps over the settings of trainings: resumable, parallel, and the best encoder is a run."""

from __future__ import annotations

import math
import os
import shutil
import statistics
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.errors import LlmcondError, UserError, format_count
from llmcond.evaluation.results import FittedResults, Results, SweptResult, score_results
from llmcond.files import check_writable, digest_file, read_json, write_json, write_text
from llmcond.log import log
from llmcond.metrics import Metric, choose_metrics
from llmcond.records import RECORD as RECORDED
from llmcond.records import check_record
from llmcond.report.tables import estimate_text
from llmcond.run_log import TRAINING, log_path, send_log
from llmcond.runs import open_any_run
from llmcond.runs.examples import load_examples
from llmcond.runs.pool import run_in_pool
from llmcond.system import process_context, provenance
from llmcond.workflows.options.training import SweepLoraOptions
from llmcond.workflows.training import TrainingJob
from llmcond.workflows.training_grid import PlannedTraining, format_settings, plan_trainings
from llmcond.workflows.training_record import RECORD, TrainingResult

#: The format of the files that finished trainings are recorded in.
_FORMAT = 1
#: The folders for all trainings, and for the best of them.
_TRAININGS, _BEST = "trainings", "best"
#: Imported once for all worker processes.
_PRELOAD = "llmcond.encoders.encoder"


@dataclass(frozen=True)
class LoraSweepResult(FittedResults[SweptResult]):
    """The results of a sweep over the settings of trainings.

    Attributes:
        results: one result for each combination of settings, with means over seeds of the scores on
            dev and confidence intervals. The best comes first. Combinations with failed trainings
            come last.
        failures: a line for each training that failed; its result lacks that seed.
        best: the training of the best settings with the best score on dev; its run is ``best``.
        test: the scores of the best settings on test, as means over seeds; None without test.

    Examples:
        >>> import llmcond
        >>> swept = llmcond.SweptResult(
        ...     name="none@routed", head="none", prompts=("routed",), subtract=False, split="dev",
        ...     metrics={"spearman": llmcond.Estimate(0.61)}, settings={"rank": 8},
        ... )
        >>> best = llmcond.TrainingResult({"run": "runs/search/best"})
        >>> result = llmcond.LoraSweepResult(llmcond.Results((swept,)), (), best, None)
        >>> result.results[0].settings, result.best.run.name
        ({'rank': 8}, 'best')
    """

    best: TrainingResult
    test: SweptResult | None

    @override
    def to_json(self) -> dict[str, Any]:
        test = None if self.test is None else self.test.to_json()
        return {**super().to_json(), "best": self.best.to_json(), "test": test}

    @override
    def _displayed(self) -> dict[str, Any]:
        return {**super()._displayed(), "best": str(self.best.run)}


def sweep_lora(options: SweepLoraOptions) -> LoraSweepResult:
    """Train an encoder with every combination of settings and seeds, and keep the best on dev.

    Finished trainings are reused, and one that was stopped continues from its last checkpoint.

    Raises:
        UserError: the input is invalid, nothing varies, or the folder holds something else.
        LlmcondError: the encoder cannot be loaded, every training failed, or a worker process was
            killed.
    """
    folder = Path(options.run)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "sweep-lora starts its own processes, one per GPU, so it cannot be launched with "
            "accelerate or torchrun. Start it directly; --workers sets the number of processes."
        )
    if (folder / "run.json").exists() or (folder / RECORD).exists():
        raise UserError(f"{folder} already holds a run. Name another --run.")
    groups = plan_trainings(options, folder / _TRAININGS)
    check_writable(folder / _TRAININGS / "x.json")
    search = _Search(folder, groups, options.keep_all, options.log)
    search.run(options.workers, _list_gpus(options, groups[0][0].job))
    result = search.finish()
    data = groups[0][0].job.dataset.to_json()
    write_json(folder / "sweep.json", {**result.to_json(), "data": data, **provenance()})
    if result.test is not None:
        test, seeds = result.test, format_count(len(result.test.seeds), "seed")
        figure = estimate_text(test.primary, test.main)
        log.info(f"its settings on test: {test.primary.heading} {figure}, mean over {seeds}")
    return result


@dataclass(frozen=True)
class _TrainingFile:
    """The schema of the file of a finished training.

    Attributes:
        summary: the summary of its training record.
        fit: the record of the fit, in head.json.
        predictions: the predictions of dev and test, which intervals are computed from.
        record_sha256: a digest of its training record, by which its folder is recognised.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORDED

    summary: Mapping[str, Any]
    fit: Mapping[str, Any]
    predictions: Mapping[str, Sequence[float]]
    record_sha256: str


#: The content of the file of a finished training, or the reason why it failed.
_Record = dict[str, Any] | str


class _Search:
    """The trainings of a sweep, with the records of those that have finished."""

    def __init__(
        self,
        folder: Path,
        groups: Sequence[Sequence[PlannedTraining]],
        keep_all: bool,
        trackers: Sequence[str],
    ) -> None:
        self._folder, self._groups, self._keep_all = folder, groups, keep_all
        self._trackers = trackers
        self._trainings = {training.digest: training for group in groups for training in group}
        self._records = {
            digest: record
            for digest in self._trainings
            if (record := _read_record(self._file(digest))) is not None
        }
        self._failures: dict[str, str] = {}
        self._metric: Metric = groups[0][0].job.task.main_metric

    def _file(self, digest: str) -> Path:
        return self._folder / _TRAININGS / f"{digest}.json"

    def run(self, workers: int | None, gpus: Sequence[str]) -> None:
        """Run the trainings that have not finished; see ``sweep_lora``."""
        missing = {d: t for d, t in self._trainings.items() if d not in self._records}
        log.info(
            f"{len(self._trainings):,} trainings ({len(self._groups):,} combinations of settings), "
            f"{len(self._records):,} of them already done"
        )
        # Closed explicitly: after an interrupt, the traceback would keep the processes alive.
        with closing(_run_trainings(missing, workers, gpus)) as finished:
            for count, (digest, record) in enumerate(finished, start=1):
                label = self._trainings[digest].label
                if isinstance(record, str):
                    self._failures[digest] = f"{label}: {record}"
                    log.info(f"failed: {self._failures[digest]}")
                else:
                    self._keep_log(digest, label)
                    write_json(self._file(digest), record)
                    self._records[digest] = record
                    score = f"{self._metric.heading} {self._metric.format(self._score(digest))}"
                    log.info(f"{count:,}/{len(missing):,} {label}: {score} on dev")
                self._remove_weights()
        if not self._records:
            failure = next(iter(self._failures.values()))
            raise LlmcondError(f"every training failed. The first failure: {failure}")

    def _keep_log(self, digest: str, label: str) -> None:
        """Copy the log of a training, whose folder may be removed, and send it to the trackers."""
        trained = log_path(self._folder / _TRAININGS / digest, TRAINING)
        if trained.is_file():  # an ensemble has the logs of its members
            path = log_path(self._folder, digest)
            write_text(path, trained.read_text(encoding="utf-8"))
            send_log(path, f"{self._folder.name}/{label}", self._trackers)

    def _score(self, digest: str) -> float:
        """Return the score on dev; NaN if it is undefined."""
        value = _scores(self._records[digest], "dev")[self._metric.name]
        return math.nan if value is None else float(value)

    def _quality(self, digest: str) -> float:
        """Return the score on dev as a number that is higher for better trainings."""
        score = self._score(digest)
        if math.isnan(score):
            return -math.inf
        return score if self._metric.higher_is_better else -score

    def _finished(self, group: Sequence[PlannedTraining]) -> list[str]:
        return [training.digest for training in group if training.digest in self._records]

    def _rank(self, groups: Sequence[Sequence[PlannedTraining]]) -> list[list[str]]:
        """Return the finished trainings of each combination, those of the best one first.

        Combinations with failed trainings come last. Ties keep the order of the grid.
        """
        digests = filter(None, map(self._finished, groups))
        return sorted(
            digests, key=lambda group: (-len(group), -statistics.fmean(map(self._quality, group)))
        )

    def _best_seed(self, digests: Sequence[str]) -> str:
        return max(digests, key=self._quality)

    def _remove_weights(self) -> None:
        """Remove the weights of all trainings that cannot become the best.

        The best seed of a combination stays while its other seeds are trained.
        """
        if self._keep_all:
            return
        done = self._records.keys() | self._failures.keys()
        complete = [group for group in self._groups if all(t.digest in done for t in group)]
        needed = {self._best_seed(group) for group in self._rank(complete)[:1]}
        for group in self._groups:
            finished = self._finished(group)
            if finished and group not in complete:
                needed.add(self._best_seed(finished))
        for digest in done - needed:
            shutil.rmtree(self._folder / _TRAININGS / digest, ignore_errors=True)

    def finish(self) -> LoraSweepResult:
        """Keep the best training in the folder ``best``, and return the results."""
        ranked = self._rank(self._groups)
        best = self._keep_best(self._best_seed(ranked[0]))
        run = open_any_run(best)
        examples, metrics = load_examples(run), choose_metrics(run.task.metrics)
        results, predictions = zip(*(self._combine(group, "dev") for group in ranked), strict=True)
        scored = score_results(results, predictions, examples.scored_rows("dev"), metrics)
        test = None
        if "test" in self._records[ranked[0][0]]["predictions"]:
            result, test_predictions = self._combine(ranked[0], "test")
            rows = examples.scored_rows("test")
            (test,) = score_results([result], [test_predictions], rows, metrics)
        summary = {**self._records[self._best_seed(ranked[0])]["summary"], "run": str(best)}
        failures = list(self._failures.values())
        log.info(
            f"best on dev: {format_settings(scored[0].settings)}; seed {summary['seed']} -> {best}"
        )
        return LoraSweepResult(Results(tuple(scored)), failures, TrainingResult(summary), test)

    def _keep_best(self, digest: str) -> Path:
        """Make a training the folder ``best``; train it again if its weights were removed."""
        best, trained = self._folder / _BEST, self._folder / _TRAININGS / digest
        if _is_trained(best, self._records[digest]):
            return best
        if not _is_trained(trained, self._records[digest]):
            log.info(f"training the best again, because its weights were removed: {digest}")
            record = _run_training(self._trainings[digest].job)
            if isinstance(record, str):
                raise LlmcondError(f"{self._trainings[digest].label}: {record}")
            write_json(self._file(digest), record)
            self._records[digest] = record
        shutil.rmtree(best, ignore_errors=True)
        if self._keep_all:
            shutil.copytree(trained, best)
        else:
            trained.rename(best)
        return best

    def _combine(
        self, digests: Sequence[str], split: str
    ) -> tuple[SweptResult, NDArray[np.float32]]:
        """Return a result without figures, and the (seeds, n) predictions of its trainings."""
        records = [self._records[digest] for digest in digests]
        trainings = [self._trainings[digest] for digest in digests]
        row = _scores(records[0], split)
        result = SweptResult(
            name=row["name"],
            head=row["head"],
            prompts=tuple(row["prompt"].split("+")),
            subtract=row["subtract"],
            split=split,
            task=row["task"],
            dim=row["dim"],
            seeds=tuple(training.job.seed for training in trainings),
            fits=tuple(record["fit"] for record in records),
            settings=dict(trainings[0].settings),
        )
        predictions = [record["predictions"][split] for record in records]
        return result, np.array(predictions, dtype=np.float32)


def _scores(record: Mapping[str, Any], split: str) -> Mapping[str, Any]:
    """Return the scores on a split in the record of a training."""
    return next(scores for scores in record["summary"]["scores"] if scores["split"] == split)


def _is_trained(folder: Path, record: Mapping[str, Any]) -> bool:
    """Return whether a folder holds the training of a record."""
    path = folder / RECORD
    return path.is_file() and digest_file(path) == record["record_sha256"]


def _read_record(path: Path) -> dict[str, Any] | None:
    """Read the file of a finished training; None if there is none, or a damaged one."""
    if not path.is_file():
        return None
    try:
        record = read_json(path)
        check_record(record, _TrainingFile, str(path))
    except LlmcondError as error:
        log.warning(f"{error} The training is repeated.")
        return None
    return record if record.get("format") == _FORMAT else None


def _list_gpus(options: SweepLoraOptions, job: TrainingJob) -> list[str]:
    """Return the GPUs to share among workers; empty: all use the device of the options."""
    if job.resolved.device == "cpu" or options.device not in ("auto", "cuda"):
        return []
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))


def _run_trainings(
    trainings: Mapping[str, PlannedTraining], workers: int | None, gpus: Sequence[str]
) -> Generator[tuple[str, _Record]]:
    """Run trainings, and yield the digest and the record of each one when it is done."""
    count = min(workers or max(1, len(gpus)), len(trainings))
    jobs: dict[str, Any] = {digest: training.job for digest, training in trainings.items()}
    if any(job.recipe.family.__module__ == "__main__" for job in jobs.values()):
        count = 1  # other processes cannot import a class that the main module defined
    if count > 1:
        queue = process_context(_PRELOAD).SimpleQueue()
        for number in range(count if gpus else 0):
            queue.put(gpus[number % len(gpus)])
        arguments = (queue if gpus else None,)
        yield from run_in_pool(
            _run_numbered,
            jobs.items(),
            count,
            _use_gpu,
            *arguments,
            preload=_PRELOAD,
            noun="trainings",
        )
        return
    for number, (digest, job) in enumerate(jobs.items(), start=1):
        log.info(f"training {number:,} of {len(jobs):,}: {trainings[digest].label}")
        yield _run_numbered(digest, job)


def _use_gpu(gpus: Any) -> None:
    """Assign one GPU to this process, which PyTorch must not have looked for yet."""
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus.get()


def _run_numbered(digest: str, job: TrainingJob) -> tuple[str, _Record]:
    return digest, _run_training(job)


def _run_training(job: TrainingJob) -> _Record:
    """Train, and return the record of the training, or the reason why it failed."""
    try:
        summary = job.run().to_json()
        run = open_any_run(job.folder)
        head, examples = run.load_head(summary["head"]), load_examples(run)
        splits = [scores["split"] for scores in summary["scores"]]
        if "dev" not in splits:
            return "it has no score on dev"
        fit = _describe_fit(head.head.fit.record)
        return {
            "format": _FORMAT,
            "summary": summary,
            "fit": fit,
            "predictions": {split: examples.predict(head, split).tolist() for split in splits},
            "record_sha256": digest_file(job.folder / RECORD),
            **provenance(),
        }
    except LlmcondError as error:
        return str(error)
    except (RuntimeError, MemoryError) as error:  # for example out of memory
        return f"{type(error).__name__}: {error}"


def _describe_fit(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a fit with its best epoch, as heads on frozen features have it."""
    best_epoch = next(
        (e["epoch"] for e in record.get("curve", ()) if e["step"] == record.get("best_step")), None
    )
    return {**record, "best_epoch": best_epoch}
