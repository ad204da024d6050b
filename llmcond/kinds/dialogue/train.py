"""Train an encoder and the roles of its utterances together on dialogues, into a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from llmcond.errors import UserError
from llmcond.features.view import view_of
from llmcond.kinds.dialogue.data import Dialogues
from llmcond.kinds.dialogue.fit import check_turns
from llmcond.kinds.dialogue.inputs import UtteranceInputs
from llmcond.kinds.dialogue.model import DialogueInputs, TurnModel
from llmcond.kinds.dialogue.roles import FittedRoles, load_roles_head
from llmcond.kinds.dialogue.task import Dialogue
from llmcond.prompts import load_prompt
from llmcond.workflows.account import TrainingResult, made_of
from llmcond.workflows.extract import check_prompts, read_data
from llmcond.workflows.options.training import TrainLoraOptions
from llmcond.workflows.trainable import (
    check_unrouted,
    chosen_head,
    refuse_rated_options,
    resolve_trainable,
    tune_settings,
)
from llmcond.workflows.training import Parts, RankingJob, train

if TYPE_CHECKING:
    from llmcond.finetune.build import Trainable


def train_dialogues(asked: TrainLoraOptions, task: Dialogue) -> TrainingResult:
    """Train an encoder's adapters and a head on dialogues; see :func:`train_lora`.

    Raises:
        UserError: wrong input, or a head of another task.
        LlmcondError: the encoder cannot be loaded or trained.
    """
    refuse_rated_options(asked, task)
    recipe, prompts, start = chosen_head(asked, task, load_roles_head, check_turns)
    tuning = tune_settings(asked.tune_settings(), recipe)
    dataset = read_data(task, asked.data_options())
    model, merge = asked.model, asked.merge
    resolved = resolve_trainable(model, asked.encoder_options(), tuning, merge)
    prompts = prompts or (load_prompt(str(task.prompt)),)
    check_prompts(prompts, resolved, task)
    check_unrouted(prompts, resolved)
    return train(
        _DialogueJob(
            model=model,
            resolved=resolved,
            folder=Path(asked.run),
            task=task,
            dataset=dataset,
            settings=tuning,
            head=recipe.name,
            seed=asked.seed,
            merge=merge,
            made_of=made_of(resolved, dataset, prompts, recipe, asked, tuning, merge),
            recipe=recipe,
            start=start,
            view=view_of(recipe, prompts, subtract=False),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _DialogueJob(RankingJob):
    """An encoder of utterances, and a head that maps them to their roles."""

    unit: ClassVar[str] = "dialogues"
    scored: ClassVar[str] = "next turns"

    task: Dialogue
    dataset: Dialogues
    start: FittedRoles | None

    def parts(self, trainable: Trainable) -> Parts:
        splits, (prompt,) = self.dataset.splits, self.view.prompts
        metric = self.task.main_metric
        model = TurnModel(trainable.engine, self.recipe, self.seed, self.start, metric)
        tokens = trainable.tokenizer(UtteranceInputs(self.dataset.texts, prompt).inputs)
        train = DialogueInputs(splits["train"], tokens, self.recipe.settings)
        if not len(train):
            raise UserError(
                f"no dialogue of {self.dataset.source} has turns enough to train on. Name others."
            )
        dev = replace(train, turns=splits["dev"]) if "dev" in splits else None
        return Parts(model, train, dev)
