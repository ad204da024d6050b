"""``llmcond train-lora``: train an encoder's adapters, or all of its weights, with a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import RESUMES, Command, verb
from llmcond.workflows.options.training import TrainLoraOptions

if TYPE_CHECKING:
    from llmcond.workflows.account import TrainingResult


@dataclass(frozen=True, kw_only=True)
class TrainLora(TrainLoraOptions, Command):
    """Train an encoder's adapters and a head together; stopped, the same command goes on."""

    position = 40
    example = "llmcond train-lora --model minilm --head none --run runs/tuned"
    if_interrupted = RESUMES

    def execute(self) -> TrainingResult:
        """Train."""
        from llmcond.workflows.finetune import train_lora

        return train_lora(self)


train_lora = verb(TrainLora)
