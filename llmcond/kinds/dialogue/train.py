"""Joint training of an encoder and a head for the roles of utterances, into a new run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from llmcond.errors import UserError
from llmcond.kinds.dialogue.data import Dialogues
from llmcond.kinds.dialogue.fit import check_turns
from llmcond.kinds.dialogue.inputs import UtteranceInputs
from llmcond.kinds.dialogue.model import DialogueInputs, TurnModel
from llmcond.kinds.dialogue.roles import FittedRoles, load_roles_head
from llmcond.kinds.dialogue.task import Dialogue
from llmcond.workflows.account import TrainingResult
from llmcond.workflows.options.training import TrainLoraOptions
from llmcond.workflows.training import Parts, RankingJob, train

if TYPE_CHECKING:
    from llmcond.finetune.build import Trainable


def train_dialogues(options: TrainLoraOptions, task: Dialogue) -> TrainingResult:
    """Train the adapters of an encoder and a head on dialogues; see ``train_lora``.

    Raises:
        UserError: The input is invalid, or the head is for another task.
        LlmcondError: The encoder cannot be loaded or trained.
    """
    return train(_DialogueJob.of(options, task, load_roles_head, check_turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class _DialogueJob(RankingJob):
    """Trains an encoder of utterances, and a head that maps them to their roles."""

    unit: ClassVar[str] = "dialogues"
    scored: ClassVar[str] = "next turns"

    task: Dialogue
    dataset: Dialogues
    start: FittedRoles | None

    def parts(self, trainable: Trainable) -> Parts:
        splits, (prompt,) = self.dataset.splits, self.view.prompts
        metric = self.task.main_metric
        model = TurnModel(trainable.engine, self.recipe, self.seed, self.start, metric)
        tokens = trainable.tokenizer(UtteranceInputs(self.dataset.texts, prompt))
        train = DialogueInputs(splits["train"], tokens, self.recipe.settings)
        if not len(train):
            raise UserError(
                f"no dialogue of {self.dataset.source} has enough turns for training. Give longer "
                "dialogues."
            )
        dev = replace(train, turns=splits["dev"]) if "dev" in splits else None
        return Parts(model, train, dev)
