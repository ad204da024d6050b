"""Training on rated pairs: encoders with a head, cross-encoders, ensembles, and distillation.

A cross-encoder is one model that rates two sentences under a condition together. The members of an
ensemble are adapters on one base encoder, each trained with its own seed in its own folder; the
ensemble's vector is the concatenation of theirs.

In distillation, a smaller model learns from the labels that a larger one gives to unlabelled inputs
(Hinton et al. 2015, arXiv 1503.02531). The labels are similarities on the scale of ratings, and the
inputs are sentence pairs of train under the conditions of other rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.files import check_writable, digest_file, digest_text, read_json, write_json
from llmcond.base.metrics import choose_metrics
from llmcond.base.output import format_duration, log
from llmcond.base.package import bundled_names
from llmcond.base.records import build
from llmcond.data.datasets import DataOptions, Dataset
from llmcond.data.guides import AspectSample, dataset_files, read_aspect_datasets
from llmcond.data.rows import Rows, join_rows
from llmcond.encoders import ResolvedEncoder
from llmcond.encoders.adapter import member_folders, read_encoder_record, write_encoder_record
from llmcond.evaluation.results import Result, check_fold_count
from llmcond.features.view import FeatureView, recipe_view
from llmcond.finetune.model import (
    AspectModel,
    AspectSampler,
    BiEncoderModel,
    CrossInputs,
    CrossModel,
    HeadConfig,
    RatedInputs,
)
from llmcond.finetune.settings import AspectSettings, StageSettings
from llmcond.heads import FittedHead, Recipe, load_head, load_recipe, save_head
from llmcond.heads.conditioned import RegressionSettings
from llmcond.heads.module import check_contrasts
from llmcond.heads.numpy_heads import FitReport
from llmcond.heads.recipes import parse_settings
from llmcond.heads.settings import ObjectiveSettings
from llmcond.options.training import TrainCrossOptions, TrainLoraOptions
from llmcond.prompts import list_fields, load_prompt
from llmcond.runs import Run, open_run
from llmcond.runs.cross import KIND, NAME, CrossEncoder, load_cross_encoder
from llmcond.runs.embedder import Embedder, make_embedder
from llmcond.runs.examples import AnyPredictor, RowFeatures, predict, score_predictors
from llmcond.runs.open import LazyEncoder
from llmcond.runs.run import encoder_and_data_record, is_selected_on_dev
from llmcond.runs.trials import size_recipe
from llmcond.tasks import AnyTask, find_task
from llmcond.workflows.extract import check_prompts, check_router_used, read_data
from llmcond.workflows.train_job import (
    DataReader,
    RankingJob,
    TrainedHead,
    TrainingJob,
    build_tune_settings,
    load_named_head,
    resolve_trainable,
    save_trained_head,
    train,
    write_training_record,
)
from llmcond.workflows.training_record import (
    STATE,
    TrainingResult,
    head_config,
    load_finished_training,
    training_config,
)

if TYPE_CHECKING:
    from llmcond.encoders.tokenizing import InputTokenizer
    from llmcond.finetune.encoder import TrainableEncoder


#: The number of rows that are rated and saved together. A kill loses no more than these.
_BLOCK = 2_048
#: The second seed for sampling rows. The training steps use numbers from 0 as theirs.
_ROW_SEED = 2**32 + 1


@dataclass(frozen=True)
class Teacher:
    """A run whose head rates rows. Its model is loaded when it rates the first rows.

    Attributes:
        run: the run.
        head: the full name of the head; for a cross-encoder, the name of its linear layer.
        rows: the number of rows to rate.
        record: what identifies the teacher: the digests of encoder and head, and ``rows``.
        trained_on: the splits that its encoder or its head was trained on.
    """

    run: Run
    head: str
    rows: int
    record: Mapping[str, Any]
    trained_on: tuple[str, ...]

    def record_fields(self) -> dict[str, Any]:
        """Return the names of encoder and head for the training record, with an adapter's base."""
        tuned = read_encoder_record(self.run.folder)
        base = {} if tuned is None or tuned.base is None else {"base": tuned.base}
        fields = {"encoder": self.run.encoder_name, **base}
        return {**fields, "head": self.head, "rows": self.rows}

    def was_trained_on_dev(self, dataset: Dataset) -> bool:
        """Return whether the teacher was trained on the dev rows of a dataset."""
        is_same_data = self.run.manifest["data"]["digest"] == dataset.digest
        return is_same_data and "dev" in self.trained_on

    def rate(self, train: Rows, seed: int, folder: Path, device: str) -> Rows:
        """Return new rows, which train does not contain, with the teacher's ratings.

        The ratings are saved in ``folder``, so that a killed call continues from there.

        Args:
            train: the rows whose sentence pairs and conditions are combined.
            seed: the seed for sampling the new rows.
            folder: the folder of the ratings.
            device: the device to rate on.

        Raises:
            UserError: train has too few conditions, or a similarity is not finite.
            LlmcondError: the encoder cannot be loaded, or the file of ratings is damaged.
        """
        rows = sample_unrated_rows(train, self.rows, seed)
        identity = json.dumps([self.record, seed, list(rows.texts.values())])
        path = folder / f"teacher-{digest_text(identity)}.json"
        ratings = _read_ratings(path)
        if len(ratings) < len(rows):
            log.info(
                f"rating {len(rows) - len(ratings):,} rows with {self.head} of {self.run.folder}"
            )
            model = self._load(device)
            while len(ratings) < len(rows):
                batch = slice(len(ratings), len(ratings) + _BLOCK)
                texts = (rows.sentence1[batch], rows.sentence2[batch], rows.condition[batch])
                similarities = model.similarity(*map(list, texts), show_progress=True)
                # Cosines and regressions may lie outside the scale of ratings.
                similarities = similarities.clip(0, 1)
                ratings += similarities.astype(np.float64).tolist()
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, {"ratings": ratings})
        return replace(rows, rating=np.array(ratings))

    def _load(self, device: str) -> CrossEncoder | Embedder:
        if self.run.cross:
            return load_cross_encoder(self.run.folder, device=device)
        encoder = LazyEncoder(self.run.resolve_encoder(device))()
        return make_embedder(encoder, self.run.load_head(self.head))


