"""Train an encoder and a head together, into a run whose folder is the encoder's too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from llmcond.bundled import bundled_names
from llmcond.config import build
from llmcond.data.aspects import AspectSample, read_sets, set_files
from llmcond.data.rows import Rows
from llmcond.encoders import ResolvedEncoder
from llmcond.errors import UserError
from llmcond.features.view import View, view_of
from llmcond.files import digest_file
from llmcond.finetune.aspects import AspectGroups, AspectModel
from llmcond.finetune.model import HeadPlan, RatedInputs, TunedModel
from llmcond.finetune.settings import AspectSettings, StageSettings
from llmcond.heads import FittedHead, Recipe, load_head, load_recipe
from llmcond.heads.objectives import check_contrasts
from llmcond.heads.recipes import parse_settings
from llmcond.heads.settings import ObjectiveSettings
from llmcond.log import log
from llmcond.prompts import fields_of, load_prompt
from llmcond.runs import Run
from llmcond.runs.features import RowFeatures
from llmcond.runs.kind import find_kind
from llmcond.runs.predictors import predict
from llmcond.runs.trials import sized
from llmcond.tasks import Task, find_task
from llmcond.workflows.account import TrainingResult, made_of
from llmcond.workflows.ensemble import check_ensemble, train_ensemble
from llmcond.workflows.extract import check_prompts, check_routed
from llmcond.workflows.last_stage import check_folds, stage_settings, stage_splits
from llmcond.workflows.options.training import HeadChoice, TeacherOptions, TrainLoraOptions
from llmcond.workflows.teacher import find_teacher
from llmcond.workflows.trainable import named_head, rated_dataset, resolve_trainable, tune_settings
from llmcond.workflows.training import (
    Kept,
    Parts,
    RatedJob,
    keep_head,
    scores_of,
    train,
)

if TYPE_CHECKING:
    from llmcond.encoders.engine.tokenizing import InputTokenizer
    from llmcond.finetune.build import Trainable


def train_lora(asked: TrainLoraOptions) -> TrainingResult:
    """Train an encoder's adapters, or all of its weights, and a head behind it.

    Stopped at any step, the same call goes on from the last checkpoint, and ends as if it had not
    been stopped: on one CPU with the same number of threads to the last bit.

    Raises:
        UserError: wrong input, a run of something else, or a loss that became NaN.
        LlmcondError: the encoder cannot be loaded or trained.
    """
    task = find_task(asked.task)
    result: TrainingResult = find_kind(task.kind).train(asked, task)
    return result


def train_pairs(asked: TrainLoraOptions, task: Task) -> TrainingResult:
    """Train on rated pairs; see :func:`train_lora`."""
    stage, taught = stage_settings(asked.part(StageSettings)), asked.part(TeacherOptions)
    learned = None if asked.aspects is None else asked.part(AspectSettings)
    plan = _plan(asked)
    tuning = tune_settings(asked.tune_settings(), plan.recipe)
    dataset = rated_dataset(task, replace(asked.data_options(), extra=fields_of(plan.prompts)))
    if stage is not None:
        stage_splits(dataset, stage)  # told before training rather than after it
    folder = None if taught.teacher is None else Path(taught.teacher)
    teacher = find_teacher(folder, taught.teacher_rows, dataset)
    sets = [] if learned is None else read_sets(Path(str(learned.aspects)))
    model, options, merge = asked.model, asked.encoder_options(), asked.merge
    resolved = resolve_trainable(model, options, tuning, merge)
    knowing = [f"the teacher {taught.teacher}"] if teacher and teacher.knows_dev(dataset) else []
    check_folds(stage, model, resolved, dataset, *knowing)
    plan, view = _with_prompts(plan, resolved, task)
    check_routed(plan.prompts, options, task)
    own = {
        **made_of(resolved, dataset, plan.prompts, plan.recipe, asked, tuning, merge),
        "subtract": plan.subtract,
        "objective": asdict(plan.objective),
        **({} if stage is None else {"then": asdict(stage)}),
        **({} if teacher is None else {"teacher": dict(teacher.record)}),
        **({} if learned is None else {"aspects": _aspects_record(learned)}),
    }
    check_ensemble(asked.ensemble, plan, resolved, tuning, merge)
    job = _HeadJob(
        model=model,
        resolved=resolved,
        folder=Path(asked.run),
        task=task,
        dataset=dataset,
        settings=tuning,
        head=plan.recipe.name,
        seed=plan.seed,
        merge=merge,
        made_of=own,
        plan=plan,
        view=view,
        stage=stage,
        teacher=teacher,
        aspects=learned,
        sets=sets,
    )
    if asked.ensemble == 1:
        return train(job)
    whole = replace(job, made_of={**own, "ensemble": asked.ensemble})
    return train_ensemble(whole, [job.member(number) for number in range(asked.ensemble)])


def _aspects_record(settings: AspectSettings) -> dict[str, Any]:
    """Return what decides the groups that are drawn: settings, and the digest of each set."""
    files = set_files(Path(str(settings.aspects)))
    digests = {name: digest_file(path) for name, path in files.items()}
    return {**asdict(settings), "aspects": digests}


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadJob(RatedJob):
    """An encoder of each text, and a head that compares their embeddings."""

    plan: HeadPlan
    view: View
    aspects: AspectSettings | None = None
    sets: Sequence[AspectSample] = ()

    def member(self, number: int) -> _HeadJob:
        """Return the same with another seed, for a member of an ensemble."""
        seed = self.seed + number
        made = {**self.made_of, "seed": seed}
        return replace(self, seed=seed, plan=replace(self.plan, seed=seed), made_of=made)

    def parts(self, trainable: Trainable) -> Parts:
        plan, view = replace(self.plan, metric=self.task.main_metric), self.view
        dim = trainable.engine.dim
        dims = dim * len(view.prompts), dim if view.conditioned else 0
        if plan.start is None:
            plan = replace(plan, recipe=sized(plan.recipe, None, dims[0]))
        train = self.inputs(self.taught_train(), trainable.tokenizer)
        dev = self.rated_dev()
        counts = check_contrasts(train.pair, train.rating, plan.objective)
        if counts:
            log.info(f"contrastive pairs: {counts['n_contrastive_pairs']:,} in {len(train):,} rows")
        scored = None if dev is None else self.inputs(dev, trainable.tokenizer)
        if self.aspects is None:
            return Parts(TunedModel(trainable.engine, plan, dims), train, scored)
        groups = AspectGroups(self.sets, self.aspects)
        model = AspectModel(trainable.engine, plan, dims, groups, trainable.tokenizer)
        return Parts(model, train, scored)

    def about(self) -> dict[str, Any]:
        """See :class:`RatedJob`; the sets of texts with attributes by their names."""
        record = RatedJob.about(self)
        names = [sample.name for sample in self.sets]
        return {**record, "aspects": names} if names else record

    def inputs(self, rows: Rows, tokenizer: InputTokenizer) -> RatedInputs:
        """See :class:`RatedJob`."""
        return RatedInputs.of(rows, self.view, tokenizer)

    def keep(self, head: FittedHead) -> Kept:
        (made, resolved), view = self.complete(), self.view
        run = cast(Run, made)
        kept = keep_head(run, resolved, head, self.plan.recipe, view)
        saved = run.load_head(kept.name)

        def predicted(rows: Rows) -> NDArray[np.float32]:
            return predict(saved, RowFeatures(rows, run.store()).pairs(view))

        takes = {**kept.takes, "subtract": view.subtracts}
        return replace(kept, takes=takes, scores=scores_of(run, saved, predicted))


def _plan(choice: HeadChoice) -> HeadPlan:
    recipe, prompts, start, record = named_head(choice, None, _load)
    subtract = record.get("subtract", False) if choice.subtract is None else choice.subtract
    recipe, objective = _changed(recipe, dict(choice.set or {}), choice.dim)
    return HeadPlan(recipe, objective, choice.seed, prompts, subtract, start)


def _load(folder: Path) -> tuple[FittedHead, dict[str, Any]]:
    """Read a head that has embeddings, and its record."""
    start, record = load_head(folder)
    if start.family.no_recipe:
        raise UserError(
            f"{folder} {start.family.no_recipe}. Start from a head that fit-head or train-lora "
            "made."
        )
    return start, record


def _changed(
    recipe: Recipe, changes: dict[str, str], dim: int | None
) -> tuple[Recipe, ObjectiveSettings]:
    """Return a recipe with ``--set`` and ``--dim``, and what is minimised."""
    if not _trains(recipe):
        can = [name for name in bundled_names("heads") if _trains(load_recipe(name))]
        raise UserError(
            f"the head {recipe.name} is not fitted by gradients, so it cannot be trained with an "
            f"encoder. Heads that can: {', '.join(can)}; or fit it afterwards on the trained "
            "encoder: llmcond fit-head."
        )
    if recipe.is_identity:
        # There is no head to set anything of, but what is minimised has settings too.
        given = parse_settings(ObjectiveSettings, changes, "--set", "no head")
    else:
        if changes:
            recipe = recipe.with_settings(recipe.parse_changes(changes, "--set"), "--set")
        given = {
            item.name: getattr(recipe.settings, item.name) for item in fields(ObjectiveSettings)
        }
    if dim is not None:
        recipe = sized(recipe, dim, dim)
    if getattr(recipe.settings, "members", 1) > 1:
        raise UserError(
            f"the head {recipe.name} has {recipe.settings.members} members, each fitted by itself; "
            "with an encoder one is trained. Give --set members=1."
        )
    return recipe, build(ObjectiveSettings, given, "--set")


def _trains(recipe: Recipe) -> bool:
    return recipe.family.supervised or recipe.is_identity


def _with_prompts(plan: HeadPlan, resolved: ResolvedEncoder, task: Task) -> tuple[HeadPlan, View]:
    """Return the plan with prompts, those named or what suits encoder and head, and its view."""
    apart, joint = [load_prompt("separate")], [load_prompt(resolved.joint_prompt)]
    suits = {"separate": apart, "joint": joint, "both": [*joint, *apart]}
    prompts = plan.prompts or tuple(suits[plan.recipe.features])
    check_prompts(prompts, resolved, task)
    # Separate features stand last: heads that take both kinds find them there.
    ordered = tuple(sorted(prompts, key=lambda prompt: prompt.separate))
    view = view_of(plan.recipe, ordered, plan.subtract)
    view.check_texts()
    return replace(plan, prompts=ordered), view
