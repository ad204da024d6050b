"""Train an encoder and the roles of its utterances together on dialogues, into a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmcond.data.datasets import DataOptions
from llmcond.encoders import EncoderOptions
from llmcond.errors import UserError
from llmcond.features.view import View, view_of
from llmcond.finetune.dialogues import DialogueInputs, TurnModel
from llmcond.heads import FittedRoles, Recipe, load_roles_head, save_head
from llmcond.heads.turn_fit import check_turns
from llmcond.metrics import finite
from llmcond.prompts import load_prompt
from llmcond.prompts.utterances import UtteranceInputs
from llmcond.runs import complete_run, head_name, head_record
from llmcond.runs.dialogues import DialogueExamples
from llmcond.tasks.dialogue import Dialogue
from llmcond.tasks.dialogues import Dialogues
from llmcond.workflows.dialogues import evaluate_dialogues
from llmcond.workflows.extract import check_prompts, read_data
from llmcond.workflows.options import DialogueOptions, HeadChoice
from llmcond.workflows.training import (
    Job,
    Kept,
    Parts,
    Trained,
    check_unrouted,
    chosen_head,
    extract_trained,
    made_of,
    resolve_trainable,
    resolve_trained,
    train,
    tune_settings,
)

if TYPE_CHECKING:
    from llmcond.finetune.build import Trainable


def train_dialogues(
    model: str,
    options: EncoderOptions,
    run_folder: Path,
    data: DataOptions,
    choice: HeadChoice,
    settings: Mapping[str, Any],
    merge: bool,
    task: Dialogue,
) -> Trained:
    """Train an encoder's adapters and a head on dialogues; see :func:`train_lora`.

    Raises:
        UserError: wrong input, or a head of another task.
        LlmcondError: the encoder cannot be loaded or trained.
    """
    recipe, prompts, start = chosen_head(choice, task.name, load_roles_head, check_turns)
    tuning = tune_settings(settings, recipe)
    dataset = read_data(task, data)
    resolved = resolve_trainable(model, options, tuning, merge)
    prompts = prompts or (load_prompt(str(task.prompt)),)
    check_prompts(prompts, resolved, task)
    check_unrouted(prompts, resolved)
    return train(
        _DialogueJob(
            model=model,
            resolved=resolved,
            folder=run_folder,
            task=task,
            dataset=dataset,
            settings=tuning,
            head=recipe.name,
            seed=choice.seed,
            merge=merge,
            made_of=made_of(resolved, dataset, prompts, recipe, choice, tuning, merge),
            recipe=recipe,
            start=start,
            view=view_of(recipe, prompts, subtract=False),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _DialogueJob(Job):
    """An encoder of utterances, and a head that maps them to their roles."""

    unit: ClassVar[str] = "dialogues"
    scored: ClassVar[str] = "next turns"
    score: ClassVar[str] = "average rank"

    task: Dialogue
    dataset: Dialogues
    recipe: Recipe
    start: FittedRoles | None
    view: View

    def parts(self, trainable: Trainable) -> Parts:
        splits, (prompt,) = self.dataset.splits, self.view.prompts
        model = TurnModel(trainable.engine, self.recipe, self.seed, self.start)
        tokens = trainable.tokenizer(UtteranceInputs(self.dataset.texts, prompt).inputs)
        train = DialogueInputs(splits["train"], tokens, self.recipe.settings)
        if not len(train):
            raise UserError(
                f"no dialogue of {self.dataset.source} has turns enough to train on. Name others."
            )
        dev = replace(train, turns=splits["dev"]) if "dev" in splits else None
        return Parts(model, train, dev)

    def keep(self, head: FittedRoles) -> Kept:
        resolved, view, recipe = resolve_trained(self), self.view, self.recipe
        run = complete_run(self.folder, resolved, self.dataset, self.task)
        extract_trained(run, resolved, view.prompts)
        name = head_name(recipe.name, view)
        on_dev = finite(DialogueExamples(run).on_dev(head, view))
        record = {**head_record(run, view, recipe.to_json()), f"dev_{run.dev_metric}": on_dev}
        save_head(head, run.head_folder(name), record)
        scores = [
            result
            for split in ("dev", "test")
            if split in run.splits
            for result in evaluate_dialogues(run, [name], split, DialogueOptions())
            if result.name == name
        ]
        return Kept(name, {"prompt": view.name}, scores)
