"""Sweeps over the settings of trainings: resumable, parallel, and the best encoder is a run."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shutil
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from llmcond.base.errors import LlmcondError, UserError, format_count, nearest
from llmcond.base.files import (
    create_folder_atomically,
    digest_file,
    digest_text,
    write_json,
    write_text,
)
from llmcond.base.metrics import Metric, choose_metrics
from llmcond.base.options import options_of, parse_value
from llmcond.base.output import log
from llmcond.base.run_log import TRAINING, log_path, send_log
from llmcond.base.system import process_context, provenance
from llmcond.data.datasets import DataOptions
from llmcond.evaluation.results import (
    FittedResults,
    Result,
    Results,
    estimate_text,
    format_settings,
    score_results,
)
from llmcond.features.pool import list_gpus
from llmcond.finetune.settings import StageSettings
from llmcond.heads import load_recipe
from llmcond.heads.settings import ObjectiveSettings
from llmcond.options.common import LogOption, RunOption, TaskOptions
from llmcond.options.training import SweepLoraOptions, TrainLoraOptions
from llmcond.runs import open_any_run
from llmcond.runs.examples import load_examples
from llmcond.runs.trials import AnyTrial, Grid, TrialRecord, Worker, combine_seeds
from llmcond.tasks import AnyTask, find_task
from llmcond.workflows.extract import read_data
from llmcond.workflows.train import plan_training, run_training
from llmcond.workflows.train_job import TrainingJob
from llmcond.workflows.training_record import RECORD, TrainingResult

#: Prefix of the keys of --set, where an option of train-lora has the same name.
_HEAD = "head."
#: Options that are the same in all trainings of a sweep, besides those of the classes below.
_FIXED = {"model", "device", "set", "seed", "teacher", "teacher_rows"}
_FIXED |= {
    item.name for cls in (RunOption, TaskOptions, LogOption, StageSettings) for item in fields(cls)
}


@dataclass(frozen=True)
class PlannedTraining(AnyTrial):
    """One training of a sweep, whose input has been checked.

    Attributes:
        job: the training. Its folder is named by a digest of what decides the trained weights.
    """

    job: TrainingJob


def plan_trainings(options: SweepLoraOptions, folder: Path) -> list[dict[str, PlannedTraining]]:
    """Return the trainings of each combination of settings by digest, one for each seed.

    Everything is checked before the first training.

    Args:
        options: the options of the command.
        folder: the folder for the trainings, each in a folder named by its digest.

    Raises:
        UserError: a name or a value is invalid, nothing varies, or dev cannot choose.
        LlmcondError: the encoder cannot be loaded.
    """
    task, varied = find_task(options.task), options.varied()
    base = replace(options.select(TrainLoraOptions), log=())  # the sweep sends finished logs
    _check_names(varied, base, task)
    grid = list(itertools.product(*(dict.fromkeys(values) for values in varied.values())))
    if len(grid) == options.seeds == 1:
        raise UserError(
            "there is nothing to vary. Give several values (--vary learning_rate=5e-4,1e-3) or "
            "--seeds, or train once: llmcond train-lora"
        )
    if options.trials is not None:
        # The first N of one order, so that a larger N adds combinations.
        order = np.random.default_rng(options.seed).permutation(len(grid))
        grid = [grid[i] for i in sorted(order[: options.trials])]
    datasets: dict[tuple[str, ...], Any] = {}

    def read(task: AnyTask[Any], data: DataOptions) -> Any:
        # Prompts may need further columns; all other options are the same.
        if data.extra not in datasets:
            datasets[data.extra] = read_data(task, data)
        return datasets[data.extra]

    groups: list[dict[str, PlannedTraining]] = []
    level = log.level
    try:
        for values in grid:
            texts = dict(zip(varied, values, strict=True))
            try:
                changed = _with_settings(base, texts)
                job = plan_training(changed, task, read)
                _check_dev(job)
            except UserError as error:
                where = f"--vary {format_settings(texts)}: " if texts else ""
                raise UserError(f"{where}{str(error).removeprefix('--set: ')}") from error
            if not groups:
                log.setLevel(logging.WARNING)  # each further plan would repeat the notes
            settings, group = _read_settings(job, texts), {}
            # Ensembles train with several seeds each, which must not overlap.
            step = changed.ensemble
            for seed in range(options.seed, options.seed + options.seeds * step, step):
                seeded = job.with_seed(seed)
                digest = digest_text(json.dumps(seeded.config, sort_keys=True))
                seeded = seeded.with_seed(seed, run=folder / digest)
                group[digest] = PlannedTraining(seeded.recipe, seed, settings, seeded)
            groups.append(group)
    finally:
        log.setLevel(level)
    return groups


def _check_names(
    varied: Mapping[str, Sequence[str]], base: TrainLoraOptions, task: AnyTask[Any]
) -> None:
    """Raise a UserError for names that cannot be varied, or that have a value already."""
    options = {name for name, _, _ in options_of(TrainLoraOptions)} - _FIXED
    head_keys = _head_keys(varied, base, task)
    defaults = {field.name: field.default for field in fields(base)}
    seen: set[str] = set()
    for name in (name for key in varied for name in key.split("+")):
        key = name.removeprefix(_HEAD)
        if name in seen:
            raise UserError(f"--vary repeats {name}. Give all of its values together.")
        seen.add(name)
        if name not in options and (head_keys is not None and key not in head_keys):
            known = {*options, *(head_keys if name == key else map(_HEAD.__add__, head_keys))}
            raise UserError(
                f"--vary names {name!r}, which is no setting of the training or of its head. "
                f"{nearest(name, known)}"
            )
        is_option = name in options
        if getattr(base, name) != defaults[name] if is_option else key in (base.set or {}):
            raise UserError(f"{name} is both varied and set. Give it once.")


def _head_keys(
    varied: Mapping[str, Sequence[str]], base: TrainLoraOptions, task: AnyTask[Any]
) -> set[str] | None:
    """Return the keys of --set for the named heads; None: a fitted head decides them."""
    names = varied.get("head") or ([] if base.head is None else [base.head])
    if base.start is not None or "start" in varied or not names:
        return None
    keys: set[str] = set()
    for name in names:
        recipe = load_recipe(name, task.recipes)
        keys.update(field.name for field in fields(recipe.settings))
        if recipe.is_identity:
            keys.update(field.name for field in fields(ObjectiveSettings))
    return keys


def _with_settings(base: TrainLoraOptions, texts: Mapping[str, str]) -> TrainLoraOptions:
    """Return options with the values of one combination."""
    names = {name for name, _, _ in options_of(TrainLoraOptions)}
    values: dict[str, Any] = {}
    head = dict(base.set or {})
    for key, text in texts.items():
        for name in key.split("+"):
            if name in names:
                values[name] = parse_value(TrainLoraOptions, name, text)
            else:
                head[name.removeprefix(_HEAD)] = text
    if values.get("rank") == 0:  # full: the options of adapters are for the other ranks
        values = {"alpha": None, "target": None, "adapter_dropout": None, **values}
    return replace(base, **values, set=head or None)


def _read_settings(job: TrainingJob, names: Iterable[str]) -> dict[str, Any]:
    """Return the values that varied settings have in a training."""
    head = {**job.config.get("objective", {}), **job.config["head"]}
    settings = {}
    for key in names:
        name = key.partition("+")[0]
        is_option = hasattr(job.options, name)
        value = getattr(job.options, name) if is_option else head[name.removeprefix(_HEAD)]
        settings[key] = "+".join(map(str, value)) if isinstance(value, tuple) else value
    return settings


def _check_dev(job: TrainingJob) -> None:
    """Raise a UserError unless dev can choose among trainings."""
    dev = job.dataset.splits.get("dev")
    if "dev" in job.trained_on:
        raise UserError(
            "sweep-lora chooses the best settings on dev, and this training, its encoder or its "
            "teacher uses dev as training data. Leave out --then, and train the best settings "
            "with it afterwards: llmcond train-lora"
        )
    if dev is None or not len(dev) or not np.any(getattr(dev, "rated", True)):
        raise UserError(
            f"sweep-lora chooses the best settings on dev, and {job.dataset.source} has no dev "
            f"split with {job.task.unit}. Add one."
        )


#: The folders for all trainings, and for the best of them.
_TRAININGS, _BEST = "trainings", "best"
#: Imported once for all worker processes.
_PRELOAD = "llmcond.encoders.encoder"


@dataclass(frozen=True)
class LoraSweepResult(FittedResults):
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
        >>> swept = llmcond.Result(
        ...     name="none@routed", head="none", prompts=("routed",), subtract=False, split="dev",
        ...     metrics={"spearman": llmcond.Estimate(0.61)}, about={"settings": {"rank": 8}},
        ... )
        >>> best = llmcond.TrainingResult({"run": "runs/search/best"})
        >>> result = llmcond.LoraSweepResult(llmcond.Results((swept,)), (), best, None)
        >>> result.results[0].settings, result.best.run.name
        ({'rank': 8}, 'best')
    """

    best: TrainingResult
    test: Result | None

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
    job = next(iter(groups[0].values())).job
    search = _Search(folder, groups, job.task.main_metric, options)
    search.run(job)
    result = search.finish()
    data = job.dataset.to_json()
    write_json(folder / "sweep.json", {**result.to_json(), "data": data, **provenance()})
    if result.test is not None:
        test, seeds = result.test, format_count(len(result.test.seeds), "seed")
        figure = estimate_text(test.primary, test.main)
        log.info(f"its settings on test: {test.primary.heading} {figure}, mean over {seeds}")
    return result


