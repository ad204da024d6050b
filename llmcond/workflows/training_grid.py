"""The trainings of a sweep: every combination of settings, each with several seeds."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmcond.data.datasets import DataOptions
from llmcond.errors import UserError, nearest
from llmcond.files import digest_text
from llmcond.finetune.settings import StageSettings
from llmcond.heads import load_recipe
from llmcond.heads.settings import ObjectiveSettings
from llmcond.log import log
from llmcond.options import options_of, parse_value
from llmcond.runs.kind import find_kind
from llmcond.runs.trials import AnyTrial, format_settings
from llmcond.tasks import AnyTask, find_task
from llmcond.workflows.extract import read_data
from llmcond.workflows.options.common import LogOption, RunOption, TaskOptions
from llmcond.workflows.options.training import SweepLoraOptions, TrainLoraOptions
from llmcond.workflows.train_job import TrainingJob

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
        job: the training. Its folder is named by the digest.
        digest: a digest of everything that decides the trained weights.
    """

    job: TrainingJob
    digest: str


def plan_trainings(options: SweepLoraOptions, folder: Path) -> list[list[PlannedTraining]]:
    """Return the trainings of each combination of settings, one for each seed.

    Everything is checked before the first training. Combinations that amount to the same training
    are planned once.

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
    # Ensembles train with several seeds each, which must not overlap.
    seeds = range(options.seed, options.seed + options.seeds * options.ensemble, options.ensemble)
    read = _share_data()
    planned: dict[str, list[PlannedTraining]] = {}
    for number, values in enumerate(grid):
        texts = dict(zip(varied, values, strict=True))
        trainings = []
        with _quiet(number > 0):
            try:
                for seed in seeds:
                    trainings.append(_plan(_with_settings(base, texts, seed), task, read, texts))
            except UserError as error:
                where = f"--vary {format_settings(texts)}: " if texts else ""
                raise UserError(f"{where}{str(error).removeprefix('--set: ')}") from error
        job = trainings[0].job
        if not number:
            _check_dev(job)
        planned.setdefault(
            trainings[0].digest,
            [
                replace(training, job=replace(training.job, folder=folder / training.digest))
                for training in trainings
            ],
        )
    return list(planned.values())


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


def _with_settings(base: TrainLoraOptions, texts: Mapping[str, str], seed: int) -> TrainLoraOptions:
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
    return replace(base, **values, set=head or None, seed=seed)


def _plan(
    options: TrainLoraOptions, task: AnyTask[Any], read: Any, texts: Mapping[str, str]
) -> PlannedTraining:
    job: Any = find_kind(task.kind).plan_training(options, task, read)
    head = {**job.config.get("objective", {}), **job.config["head"]}
    settings = {}
    for key in texts:
        name = key.partition("+")[0]
        is_option = hasattr(options, name)
        value = getattr(options, name) if is_option else head[name.removeprefix(_HEAD)]
        settings[key] = "+".join(value) if isinstance(value, tuple) else value
    digest = digest_text(json.dumps(job.config, sort_keys=True))
    return PlannedTraining(job.recipe, job.seed, settings, job, digest)


def _check_dev(job: TrainingJob) -> None:
    """Raise a UserError unless dev can choose among trainings."""
    splits: Mapping[str, Any] = job.dataset.splits  # type: ignore[attr-defined]
    dev = splits.get("dev")
    if "dev" in job.trained_on:
        raise UserError(
            "sweep-lora chooses the best settings on dev, and this training, its encoder or its "
            "teacher uses dev as training data. Leave out --then, and train the best settings "
            "with it afterwards: llmcond train-lora"
        )
    if dev is None or not len(dev) or not np.any(getattr(dev, "rated", True)):
        raise UserError(
            f"sweep-lora chooses the best settings on dev, and {job.dataset.source} has no dev "
            f"split with {job.unit}. Add one."
        )


def _share_data() -> Any:
    """Return a reader that reads the same data only once."""
    datasets: dict[tuple[str, ...], Any] = {}

    def read(task: AnyTask[Any], options: DataOptions) -> Any:
        # Prompts may need further columns; all other options are the same.
        key = tuple(options.extra)
        if key not in datasets:
            datasets[key] = read_data(task, options)
        return datasets[key]

    return read


@contextmanager
def _quiet(active: bool) -> Iterator[None]:
    """Do not log notes, which each plan would repeat, if ``active``."""
    level = log.level
    if active:
        log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)
