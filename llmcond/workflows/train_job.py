"""Training an encoder with any kind of head: the jobs, the training itself, and its results."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.data.datasets import Dataset
from llmcond.data.rows import Rows, join_rows
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.spec import Orders
from llmcond.errors import UserError
from llmcond.evaluation.results import Result, check_fold_count
from llmcond.features.view import FeatureView, recipe_view
from llmcond.files import check_writable, write_json, write_text
from llmcond.finetune.loop import TrainingProgress, TrainingState
from llmcond.finetune.settings import StageSettings, TuneSettings
from llmcond.heads import Recipe, save_head
from llmcond.heads.fitted import FittedModule
from llmcond.log import log
from llmcond.metrics import finite_or_none
from llmcond.progress import TrainBar, format_duration
from llmcond.prompts import load_prompt
from llmcond.report.card import model_card
from llmcond.report.tables import dev_gain_text, estimate_text
from llmcond.run_log import TRAINING, RunLog, log_path
from llmcond.runs import AnyRun, Run, complete_run, head_name, head_record, portable_model_name
from llmcond.runs.cross import CrossEncoder
from llmcond.runs.examples import load_examples
from llmcond.runs.extraction import LazyEncoder, extract_run
from llmcond.runs.predictors import AnyPredictor, score_predictors
from llmcond.system import provenance
from llmcond.tasks import AnyTask, Data, Task
from llmcond.workflows.evaluate import evaluate
from llmcond.workflows.extract import check_prompts, check_router_used, read_data
from llmcond.workflows.options.common import Split
from llmcond.workflows.options.scoring import EvaluateOptions
from llmcond.workflows.options.training import TrainLoraOptions
from llmcond.workflows.teacher import Teacher
from llmcond.workflows.training_options import (
    DataReader,
    build_tune_settings,
    check_rated_options,
    choose_head,
    resolve_trainable,
)
from llmcond.workflows.training_record import (
    RECORD,
    STATE,
    TRAINING_FORMAT,
    TrainingResult,
    load_finished_training,
    training_config,
)

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from llmcond.encoders.engine.tokenizing import InputTokenizer
    from llmcond.finetune.encoder import TrainableEncoder
    from llmcond.finetune.loop import LastStage
    from llmcond.finetune.model import TrainedModel


@dataclass(frozen=True)
class StageResult:
    """The outcome of a last stage.

    Attributes:
        record: under the key ``then``, the stage's settings, steps and seconds, and
            ``folds`` if they were evaluated.
        curve: the loss of each epoch.
    """

    record: dict[str, Any]
    curve: list[dict[str, Any]]

    @property
    def steps(self) -> int:
        """The number of steps."""
        return int(self.record["then"]["steps"])


def check_stage_settings(stage: StageSettings) -> StageSettings | None:
    """Return the checked settings of the last stage; None if there is none.

    Raises:
        UserError: there is a single fold.
    """
    if stage.then is None:
        return None
    if stage.folds == 1:
        raise UserError("--folds is 1; expected 2 or more, or 0 for none.")
    return stage


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


def run_stage(last_stage: LastStage[Any]) -> StageResult:
    """Train the last stage; with folds, first measure its gain by cross-validation on dev."""
    fold_record: dict[str, Any] = {}
    if last_stage.stage.folds:
        fold_results = last_stage.cross_validate()
        log.info(dev_gain_text(fold_results))
        fold_record["folds"] = fold_results.to_json()
    progress = last_stage.run()
    stage = last_stage.stage
    record = {
        "share": stage.then_share,
        "weight": stage.then_weight,
        "learning_rate": last_stage.settings.learning_rate
        * stage.learning_rate_scale(last_stage.settings),
        "epochs": stage.then_epochs,
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        **fold_record,
    }
    curve = [{key: entry[key] for key in ("step", "epoch", "loss")} for entry in progress.curve]
    return StageResult({"then": record}, curve)


@dataclass(frozen=True)
class TrainingParts:
    """The model and the data of the training loop.

    Attributes:
        model: the model that is trained.
        train: the rows or triples to train on.
        dev: the rows or triples that choose the weights; None: the last weights are kept.
    """

    model: TrainedModel[Any, Any]
    train: Any
    dev: Any


@dataclass(frozen=True)
class TrainedHead:
    """A trained head that was saved in its run.

    Attributes:
        name: the name of the head.
        takes: what the head takes, for the summary, such as the names of its prompts.
        scores: its scores on dev and test.
        card: a function from the training record to a model card; None: the folder gets no card.
    """

    name: str
    takes: Mapping[str, Any]
    scores: Sequence[Result] = ()
    card: Callable[[Mapping[str, Any]], str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A training: the encoder, the data, the settings and the folder. Subclasses add the head.

    Attributes:
        model: the encoder's name as the user gave it.
        resolved: the encoder.
        folder: the run's folder, which also gets the encoder.
        task: the task of the data.
        dataset: the data to train on.
        settings: the settings of the training.
        head: the name of the head, for messages.
        seed: the random seed.
        merge: whether adapters are merged into the encoder at the end.
        config: everything that decides the resulting weights.
        trackers: the trackers that get the records of the training.
    """

    cross: ClassVar[bool] = False
    #: Words for messages: the examples to train on, the examples that are scored, and whether the
    #: score is that of a sample.
    unit: ClassVar[str] = "rated rows"
    scored_noun: ClassVar[str] = "rows"
    of_sample: ClassVar[bool] = False

    model: str
    resolved: ResolvedEncoder
    folder: Path
    task: AnyTask[Any]
    dataset: Data
    settings: TuneSettings
    head: str
    seed: int
    merge: bool
    config: Mapping[str, Any]
    trackers: Sequence[str] = ()

    def run(self) -> TrainingResult:
        """Train, or continue where the same job was stopped; see ``train``."""
        return train(self)

    def build_parts(self, trainable: TrainableEncoder) -> TrainingParts:
        """Return the model, and the examples of train and dev in the form that it takes."""
        raise NotImplementedError

    @property
    def trained_on(self) -> tuple[str, ...]:
        """The splits whose examples the encoder, or its teacher, was trained on."""
        return ("train",)

    def record_fields(self) -> dict[str, Any]:
        """Return further fields for the training record, on the data that was trained on."""
        return {} if self.trained_on == ("train",) else {"trained_on": list(self.trained_on)}

    def last_stage(
        self,
        model: Any,
        tokenizer: InputTokenizer,
        start: Mapping[str, Tensor],
        accelerator: Accelerator,
        config: Mapping[str, Any],
        run_log: RunLog,
    ) -> StageResult | None:
        """Train the model further from its best weights ``start``, if there is a last stage."""
        return None

    def complete_run(self, orders: Orders | None = None) -> tuple[AnyRun, ResolvedEncoder]:
        """Make the folder of the saved encoder a run.

        Args:
            orders: the sentence orders of a cross-encoder; None: it is not a cross-encoder.

        Returns:
            The run, and the trained encoder.
        """
        base = self.resolved
        dtype, quantize = base.identity.dtype, base.identity.quantize
        options = EncoderOptions(dtype=dtype, quantize=quantize, device=base.device)
        trained = resolve(str(self.folder), options, cross=self.cross)
        completion = (self.folder, trained, self.dataset, self.task, orders, self.trained_on)
        return complete_run(*completion), trained

    def save(self, head: Any) -> TrainedHead:
        """Complete the run, and save the head in it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingJob(TrainingJob):
    """Training on correct answers: the triples of a graph, or dialogues.

    Attributes:
        recipe: the recipe of the head.
        start: the head that training starts from; None: a new one.
        view: the features that the head takes.
    """

    recipe: Recipe
    start: FittedModule | None
    view: FeatureView

    @classmethod
    def check_data(cls, dataset: Data, task: AnyTask[Any]) -> None:
        """Raise a UserError for data that this job cannot train on."""

    @classmethod
    def from_options(
        cls,
        options: TrainLoraOptions,
        task: AnyTask[Any],
        load: Callable[[Path], tuple[FittedModule, dict[str, Any]]],
        check: Callable[[Recipe], object],
        read: DataReader | None = None,
    ) -> Self:
        """Create a job from options, and check its data and its encoder.

        Args:
            options: the options of the command.
            task: the task of the data.
            load: a function that reads a fitted head of the task, and its record.
            check: a function that raises a UserError for a recipe that cannot be trained.
            read: a function that reads the data; None: ``read_data``.

        Raises:
            UserError: the input is invalid, or the head cannot be trained (see ``choose_head``).
            LlmcondError: the encoder cannot be loaded.
        """
        check_rated_options(options, task)
        recipe, prompts, start = choose_head(options, task, load, check)
        settings = build_tune_settings(options.tune_settings(), recipe)
        dataset = (read or read_data)(task, options.data_options())
        cls.check_data(dataset, task)
        model, merge = options.model, options.merge
        resolved = resolve_trainable(model, options.encoder_options(), settings, merge)
        if not prompts:
            prompt_names = {"separate": "separate", "alone": task.prompt}
            prompts = (load_prompt(str(prompt_names.get(recipe.features, resolved.joint_prompt))),)
        check_prompts(prompts, resolved, task)
        view = recipe_view(recipe, prompts, subtract=False)
        view.check_texts()
        check_router_used(prompts, options.encoder_options(), task)
        return cls(
            model=model,
            resolved=resolved,
            folder=Path(options.run),
            task=task,
            dataset=dataset,
            settings=settings,
            head=recipe.name,
            seed=options.seed,
            merge=merge,
            config=training_config(resolved, dataset, prompts, recipe, options, settings, merge),
            trackers=options.log,
            recipe=recipe,
            start=start,
            view=view,
        )

    @override
    def save(self, head: FittedModule) -> TrainedHead:
        run, resolved = self.complete_run()
        trained_head = save_trained_head(run, resolved, head, self.recipe, self.view)
        splits: Sequence[Split] = ("dev", "test")
        scores = [
            result
            for split in splits
            if split in run.splits
            for result in evaluate(
                EvaluateOptions(run=self.folder, head=[trained_head.name], split=split)
            )
            if result.name == trained_head.name
        ]
        return replace(trained_head, scores=scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedJob(TrainingJob):
    """Training on rated rows.

    Attributes:
        stage: the last stage, which includes dev; None: there is none.
        teacher: the teacher that rates additional training rows; None: there is none.
    """

    task: Task
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
        self,
        model: Any,
        tokenizer: InputTokenizer,
        start: Mapping[str, Tensor],
        accelerator: Accelerator,
        config: Mapping[str, Any],
        run_log: RunLog,
    ) -> StageResult | None:
        if self.stage is None:
            return None
        from llmcond.finetune.loop import LastStage

        train, dev = read_stage_splits(self.dataset, self.stage)
        return run_stage(
            LastStage(
                model=model,
                to_inputs=lambda rows: self.inputs(rows, tokenizer),
                train=train,
                dev=dev,
                settings=self.settings,
                stage=self.stage,
                start=start,
                accelerator=accelerator,
                folder=self.folder / STATE,
                training_config=config,
                run_log=run_log,
            )
        )


def save_trained_head(
    run: AnyRun, resolved: ResolvedEncoder, head: FittedModule, recipe: Recipe, view: FeatureView
) -> TrainedHead:
    """Save a trained head in its run, and extract the run's features.

    Args:
        run: the run in the folder of the trained encoder.
        resolved: the trained encoder.
        head: the trained head.
        recipe: the recipe that the head was created from.
        view: the features that the head takes.

    Returns:
        The saved head, without scores.
    """
    log.info(f"encoder -> {run.folder}; its features:")
    encoder = LazyEncoder(resolved)
    for prompt in view.prompts:
        extract_run(run, encoder, prompt)
    name = head_name(recipe.name, view)
    record = head_record(run, view, replace(recipe, settings=head.settings).to_json())
    if "dev" in run.splits:
        record[f"dev_{run.dev_metric}"] = finite_or_none(
            load_examples(run).score_on_dev(head, view)
        )
    save_head(head, run.head_folder(name), record)
    make_card = partial(model_card, kind=run.kind, prompts=view.prompts, recipe=record["recipe"])
    return TrainedHead(name, {"prompt": view.name}, card=make_card)


def train(job: TrainingJob) -> TrainingResult:
    """Train, or continue where the same job was stopped; a finished job is not trained again."""
    summary = load_finished_training(job.folder, job.config)
    if summary is not None:
        return TrainingResult(summary)
    check_writable(job.folder / STATE / "state.safetensors")
    return TrainingResult(_train(job))


def _train(job: TrainingJob) -> dict[str, Any]:
    from llmcond.finetune.encoder import load_trainable, prepare_accelerator, save_encoder
    from llmcond.finetune.loop import Trainer

    resolved, settings = job.resolved, job.settings
    accelerator = prepare_accelerator(resolved)
    trainable = load_trainable(resolved, settings, job.seed)
    parts = job.build_parts(trainable)
    if parts.dev is None:
        log.info(f"no {job.unit} in dev to score, so the last weights are kept")
    config = {**job.config, "processes": accelerator.num_processes}
    # A different last stage can continue from the same training, so it is left out.
    main_config = {key: value for key, value in config.items() if key != "then"}
    state = TrainingState(job.folder / STATE, main_config)
    trainer = Trainer(parts.model, parts.train, parts.dev, settings, accelerator, state)
    n_trained, n_all = trainable.count_weights()
    n_head = sum(value.numel() for value in parts.model.head.parameters())
    weights = {"trained": n_trained, "of": n_all, "head": n_head}
    quantize = resolved.identity.quantize
    log.info(
        f"training {n_trained:,} weights of {resolved.checkpoint.name} "
        f"({100 * n_trained / n_all:.1f} % of {n_all:,}) and {n_head:,} of the head "
        f"{job.head} in {resolved.identity.dtype}"
        + ("" if quantize == "none" else f" ({quantize})")
        + f" on {resolved.device}: {trainer.steps:,} steps"
        + (f", from step {trainer.progress.step:,}" if trainer.progress.step else "")
    )
    path = log_path(job.folder, TRAINING) if accelerator.is_main_process else None
    log_config = {"task": job.task.name, **config, "weights": weights}
    first_step = trainer.progress.step
    with RunLog(path, _name_in_trackers(job), log_config, job.trackers, first_step) as run_log:
        on_dev, metric = parts.model.dev_score_name, parts.model.metric
        score_heading = metric.heading + (" of a sample" if job.of_sample else "")
        with TrainBar(key=on_dev, score=score_heading, show=metric.format) as bar:
            trainer.run(run_log.on_step(bar.on_step))
        accelerator.wait_for_everyone()
        progress, head = trainer.progress, None
        trainer.load_best_weights()
        del trainer
        accelerator.free_memory()
        staged = job.last_stage(
            parts.model, trainable.tokenizer, state.load_best(), accelerator, config, run_log
        )
        # All processes must have read the state before the main process deletes it.
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            name, cross = portable_model_name(job.model, resolved), job.cross
            dev_of = job.dataset.digest if "dev" in job.trained_on else None
            save_encoder(trainable, name, job.folder, merge=job.merge, cross=cross, dev_of=dev_of)
            head = parts.model.fitted_head(
                {
                    "best_step": progress.best_step,
                    "selected_on": None if progress.best_score is None else "dev",
                    "n_parameters": n_head,
                    "curve": list(progress.curve),
                    **job.record_fields(),
                    **({} if staged is None else staged.record),
                }
            )
        # The saved encoder is loaded next, and a GPU may not have room for both.
        del trainable, parts
        accelerator.free_memory()
        summary = (
            {} if head is None else _finish(job, head, progress, weights, on_dev, staged, run_log)
        )
        accelerator.wait_for_everyone()
        return summary


def _name_in_trackers(job: TrainingJob) -> str:
    """Return the last two parts of a run's path, as members of an ensemble share the last."""
    return "/".join(job.folder.absolute().parts[-2:])