class _Search:
    """The trainings of a sweep, with the records of those that have finished."""

    def __init__(
        self,
        folder: Path,
        groups: Sequence[Mapping[str, PlannedTraining]],
        metric: Metric,
        options: SweepLoraOptions,
    ) -> None:
        self._folder, self._options, self._metric = folder, options, metric
        self._grid = Grid(groups, folder / _TRAININGS, metric, "dev", "training")

    def run(self, job: TrainingJob) -> None:
        """Run the trainings that have not finished; see ``sweep_lora``."""
        trainings, records = self._grid.trials, self._grid.records
        log.info(
            f"{len(trainings):,} trainings ({len(self._grid.groups):,} combinations of settings), "
            f"{len(records):,} of them already done"
        )
        n_missing = len(trainings) - len(records)
        gpus = _list_gpus(self._options, job)
        count = min(self._options.workers or max(1, len(gpus)), n_missing)
        queue = None
        if gpus and count > 1:
            queue = process_context(_PRELOAD).SimpleQueue()
            for number in range(count):
                queue.put(gpus[number % len(gpus)])
        self._grid.run(
            count,
            _prepare_training,
            queue,
            preload=_PRELOAD,
            on_success=self._keep_log,
            on_end=self._remove_weights,
        )

    def _keep_log(self, digest: str) -> None:
        """Copy the log of a training, whose folder may be removed, and send it to the trackers."""
        trained = log_path(self._folder / _TRAININGS / digest, TRAINING)
        if trained.is_file():  # an ensemble has the logs of its members
            path = log_path(self._folder, digest)
            write_text(path, trained.read_text(encoding="utf-8"))
            label = f"{self._folder.name}/{self._grid.trials[digest].label}"
            send_log(path, label, self._options.log)

    def _quality(self, digest: str) -> float:
        """Return the score on dev as a number that is higher for better trainings."""
        score = self._grid.records[digest].score("dev")[self._metric.name]
        if score is None:
            return -math.inf
        return float(score) if self._metric.higher_is_better else -float(score)

    def _rank(self, groups: Iterable[Iterable[str]]) -> list[list[str]]:
        """Return the finished trainings of each combination, those of the best one first.

        Combinations with failed trainings come last. Ties keep the order of the grid.
        """
        finished = [
            [digest for digest in group if digest in self._grid.records] for group in groups
        ]
        return sorted(
            filter(None, finished),
            key=lambda group: (-len(group), -statistics.fmean(map(self._quality, group))),
        )

    def _remove_weights(self) -> None:
        """Remove the weights of all trainings that cannot become the best.

        The best seed of a combination stays while its other seeds are trained.
        """
        if self._options.keep_all:
            return
        done = self._grid.records.keys() | self._grid.failures.keys()
        incomplete = [group for group in self._grid.groups if not done.issuperset(group)]
        groups = [*self._rank(self._grid.groups)[:1], *self._rank(incomplete)]
        needed = {max(group, key=self._quality) for group in groups}
        # A failed training can still become the best, if the same command tries it again.
        for digest in self._grid.records.keys() - needed:
            shutil.rmtree(self._folder / _TRAININGS / digest, ignore_errors=True)

    def finish(self) -> LoraSweepResult:
        """Keep the best training in the folder ``best``, and return the results."""
        ranked = self._rank(self._grid.groups)
        best_digest = max(ranked[0], key=self._quality)
        best = self._keep_best(best_digest)
        run = open_any_run(best)
        examples, metrics = load_examples(run), choose_metrics(run.task.metrics)

        def score(groups: Sequence[Sequence[str]], split: str) -> list[Result]:
            grid = self._grid
            trials = [[(grid.trials[d], grid.records[d]) for d in group] for group in groups]
            results = [combine_seeds(group, split) for group in trials]
            described, predictions = zip(*results, strict=True)
            return score_results(described, predictions, examples.scored_rows(split), metrics)

        scored = score(ranked, "dev")
        record = self._grid.records[best_digest]
        test = score(ranked[:1], "test")[0] if "test" in record.predictions else None
        summary = {**record.training, "run": str(best)}
        log.info(
            f"best on dev: {format_settings(scored[0].settings)}; seed {summary['seed']} -> {best}"
        )
        failures = list(self._grid.failures.values())
        return LoraSweepResult(Results(tuple(scored)), failures, TrainingResult(summary), test)

    def _keep_best(self, digest: str) -> Path:
        """Make a training the folder ``best``; train it again if its weights were removed."""
        best, trained = self._folder / _BEST, self._folder / _TRAININGS / digest
        folders = (best, *sorted(self._folder.glob(f"{_BEST}-*")), trained)
        record = self._grid.records[digest]
        source = next((path for path in folders if _is_trained(path, record)), None)
        if source == best:
            return best
        if source is None:
            source = trained
            log.info(f"training the best again, because its weights were removed: {digest}")
            self._grid.save(digest, _run_training(digest, self._grid.trials[digest]))
        if best.exists():  # of an earlier call; the user may have fitted heads on it
            names = (best.with_name(f"{_BEST}-{n}") for n in itertools.count(2))
            earlier = next(path for path in names if not path.exists())
            best.rename(earlier)
            log.info(f"{best} was the best of an earlier call, and is {earlier} now")
        if self._options.keep_all and source == trained:
            with create_folder_atomically(best) as folder:
                shutil.copytree(trained, folder, dirs_exist_ok=True)
        else:
            source.rename(best)
        return best


