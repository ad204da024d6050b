"""Training an encoder and a head together, into a run whose folder also holds the encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

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


def train_lora(options: TrainLoraOptions) -> TrainingResult:
    """Train an encoder's adapters, or all of its weights, and a head behind it.

    A call that was stopped at any step continues from the last checkpoint, with the same result as
    without the stop; on one CPU with the same number of threads, the result is identical in every
    bit.

    Raises:
        UserError: the input is invalid, the run holds something else, or the loss became NaN.
        LlmcondError: the encoder cannot be loaded or trained.
    """
    task = find_task(options.task)
    result: TrainingResult = find_kind(task.kind).train(options, task)
    return result


def train_pairs(options: TrainLoraOptions, task: Task) -> TrainingResult:
    """Train on rated pairs; see ``train_lora``."""
    stage, teacher_options = (
        stage_settings(options.part(StageSettings)),
        options.part(TeacherOptions),
    )
    aspects = None if options.aspects is None else options.part(AspectSettings)
    plan = _plan_head(options)
    tuning = tune_settings(options.tune_settings(), plan.recipe)
    dataset = rated_dataset(task, replace(options.data_options(), extra=fields_of(plan.prompts)))
    if stage is not None:
        stage_splits(dataset, stage)  # reports errors before training, not after it
    folder = None if teacher_options.teacher is None else Path(teacher_options.teacher)
    teacher = find_teacher(folder, teacher_options.teacher_rows, dataset)
    sets = [] if aspects is None else read_sets(Path(str(aspects.aspects)))
    model, encoder_options, merge = options.model, options.encoder_options(), options.merge
    resolved = resolve_trainable(model, encoder_options, tuning, merge)
    dev_sources = (
        [f"the teacher {teacher_options.teacher}"] if teacher and teacher.knows_dev(dataset) else []
    )
    check_folds(stage, model, resolved, dataset, *dev_sources)
    plan, view = _add_prompts(plan, resolved, task)
    check_routed(plan.prompts, encoder_options, task)
    config = {
        **made_of(resolved, dataset, plan.prompts, plan.recipe, options, tuning, merge),
        "subtract": plan.subtract,
        "objective": asdict(plan.objective),
        **({} if stage is None else {"then": asdict(stage)}),
        **({} if teacher is None else {"teacher": dict(teacher.record)}),
        **({} if aspects is None else {"aspects": _record_aspects(aspects)}),
    }
    check_ensemble(options.ensemble, plan, resolved, tuning, merge)
    job = _HeadJob(
        model=model,
        resolved=resolved,
        folder=Path(options.run),
        task=task,
        dataset=dataset,
        settings=tuning,
        head=plan.recipe.name,
        seed=plan.seed,
        merge=merge,
        made_of=config,
        plan=plan,
        view=view,
        stage=stage,
        teacher=teacher,
        aspects=aspects,
        sets=sets,
    )
    if options.ensemble == 1:
        return train(job)
    ensemble_job = replace(job, made_of={**config, "ensemble": options.ensemble})
    return train_ensemble(ensemble_job, [job.member(number) for number in range(options.ensemble)])


def _record_aspects(settings: AspectSettings) -> dict[str, Any]:
    """Return what decides the sampled groups: the settings, and the digest of each set."""
    files = set_files(Path(str(settings.aspects)))
    digests = {name: digest_file(path) for name, path in files.items()}
    return {**asdict(settings), "aspects": digests}


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadJob(RatedJob):
    """Training of an encoder that reads each text, with a head that compares the embeddings."""

    plan: HeadPlan
    view: View
    aspects: AspectSettings | None = None
    sets: Sequence[AspectSample] = ()

    def member(self, number: int) -> _HeadJob:
        """Return the job of one member of an ensemble, which differs by its seed."""
        seed = self.seed + number
        config = {**self.made_of, "seed": seed}
        return replace(self, seed=seed, plan=replace(self.plan, seed=seed), made_of=config)

    @override
    def parts(self, trainable: Trainable) -> Parts:
        plan, view = replace(self.plan, metric=self.task.main_metric), self.view
        dim = trainable.engine.dim
        dims = dim * len(view.prompts), dim if view.conditioned else 0
        if plan.start is None:
            plan = replace(plan, recipe=sized(plan.recipe, None, dims[0]))
        train_inputs = self.inputs(self.taught_train(), trainable.tokenizer)
        dev = self.rated_dev()
        counts = check_contrasts(train_inputs.pair, train_inputs.rating, plan.objective)
        if counts:
            log.info(
                f"contrastive pairs: {counts['n_contrastive_pairs']:,} in "
                f"{len(train_inputs):,} rows"
            )
        dev_inputs = None if dev is None else self.inputs(dev, trainable.tokenizer)
        if self.aspects is None:
            return Parts(TunedModel(trainable.engine, plan, dims), train_inputs, dev_inputs)
        groups = AspectGroups(self.sets, self.aspects)
        model = AspectModel(trainable.engine, plan, dims, groups, trainable.tokenizer)
        return Parts(model, train_inputs, dev_inputs)

    @override
    def about(self) -> dict[str, Any]:
        record = RatedJob.about(self)
        names = [sample.name for sample in self.sets]
        return {**record, "aspects": names} if names else record

    @override
    def inputs(self, rows: Rows, tokenizer: InputTokenizer) -> RatedInputs:
        return RatedInputs.of(rows, self.view, tokenizer)

    @override
    def keep(self, head: FittedHead) -> Kept:
        (completed, resolved), view = self.complete(), self.view
        run = cast(Run, completed)
        trained_head = keep_head(run, resolved, head, self.plan.recipe, view)
        saved = run.load_head(trained_head.name)

        def predicted(rows: Rows) -> NDArray[np.float32]:
            return predict(saved, RowFeatures(rows, run.store()).pairs(view))

        takes = {**trained_head.takes, "subtract": view.subtracts}
        return replace(trained_head, takes=takes, scores=scores_of(run, saved, predicted))


def _plan_head(choice: HeadChoice) -> HeadPlan:
    recipe, prompts, start, record = named_head(choice, None, _load_head)
    subtract = record.get("subtract", False) if choice.subtract is None else choice.subtract
    recipe, objective = _apply_changes(recipe, dict(choice.set or {}), choice.dim)
    return HeadPlan(recipe, objective, choice.seed, prompts, subtract, start)


def _load_head(folder: Path) -> tuple[FittedHead, dict[str, Any]]:
    """Read a head that gives embeddings, and its record."""
    start, record = load_head(folder)
    if start.family.no_recipe:
        raise UserError(
            f"{folder} {start.family.no_recipe}. Start from a head of fit-head or train-lora."
        )
    return start, record


def _apply_changes(
    recipe: Recipe, changes: dict[str, str], dim: int | None
) -> tuple[Recipe, ObjectiveSettings]:
    """Apply ``--set`` and ``--dim`` to a recipe; return it, and the settings of the objective."""
    if not _is_trainable(recipe):
        names = [name for name in bundled_names("heads") if _is_trainable(load_recipe(name))]
        raise UserError(
            f"the head {recipe.name} is not fitted by gradients, so it cannot be trained with an "
            f"encoder. Name another head ({', '.join(names)}), or fit it afterwards on the trained "
            "encoder: llmcond fit-head."
        )
    if recipe.is_identity:
        # There is no head with settings, but the objective has settings too.
        values = parse_settings(ObjectiveSettings, changes, "--set", "no head")
    else:
        if changes:
            recipe = recipe.with_settings(recipe.parse_changes(changes, "--set"), "--set")
        values = {
            item.name: getattr(recipe.settings, item.name) for item in fields(ObjectiveSettings)
        }
    if dim is not None:
        recipe = sized(recipe, dim, dim)
    if getattr(recipe.settings, "members", 1) > 1:
        raise UserError(
            f"the head {recipe.name} has {recipe.settings.members} members, but only a single head "
            "can be trained with an encoder. Give --set members=1."
        )
    return recipe, build(ObjectiveSettings, values, "--set")


def _is_trainable(recipe: Recipe) -> bool:
    return recipe.family.supervised or recipe.is_identity


def _add_prompts(plan: HeadPlan, resolved: ResolvedEncoder, task: Task) -> tuple[HeadPlan, View]:
    """Add the named or the default prompts to a plan; return it, and the view of its features."""
    separate, joint = [load_prompt("separate")], [load_prompt(resolved.joint_prompt)]
    prompts_by_features = {"separate": separate, "joint": joint, "both": [*joint, *separate]}
    prompts = plan.prompts or tuple(prompts_by_features[plan.recipe.features])
    check_prompts(prompts, resolved, task)
    # Separate features come last, where heads that take both kinds expect them.
    ordered = tuple(sorted(prompts, key=lambda prompt: prompt.separate))
    view = view_of(plan.recipe, ordered, plan.subtract)
    view.check_texts()
    return replace(plan, prompts=ordered), view
