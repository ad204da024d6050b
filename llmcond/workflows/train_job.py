"""Training an encoder with any kind of head: checks of the options, the jobs, and the loop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from llmcond.base.errors import UserError
from llmcond.base.files import digest_text, write_json, write_text
from llmcond.base.metrics import finite_or_none
from llmcond.base.output import FitBar, format_duration, log
from llmcond.base.records import read_record
from llmcond.base.run_log import TRAINING, RunLog, log_path
from llmcond.base.system import provenance
from llmcond.data.datasets import Dataset
from llmcond.data.guides import AspectSample
from llmcond.data.rows import Rows, join_rows
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.adapter import read_encoder_record
from llmcond.encoders.spec import Orders
from llmcond.evaluation.results import Result, estimate_text
from llmcond.finetune.loop import TrainingState
from llmcond.finetune.settings import AspectSettings, StageSettings, TuneSettings
from llmcond.heads import Recipe, save_head
from llmcond.heads.fitted import FittedModule
from llmcond.heads.settings import ObjectiveSettings
from llmcond.options.common import Split
from llmcond.options.scoring import EvaluateOptions
from llmcond.options.training import TrainCrossOptions, TrainLoraOptions
from llmcond.report.card import model_card
from llmcond.runs import Run, complete_run, head_name, head_record, open_run, portable_model_name
from llmcond.runs.cross import NAME, CrossEncoder, load_cross_encoder
from llmcond.runs.embedder import Embedder, make_embedder
from llmcond.runs.examples import load_examples
from llmcond.runs.open import LazyEncoder, extract_run, local_folder
from llmcond.runs.trials import size_recipe
from llmcond.workflows.evaluate import evaluate
from llmcond.workflows.training_record import (
    RECORD,
    STATE,
    TRAINING_FORMAT,
)

if TYPE_CHECKING:
    from llmcond.encoders.tokenizing import InputTokenizer
    from llmcond.finetune.encoder import TrainableEncoder


#: The number of rows that are rated and saved together. A kill loses no more than these.
_BLOCK = 2_048
#: The second seed for sampling rows. The training steps use numbers from 0 as theirs.
_ROW_SEED = 2**32 + 1


@dataclass(frozen=True)
class _Ratings:
    """The file of a teacher's ratings."""

    ratings: Sequence[float]


@dataclass(frozen=True)
class Teacher:
    """A run whose head rates rows. Its model is loaded when it rates the first rows.

    Attributes:
        run: the run.
        head: the full name of the head; for a cross-encoder, the name of its linear layer.
        rows: the number of rows to rate; 0: it rates none.
        record: what identifies the teacher: the digests of encoder and head, the view of a head
            without weights, and ``rows``, if any.
        dev_digests: digests of the datasets whose dev rows its encoder or its head was trained on.
    """

    run: Run
    head: str
    rows: int
    record: Mapping[str, Any]
    dev_digests: frozenset[str]

    def record_fields(self) -> dict[str, Any]:
        """Return the names of encoder and head for the training record, with an adapter's base."""
        tuned = read_encoder_record(self.run.folder)
        base = {} if tuned is None or tuned.base is None else {"base": tuned.base}
        fields = {"encoder": self.run.encoder_name, **base}
        rows = {"rows": self.rows} if self.rows else {}
        return {**fields, "head": self.head, **rows}

    def was_trained_on_dev(self, dataset: Dataset) -> bool:
        """Return whether the teacher was trained on the dev rows of a dataset."""
        return bool(self.dev_digests & dataset.dev_digests)

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
        ratings: list[float] = []
        if path.is_file():
            ratings += read_record(path, _Ratings, "Delete it to rate the rows again.").ratings
        if len(ratings) < len(rows):
            log.info(
                f"rating {len(rows) - len(ratings):,} rows with {self.head} of {self.run.folder}"
            )
            if self.run.cross:
                model: CrossEncoder | Embedder = load_cross_encoder(self.run.folder, device=device)
            else:
                model = self.load_embedder(device)
            while len(ratings) < len(rows):
                batch = np.arange(len(rows))[len(ratings) : len(ratings) + _BLOCK]
                # Cosines and regressions may lie outside the scale of ratings.
                similarities = model.predict(rows.take(batch)).clip(0, 1)
                ratings += similarities.astype(np.float64).tolist()
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, {"ratings": ratings})
        return replace(rows, rating=np.array(ratings))

    def load_embedder(self, device: str) -> Embedder:
        """Load its encoder and head to a device.

        Raises:
            LlmcondError: the encoder cannot be loaded.
        """
        encoder = LazyEncoder(self.run.resolve_encoder(device))()
        return make_embedder(encoder, self.run.load_head(self.head))