def _finish(
    job: TrainingJob,
    head: FittedModule,
    progress: TrainingProgress,
    weights: Mapping[str, int],
    on_dev: str,
    staged: StageResult | None,
    run_log: RunLog,
) -> dict[str, Any]:
    """Save the head, its scores, the card and, as the last step, the training record."""
    folder, base, trained_head = job.folder, job.resolved, job.save(head)
    best_score, best_step = progress.best_score, progress.best_step
    summary = {
        "run": str(folder),
        "encoder": base.checkpoint.name,
        "head": trained_head.name,
        **trained_head.takes,
        "seed": job.seed,
        "weights": weights,
        "steps": progress.step,
        "best_step": best_step,
        on_dev: best_score if staged is None else None,
        "seconds": round(progress.seconds, 1),
        **job.record_fields(),
        # The score on dev is that of the weights before the last stage.
        **({} if staged is None else {**staged.record, f"{on_dev}_before": best_score}),
        "scores": [result.to_json() for result in trained_head.scores],
    }
    scores = {
        f"{result.split}_{name}": estimate.value
        for result in trained_head.scores
        for name, estimate in result.metrics.items()
    }
    figures = {key: summary[key] for key in ("steps", "best_step", on_dev, "seconds")}
    run_log.write("end", {**figures, **scores})
    curves = {"curve": head.fit.record["curve"]}
    if staged is not None:
        curves["then_curve"] = staged.curve
    write_training_record(job, trained_head, summary, curves)
    log.info(
        f"{trained_head.name}: step {best_step:,} of {progress.step:,}"
        + ("" if staged is None else f" and {staged.steps:,} of the last stage, with dev")
        + f", trained in {format_duration(progress.seconds)} -> {folder}"
    )
    return summary


