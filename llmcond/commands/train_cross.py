"""``llmcond train-cross``: train an encoder to rate two sentences and a condition at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import RESUMES, Command, verb
from llmcond.workflows.options.training import TrainCrossOptions

if TYPE_CHECKING:
    from llmcond.workflows.account import TrainingResult


@dataclass(frozen=True, kw_only=True)
class TrainCross(TrainCrossOptions, Command):
    """Train a cross-encoder: it reads both sentences and the condition at once, and rates them.

    It compares two texts, and has no embeddings. Stopped, the same command goes on.
    """

    position = 50
    example = "llmcond train-cross --model minilm --run runs/cross"
    if_interrupted = RESUMES

    def execute(self) -> TrainingResult:
        """Train."""
        from llmcond.workflows.cross import train_cross

        return train_cross(self)


train_cross = verb(TrainCross)
