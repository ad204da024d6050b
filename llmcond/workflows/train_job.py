"""Training an encoder with any kind of head: checks of the options, the jobs, and the loop."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from typing_extensions import override

from llmcond.base.errors import UserError
from llmcond.base.files import check_writable, write_json, write_text
from llmcond.base.metrics import finite_or_none
from llmcond.base.output import FitBar, format_duration, log
from llmcond.base.records import build
from llmcond.base.run_log import TRAINING, RunLog, log_path
from llmcond.base.system import provenance, require_libraries
from llmcond.data.datasets import DataOptions
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.spec import Orders
from llmcond.evaluation.results import Result
from llmcond.features.view import FeatureView, recipe_view
from llmcond.finetune.loop import TrainingState
from llmcond.finetune.settings import TuneSettings, default_learning_rate
from llmcond.heads import Recipe, load_recipe, save_head
from llmcond.heads.fitted import FittedModule
from llmcond.options.common import Split
from llmcond.options.scoring import EvaluateOptions
from llmcond.options.training import (
    HeadTrainingOptions,
    TeacherOptions,
    TrainCrossOptions,
    TrainingOptions,
    TrainLoraOptions,
)
from llmcond.prompts import Prompt, load_prompt, prompt_from_json
from llmcond.report.card import model_card
from llmcond.report.tables import estimate_text
from llmcond.runs import Run, complete_run, head_name, head_record, portable_model_name
from llmcond.runs.examples import load_examples
from llmcond.runs.open import LazyEncoder, extract_run
from llmcond.runs.run import check_head_record
from llmcond.runs.trials import size_recipe
from llmcond.tasks import AnyTask, Data
from llmcond.workflows.evaluate import evaluate
from llmcond.workflows.extract import check_prompts, check_router_used, read_data
from llmcond.workflows.training_record import (
    RECORD,
    STATE,
    TRAINING_FORMAT,
    TrainingResult,
    head_config,
    load_finished_training,
    training_config,
)

if TYPE_CHECKING:
    from llmcond.encoders.tokenizing import InputTokenizer
    from llmcond.finetune.encoder import TrainableEncoder
    from llmcond.finetune.model import TrainedModel


F = TypeVar("F", bound=FittedModule)
#: A function that reads the data of a task, such as ``read_data``.
DataReader = Callable[[AnyTask[Any], DataOptions], Any]


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
    choice: HeadTrainingOptions,
    recipes: str | None,
    load: Callable[[Path], tuple[F, dict[str, Any]]],
) -> tuple[Recipe, tuple[Prompt, ...], F | None, dict[str, Any]]:
    """Return the recipe and the prompts to train with, and the head to start from.

    A head to start from gives the recipe, and the prompts unless others were named.

    Args:
        choice: the options for the head.
        recipes: the task whose recipes can be named; None: the recipes of rated pairs.
        load: a function that reads a fitted head and its record.

    Returns:
        The recipe, the prompts, the head to start from or None, and its record (empty without one).

    Raises:
        UserError: no head is named.
    """
    prompts = tuple(load_prompt(name) for name in choice.prompt)
    if choice.start is None:
        if choice.head is None:
            raise UserError("no head is named. Give --head (none: the encoder without a head).")
        return load_recipe(choice.head, recipes), prompts, None, {}
    folder = Path(choice.start)
    start, record = load(folder)
    record_path = str(folder / "head.json")
    record = check_head_record(record, record_path)
    prompts = prompts or tuple(
        prompt_from_json(prompt_record, record_path) for prompt_record in record["prompts"]
    )
    recipe = replace(
        load_recipe("none", recipes),
        **{key: record["recipe"][key] for key in ("name", "description", "source")},
        kind=start.kind,
        family=start.family,
        settings=start.settings,
    )
    return recipe, prompts, start, record


def resolve_trainable(
    options: TrainingOptions, encoder_options: EncoderOptions, settings: TuneSettings
) -> ResolvedEncoder:
    """Resolve an encoder, and check that it can be trained with the settings.

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

    check_trainable(resolved, settings, options.merge)
    return resolved


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
        options: the options of the command: model, run, seed, merge and trackers are read here.
        resolved: the encoder.
        task: the task of the data.
        dataset: the data to train on.
        settings: the settings of the training.
        head: the name of the head, for messages.
        config: everything that decides the resulting weights.
    """

    cross: ClassVar[bool] = False
    #: Words for messages: the examples to train on, the examples that are scored, and whether the

    options: TrainLoraOptions | TrainCrossOptions
    resolved: ResolvedEncoder
    task: AnyTask[Any]
    dataset: Data
    settings: TuneSettings
    head: str
    config: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The run's folder, which also gets the encoder."""
        return Path(self.options.run)

    @property
    def seed(self) -> int:
        """The random seed."""
        return self.options.seed

    def in_folder(self, folder: Path) -> Self:
        """Return the same training with another folder."""
        return replace(self, options=replace(self.options, run=folder))

    def run(self) -> TrainingResult:
        """Train, or continue where the same job was stopped; see ``train``."""
        return train(self)

    def build_parts(self, trainable: TrainableEncoder) -> tuple[TrainedModel[Any, Any], Any, Any]:
        """Return the model, and the examples of train and dev in the form that it takes.

        Those of dev choose the weights; None: the last weights are kept.
        """
        raise NotImplementedError

    @property
    def trained_on(self) -> tuple[str, ...]:
        """The splits whose examples the encoder, or its teacher, was trained on."""
        return ("train",)

    def record_fields(self) -> dict[str, Any]:
        """Return further fields for the training record, on the data that was trained on."""
        return {} if self.trained_on == ("train",) else {"trained_on": list(self.trained_on)}

    def last_stage(
        self, tokenizer: InputTokenizer, **parts: Any
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Train the model further, if there is a last stage; see ``LastStage``.

        Returns:
            The stage's entry in the training record and its curve; both are empty without a stage.
        """
        return {}, []

    def complete_run(self, orders: Orders | None = None) -> tuple[Run, ResolvedEncoder]:
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
        run = complete_run(self.folder, trained, self.dataset, self.task, orders, self.trained_on)
        return run, trained

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
    def from_options(
        cls,
        options: TrainLoraOptions,
        task: AnyTask[Any],
        read: DataReader | None = None,
    ) -> Self:
        """Create a job from options, and check its data and its encoder.

        Args:
            options: the options of the command.
            task: the task of the data.
            read: a function that reads the data; None: ``read_data``.

        Raises:
            UserError: the input is invalid: no head is named, or two; the head cannot be trained;
                several prompts are named; or features are to be subtracted.
            LlmcondError: the encoder cannot be loaded.
        """
        only_for_pairs = {
            f"--then {options.then}": options.then is not None,
            f"--aspects {options.aspects}": options.aspects is not None,
            "--ensemble": options.ensemble != 1,
            "--teacher": options.select(TeacherOptions) != TeacherOptions(),
        }
        for option in [name for name, is_set in only_for_pairs.items() if is_set]:
            raise UserError(
                f"{option} is for rated pairs, and the task {task.name} has none. Leave it out."
            )
        if options.subtract:
            raise UserError(
                f"nothing can be subtracted in the task {task.name}, because its candidates have "
                "no conditions. Leave out --subtract."
            )
        recipe, prompts, start, _ = load_named_head(options, task.recipes, task.load_head)
        if options.set:
            recipe = recipe.with_settings(recipe.parse_changes(dict(options.set), "--set"), "--set")
        if options.dim is not None:
            recipe = size_recipe(recipe, options.dim, options.dim)
        if len(prompts) > 1:
            raise UserError(
                f"in the task {task.name}, an encoder is trained with one prompt, but "
                f"{len(prompts)} are named. Give one --prompt."
            )
        settings = build_tune_settings(options.tune_settings(), recipe)
        dataset = (read or read_data)(task, options.data_options())
        task.check_training(recipe, dataset)
        resolved = resolve_trainable(options, options.encoder_options(), settings)
        if not prompts:
            prompt_names = {"separate": "separate", "alone": task.prompt}
            prompts = (load_prompt(str(prompt_names.get(recipe.features, resolved.joint_prompt))),)
        check_prompts(prompts, resolved, task)
        view = recipe_view(recipe, prompts, subtract=False)
        view.check_texts()
        check_router_used(prompts, options.encoder_options(), task)
        return cls(
            options=options,
            resolved=resolved,
            task=task,
            dataset=dataset,
            settings=settings,
            head=recipe.name,
            config=training_config(
                options, resolved, dataset, settings, head_config(options, prompts, recipe)
            ),
            recipe=recipe,
            start=start,
            view=view,
        )

    @override
    def build_parts(self, trainable: TrainableEncoder) -> tuple[TrainedModel[Any, Any], Any, Any]:
        return self.task.training_parts(self, trainable)

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


def save_trained_head(
    run: Run, resolved: ResolvedEncoder, head: FittedModule, recipe: Recipe, view: FeatureView
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
    make_card = partial(
        model_card, kind=run.kind.kind, prompts=view.prompts, recipe=record["recipe"]
    )
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

    resolved, settings, options = job.resolved, job.settings, job.options
    accelerator = prepare_accelerator(resolved)
    trainable = load_trainable(resolved, settings, job.seed)
    model, train_inputs, dev_inputs = job.build_parts(trainable)
    if dev_inputs is None:
        log.info(f"no {job.task.unit} in dev to score, so the last weights are kept")
    config = {**job.config, "processes": accelerator.num_processes}
    # A different last stage can continue from the same training, so it is left out.
    main_config = {key: value for key, value in config.items() if key != "then"}
    state = TrainingState(job.folder / STATE, main_config)
    trainer = Trainer(model, train_inputs, dev_inputs, settings, accelerator, state)
    n_trained, n_all = trainable.count_weights()
    n_head = sum(value.numel() for value in model.head.parameters())
    weights = {"trained": n_trained, "of": n_all, "head": n_head}
    quantize, first_step = resolved.identity.quantize, trainer.progress.step
    log.info(
        f"training {n_trained:,} weights of {resolved.checkpoint.name} "
        f"({100 * n_trained / n_all:.1f} % of {n_all:,}) and {n_head:,} of the head "
        f"{job.head} in {resolved.identity.dtype}"
        + ("" if quantize == "none" else f" ({quantize})")
        + f" on {resolved.device}: {trainer.steps:,} steps"
        + (f", from step {first_step:,}" if first_step else "")
    )
    path = log_path(job.folder, TRAINING) if accelerator.is_main_process else None
    # The last two parts of the path, as members of an ensemble share the last.
    name_in_trackers = "/".join(job.folder.absolute().parts[-2:])
    log_config = {"task": job.task.name, **config, "weights": weights}
    with RunLog(path, name_in_trackers, log_config, options.log, first_step) as run_log:
        metric = model.metric
        score_heading = metric.heading + (" of a sample" if job.task.dev_is_sample else "")
        with FitBar(
            key=model.dev_score_name, score=score_heading, show=metric.format, name="training"
        ) as bar:
            trainer.run(run_log.on_step(bar.on_step))
        accelerator.wait_for_everyone()
        progress, head = trainer.progress, None
        trainer.load_best_weights()
        del trainer, train_inputs, dev_inputs
        accelerator.free_memory()
        stage, stage_curve = job.last_stage(
            trainable.tokenizer,
            model=model,
            start=state.load_best(),
            accelerator=accelerator,
            training_config=config,
            run_log=run_log,
        )
        # All processes must have read the state before the main process deletes it.
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            save_encoder(
                trainable,
                portable_model_name(options.model, resolved),
                job.folder,
                merge=options.merge,
                cross=job.cross,
                dev_of=job.dataset.digest if "dev" in job.trained_on else None,
            )
            head = model.fitted_head(
                {
                    "best_step": progress.best_step,
                    "selected_on": None if progress.best_score is None else "dev",
                    "n_parameters": n_head,
                    "curve": list(progress.curve),
                    **job.record_fields(),
                    **stage,
                }
            )
        on_dev = model.dev_score_name
        # The saved encoder is loaded next, and a GPU may not have room for both.
        del trainable, model
        accelerator.free_memory()
        summary = {}
        if head is not None:
            figures = {
                "weights": weights,
                "steps": progress.step,
                "best_step": progress.best_step,
                on_dev: None if stage else progress.best_score,
                "seconds": round(progress.seconds, 1),
                # The score on dev is that of the weights before the last stage.
                **({**stage, f"{on_dev}_before": progress.best_score} if stage else {}),
            }
            summary = _finish(job, head, figures, stage_curve, run_log)
        accelerator.wait_for_everyone()
        return summary


def _finish(
    job: TrainingJob,
    head: FittedModule,
    figures: Mapping[str, Any],
    stage_curve: Sequence[Mapping[str, Any]],
    run_log: RunLog,
) -> dict[str, Any]:
    """Save the head, its scores, the card and, as the last step, the training record."""
    trained_head = job.save(head)
    scores = {
        f"{result.split}_{name}": estimate.value
        for result in trained_head.scores
        for name, estimate in result.metrics.items()
    }
    unlogged = ("weights", "then")
    logged = {
        key: value
        for key, value in figures.items()
        if key not in unlogged and not key.endswith("_before")
    }
    run_log.write("end", {**logged, **scores})
    curves = {"curve": head.fit.record["curve"]}
    then = figures.get("then")
    if then is not None:
        curves["then_curve"] = stage_curve
    summary = write_training_record(job, trained_head, figures, curves)
    log.info(
        f"{trained_head.name}: step {figures['best_step']:,} of {figures['steps']:,}"
        + ("" if then is None else f" and {then['steps']:,} of the last stage, with dev")
        + f", trained in {format_duration(figures['seconds'])} -> {job.folder}"
    )
    return summary


def write_training_record(
    job: TrainingJob,
    trained_head: TrainedHead,
    figures: Mapping[str, Any],
    curves: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the model card and then the training record, log the scores, and return the summary."""
    from llmcond.finetune.encoder import hub_name

    folder, base, model = job.folder, job.resolved, job.options.model
    summary = {
        "run": str(folder),
        "encoder": base.checkpoint.name,
        "head": trained_head.name,
        **trained_head.takes,
        "seed": job.seed,
        **figures,
        **job.record_fields(),
        "scores": [result.to_json() for result in trained_head.scores],
    }
    record = {
        "format": TRAINING_FORMAT,
        "summary": summary,
        **curves,
        "made_of": job.config,
        "base": {
            "model": model,
            "repo": hub_name(model, base),
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
            f"{estimate_text(result.primary, result.main)} on {result.counts.n:,} "
            f"{job.task.card.rows}"
        )
    return summary