def write_training_record(
    job: TrainingJob,
    trained_head: TrainedHead,
    summary: Mapping[str, Any],
    curves: Mapping[str, Any],
) -> None:
    """Write the model card and then the training record, and log the scores."""
    from llmcond.finetune.encoder import hub_name

    folder, base = job.folder, job.resolved
    record = {
        "format": TRAINING_FORMAT,
        "summary": summary,
        **curves,
        "made_of": job.config,
        "base": {
            "model": job.model,
            "repo": hub_name(job.model, base),
            "weights": base.identity.weights,
        },
        "data": job.dataset.to_json(),
        **provenance(),
    }
    if trained_head.card is not None:
        write_text(folder / "README.md", trained_head.card(record))
    write_json(folder / RECORD, record)
    shutil.rmtree(folder / STATE, ignore_errors=True)
    for result in trained_head.scores:
        log.info(
            f"{result.split}: {result.primary.heading} "
            f"{estimate_text(result.primary, result.main)} on {result.counts.n:,} {job.scored_noun}"
        )


def score_predictor(
    run: Run,
    predictor: AnyPredictor | CrossEncoder,
    predicted: Callable[[Rows], NDArray[np.float32]],
) -> list[Result]:
    """Return the scores of a predictor on dev and test, as ``evaluate`` gives them."""
    results: list[Result] = []
    for split in ("dev", "test"):
        if split in run.splits and run.rows(split).rated.any() and split not in run.trained_on:
            rows = run.rows(split)
            results += score_predictors(
                [predictor], [predicted(rows)], rows, split, task=run.task.name
            )
    return results
