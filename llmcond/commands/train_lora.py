"""``llmcond train-lora``: train an encoder's adapters, or all of its weights, with a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmcond.commands.base import RESUMES, verb
from llmcond.commands.shared import data_options
from llmcond.commands.training import Training
from llmcond.finetune.settings import AspectSettings, StageSettings
from llmcond.workflows.options import HeadChoice, TeacherOptions

if TYPE_CHECKING:
    from llmcond.workflows.account import TrainingResult


@dataclass(frozen=True, kw_only=True)
class TrainLora(HeadChoice, StageSettings, TeacherOptions, AspectSettings, Training):
    """Train an encoder's adapters and a head together; stopped, the same command goes on."""

    example: ClassVar[str] = "llmcond train-lora --model minilm --head none --run runs/tuned"
    if_interrupted: ClassVar[str] = RESUMES

    def execute(self) -> TrainingResult:
        """Train."""
        data = data_options(self)
        from llmcond.workflows.finetune import train_lora

        return self.call(
            train_lora,
            options=self.encoder_options(),
            run_folder=self.run,
            data=data,
            choice=self.part(HeadChoice),
            settings=self.tune_settings(),
            last_stage=self.part(StageSettings),
            taught=self.part(TeacherOptions),
            aspects=self.part(AspectSettings),
        )


train_lora = verb(TrainLora)
