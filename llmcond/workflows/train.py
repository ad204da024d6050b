"""Training on rated pairs: encoders with a head, cross-encoders, ensembles, and distillation.

A cross-encoder is one model that rates two sentences under a condition together. The members of an
ensemble are adapters on one base encoder, each trained with its own seed in its own folder; the
ensemble's vector is the concatenation of theirs.

In distillation, a smaller model learns from the labels that a larger one gives to unlabelled inputs
(Hinton et al. 2015, arXiv 1503.02531). The labels are similarities on the scale of ratings, and the
inputs are sentence pairs of train under the conditions of other rows.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.files import check_writable, digest_file, read_json
from llmcond.base.metrics import choose_metrics
from llmcond.base.output import format_duration, log
from llmcond.base.package import bundled_names, user_modules
from llmcond.base.records import build, check_record
from llmcond.base.system import require_libraries
from llmcond.data.datasets import Dataset
from llmcond.data.guides import dataset_files, read_aspect_datasets
from llmcond.data.rows import Rows
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.adapter import member_folders, read_encoder_record, write_encoder_record
from llmcond.evaluation.results import Result, check_fold_count
from llmcond.features.view import recipe_view
from llmcond.finetune.model import (
    AspectSampler,
    BiEncoderModel,
    CrossInputs,
    CrossModel,
    RatedInputs,
)
from llmcond.finetune.settings import (
    AspectSettings,
    StageSettings,
    TuneSettings,
    default_learning_rate,
)
from llmcond.heads import FittedHead, Recipe, load_head, load_recipe, save_head
from llmcond.heads.conditioned import Regression, RegressionSettings
from llmcond.heads.fitted import fitted_head
from llmcond.heads.module import check_contrasts
from llmcond.heads.numpy_heads import FitReport
from llmcond.heads.recipes import parse_settings
from llmcond.heads.settings import ObjectiveSettings
from llmcond.options.training import TrainCrossOptions, TrainingOptions, TrainLoraOptions
from llmcond.prompts import Prompt, list_fields, load_prompt, prompt_from_json
from llmcond.runs import Run
from llmcond.runs.cross import KIND, NAME, CrossEncoder, load_cross_encoder
from llmcond.runs.examples import AnyPredictor, load_examples, score_predictors
from llmcond.runs.run import (
    FittedHeadRecord,
    encoder_and_data_record,
    is_selected_on_dev,
    training_splits,
)
from llmcond.runs.trials import size_recipe
from llmcond.tasks import AnyTask, find_task
from llmcond.workflows.extract import check_prompts, check_router_used, read_data
from llmcond.workflows.train_job import (
    Teacher,
    TrainedHead,
    TrainingJob,
    find_teacher,
    train,
    write_training_record,
)
from llmcond.workflows.training_record import (
    STATE,
    TrainingResult,
    load_finished_training,
    training_config,
)

if TYPE_CHECKING:
    from llmcond.encoders.tokenizing import InputTokenizer
    from llmcond.finetune.encoder import TrainableEncoder


def check_rated_dataset(dataset: Dataset) -> None:
    """Check that the train split of a dataset has rated rows.

    Raises:
        UserError: train has fewer than two rated rows, or only equal ratings.
    """
    train = dataset.splits["train"]
    if int(train.rated.sum()) < 2:
        raise UserError(
            f"{train.file} has {int(train.rated.sum())} rated rows among its {len(train):,}; "
            "training needs rated sentence pairs. Name another --data, or its label column: "
            "--columns label=COLUMN"
        )
    if len(set(train.rating[train.rated].tolist())) < 2:
        raise UserError(
            f"all rated rows of {train.file} have the same rating, so there is nothing to learn."
        )


def plan_stage(
    options: TrainLoraOptions | TrainCrossOptions,
    dataset: Dataset,
    resolved: ResolvedEncoder,
    teachers: Iterable[Teacher | None] = (),
) -> StageSettings | None:
    """Return the settings of the last stage, checked before any training; None: there is none.

    Raises:
        UserError: dev has no rated rows, or fewer sentence pairs than folds; or there are folds,
            and the encoder or a teacher was trained on dev.
    """
    stage = options.select(StageSettings)
    if stage.then is None:
        return None
    dev = dataset.splits.get("dev")
    if dev is None or not dev.rated.any():
        raise UserError(
            f"{dataset.source} has no rated rows in dev to train on. Leave out --then, or add a "
            "dev file."
        )
    check_fold_count(dev.take(dev.rated), stage.folds)
    knows_dev = dataset.dev_digests & resolved.checkpoint.dev_digests
    trained_on_dev = [options.model] if knows_dev else []
    trained_on_dev += [
        f"the teacher {teacher.run.folder}"
        for teacher in teachers
        if teacher and teacher.was_trained_on_dev(dataset)
    ]
    if stage.folds and trained_on_dev:
        raise UserError(
            f"{trained_on_dev[0]} was trained on dev, so folds of dev would measure nothing. "
            "Leave out --folds."
        )
    return stage


def score_predictor(
    run: Run,
    predictor: AnyPredictor | CrossEncoder,
    predict: Callable[[str], NDArray[np.float32]],
) -> list[Result]:
    """Return the scores of a predictor on dev and test, as ``evaluate`` gives them.

    ``predict`` returns the predicted similarities of all rows of a split.
    """
    results: list[Result] = []
    for split in ("dev", "test"):
        if split in run.splits and run.rows(split).rated.any() and split not in run.trained_on:
            rows, metrics = run.rows(split), choose_metrics(run.task.metrics)
            results += score_predictors(
                [predictor], [predict(split)], rows, split, metrics, task=run.task.name
            )
    return results


def train_lora(options: TrainLoraOptions) -> TrainingResult:
    """Train an encoder's adapters, or all of its weights, and a head behind it.

    A call that was stopped at any step continues from the last checkpoint, with the same result as
    without the stop; on one CPU with the same number of threads, the result is identical in every
    bit.

    Raises:
        UserError: the input is invalid, the run holds something else, or the loss became NaN.
        LlmcondError: the encoder cannot be loaded or trained.
    """
    return run_training(plan_training(options, find_task(options.task)))


def run_training(job: TrainingJob) -> TrainingResult:
    """Train one encoder, or the members of an ensemble; a finished training is not repeated."""
    summary = load_finished_training(job.folder, job.config)
    if summary is None:
        check_writable(job.folder / STATE / "state.safetensors")
        members = job.options.ensemble if isinstance(job.options, TrainLoraOptions) else 1
        summary = train(job) if members == 1 else _train_ensemble(job, members)
    return TrainingResult(summary)


def plan_training(
    options: TrainLoraOptions, task: AnyTask[Any], read: Callable[..., Any] = read_data
) -> TrainingJob:
    """Check everything that a training needs.

    Args:
        options: the options of the command.
        task: the task of the data.
        read: the function that reads the data; several trainings may share what it has read.

    Raises:
        UserError: the input is invalid, or an option is for another kind of task.
        LlmcondError: the encoder cannot be loaded.
    """
    is_rated = task.has_columns
    if not is_rated:
        _check_options_without_ratings(options, task)
    recipe, prompts, start, subtract = load_named_head(options, task)
    objective = ObjectiveSettings()
    if is_rated:
        recipe, objective = _plan_objective(recipe, options.set or {})
    else:
        recipe = recipe.with_changes(options.set, "--set")
    if options.dim is not None:
        recipe = size_recipe(recipe, options.dim, options.dim)
    if not is_rated and len(prompts) > 1:
        raise UserError(
            f"in the task {task.name}, an encoder is trained with one prompt, but "
            f"{len(prompts)} are named. Give one --prompt."
        )
    settings = build_tune_settings(options.tune_settings(), recipe)
    dataset = read(task, replace(options.data_options(), extra=list_fields(prompts)))
    if is_rated:
        check_rated_dataset(dataset)
    else:
        task.check_training(recipe, dataset)
    teacher = find_teacher(options.teacher, options.teacher_rows, dataset)
    aspects = None if options.aspects is None else options.select(AspectSettings)
    samples = [] if aspects is None else read_aspect_datasets(Path(str(aspects.aspects)))
    aspects_teacher = find_teacher(options.aspects_teacher, 0, dataset)
    resolved, settings = resolve_trainable(options, options.encoder_options(), settings)
    stage = plan_stage(options, dataset, resolved, (teacher, aspects_teacher))
    names = {"separate": ["separate"], "both": [resolved.joint_prompt, "separate"]}
    names["alone"] = [str(task.prompt)]
    prompts = prompts or [
        load_prompt(name) for name in names.get(recipe.features, [resolved.joint_prompt])
    ]
    check_prompts(prompts, resolved, task)
    # Separate features come last, where heads that take both kinds expect them.
    prompts = sorted(prompts, key=lambda prompt: prompt.separate)
    view = recipe_view(recipe, prompts, subtract)
    view.check_texts(columns=aspects is None)
    check_router_used(prompts, options.encoder_options(), task)
    config = training_config(
        options,
        resolved,
        dataset,
        settings,
        recipe.user_modules(task, task.main_metric.function),
        prompts={prompt.name: prompt.digest for prompt in prompts},
        head={"kind": recipe.kind, **asdict(recipe.settings)},
        start=options.start and read_json(Path(options.start, "head.json"))["weights_sha256"],
    )
    if is_rated:
        optional = {
            "subtract": subtract,
            "objective": asdict(objective),
            "then": stage and asdict(stage),
            "teacher": teacher and dict(teacher.record),
            "aspects": aspects and _record_aspects(aspects, aspects_teacher),
            "ensemble": options.ensemble if options.ensemble > 1 else None,
        }
        config |= {key: value for key, value in optional.items() if value is not None}
    job = (_PairJob if is_rated else TrainingJob)(
        options=options,
        resolved=resolved,
        task=task,
        dataset=dataset,
        settings=settings,
        config=config,
        recipe=recipe,
        view=view,
        start=start,
        stage=stage,
        teacher=teacher,
        objective=objective,
        aspects=aspects,
        aspects_teacher=aspects_teacher,
        samples=samples,
    )
    if options.ensemble > 1:
        _check_ensemble(job)
    return job


def _check_options_without_ratings(options: TrainLoraOptions, task: AnyTask[Any]) -> None:
    """Raise a UserError for options that only rated pairs have."""
    only_for_pairs = {
        f"--then {options.then}": options.then is not None,
        f"--aspects {options.aspects}": options.aspects is not None,
        "--ensemble": options.ensemble != 1,
        "--teacher": options.teacher is not None,
        "--subtract": bool(options.subtract),
    }
    for option in [name for name, is_set in only_for_pairs.items() if is_set]:
        raise UserError(
            f"{option} is for rated pairs, and the task {task.name} has none. Leave it out."
        )


def _record_aspects(settings: AspectSettings, teacher: Teacher | None) -> dict[str, Any]:
    """Return what decides their losses: the settings, the digest of each set, and the teacher."""
    files = dataset_files(Path(str(settings.aspects)))
    record = asdict(settings) | {
        "aspects": {name: digest_file(path) for name, path in files.items()},
        "aspects_teacher": teacher and dict(teacher.record),
    }
    return {key: value for key, value in record.items() if value is not None}


class _PairJob(TrainingJob):
    """Training of an encoder that reads each text, with a head that compares the embeddings."""

    @override
    def build_parts(self, trainable: TrainableEncoder) -> tuple[BiEncoderModel, Any, Any]:
        view, recipe, tokenizer = self.view, self.recipe, trainable.tokenizer
        dim = trainable.engine.dim
        dims = dim * len(view.prompts), dim if view.conditioned else 0
        if self.start is None:
            recipe = self.sized_recipe(dims[0])
        train_inputs, dev_inputs = self.rated_inputs(tokenizer)
        counts = check_contrasts(train_inputs.pair, train_inputs.rating, self.objective)
        if counts:
            log.info(
                f"contrastive pairs: {counts['n_contrastive_pairs']:,} in "
                f"{len(train_inputs):,} rows"
            )
        sampler = None
        if self.aspects is not None:
            # Each part of a step samples its share of the texts.
            share = math.ceil(
                self.aspects.aspects_texts / self.settings.gradient_accumulation_steps
            )
            aspects = replace(self.aspects, aspects_texts=share)
            device, teacher = self.resolved.options.device, self.aspects_teacher
            encode = None if teacher is None else teacher.load_embedder(device).encode
            sampler = AspectSampler(self.samples, aspects, tokenizer, encode)
        model = BiEncoderModel(
            trainable.engine,
            recipe,
            self.objective,
            dims,
            self.seed,
            start=self.start,
            metric=self.task.main_metric,
            aspects=sampler,
        )
        return model, train_inputs, dev_inputs

    @override
    def inputs(self, rows: Rows, tokenizer: InputTokenizer) -> RatedInputs:
        return RatedInputs.from_rows(rows, self.view, tokenizer)

    @override
    def save(self, head: FittedHead) -> TrainedHead:
        saved = TrainingJob.save(self, head)
        return replace(saved, takes={**saved.takes, "subtract": self.view.subtracts})

    @override
    def score(self, run: Run, name: str) -> list[Result]:
        saved = run.load_head(name)
        return score_predictor(run, saved, partial(load_examples(run).predict, saved))


def build_tune_settings(options: Mapping[str, Any], recipe: Recipe | None = None) -> TuneSettings:
    """Return the training settings from the options, then a recipe, and then the defaults."""
    defaults: dict[str, Any] = {}
    if recipe is not None:
        defaults = dict(recipe.finetune)
        build(TuneSettings, defaults, f"{recipe.path}: [finetune]")
    values = {**defaults, **options}
    if isinstance(values.get("rank"), int):
        values.setdefault("learning_rate", default_learning_rate(values["rank"]))
    return build(TuneSettings, values, "training")


def load_named_head(
    options: TrainLoraOptions, task: AnyTask[Any]
) -> tuple[Recipe, Sequence[Prompt], Any, bool]:
    """Return the recipe and the prompts to train with, and the head to start from.

    A head to start from gives the recipe, and the prompts unless others were named.

    Returns:
        The recipe, the prompts, the head to start from or None, and whether e(c) is subtracted.

    Raises:
        UserError: no head is named, or the head to start from gives no embeddings or was fitted on
            dev.
    """
    prompts = [load_prompt(name) for name in options.prompt]
    if options.start is None:
        if options.head is None:
            raise UserError("no head is named. Give --head (none: the encoder without a head).")
        return load_recipe(options.head, task.recipes), prompts, None, bool(options.subtract)
    folder = Path(options.start)
    start, record = task.load_head(folder)
    if start.family.no_recipe:
        raise UserError(
            f"{folder} {start.family.no_recipe}. Start from a head of fit-head or train-lora."
        )
    source = str(folder / "head.json")
    check_record(record, FittedHeadRecord, source, "Fit it again.")
    if "dev" in training_splits(record):
        raise UserError(
            f"{folder} was fitted on dev as well, which is to choose the weights. Start from "
            "another head."
        )
    prompts = prompts or [prompt_from_json(values, source) for values in record["prompts"]]
    about = {key: record["recipe"][key] for key in ("name", "description", "source")}
    recipe = Recipe(**about, kind=start.kind, family=start.family, settings=start.settings)
    subtract = record["subtract"] if options.subtract is None else options.subtract
    return recipe, prompts, start, task.has_columns and subtract


def resolve_trainable(
    options: TrainingOptions, encoder_options: EncoderOptions, settings: TuneSettings
) -> tuple[ResolvedEncoder, TuneSettings]:
    """Resolve an encoder, and return it with the settings to train it with.

    Raises:
        UserError: the encoder cannot be trained with them, or a package for training is missing.
    """
    if encoder_options.long_texts == "windows":
        raise UserError(
            "windows are only for frozen encoders, because training reads each text once. Leave "
            "out --long-texts windows, or shorten the texts."
        )
    resolved = resolve(options.model, replace(encoder_options, runtime="torch"))
    for assumption in resolved.assumed:
        log.info(f"assumed: {assumption}")
    require_libraries("training an encoder", "accelerate", "peft", extra="lora")
    from llmcond.finetune.encoder import check_trainable

    return resolved, check_trainable(resolved, settings, options.merge, options.tune_settings())


def _plan_objective(recipe: Recipe, changes: Mapping[str, str]) -> tuple[Recipe, ObjectiveSettings]:
    """Apply ``--set`` to a recipe; return it, and the settings of the objective."""

    def is_trainable(recipe: Recipe) -> bool:
        return recipe.family.supervised or recipe.is_identity

    if not is_trainable(recipe):
        names = [name for name in bundled_names("heads") if is_trainable(load_recipe(name))]
        raise UserError(
            f"the head {recipe.name} is not fitted by gradients, so it cannot be trained with an "
            f"encoder. Name another head ({', '.join(names)}), or fit it afterwards on the trained "
            "encoder: llmcond fit-head."
        )
    if recipe.is_identity:
        # There is no head with settings, but the objective has settings too.
        values = parse_settings(ObjectiveSettings, changes)
        return recipe, build(ObjectiveSettings, values, "--set")
    recipe = recipe.with_changes(changes, "--set")
    if recipe.settings.members > 1:
        raise UserError(
            f"the head {recipe.name} has {recipe.settings.members} members, but only a single head "
            "can be trained with an encoder. Give --set members=1."
        )
    values = {item.name: getattr(recipe.settings, item.name) for item in fields(ObjectiveSettings)}
    return recipe, ObjectiveSettings(**values)


def train_cross(options: TrainCrossOptions) -> TrainingResult:
    """Train an encoder, by adapters or fully, to rate [sentence1; sentence2; condition].

    A call that was stopped at any step continues from the last checkpoint, as ``train_lora`` does.

    Raises:
        UserError: the input is invalid, the run holds something else, or the loss became NaN.
        LlmcondError: the encoder cannot be loaded or trained.
    """
    settings = build_tune_settings(options.tune_settings())
    changes = parse_settings(RegressionSettings, options.set or {})
    head_settings = build(RegressionSettings, changes, "--set")
    task: Any = find_task(options.task)
    if not task.has_columns:
        raise UserError(
            f"the task {task.name} ranks candidates, but a cross-encoder is trained on rated pairs "
            "of sentences. Leave out --task, or train an encoder of single texts: llmcond "
            "train-lora."
        )
    first, second = task.conditioned
    if first != second and options.orders == "both":
        raise UserError(
            f"the task {task.name} puts only its {'first' if first else 'second'} text under the "
            "condition, so the order of the two texts matters. Give --orders given."
        )
    dataset = read_data(task, options.data_options())
    check_rated_dataset(dataset)
    # A linear layer also reads the length of a vector, so vectors keep theirs by default.
    encoder_options = replace(options.encoder_options(), normalize=bool(options.normalize))
    resolved, settings = resolve_trainable(options, encoder_options, settings)
    stage = plan_stage(options, dataset, resolved)
    if resolved.identity.routes_inside:
        raise UserError(
            "a cross-encoder reads the condition as a part of its input, so a router would have no "
            "effect. Leave out --router, or name a --model without a router."
        )
    head = {"kind": KIND, **asdict(head_settings)}
    code = user_modules(task, task.main_metric.function)
    config = training_config(
        options, resolved, dataset, settings, code, orders=options.orders, head=head
    )
    job = _CrossJob(
        options=options,
        resolved=resolved,
        task=task,
        dataset=dataset,
        settings=settings,
        config=config if stage is None else {**config, "then": asdict(stage)},
        recipe=Recipe(NAME, "", "", KIND, Regression, head_settings),
        stage=stage,
    )
    return run_training(job)


#: Mean length of vectors from which on a cross-encoder's layer, whose steps are proportional to it,
#: does not converge: MiniLM's vectors have 6, EmbeddingGemma's 800.
_LONG_VECTORS = 30
#: Number of rows whose vectors are measured.
_SAMPLED_ROWS = 8


class _CrossJob(TrainingJob):
    """Training of an encoder that reads both sentences and the condition, with a linear layer."""

    cross: ClassVar[bool] = True
    options: TrainCrossOptions

    @override
    def build_parts(self, trainable: TrainableEncoder) -> tuple[CrossModel, Any, Any]:
        rows, dev_inputs = self.rated_inputs(trainable.tokenizer)
        if rows.n_cut:
            log.info(
                f"{rows.n_cut:,} rows of train are longer than {self.resolved.identity.max_length} "
                "tokens: their sentences are truncated, but not their conditions"
            )
        settings, mean, metric = (
            self.recipe.settings,
            float(rows.rating.mean()),
            self.task.main_metric,
        )
        model = CrossModel(trainable.engine, settings, self.seed, mean, metric)
        length = np.linalg.norm(model.vectors(rows.orders[0][:_SAMPLED_ROWS]), axis=1).mean()
        if length > _LONG_VECTORS:
            log.warning(
                f"the encoder's vectors have a mean length of {length:,.0f}, with which the steps "
                "of the layer are too large: add --normalize"
            )
        return model, rows, dev_inputs

    @override
    def inputs(self, rows: Rows, tokenizer: InputTokenizer) -> CrossInputs:
        return CrossInputs.from_rows(rows, self.options.orders, tokenizer)

    @override
    def save(self, head: FittedHead) -> TrainedHead:
        run, resolved = self.complete_run(self.options.orders)
        save_head(head, run.head_folder(NAME), encoder_and_data_record(run))
        log.info(f"encoder -> {self.folder}; its scores:")
        cross = load_cross_encoder(self.folder, device=resolved.options.device)
        scores = score_predictor(run, cross, lambda split: cross.predict(run.rows(split)))
        return TrainedHead(NAME, {"orders": self.options.orders}, scores)


#: Prefixes of the keys in a member's summary that the ensemble's training record repeats.
_REPEATED_KEYS = ("seed", "steps", "best_step", "dev_", "then")


def _check_ensemble(job: TrainingJob) -> None:
    """Raise a UserError unless a job trains adapters whose vectors can be concatenated."""
    identity = job.resolved.identity
    routes = identity.routes_inside or any(prompt.has_router for prompt in job.view.prompts)
    for has, content, advice in (
        (
            not job.recipe.is_identity,
            f"the head {job.recipe.name}",
            "Give --head none, and fit the head afterwards: llmcond fit-head",
        ),
        (routes, "a router", "Leave out --router, and name a --prompt such as concat-cond-sent"),
        (job.settings.full, "--rank full", "Give --rank a number"),
        (job.options.merge, "--merge", "Leave it out"),
        (not identity.normalize, "vectors without unit length", "Add --normalize"),
    ):
        if has:
            raise UserError(
                f"an ensemble cannot have {content}: it consists of adapters on one base, whose "
                f"vectors are concatenated. {advice}."
            )


def _train_ensemble(job: TrainingJob, count: int) -> dict[str, Any]:
    """Train the members one after the other; a finished member is not trained again."""
    # This folder marks an ensemble whose training is not finished.
    (job.folder / STATE).mkdir(parents=True, exist_ok=True)
    summaries = []
    for number, folder in enumerate(member_folders(job.folder, count)):
        member = job.with_seed(job.seed + number, run=folder, ensemble=1)
        config = {key: value for key, value in member.config.items() if key != "ensemble"}
        member = replace(member, config=config)
        log.info(f"member {number + 1} of {count}, seed {member.seed}:")
        summaries.append(run_training(member).to_json())
    from accelerate import PartialState

    return _combine_members(job, summaries) if PartialState().is_main_process else {}


def _combine_members(job: TrainingJob, members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the ensemble's folder one encoder, and a run with its features and scores."""
    folders = member_folders(job.folder, len(members))
    tuned = read_encoder_record(folders[0])
    if tuned is None:
        raise LlmcondError(f"{folders[0]} lacks encoder.json. Train into another --run.")
    write_encoder_record(job.folder, replace(tuned, members=len(members)))
    selected_on = "dev" if is_selected_on_dev(members[0]) else None
    record = {"selected_on": selected_on, **job.record_fields()}
    member_head, _ = load_head(folders[0] / "heads" / members[0]["head"])
    module = member_head.family(member_head.settings, len(members) * member_head.dim_in)
    head = fitted_head(member_head.kind, module, job.seed, FitReport(record))
    log.info(f"the ensemble of {len(members)}:")
    trained_head, seconds = job.save(head), sum(member["seconds"] for member in members)
    weights = members[0]["weights"]
    figures = {
        "weights": {**weights, "trained": len(members) * weights["trained"]},
        "steps": sum(member["steps"] for member in members),
        "seconds": round(seconds, 1),
        "members": [
            {key: value for key, value in member.items() if key.startswith(_REPEATED_KEYS)}
            for member in members
        ],
    }
    summary = write_training_record(job, trained_head, figures, {})
    for folder in folders:  # the run has the features of the whole ensemble
        shutil.rmtree(folder / "features", ignore_errors=True)
    log.info(
        f"{trained_head.name}: {len(members)} members in {format_duration(seconds)} -> {job.folder}"
    )
    return summary
