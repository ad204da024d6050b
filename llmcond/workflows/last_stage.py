"""The options, checks and training record of a last training stage, which includes dev."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcond.data.datasets import Dataset
from llmcond.data.rows import Rows
from llmcond.encoders import ResolvedEncoder
from llmcond.errors import UserError
from llmcond.evaluation.dev_gain import check_fold_count
from llmcond.finetune.settings import StageSettings
from llmcond.log import log
from llmcond.report.tables import dev_gain_text

if TYPE_CHECKING:
    from llmcond.finetune.stage import LastStage


@dataclass(frozen=True)
class StageResult:
    """The outcome of a last stage.

    Attributes:
        record: under the key ``then``, the stage's settings, steps and seconds, and
            ``folds`` if they were evaluated.
        curve: the loss of each epoch.
    """

    record: dict[str, Any]
    curve: list[dict[str, Any]]

    @property
    def steps(self) -> int:
        """The number of steps."""
        return int(self.record["then"]["steps"])


def check_stage_settings(stage: StageSettings) -> StageSettings | None:
    """Return the checked settings of the last stage; None if there is none.

    Raises:
        UserError: there is a single fold.
    """
    if stage.then is None:
        return None
    if stage.folds == 1:
        raise UserError("--folds is 1; expected 2 or more, or 0 for none.")
    return stage


def read_stage_splits(dataset: Dataset, stage: StageSettings) -> tuple[Rows, Rows]:
    """Return the rated rows of train and of dev.

    Raises:
        UserError: dev has no rated rows, or fewer sentence pairs than folds.
    """
    train, dev = dataset.splits["train"], dataset.splits.get("dev")
    if dev is None or not dev.rated.any():
        raise UserError(
            f"{dataset.source} has no rated rows in dev to train on. Leave out --then, or add a "
            "dev file."
        )
    dev = dev.take(dev.rated)
    check_fold_count(dev, stage.folds)
    return train.take(train.rated), dev


def check_folds(
    stage: StageSettings | None,
    model: str,
    resolved: ResolvedEncoder,
    dataset: Dataset,
    *others: str,
) -> None:
    """Raise a UserError for folds of dev if the encoder or another model was trained on dev.

    Args:
        stage: the last stage; None: there is none.
        model: the name of the encoder.
        resolved: the encoder.
        dataset: the dataset with the dev rows.
        others: the names of other models, such as a teacher, that were trained on dev.
    """
    sources = [model] if resolved.checkpoint.dev_digest == dataset.digest else []
    if stage is not None and stage.folds and (sources or others):
        raise UserError(
            f"{[*sources, *others][0]} was trained on dev, so folds of dev would measure nothing. "
            "Leave out --folds."
        )


def run_stage(last_stage: LastStage[Any]) -> StageResult:
    """Train the last stage; with folds, first measure its gain by cross-validation on dev."""
    fold_record: dict[str, Any] = {}
    if last_stage.stage.folds:
        fold_results = last_stage.cross_validate()
        log.info(dev_gain_text(fold_results))
        fold_record["folds"] = fold_results.to_json()
    progress = last_stage.run()
    stage = last_stage.stage
    record = {
        "share": stage.then_share,
        "weight": stage.then_weight,
        "learning_rate": last_stage.settings.learning_rate
        * stage.learning_rate_scale(last_stage.settings),
        "epochs": stage.then_epochs,
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        **fold_record,
    }
    curve = [{key: entry[key] for key in ("step", "epoch", "loss")} for entry in progress.curve]
    return StageResult({"then": record}, curve)
