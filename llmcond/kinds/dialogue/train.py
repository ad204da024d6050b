"""Joint training of an encoder and a head for the roles of utterances, into a new run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from llmcond.errors import UserError
from llmcond.kinds.dialogue.data import Dialogues
from llmcond.kinds.dialogue.fit import check_turns
from llmcond.kinds.dialogue.inputs import UtteranceInputs
from llmcond.kinds.dialogue.model import DialogueInputs, TurnModel
from llmcond.kinds.dialogue.roles import FittedRoleHead, load_roles_head
from llmcond.kinds.dialogue.task import DialogueTask
from llmcond.workflows.options.training import TrainLoraOptions
from llmcond.workflows.training import RankingJob, TrainingParts
from llmcond.workflows.training_options import DataReader

if TYPE_CHECKING:
    from llmcond.finetune.loading import TrainableEncoder


def plan_dialogues(
    options: TrainLoraOptions, task: DialogueTask, read: DataReader | None = None
) -> RankingJob:
    """Plan the training of an encoder and a head on dialogues; see ``Kind.plan_training``.

    Raises:
        UserError: The input is invalid, or the head is for another task.
        LlmcondError: The encoder cannot be loaded.
    """
    return _DialogueJob.from_options(options, task, load_roles_head, check_turns, read)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DialogueJob(RankingJob):
    """Trains an encoder of utterances, and a head that maps them to their roles."""

    unit: ClassVar[str] = "dialogues"
    scored_noun: ClassVar[str] = "next turns"

    task: DialogueTask
    dataset: Dialogues
    start: FittedRoleHead | None

    def build_parts(self, trainable: TrainableEncoder) -> TrainingParts:
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
        return TrainingParts(model, train, dev)
