"""``llmcond train-lora``: train an encoder's adapters, or all of its weights, with a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import RESUMES, Command, as_function
from llmcond.workflows.options.training import TrainLoraOptions

if TYPE_CHECKING:
    from llmcond.workflows.training_record import TrainingResult


@dataclass(frozen=True, kw_only=True)
class TrainLora(TrainLoraOptions, Command):
    """Train the LoRA adapters, or all weights, of an encoder together with a head.

    If interrupted, the same command resumes from the last checkpoint.
    """

    position = 40
    example = "llmcond train-lora --model minilm --head none --run runs/tuned"
    if_interrupted = RESUMES

    def execute(self) -> TrainingResult:
        """Train the encoder and the head.

        Returns:
            A ``TrainingResult`` with the training record: the run's folder, the head's name, the
            numbers of steps and trained weights, and the scores.

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
            >>> result = llmcond.train_lora(model="minilm", data=rows, head="none", epochs=1)
            >>> result.run
            PosixPath('runs/default')
        """
        from llmcond.workflows.train import train_lora

        return train_lora(self)


train_lora = as_function(TrainLora)