def _is_trained(folder: Path, record: TrialRecord) -> bool:
    """Return whether a folder holds the training of a record."""
    path = folder / RECORD
    return path.is_file() and digest_file(path) == record.training_sha256


def _list_gpus(options: SweepLoraOptions, job: TrainingJob) -> list[str]:
    """Return the GPUs to share among workers; empty: all use the device of the options."""
    if job.resolved.device == "cpu" or options.device not in ("auto", "cuda"):
        return []
    return list_gpus()


def _prepare_training(gpus: Any) -> Worker[PlannedTraining]:
    """Assign one GPU to this process, which PyTorch must not have looked for yet."""
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus.get()
    return _run_training


def _run_training(digest: str, training: PlannedTraining, position: str = "") -> TrialRecord:
    """Train, and return the record of the training."""
    if position:
        log.info(f"training {position}: {training.label}")
    summary = run_training(training.job).to_json()
    run = open_any_run(training.job.folder)
    head, examples = run.load_head(summary["head"]), load_examples(run)
    splits = [scores["split"] for scores in summary["scores"]]
    if "dev" not in splits:
        raise LlmcondError("it has no score on dev")
    fit = head.head.fit.record
    best_step, curve = fit.get("best_step"), fit.get("curve", ())
    best_epoch = next((e["epoch"] for e in curve if e["step"] == best_step), None)
    return TrialRecord(
        scores=summary["scores"],
        predictions={split: examples.predict(head, split).tolist() for split in splits},
        recipe=training.recipe.to_json(),
        # As heads on frozen features have it.
        fit={**fit, "best_epoch": best_epoch},
        dev_score=summary["scores"][splits.index("dev")][run.dev_metric],
        training=summary,
        training_sha256=digest_file(training.job.folder / RECORD),
    )
