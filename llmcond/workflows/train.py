"""Training an encoder and a head together, and training cross-encoders, into a new run.

A cross-encoder is one model that rates two sentences under a condition together.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.bundled import bundled_names
from llmcond.config import build
from llmcond.data.aspects import AspectSample, dataset_files, read_aspect_datasets
from llmcond.data.rows import Rows
from llmcond.encoders import ResolvedEncoder
from llmcond.encoders.checkpoints.adapter import (
    member_folders,
    read_encoder_record,
    write_encoder_record,
)
from llmcond.encoders.spec import Orders
from llmcond.errors import LlmcondError, UserError
from llmcond.features.view import FeatureView, recipe_view
from llmcond.files import check_writable, digest_file
from llmcond.finetune.model import (
    AspectModel,
    AspectSampler,
    BiEncoderModel,
    CrossInputs,
    CrossModel,
    HeadConfig,
    RatedInputs,
)
from llmcond.finetune.settings import AspectSettings, StageSettings, TuneSettings
from llmcond.heads import FittedHead, Recipe, load_head, load_recipe, save_head
from llmcond.heads.dense import RegressionSettings
from llmcond.heads.objectives import check_contrasts
from llmcond.heads.pairs import FitReport
from llmcond.heads.recipes import parse_settings
from llmcond.heads.settings import ObjectiveSettings
from llmcond.log import log
from llmcond.progress import format_duration
from llmcond.prompts import list_fields, load_prompt
from llmcond.runs import Run
from llmcond.runs.cross import KIND, NAME, load_cross_encoder
from llmcond.runs.features import RowFeatures
from llmcond.runs.kind import find_kind
from llmcond.runs.predictors import predict
from llmcond.runs.run import encoder_and_data_record
from llmcond.runs.run_heads import is_selected_on_dev
from llmcond.runs.trials import size_recipe
from llmcond.tasks import Task, find_task
from llmcond.workflows.extract import check_prompts, check_router_used
from llmcond.workflows.options.training import (
    HeadTrainingOptions,
    TeacherOptions,
    TrainCrossOptions,
    TrainLoraOptions,
)
from llmcond.workflows.teacher import find_teacher
from llmcond.workflows.train_job import (
    RatedJob,
    TrainedHead,
    TrainingParts,
    check_folds,
    check_stage_settings,
    read_stage_splits,
    save_trained_head,
    score_predictor,
    train,
    write_training_record,
)
from llmcond.workflows.training_options import (
    DataReader,
    build_tune_settings,
    find_rated_task,
    has_router,
    load_named_head,
    read_rated_dataset,
    resolve_trainable,
)
from llmcond.workflows.training_record import (
    STATE,
    TrainingResult,
    load_finished_training,
    training_config,
)

if TYPE_CHECKING:
    from llmcond.encoders.engine.tokenizing import InputTokenizer
    from llmcond.finetune.encoder import TrainableEncoder


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


def plan_pairs(options: TrainLoraOptions, task: Task, read: DataReader | None = None) -> RatedJob:
    """Plan a training on rated pairs; see ``Kind.plan_training``."""
    stage, teacher_options = (
        check_stage_settings(options.select(StageSettings)),
        options.select(TeacherOptions),
    )
    aspects = None if options.aspects is None else options.select(AspectSettings)
    plan = _plan_head(options)
    tuning = build_tune_settings(options.tune_settings(), plan.recipe)
    dataset = read_rated_dataset(
        task, replace(options.data_options(), extra=list_fields(plan.prompts)), read
    )
    if stage is not None:
        read_stage_splits(dataset, stage)  # reports errors before training, not after it
    folder = None if teacher_options.teacher is None else Path(teacher_options.teacher)
    teacher = find_teacher(folder, teacher_options.teacher_rows, dataset)
    sets = [] if aspects is None else read_aspect_datasets(Path(str(aspects.aspects)))
    model, encoder_options, merge = options.model, options.encoder_options(), options.merge
    resolved = resolve_trainable(model, encoder_options, tuning, merge)
    dev_sources = (
        [f"the teacher {teacher_options.teacher}"]
        if teacher and teacher.was_trained_on_dev(dataset)
        else []
    )
    check_folds(stage, model, resolved, dataset, *dev_sources)
    plan, view = _add_prompts(plan, resolved, task)
    check_router_used(plan.prompts, encoder_options, task)
    config = {
        **training_config(resolved, dataset, plan.prompts, plan.recipe, options, tuning, merge),
        "subtract": plan.subtract,
        "objective": asdict(plan.objective),
        **({} if stage is None else {"then": asdict(stage)}),
        **({} if teacher is None else {"teacher": dict(teacher.record)}),
        **({} if aspects is None else {"aspects": _record_aspects(aspects)}),
        **({} if options.ensemble == 1 else {"ensemble": options.ensemble}),
    }
    check_ensemble(options.ensemble, plan, resolved, tuning, merge)
    return _HeadJob(
        model=model,
        resolved=resolved,
        folder=Path(options.run),
        task=task,
        dataset=dataset,
        settings=tuning,
        head=plan.recipe.name,
        seed=plan.seed,
        merge=merge,
        config=config,
        trackers=options.log,
        plan=plan,
        view=view,
        stage=stage,
        teacher=teacher,
        aspects=aspects,
        sets=sets,
        ensemble=options.ensemble,
    )


def _record_aspects(settings: AspectSettings) -> dict[str, Any]:
    """Return what decides the sampled groups: the settings, and the digest of each set."""
    files = dataset_files(Path(str(settings.aspects)))
    digests = {name: digest_file(path) for name, path in files.items()}
    return {**asdict(settings), "aspects": digests}


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadJob(RatedJob):
    """Training of an encoder that reads each text, with a head that compares the embeddings."""

    plan: HeadConfig
    view: FeatureView
    aspects: AspectSettings | None = None
    sets: Sequence[AspectSample] = ()
    ensemble: int = 1

    @property
    def recipe(self) -> Recipe:
        """The recipe of the head."""
        return self.plan.recipe

    @override
    def run(self) -> TrainingResult:
        if self.ensemble == 1:
            return train(self)
        return train_ensemble(self, [self._member(number) for number in range(self.ensemble)])

    def _member(self, number: int) -> _HeadJob:
        """Return the job of one member of an ensemble, which differs by its seed."""
        seed = self.seed + number
        config = {**self.config, "seed": seed}
        del config["ensemble"]
        plan = replace(self.plan, seed=seed)
        return replace(self, seed=seed, plan=plan, config=config, ensemble=1)

    @override
    def build_parts(self, trainable: TrainableEncoder) -> TrainingParts:
        plan, view = replace(self.plan, metric=self.task.main_metric), self.view
        dim = trainable.engine.dim
        dims = dim * len(view.prompts), dim if view.conditioned else 0
        if plan.start is None:
            plan = replace(plan, recipe=size_recipe(plan.recipe, None, dims[0]))
        train_inputs = self.inputs(self.train_with_teacher(), trainable.tokenizer)
        dev = self.rated_dev()
        counts = check_contrasts(train_inputs.pair, train_inputs.rating, plan.objective)
        if counts:
            log.info(
                f"contrastive pairs: {counts['n_contrastive_pairs']:,} in "
                f"{len(train_inputs):,} rows"
            )
        dev_inputs = None if dev is None else self.inputs(dev, trainable.tokenizer)
        if self.aspects is None:
            return TrainingParts(
                BiEncoderModel(trainable.engine, plan, dims), train_inputs, dev_inputs
            )
        groups = AspectSampler(self.sets, self.aspects)
        model = AspectModel(trainable.engine, plan, dims, groups, trainable.tokenizer)
        return TrainingParts(model, train_inputs, dev_inputs)

    @override
    def record_fields(self) -> dict[str, Any]:
        record = RatedJob.record_fields(self)
        names = [sample.name for sample in self.sets]
        return {**record, "aspects": names} if names else record

    @override
    def inputs(self, rows: Rows, tokenizer: InputTokenizer) -> RatedInputs:
        return RatedInputs.from_rows(rows, self.view, tokenizer)

    @override
    def save(self, head: FittedHead) -> TrainedHead:
        (completed, resolved), view = self.complete_run(), self.view
        run = cast(Run, completed)
        trained_head = save_trained_head(run, resolved, head, self.plan.recipe, view)
        saved = run.load_head(trained_head.name)

        def predicted(rows: Rows) -> NDArray[np.float32]:
            return predict(saved, RowFeatures(rows, run.store()).pairs(view))

        takes = {**trained_head.takes, "subtract": view.subtracts}
        return replace(trained_head, takes=takes, scores=score_predictor(run, saved, predicted))


def _plan_head(choice: HeadTrainingOptions) -> HeadConfig:
    recipe, prompts, start, record = load_named_head(choice, None, _load_head)
    subtract = record.get("subtract", False) if choice.subtract is None else choice.subtract
    recipe, objective = _apply_changes(recipe, dict(choice.set or {}), choice.dim)
    return HeadConfig(recipe, objective, choice.seed, prompts, subtract, start)


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
        recipe = size_recipe(recipe, dim, dim)
    if getattr(recipe.settings, "members", 1) > 1:
        raise UserError(
            f"the head {recipe.name} has {recipe.settings.members} members, but only a single head "
            "can be trained with an encoder. Give --set members=1."
        )
    return recipe, build(ObjectiveSettings, values, "--set")


def _is_trainable(recipe: Recipe) -> bool:
    return recipe.family.supervised or recipe.is_identity


def _add_prompts(
    plan: HeadConfig, resolved: ResolvedEncoder, task: Task
) -> tuple[HeadConfig, FeatureView]:
    """Add the named or the default prompts to a plan; return it, and the view of its features."""
    separate, joint = [load_prompt("separate")], [load_prompt(resolved.joint_prompt)]
    prompts_by_features = {"separate": separate, "joint": joint, "both": [*joint, *separate]}
    prompts = plan.prompts or tuple(prompts_by_features[plan.recipe.features])
    check_prompts(prompts, resolved, task)
    # Separate features come last, where heads that take both kinds expect them.
    ordered = tuple(sorted(prompts, key=lambda prompt: prompt.separate))
    view = recipe_view(plan.recipe, ordered, plan.subtract)
    view.check_texts()
    return replace(plan, prompts=ordered), view


def train_cross(options: TrainCrossOptions) -> TrainingResult:
    """Train an encoder, by adapters or fully, to rate [sentence1; sentence2; condition].

    A call that was stopped at any step continues from the last checkpoint, as ``train_lora`` does.

    Raises:
        UserError: the input is invalid, the run holds something else, or the loss became NaN.
        LlmcondError: the encoder cannot be loaded or trained.
    """
    model, orders, seed, merge = options.model, options.orders, options.seed, options.merge
    stage = check_stage_settings(options.select(StageSettings))
    tuning = build_tune_settings(options.tune_settings())
    head_changes = parse_settings(
        RegressionSettings, dict(options.set or {}), "--set", "a cross-encoder"
    )
    head_settings = build(RegressionSettings, head_changes, "--set")
    task = find_rated_task(options.task)
    first, second = task.conditioned
    if first != second and orders == "both":
        raise UserError(
            f"the task {task.name} puts only its {'first' if first else 'second'} text under the "
            "condition, so the order of the two texts matters. Give --orders given."
        )
    dataset = read_rated_dataset(task, options.data_options())
    if stage is not None:
        read_stage_splits(dataset, stage)  # reports errors before training, not after it
    # A linear layer also reads the length of a vector, so vectors keep theirs by default.
    encoder_options = replace(options.encoder_options(), normalize=bool(options.normalize))
    resolved = resolve_trainable(model, encoder_options, tuning, merge)
    check_folds(stage, model, resolved, dataset)
    if resolved.identity.routes_inside:
        raise UserError(
            "a cross-encoder reads the condition as a part of its input, so a router would have no "
            "effect. Leave out --router, or name a --model without a router."
        )
    return train(
        _CrossJob(
            model=model,
            resolved=resolved,
            folder=Path(options.run),
            task=task,
            dataset=dataset,
            settings=tuning,
            head=NAME,
            seed=seed,
            merge=merge,
            config={
                "encoder": resolved.identity.to_json(),
                "data": dataset.digest,
                "orders": orders,
                "head": {"kind": KIND, **asdict(head_settings)},
                "seed": seed,
                "settings": tuning.to_json(),
                "merge": merge,
                **({} if stage is None else {"then": asdict(stage)}),
            },
            trackers=options.log,
            stage=stage,
            head_settings=head_settings,
            orders=orders,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CrossJob(RatedJob):
    """Training of an encoder that reads both sentences and the condition, with a linear layer."""

    cross: ClassVar[bool] = True

    head_settings: RegressionSettings
    orders: Orders

    @override
    def build_parts(self, trainable: TrainableEncoder) -> TrainingParts:
        train_rows, dev = self.dataset.splits["train"], self.rated_dev()
        rows = self.inputs(train_rows, trainable.tokenizer)
        dev_inputs = None if dev is None else self.inputs(dev, trainable.tokenizer)
        if rows.n_cut:
            log.info(
                f"{rows.n_cut:,} rows of train are longer than {self.resolved.identity.max_length} "
                "tokens: their sentences are truncated, but not their conditions"
            )
        mean = float(rows.rating.mean())
        metric = self.task.main_metric
        model = CrossModel(trainable.engine, self.head_settings, self.seed, mean, metric)
        return TrainingParts(model, rows, dev_inputs)

    @override
    def inputs(self, rows: Rows, tokenizer: InputTokenizer) -> CrossInputs:
        return CrossInputs.from_rows(rows, self.orders, tokenizer)

    @override
    def save(self, head: FittedHead) -> TrainedHead:
        completed, resolved = self.complete_run(self.orders)
        run = cast(Run, completed)
        save_head(head, run.head_folder(NAME), encoder_and_data_record(run))
        log.info(f"encoder -> {self.folder}; its scores:")
        cross = load_cross_encoder(self.folder, device=resolved.device)
        return TrainedHead(
            NAME, {"orders": self.orders}, score_predictor(run, cross, cross.predict)
        )


#: Prefixes of the keys in a member's summary that the ensemble's training record repeats.
_REPEATED_KEYS = ("seed", "steps", "best_step", "dev_", "then")


def check_ensemble(
    count: int, plan: HeadConfig, resolved: ResolvedEncoder, settings: TuneSettings, merge: bool
) -> None:
    """Check that the options allow an ensemble, if there is more than one member.

    Raises:
        UserError: there is a head behind the encoder, no adapter, a router, or vectors without
            unit length.
    """
    if count == 1:
        return
    if not plan.recipe.is_identity:
        raise UserError(
            f"an ensemble has no head while it is trained, but the head is {plan.recipe.name}. "
            "Give --head none, and fit the head afterwards: llmcond fit-head."
        )
    if has_router(plan.prompts, resolved):
        raise UserError(
            "an ensemble does not support routers. Leave out --router, and name a --prompt without "
            "one, such as concat-cond-sent."
        )
    if settings.full or merge:
        raise UserError(
            "an ensemble consists of adapters on one base. Leave out --merge, and give --rank a "
            "number."
        )
    if not resolved.identity.normalize:
        raise UserError("members of an ensemble need vectors of unit length. Add --normalize.")


def train_ensemble(job: RatedJob, members: Sequence[RatedJob]) -> TrainingResult:
    """Train the members one after the other, or continue where the training was stopped.

    Each member continues as in ``llmcond.workflows.train_job.train``, and a finished member is not
    trained again.

    Args:
        job: the ensemble's job, with its folder and its training configuration.
        members: the members' jobs, in the order of their seeds; this function sets their folders.

    Raises:
        UserError: as ``train``.
    """
    summary = load_finished_training(job.folder, job.config)
    if summary is not None:
        return TrainingResult(summary)
    check_writable(job.folder / STATE / "state.safetensors")
    # This folder marks an ensemble whose training is not finished.
    (job.folder / STATE).mkdir(parents=True, exist_ok=True)
    folders = member_folders(job.folder, len(members))
    summaries = []
    for number, (member, folder) in enumerate(zip(members, folders, strict=True), start=1):
        log.info(f"member {number} of {len(members)}, seed {member.seed}:")
        summaries.append(train(replace(member, folder=folder)).to_json())
    from accelerate import PartialState

    if not PartialState().is_main_process:
        return TrainingResult({})
    return TrainingResult(_combine_members(job, summaries))


def _combine_members(job: RatedJob, members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the ensemble's folder one encoder, and a run with its features and scores."""
    folders = member_folders(job.folder, len(members))
    tuned = read_encoder_record(folders[0])
    if tuned is None:
        raise LlmcondError(f"{folders[0]} lacks encoder.json. Train into another --run.")
    write_encoder_record(job.folder, replace(tuned, members=len(members)))
    selected_on = "dev" if is_selected_on_dev(members[0]) else None
    record = {"selected_on": selected_on, **job.record_fields()}
    member_head, _ = load_head(folders[0] / "heads" / members[0]["head"])
    module = member_head.family(member_head.settings, len(members) * member_head.dim_in).freeze()
    head = FittedHead(member_head.kind, member_head.family, module, job.seed, FitReport(record))
    log.info(f"the ensemble of {len(members)}:")
    trained_head, seconds = job.save(head), sum(member["seconds"] for member in members)
    weights = members[0]["weights"]
    summary = {
        "run": str(job.folder),
        "encoder": job.resolved.checkpoint.name,
        "head": trained_head.name,
        **trained_head.takes,
        "seed": job.seed,
        "weights": {**weights, "trained": len(members) * weights["trained"]},
        "steps": sum(member["steps"] for member in members),
        "seconds": round(seconds, 1),
        **job.record_fields(),
        "members": [
            {key: value for key, value in member.items() if key.startswith(_REPEATED_KEYS)}
            for member in members
        ],
        "scores": [result.to_json() for result in trained_head.scores],
    }
    write_training_record(job, trained_head, summary, {})
    for folder in folders:  # the run has the features of the whole ensemble
        shutil.rmtree(folder / "features", ignore_errors=True)
    log.info(
        f"{trained_head.name}: {len(members)} members in {format_duration(seconds)} -> {job.folder}"
    )
    return summary
