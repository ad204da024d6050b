"""``llmcond train-lora``: train an encoder's adapters, or all of its weights, with a head."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from llmcond.commands.base import optional, verb
from llmcond.commands.shared import InRun, WithEncoder, WithTask, data_options
from llmcond.finetune.settings import TuneSettings
from llmcond.options import option
from llmcond.workflows.options import HeadChoice

if TYPE_CHECKING:
    from llmcond.workflows.training import Trained

    _TuneOptions = TuneSettings
else:
    # What is not given may be in the recipe's [finetune] table.
    _TuneOptions = optional(TuneSettings)


@dataclass(frozen=True, kw_only=True)
class TrainLora(HeadChoice, InRun, WithTask, WithEncoder, _TuneOptions):
    """Train an encoder's adapters and a head together; stopped, the same command goes on."""

    example: ClassVar[str] = "llmcond train-lora --model minilm --head none --run runs/tuned"

    merge: bool = option(False, help="write the full encoder, adapters merged into its weights")

    def execute(self) -> Trained:
        """Train."""
        data = data_options(self)
        from llmcond.workflows.finetune import train_lora

        given = {item.name: getattr(self, item.name) for item in fields(_TuneOptions)}
        return self.call(
            train_lora,
            options=self.encoder_options(),
            run_folder=self.run,
            data=data,
            choice=self.part(HeadChoice),
            settings={name: value for name, value in given.items() if value is not None},
        )


train_lora = verb(TrainLora)
