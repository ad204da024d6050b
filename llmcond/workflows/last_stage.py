"""The last stage of a training, on dev as well: what is asked for, and its account."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcond.data.datasets import Dataset
from llmcond.data.rows import Rows
from llmcond.encoders import ResolvedEncoder
from llmcond.errors import UserError
from llmcond.evaluation.folds import check_fold_count
from llmcond.finetune.settings import StageSettings
from llmcond.log import log
from llmcond.report.format import folds_text

if TYPE_CHECKING:
    from llmcond.finetune.stage import LastStage


@dataclass(frozen=True)
class Staged:
    """How a last stage went.

    Attributes:
        record: ``then``: the stage's settings, steps and seconds, and, where they were asked for,
            its ``folds``.
        curve: an entry for each epoch: its loss.
    """

    record: dict[str, Any]
    curve: list[dict[str, Any]]

    @property
    def steps(self) -> int:
        """Return how many steps it had."""
        return int(self.record["then"]["steps"])


def stage_settings(stage: StageSettings) -> StageSettings | None:
    """Check what was asked for; None: no last stage.

    Raises:
        UserError: a single fold.
    """
    if stage.then is None:
        return None
    if stage.folds == 1:
        raise UserError("--folds is 1; expected 2 or more, or 0 for none.")
    return stage


def stage_splits(dataset: Dataset, stage: StageSettings) -> tuple[Rows, Rows]:
    """Return the rated rows of train and of dev.

    Raises:
        UserError: there are none of dev, or fewer of their sentence pairs than folds.
    """
    train, dev = dataset.splits["train"], dataset.splits.get("dev")
    if dev is None or not dev.rated.any():
        raise UserError(
            f"{dataset.source} has no rated rows of dev to train on. Leave out --then, or add a "
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
    *knowing: str,
) -> None:
    """Raise a UserError for folds of dev where it says nothing, as the encoder has seen it.

    ``model`` is the encoder's name, and ``knowing`` are others that have seen dev.
    """
    known = [model] if resolved.checkpoint.dev_of == dataset.digest else []
    if stage is not None and stage.folds and (known or knowing):
        raise UserError(
            f"{[*known, *knowing][0]} was trained on dev, so that folds of dev say nothing. Leave "
            "out --folds."
        )


def run_stage(last: LastStage[Any]) -> Staged:
    """Tell by folds what the stage brings, where that is asked for, and train it."""
    found: dict[str, Any] = {}
    if last.stage.folds:
        folded = last.folds()
        log.info(folds_text(folded))
        found["folds"] = folded.to_json()
    progress = last.run()
    stage = last.stage
    then = {
        "share": stage.then_share,
        "weight": stage.then_weight,
        "learning_rate": last.settings.learning_rate * stage.pace(last.settings),
        "epochs": stage.then_epochs,
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        **found,
    }
    curve = [{key: own[key] for key in ("step", "epoch", "loss")} for own in progress.curve]
    return Staged({"then": then}, curve)