def find_teacher(folder: str | Path | None, rows: int | None, dataset: Dataset) -> Teacher | None:
    """Return the teacher of a run.

    Args:
        folder: the run's folder; None: there is no teacher.
        rows: the number of rows to rate; None: as many as train has rated rows.
        dataset: the dataset of the student.

    Returns:
        The teacher; None if there is none.

    Raises:
        UserError: there is no such run, it has no head, or its head does not give ratings.
    """
    if folder is None:
        return None
    run = open_run(Path(folder), cross=True)
    splits, rows = run.trained_on, rows or int(dataset.splits["train"].rated.sum())
    if run.cross:
        name = NAME
    else:
        default_head = run.default_head()
        if default_head is None or default_head[0] not in run.head_names():
            raise UserError(
                f"{folder} has no fitted head that is better than zero-shot, and cosines of its "
                f"features are not ratings. Fit a head (llmcond fit-head --run {folder}), or train "
                "its encoder (llmcond train-lora)."
            )
        saved_head, reason = run.load_head(default_head[0]), default_head[1]
        log.info(f"teacher: {saved_head.name} of {folder}, {reason}")
        if not getattr(saved_head.head.settings, "mse", 1.0):
            raise UserError(
                f"the head {saved_head.name} of {folder} was fitted to the order of ratings, so "
                "its similarities are on another scale. Fit a head with mse above 0."
            )
        name, splits = saved_head.name, (*splits, *saved_head.trained_on)
    record = {
        "encoder": run.manifest["encoder"]["fingerprint"],
        "head": run.head_record(name)["weights_sha256"],
        "rows": rows,
    }
    return Teacher(run, name, rows, record, tuple(dict.fromkeys(splits)))


