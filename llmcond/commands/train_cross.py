"""``llmcond train-cross``: train an encoder to rate two sentences and a condition at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmcond.commands.base import RESUMES, verb
from llmcond.commands.shared import data_options
from llmcond.commands.training import Training
from llmcond.encoders.spec import Orders
from llmcond.finetune.settings import StageSettings
from llmcond.options import option

if TYPE_CHECKING:
    from llmcond.workflows.account import TrainingResult


@dataclass(frozen=True, kw_only=True)
class TrainCross(StageSettings, Training):
    """Train a cross-encoder: it reads both sentences and the condition at once, and rates them.

    It compares two texts, and has no embeddings. Stopped, the same command goes on.
    """

    example: ClassVar[str] = "llmcond train-cross --model minilm --run runs/cross"
    if_interrupted: ClassVar[str] = RESUMES

    orders: Orders = option(
        "both",
        help="of the two sentences. both: any in training, and the mean of both predictions; "
        "given: as the data has them, in half the time at prediction",
    )
    set: Mapping[str, str] | None = option(
        None,
        metavar="KEY=VALUE",
        help="settings of the linear layer: learning_rate, weight_decay, dropout",
    )
    seed: int = option(0, metavar="S", help="seed of everything random")

    def execute(self) -> TrainingResult:
        """Train."""
        data = data_options(self)
        from llmcond.workflows.cross import train_cross

        return self.call(
            train_cross,
            options=self.encoder_options(),
            run_folder=self.run,
            data=data,
            settings=self.tune_settings(),
            changes=self.set,
            last_stage=self.part(StageSettings),
        )


train_cross = verb(TrainCross)
