"""The training record (``training.json``) of a trained encoder, and its check against new options.

The record identifies a training, so that the same command finds it finished.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from llmcond.base.errors import UserError
from llmcond.base.files import read_json
from llmcond.base.metrics import Estimate
from llmcond.base.output import Displayed, log
from llmcond.base.records import check_record, read_record
from llmcond.base.run_log import LOGS
from llmcond.encoders import ResolvedEncoder
from llmcond.encoders.adapter import TRAINING_RECORD
from llmcond.finetune.settings import TuneSettings, describe_differences
from llmcond.options.training import TrainCrossOptions, TrainLoraOptions
from llmcond.runs import open_any_run

#: The version of the training record's format.
TRAINING_FORMAT = 1
#: The training record's file, and the folder that holds the state of a training in progress.
RECORD, STATE = TRAINING_RECORD, "training"


@dataclass(frozen=True)
class _TrainingConfig:
    settings: Mapping[str, Any]
    head: Mapping[str, Any]
    objective: Mapping[str, Any] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Summary:
    scores: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class _TrainingRecord:
    """The fields of a training record that are read."""

    made_of: _TrainingConfig
    summary: _Summary


@dataclass(frozen=True)
class TrainingResult(Displayed):
    """The result of training an encoder with its head.

    Attributes:
        record: the summary of the training: the run's folder, the names of encoder and head, seed,
            steps, seconds, and the scores on dev and test. Empty in the worker processes of a
            distributed training.

    Examples:
        >>> import llmcond
        >>> scores = [{"split": "test", "spearman": 0.62, "spearman_ci": [0.58, 0.66]}]
        >>> result = llmcond.TrainingResult({"run": "runs/tuned", "scores": scores})
        >>> result.run.name
        'tuned'
        >>> result.metrics["spearman"].value
        0.62
    """

    record: Mapping[str, Any]

    @property
    def run(self) -> Path:
        """The folder of the run, which also holds the encoder."""
        return Path(self.record["run"])

    @property
    def metrics(self) -> dict[str, Estimate]:
        """The scores on test, or on dev if there is no test split; empty without rated rows."""
        scores = self.record.get("scores", ())[-1:]
        return {
            name: Estimate.from_json(row[name], row[f"{name}_ci"])
            for row in scores
            for name in row
            if f"{name}_ci" in row
        }

    @override
    def to_json(self) -> dict[str, Any]:
        return dict(self.record)


def training_config(
    options: TrainLoraOptions | TrainCrossOptions,
    resolved: ResolvedEncoder,
    dataset: Any,
    settings: TuneSettings,
    code: Sequence[str],
    **head: Any,
) -> dict[str, Any]:
    """Return everything that decides the weights of an encoder and its head, for the record.

    Args:
        options: the options of the command, of which the seed and ``merge`` are recorded.
        resolved: the encoder that is trained.
        dataset: the data that it is trained on.
        settings: the settings of the training.
        code: modules of users' files that it uses, whose names change with the files.
        head: what decides the head and its inputs.
    """
    return {
        "encoder": resolved.identity.to_json(),
        "data": dataset.digest,
        **head,
        "seed": options.seed,
        "settings": asdict(settings),
        "merge": options.merge,
        **({"code": code, "task": options.task} if code else {}),
    }


def read_trained_prompts(folder: Path) -> dict[str, str]:
    """Return the digests, by name, of the prompts that a folder's encoder was trained with.

    The dictionary is empty if they are not recorded.

    Raises:
        UserError: the training record is damaged.
    """
    if not (folder / RECORD).is_file():
        return {}
    record = read_record(
        folder / RECORD, _TrainingRecord, "Name the prompt: --prompt NAME_OR_FILE."
    )
    return dict(record.made_of.prompts)


def load_finished_training(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the summary of a training that has finished in a folder, and log that it is reused.

    Args:
        folder: the run's folder.
        config: everything that decides the weights of the training that is asked for.

    Returns:
        The summary; None if no training has finished there.

    Raises:
        UserError: the folder holds something else, or was trained with other settings.
    """
    if not folder.exists():
        return None
    path, problem = folder / RECORD, ""
    if not folder.is_dir():
        problem = "is a file"
    elif path.is_file():
        record = read_json(path)
        check_record(record, _TrainingRecord, str(path), "Train into a new --run.")
        # A kill after the record was written leaves the state.
        shutil.rmtree(folder / STATE, ignore_errors=True)
        is_cross = ["orders" in training for training in (record["made_of"], config)]
        changes = describe_differences(record["made_of"], config)
        if not changes:
            log.info(f"{folder} is already trained with the same settings; nothing to do")
            summary: dict[str, Any] = record["summary"]
            return {**summary, "run": str(folder)}
        problem = f"holds an encoder that was trained with other settings: {'; '.join(changes)}"
        if is_cross[0] != is_cross[1]:
            content = "a cross-encoder" if is_cross[0] else "an encoder with its head"
            problem = f"already holds {content}, which is a different kind of model"
    elif not (folder / STATE).is_dir():
        # A training that was stopped before its first checkpoint leaves a log.
        other_files = [p.name for p in folder.iterdir() if p.name not in (LOGS, ".lock")]
        if (folder / "run.json").is_file():
            name = open_any_run(folder, cross=True).encoder_name
            problem = (
                f"holds features of the frozen encoder {name}, which differ from those of a "
                "trained one"
            )
        elif other_files:
            problem = f"holds other files ({other_files[0]})"
    if problem:
        raise UserError(f"{folder} {problem}. Name another --run.")
    return None