def sample_unrated_rows(rows: Rows, count: int, seed: int) -> Rows:
    """Combine sentence pairs of rows with conditions of other rows into unrated rows.

    Pairs are sampled uniformly, and conditions in proportion to their frequency. No new row repeats
    another one, or a pair with its condition in ``rows``, rated or not.

    Args:
        rows: the rows to combine.
        count: the number of new rows.
        seed: the random seed.

    Raises:
        UserError: fewer than ``count`` such rows can be sampled.
    """
    generator = np.random.Generator(np.random.SFC64([seed, _ROW_SEED]))
    _, first_rows = np.unique(rows.pair, return_index=True)
    pair, condition = rows.pair.tolist(), rows.condition
    used = set(zip(pair, condition, strict=True))
    possible = len(first_rows) * len(set(condition)) - len(used)
    if count > possible / 2:  # beyond that, sampling would mostly hit rows that are used already
        raise UserError(
            f"--teacher-rows is {count:,}, but {rows.file} gives {possible:,} new combinations of "
            f"sentence pairs and conditions. Ask for at most half of them, {possible // 2:,}."
        )
    row_indices, texts = list[int](), list[str]()
    while len(row_indices) < count:
        pair_numbers = generator.integers(len(first_rows), size=count).tolist()
        condition_rows = generator.integers(len(rows), size=count).tolist()
        for number, row in zip(pair_numbers, condition_rows, strict=True):
            if (number, condition[row]) not in used and len(row_indices) < count:
                used.add((number, condition[row]))
                row_indices.append(int(first_rows[number]))
                texts.append(condition[row])
    new_rows = rows.take(np.array(row_indices))
    return replace(new_rows, condition=texts, rating=np.full(count, np.nan))


def _read_ratings(path: Path) -> list[float]:
    """Read the ratings of a file; empty if there is no such file."""
    if not path.is_file():
        return []
    ratings = read_json(path).get("ratings")
    if not isinstance(ratings, list) or not all(isinstance(rating, float) for rating in ratings):
        raise LlmcondError(f"{path} is damaged. Delete it to rate the rows again.")
    return ratings


def read_rated_dataset(task: Any, options: DataOptions, read: DataReader | None = None) -> Dataset:
    """Read a dataset whose train split has rated rows, by ``read`` or by ``read_data``.

    Raises:
        UserError: train has fewer than two rated rows, or only equal ratings.
    """
    dataset: Dataset = (read or read_data)(task, options)
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
    return dataset


def read_stage_splits(dataset: Dataset, stage: StageSettings) -> tuple[Rows, Rows]:
    """Return the rated rows of train and of dev.

    Raises:
        UserError: dev has no rated rows, or fewer sentence pairs than folds.
    """
    train, dev = dataset.splits["train"], dataset.splits.get("dev")
    if dev is None or not dev.rated.any():
        raise UserError(
            f"{dataset.source} has no rated rows in dev to train on. Leave out --then, or add a "
            "dev file."
        )
    dev = dev.take(dev.rated)
    check_fold_count(dev, stage.folds)
    return train.take(train.rated), dev


def plan_stage(options: StageSettings, dataset: Dataset) -> StageSettings | None:
    """Return the settings of the last stage, checked before any training; None: there is none.

    Raises:
        UserError: there is a single fold; or as in ``read_stage_splits``.
    """
    if options.then is None:
        return None
    if options.folds == 1:
        raise UserError("--folds is 1; expected 2 or more, or 0 for none.")
    read_stage_splits(dataset, options)
    return options


