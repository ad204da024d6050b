"""``llmcond train-cross``: train a cross-encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import RESUMES, Command, as_function
from llmcond.workflows.options.training import TrainCrossOptions

if TYPE_CHECKING:
    from llmcond.workflows.training_record import TrainingResult


@dataclass(frozen=True, kw_only=True)
class TrainCross(TrainCrossOptions, Command):
    """Train a cross-encoder, which reads both sentences and the condition together and rates them.

    A cross-encoder compares two texts, but has no embeddings. If interrupted, the same command
    resumes from the last checkpoint.
    """

    position = 50
    example = "llmcond train-cross --model minilm --run runs/cross"
    if_interrupted = RESUMES

    def execute(self) -> TrainingResult:
        """Train the cross-encoder.

        Returns:
            A ``TrainingResult`` with the training record: the run's folder, the numbers of steps
            and trained weights, and the scores.

        Raises:
            UserError: an option or the data is invalid, the run holds something else, or the loss
                became NaN.
            LlmcondError: the encoder cannot be loaded or trained.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> result = llmcond.train_cross(model="minilm", data=rows, epochs=1)
            >>> result.run
            PosixPath('runs/default')
        """
        from llmcond.workflows.train import train_cross

        return train_cross(self)


train_cross = as_function(TrainCross)