def find_teacher(folder: str | Path | None, rows: int | None, dataset: Dataset) -> Teacher | None:
    """Return the teacher of a run.

    Args:
        folder: the folder of a run, or the name of a bundled model; None: there is no teacher.
        rows: the number of rows to rate; None: as many as train has rated rows; 0: it rates none,
            so that it must not be a cross-encoder, and its similarities need not be ratings.
        dataset: the dataset of the student.

    Returns:
        The teacher; None if there is none.

    Raises:
        UserError: there is no such run, it has no head, or its head cannot rate new rows or, if it
            rates none, does not compare by cosine.
    """
    if folder is None:
        return None
    run = open_run(local_folder(folder), cross=rows != 0)
    if rows is None:
        rows = int(dataset.splits["train"].rated.sum())
    splits, checkpoint = run.trained_on, run.resolve_encoder("cpu").checkpoint
    view: dict[str, Any] = {}
    if run.cross:
        name = NAME
    else:
        default_head = run.default_head()
        if default_head is None or default_head[0] not in run.head_names():
            ratings = ", and cosines of its features are not ratings" if rows else ""
            raise UserError(
                f"{folder} has no fitted head that is better than zero-shot{ratings}. Fit a head "
                f"(llmcond fit-head --run {folder}), or train its encoder (llmcond train-lora)."
            )
        saved_head, reason = run.load_head(default_head[0]), default_head[1]
        saved_head.view.check_texts()
        log.info(f"teacher: {saved_head.name} of {folder}, {reason}")
        if not (rows or saved_head.head.compares_by_cosine):
            raise UserError(
                f"the head {saved_head.name} of {folder} does not compare embeddings by cosine, "
                "and --aspects-teacher learns cosines. Fit another head, or name another run."
            )
        if rows and not all(dataset.splits["train"].conditioned):
            raise UserError(
                f"{folder} rates pairs whose texts are both encoded under the condition, and the "
                "task encodes only one so. Leave out --teacher."
            )
        objective = asdict(saved_head.head.settings)
        if saved_head.head.is_identity:  # the record of the encoder's training has the objective
            objective = checkpoint.training_record().get("made_of", {}).get("objective", {})
            prompts = [prompt.digest for prompt in saved_head.view.prompts]
            view = {"prompts": prompts, "subtract": saved_head.view.subtracts}
        if rows and not objective.get("mse", 1.0):
            raise UserError(
                f"the head {saved_head.name} of {folder} was fitted to the order of ratings, so "
                "its similarities are on another scale. Fit a head with mse above 0."
            )
        name, splits = saved_head.name, (*splits, *saved_head.trained_on)
    record = {
        "encoder": run.manifest["encoder"]["fingerprint"],
        "head": run.head_record(name)["weights_sha256"],
        **view,
        **({"rows": rows} if rows else {}),
    }
    # The encoder may have been trained on other data than those of the run.
    dev_digests = checkpoint.dev_digests
    if "dev" in splits:
        data = run.manifest["data"]
        dev_digests |= {data["digest"], *data.get("dev_digests", ())}
    return Teacher(run, name, rows, record, dev_digests)


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
        most = possible // 2
        advice = f"Give --teacher-rows {most}, or fewer" if most else "Leave out --teacher"
        raise UserError(
            f"the teacher is to rate {count:,} new rows, but {rows.file} gives {possible:,} new "
            "combinations of sentence pairs and conditions, of which at most half are used. "
            f"{advice}."
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


def _dev_digests(dataset: Any) -> frozenset[str]:
    """Return the digests by which encoders record that they know the dev examples of a dataset."""
    digests: frozenset[str] = getattr(dataset, "dev_digests", frozenset())  # only rated data
    return digests


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A training: the encoder, the data, the settings, the head and the folder.

    This class trains on correct answers, the triples of a graph or dialogues; subclasses train on
    rated pairs.

    Attributes:
        options: the options of the command: model, run, seed, merge and trackers are read here.
        resolved: the encoder.
        task: the task of the data.
        dataset: the data to train on.
        settings: the settings of the training.
        config: everything that decides the resulting weights.
        recipe: the recipe of the head.
        view: the features that the head reads; None for a cross-encoder.
        start: the head that training starts from; None: a new one.
        stage: the last stage, which includes dev; None: there is none.
        teacher: the teacher that rates additional training rows; None: there is none.
        objective: the objective on rated pairs.
        aspects: the settings of training on texts with attributes too; None: there are none.
        aspects_teacher: the teacher whose similarities of these texts are learned; None: there is
            none.
        samples: the sets of such texts.
    """

    cross: ClassVar[bool] = False

    options: TrainLoraOptions | TrainCrossOptions
    resolved: ResolvedEncoder
    task: Any
    dataset: Any
    settings: TuneSettings
    config: Mapping[str, Any]
    recipe: Recipe
    view: Any = None
    start: Any = None
    stage: StageSettings | None = None
    teacher: Teacher | None = None
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    aspects: AspectSettings | None = None
    aspects_teacher: Teacher | None = None
    samples: Sequence[AspectSample] = ()

    @property
    def folder(self) -> Path:
        """The run's folder, which also gets the encoder."""
        return Path(self.options.run)

    @property
    def seed(self) -> int:
        """The random seed."""
        return self.options.seed

    def with_seed(self, seed: int, **options: Any) -> Self:
        """Return the same training with another seed, and perhaps other options."""
        changed = replace(self.options, seed=seed, **options)
        return replace(self, options=changed, config={**self.config, "seed": seed})

    @property
    def trained_on(self) -> tuple[str, ...]:
        """The splits whose examples the encoder, or a teacher, was trained on."""
        return ("train", "dev") if self.stage is not None or self._dev_is_known else ("train",)

    @property
    def _dev_is_known(self) -> bool:
        """Whether a teacher or the encoder was trained on dev, so that dev scores are biased."""
        if _dev_digests(self.dataset) & self.resolved.checkpoint.dev_digests:
            return True
        teachers = (self.teacher, self.aspects_teacher)
        return any(teacher and teacher.was_trained_on_dev(self.dataset) for teacher in teachers)

    def known_dev_digests(self) -> frozenset[str]:
        """Return the digests of the datasets whose dev rows the trained encoder knows."""
        known = self.resolved.checkpoint.dev_digests
        for teacher in filter(None, (self.teacher, self.aspects_teacher)):
            known |= teacher.dev_digests
        return known | _dev_digests(self.dataset) if "dev" in self.trained_on else known

    def record_fields(self) -> dict[str, Any]:
        """Return further fields for the training record, on the data that was trained on."""
        record: dict[str, Any] = {}
        if self.trained_on != ("train",):
            record["trained_on"] = list(self.trained_on)
        teachers = {"teacher": self.teacher, "aspects_teacher": self.aspects_teacher}
        record |= {key: teacher.record_fields() for key, teacher in teachers.items() if teacher}
        if self.samples:
            record["aspects"] = [sample.name for sample in self.samples]
        return record

    def sized_recipe(self, dim_in: int) -> Recipe:
        """Return the recipe, whose dimension is limited to that of the features unless it is set.

        Raises:
            UserError: the dimension is set, and larger than that of the features.
        """
        options: Any = self.options  # those of train-cross have no head
        if options.dim is not None or "dim" in (options.set or {}):
            self.recipe.check_dim(dim_in)
        return size_recipe(self.recipe, None, dim_in)

    def build_parts(self, trainable: TrainableEncoder) -> tuple[Any, Any, Any]:
        """Return the model, and the examples of train and dev; see ``AnyTask.training_parts``."""
        parts: tuple[Any, Any, Any] = self.task.training_parts(self, trainable)
        return parts

    def inputs(self, rows: Rows, tokenizer: InputTokenizer) -> Any:
        """Return the rated rows of a table in the form that the model takes."""
        raise NotImplementedError

    def rated_inputs(self, tokenizer: InputTokenizer) -> tuple[Any, Any]:
        """Return the inputs of train, with the rows that the teacher rates, and those of dev.

        The latter are None if dev has no rated rows or cannot choose the weights.
        """
        train, dev = self.dataset.splits["train"], self.dataset.splits.get("dev")
        if self.teacher is not None:
            from accelerate import PartialState

            with PartialState().main_process_first():  # the other processes read its saved ratings
                folder, device = self.folder / STATE, self.resolved.options.device
                taught_rows = self.teacher.rate(train, self.seed, folder, device)
            train = join_rows([train.take(train.rated), taught_rows])
        train_inputs = self.inputs(train, tokenizer)
        if self._dev_is_known:
            log.info(
                "the encoder or a teacher was trained on dev, so dev does not choose the weights"
            )
            dev = None
        has_dev = dev is not None and dev.rated.any()
        return train_inputs, self.inputs(dev, tokenizer) if has_dev else None

    def complete_run(self, orders: Orders | None = None) -> tuple[Run, ResolvedEncoder]:
        """Make the folder of the saved encoder a run.

        Args:
            orders: the sentence orders of a cross-encoder; None: it is not a cross-encoder.

        Returns:
            The run, and the trained encoder.
        """
        base = self.resolved
        dtype, quantize = base.identity.dtype, base.identity.quantize
        options = EncoderOptions(dtype=dtype, quantize=quantize, device=base.options.device)
        trained = resolve(str(self.folder), options, cross=self.cross)
        run = complete_run(self.folder, trained, self.dataset, self.task, orders, self.trained_on)
        return run, trained

    def save(self, head: Any) -> TrainedHead:
        """Complete the run, extract its features, and save and score the head in it."""
        (run, resolved), view = self.complete_run(), self.view
        log.info(f"encoder -> {run.folder}; its features:")
        encoder = LazyEncoder(resolved)
        for prompt in view.prompts:
            extract_run(run, encoder, prompt)
        name = head_name(self.recipe.name, view)
        record = head_record(run, view, replace(self.recipe, settings=head.settings).to_json())
        if "dev" in run.splits:
            record[f"dev_{run.dev_metric}"] = finite_or_none(
                load_examples(run).score_on_dev(head, view)
            )
        save_head(head, run.head_folder(name), record)
        make_card = partial(
            model_card, kind=run.kind.kind, prompts=view.prompts, recipe=record["recipe"]
        )
        return TrainedHead(name, {"prompt": view.name}, self.score(run, name), make_card)

    def score(self, run: Run, name: str) -> list[Result]:
        """Return the scores of a saved head on dev and test."""
        splits: Sequence[Split] = ("dev", "test")
        return [
            result
            for split in splits
            if split in run.splits
            for result in evaluate(EvaluateOptions(run=self.folder, head=[name], split=split))
            if result.name == name
        ]


def train(job: TrainingJob) -> dict[str, Any]:
    """Train one encoder, or continue where the same job was stopped; return the summary.

    It is empty in the worker processes of a distributed training.
    """
    from llmcond.finetune.encoder import load_trainable, prepare_accelerator, save_encoder
    from llmcond.finetune.loop import LastStage, Trainer

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
        f"{job.recipe.name} in {resolved.identity.dtype}"
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
        stage: dict[str, Any] = {}
        stage_curve: list[dict[str, Any]] = []
        if job.stage is not None:
            to_inputs = partial(job.inputs, tokenizer=trainable.tokenizer)
            stage, stage_curve = LastStage(
                model,
                to_inputs,
                job.dataset,
                settings,
                job.stage,
                state,
                accelerator,
                config,
                run_log,
            ).run()
        # All processes must have read the state before the main process deletes it.
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            save_encoder(
                trainable,
                portable_model_name(options.model, resolved),
                job.folder,
                merge=options.merge,
                cross=job.cross,
                dev_of=job.known_dev_digests(),
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
    from llmcond.finetune.encoder import base_of, hub_name

    folder, encoder = job.folder, job.resolved
    model, base = base_of(encoder, job.options.model)
    summary = {
        "run": str(folder),
        "encoder": base.name,
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
            "repo": hub_name(model, encoder),
            "weights": encoder.identity.weights if base is encoder.checkpoint else base.weights,
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