def check_folds(
    stage: StageSettings | None,
    model: str,
    resolved: ResolvedEncoder,
    dataset: Dataset,
    *others: str,
) -> None:
    """Raise a UserError for folds of dev if the encoder or another model was trained on dev.

    Args:
        stage: the last stage; None: there is none.
        model: the name of the encoder.
        resolved: the encoder.
        dataset: the dataset with the dev rows.
        others: the names of other models, such as a teacher, that were trained on dev.
    """
    sources = [model] if resolved.checkpoint.dev_digest == dataset.digest else []
    if stage is not None and stage.folds and (sources or others):
        raise UserError(
            f"{[*sources, *others][0]} was trained on dev, so folds of dev would measure nothing. "
            "Leave out --folds."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedJob(TrainingJob):
    """Training on rated rows.

    Attributes:
        stage: the last stage, which includes dev; None: there is none.
        teacher: the teacher that rates additional training rows; None: there is none.
    """

    task: Any
    dataset: Dataset
    stage: StageSettings | None = None
    teacher: Teacher | None = None

    def inputs(self, rows: Rows, tokenizer: InputTokenizer) -> Any:
        """Return the rated rows of a table in the form that the model takes."""
        raise NotImplementedError

    @property
    @override
    def trained_on(self) -> tuple[str, ...]:
        return ("train", "dev") if self.stage is not None or self._dev_is_known else ("train",)

    @property
    def _dev_is_known(self) -> bool:
        """Whether the teacher or the encoder was trained on dev, so that dev scores are biased."""
        if self.resolved.checkpoint.dev_digest == self.dataset.digest:
            return True
        return self.teacher is not None and self.teacher.was_trained_on_dev(self.dataset)

    @override
    def record_fields(self) -> dict[str, Any]:
        fields = TrainingJob.record_fields(self)
        return (
            fields if self.teacher is None else {**fields, "teacher": self.teacher.record_fields()}
        )

    def train_with_teacher(self) -> Rows:
        """Return the train split, with the rows that the teacher rates if there is one."""
        train = self.dataset.splits["train"]
        if self.teacher is None:
            return train
        from accelerate import PartialState

        with PartialState().main_process_first():  # the other processes read its saved ratings
            folder, device = self.folder / STATE, self.resolved.device
            taught_rows = self.teacher.rate(train, self.seed, folder, device)
        return join_rows([train.take(train.rated), taught_rows])

    def rated_dev(self) -> Rows | None:
        """Return the dev split; None if it has no rated rows or cannot choose the weights."""
        if self._dev_is_known:
            log.info(
                "the encoder or its teacher was trained on dev, so dev does not choose the weights"
            )
            return None
        dev = self.dataset.splits.get("dev")
        return dev if dev is not None and dev.rated.any() else None

    @override
    def last_stage(
        self, tokenizer: InputTokenizer, **parts: Any
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        if self.stage is None:
            return {}, []
        from llmcond.finetune.loop import LastStage

        train, dev = read_stage_splits(self.dataset, self.stage)
        return LastStage(
            to_inputs=lambda rows: self.inputs(rows, tokenizer),
            train=train,
            dev=dev,
            settings=self.settings,
            stage=self.stage,
            folder=self.folder / STATE,
            **parts,
        ).run()


def score_predictor(
    run: Run,
    predictor: AnyPredictor | CrossEncoder,
    predicted: Callable[[Rows], NDArray[np.float32]],
) -> list[Result]:
    """Return the scores of a predictor on dev and test, as ``evaluate`` gives them."""
    results: list[Result] = []
    for split in ("dev", "test"):
        if split in run.splits and run.rows(split).rated.any() and split not in run.trained_on:
            rows, metrics = run.rows(split), choose_metrics(run.task.metrics)
            results += score_predictors(
                [predictor], [predicted(rows)], rows, split, metrics, task=run.task.name
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
    task: Any = find_task(options.task)
    return plan_training(options, task).run()


def plan_training(
    options: TrainLoraOptions, task: AnyTask[Any], read: DataReader | None = None
) -> TrainingJob:
    """Check everything that a training needs.

    Args:
        options: the options of the command.
        task: the task of the data.
        read: a function that reads the data instead of ``read_data``, so that several trainings
            can share them.

    Raises:
        UserError: the input is invalid, or an option is for another kind of task.
        LlmcondError: the encoder cannot be loaded.
    """
    if task.has_columns:
        return plan_pairs(options, task, read)
    return RankingJob.from_options(options, task, read)


def plan_pairs(options: TrainLoraOptions, task: Any, read: DataReader | None = None) -> RatedJob:
    """Plan a training on rated pairs; see ``plan_training``."""
    aspects = None if options.aspects is None else options.select(AspectSettings)
    plan = _plan_head(options)
    settings = build_tune_settings(options.tune_settings(), plan.recipe)
    data_options = replace(options.data_options(), extra=list_fields(plan.prompts))
    dataset = read_rated_dataset(task, data_options, read)
    stage = plan_stage(options.select(StageSettings), dataset)
    teacher = find_teacher(options.teacher, options.teacher_rows, dataset)
    samples = [] if aspects is None else read_aspect_datasets(Path(str(aspects.aspects)))
    encoder_options = options.encoder_options()
    resolved = resolve_trainable(options, encoder_options, settings)
    teacher_knows_dev = teacher is not None and teacher.was_trained_on_dev(dataset)
    sources = [f"the teacher {options.teacher}"] if teacher_knows_dev else []
    check_folds(stage, options.model, resolved, dataset, *sources)
    plan, view = _add_prompts(plan, resolved, task)
    check_router_used(plan.prompts, encoder_options, task)
    head = head_config(options, plan.prompts, plan.recipe)
    config = {
        **training_config(options, resolved, dataset, settings, head),
        "subtract": plan.subtract,
        "objective": asdict(plan.objective),
        **({} if stage is None else {"then": asdict(stage)}),
        **({} if teacher is None else {"teacher": dict(teacher.record)}),
        **({} if aspects is None else {"aspects": _record_aspects(aspects)}),
        **({} if options.ensemble == 1 else {"ensemble": options.ensemble}),
    }
    job = _HeadJob(
        options=options,
        resolved=resolved,
        task=task,
        dataset=dataset,
        settings=settings,
        head=plan.recipe.name,
        config=config,
        stage=stage,
        teacher=teacher,
        plan=plan,
        view=view,
        aspects=aspects,
        samples=samples,
    )
    if options.ensemble > 1:
        _check_ensemble(job)
    return job


def _record_aspects(settings: AspectSettings) -> dict[str, Any]:
    """Return what decides the sampled groups: the settings, and the digest of each set."""
    files = dataset_files(Path(str(settings.aspects)))
    digests = {name: digest_file(path) for name, path in files.items()}
    return {**asdict(settings), "aspects": digests}


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadJob(RatedJob):
    """Training of an encoder that reads each text, with a head that compares the embeddings."""

    options: TrainLoraOptions
    plan: HeadConfig
    view: FeatureView
    aspects: AspectSettings | None
    samples: Sequence[AspectSample]

    @property
    def recipe(self) -> Recipe:
        """The recipe of the head."""
        return self.plan.recipe

    @override
    def run(self) -> TrainingResult:
        return train(self) if self.options.ensemble == 1 else _train_ensemble(self)

    def member(self, number: int, folder: Path) -> _HeadJob:
        """Return the job of one member of an ensemble, which differs by its seed and folder."""
        options = replace(self.options, run=folder, seed=self.seed + number, ensemble=1)
        config = {**self.config, "seed": options.seed}
        del config["ensemble"]
        plan = replace(self.plan, seed=options.seed)
        return replace(self, options=options, plan=plan, config=config)

    @override
    def build_parts(self, trainable: TrainableEncoder) -> tuple[BiEncoderModel, Any, Any]:
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
        model = BiEncoderModel(trainable.engine, plan, dims)
        if self.aspects is not None:
            groups = AspectSampler(self.samples, self.aspects)
            model = AspectModel(trainable.engine, plan, dims, groups, trainable.tokenizer)
        return model, train_inputs, dev_inputs

    @override
    def record_fields(self) -> dict[str, Any]:
        record = RatedJob.record_fields(self)
        names = [sample.name for sample in self.samples]
        return {**record, "aspects": names} if names else record

    @override
    def inputs(self, rows: Rows, tokenizer: InputTokenizer) -> RatedInputs:
        return RatedInputs.from_rows(rows, self.view, tokenizer)

    @override
    def save(self, head: FittedHead) -> TrainedHead:
        (run, resolved), view = self.complete_run(), self.view
        trained_head = save_trained_head(run, resolved, head, self.plan.recipe, view)
        saved = run.load_head(trained_head.name)

        def predicted(rows: Rows) -> NDArray[np.float32]:
            return predict(saved, RowFeatures(rows, run.store()).pairs(view))

        takes = {**trained_head.takes, "subtract": view.subtracts}
        return replace(trained_head, takes=takes, scores=score_predictor(run, saved, predicted))


def _plan_head(choice: TrainLoraOptions) -> HeadConfig:
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
    plan: HeadConfig, resolved: ResolvedEncoder, task: AnyTask[Any]
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
    settings = build_tune_settings(options.tune_settings())
    changes = parse_settings(
        RegressionSettings, dict(options.set or {}), "--set", "a cross-encoder"
    )
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
    dataset = read_rated_dataset(task, options.data_options())
    stage = plan_stage(options.select(StageSettings), dataset)
    # A linear layer also reads the length of a vector, so vectors keep theirs by default.
    encoder_options = replace(options.encoder_options(), normalize=bool(options.normalize))
    resolved = resolve_trainable(options, encoder_options, settings)
    check_folds(stage, options.model, resolved, dataset)
    if resolved.identity.routes_inside:
        raise UserError(
            "a cross-encoder reads the condition as a part of its input, so a router would have no "
            "effect. Leave out --router, or name a --model without a router."
        )
    head = {"orders": options.orders, "head": {"kind": KIND, **asdict(head_settings)}}
    job = _CrossJob(
        options=options,
        resolved=resolved,
        task=task,
        dataset=dataset,
        settings=settings,
        head=NAME,
        config={
            **training_config(options, resolved, dataset, settings, head),
            **({} if stage is None else {"then": asdict(stage)}),
        },
        stage=stage,
        head_settings=head_settings,
    )
    return train(job)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CrossJob(RatedJob):
    """Training of an encoder that reads both sentences and the condition, with a linear layer."""

    cross: ClassVar[bool] = True

    options: TrainCrossOptions
    head_settings: RegressionSettings

    @override
    def build_parts(self, trainable: TrainableEncoder) -> tuple[CrossModel, Any, Any]:
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
        return model, rows, dev_inputs

    @override
    def inputs(self, rows: Rows, tokenizer: InputTokenizer) -> CrossInputs:
        return CrossInputs.from_rows(rows, self.options.orders, tokenizer)

    @override
    def save(self, head: FittedHead) -> TrainedHead:
        run, resolved = self.complete_run(self.options.orders)
        save_head(head, run.head_folder(NAME), encoder_and_data_record(run))
        log.info(f"encoder -> {self.folder}; its scores:")
        cross = load_cross_encoder(self.folder, device=resolved.device)
        scores = score_predictor(run, cross, cross.predict)
        return TrainedHead(NAME, {"orders": self.options.orders}, scores)


#: Prefixes of the keys in a member's summary that the ensemble's training record repeats.
_REPEATED_KEYS = ("seed", "steps", "best_step", "dev_", "then")


def _check_ensemble(job: _HeadJob) -> None:
    """Check that the options allow an ensemble.

    Raises:
        UserError: there is a head behind the encoder, no adapter, a router, or vectors without
            unit length.
    """
    plan, identity = job.plan, job.resolved.identity
    if not plan.recipe.is_identity:
        raise UserError(
            f"an ensemble has no head while it is trained, but the head is {plan.recipe.name}. "
            "Give --head none, and fit the head afterwards: llmcond fit-head."
        )
    if identity.routes_inside or any(prompt.has_router for prompt in plan.prompts):
        raise UserError(
            "an ensemble does not support routers. Leave out --router, and name a --prompt without "
            "one, such as concat-cond-sent."
        )
    if job.settings.full or job.options.merge:
        raise UserError(
            "an ensemble consists of adapters on one base. Leave out --merge, and give --rank a "
            "number."
        )
    if not identity.normalize:
        raise UserError("members of an ensemble need vectors of unit length. Add --normalize.")


def _train_ensemble(job: _HeadJob) -> TrainingResult:
    """Train the members one after the other, or continue where the training was stopped.

    Each member continues as in ``train``, and a finished member is not trained again.

    Raises:
        UserError: as ``train``.
    """
    summary = load_finished_training(job.folder, job.config)
    if summary is not None:
        return TrainingResult(summary)
    check_writable(job.folder / STATE / "state.safetensors")
    # This folder marks an ensemble whose training is not finished.
    (job.folder / STATE).mkdir(parents=True, exist_ok=True)
    count, summaries = job.options.ensemble, []
    for number, folder in enumerate(member_folders(job.folder, count)):
        member = job.member(number, folder)
        log.info(f"member {number + 1} of {count}, seed {member.seed}:")
        summaries.append(train(member).to_json())
    from accelerate import PartialState

    if not PartialState().is_main_process:
        return TrainingResult({})
    return TrainingResult(_combine_members(job, summaries))


def _combine_members(job: _HeadJob, members: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
