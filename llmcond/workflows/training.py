"""Training an encoder, whatever stands behind it: the loop, and what is kept of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmcond.data.datasets import Dataset
from llmcond.data.rows import Rows, join_rows
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.spec import Orders
from llmcond.evaluation.results import Result
from llmcond.features.view import View, view_of
from llmcond.files import check_writable, write_json, write_text
from llmcond.finetune.settings import StageSettings, TuneSettings
from llmcond.finetune.state import Progress, StateFolder
from llmcond.heads import Recipe, save_head
from llmcond.heads.base import Fitted
from llmcond.log import log
from llmcond.metrics import finite
from llmcond.progress import TrainBar, duration
from llmcond.prompts import load_prompt
from llmcond.report.card import model_card
from llmcond.report.format import estimate_text
from llmcond.runs import AnyRun, Run, complete_run, head_name, head_record, where_model
from llmcond.runs.cross import CrossEncoder
from llmcond.runs.examples import examples_of
from llmcond.runs.extraction import LazyEncoder, extract_own
from llmcond.runs.predictors import AnyPredictor, results_of
from llmcond.system import provenance
from llmcond.tasks import AnyTask, Data, Task
from llmcond.workflows.account import FORMAT, RECORD, STATE, TrainingResult, finished, made_of
from llmcond.workflows.evaluate import evaluate
from llmcond.workflows.extract import check_prompts, read_data
from llmcond.workflows.last_stage import Staged, run_stage, stage_splits
from llmcond.workflows.options.common import Split
from llmcond.workflows.options.scoring import EvaluateOptions
from llmcond.workflows.options.training import TrainLoraOptions
from llmcond.workflows.teacher import Teacher
from llmcond.workflows.trainable import (
    check_unrouted,
    chosen_head,
    refuse_rated_options,
    resolve_trainable,
    tune_settings,
)

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from llmcond.encoders.engine.tokenizing import InputTokenizer
    from llmcond.finetune.base import TrainedModel
    from llmcond.finetune.build import Trainable


@dataclass(frozen=True)
class Parts:
    """What the loop trains, and on what: rows or triples. Those of dev choose the weights."""

    model: TrainedModel[Any, Any]
    train: Any
    dev: Any


@dataclass(frozen=True)
class Kept:
    """A head that was trained, in its run: its name, what it takes, its scores.

    ``card`` makes a model card of the account of the training, where the folder can be shared.
    """

    name: str
    takes: Mapping[str, Any]
    scores: Sequence[Result] = ()
    card: Callable[[Mapping[str, Any]], str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained on what, into which folder; a subclass says what stands behind the encoder.

    Attributes:
        head: its name, for messages.
        made_of: all that decides the weights that come out.
    """

    cross: ClassVar[bool] = False
    #: In messages: what it is trained on, what is scored, and whether the score is of a sample.
    unit: ClassVar[str] = "rated rows"
    scored: ClassVar[str] = "rows"
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
    made_of: Mapping[str, Any]

    def parts(self, trainable: Trainable) -> Parts:
        """Return the model, and the rated rows of train and dev as it takes them."""
        raise NotImplementedError

    @property
    def trained_on(self) -> tuple[str, ...]:
        """Return the splits that decide the weights by their rows' loss, also by a teacher's."""
        return ("train",)

    def about(self) -> dict[str, Any]:
        """Return what else the account says of what was trained on."""
        return {} if self.trained_on == ("train",) else {"trained_on": list(self.trained_on)}

    def last_stage(
        self,
        model: Any,
        tokenizer: InputTokenizer,
        start: Mapping[str, Tensor],
        accelerator: Accelerator,
        made_of: Mapping[str, Any],
    ) -> Staged | None:
        """Train the model further from its best weights, ``start``; None: it is not asked for."""
        return None

    def complete(self, orders: Orders | None = None) -> tuple[AnyRun, ResolvedEncoder]:
        """Make the folder, which holds the encoder, a run; return that with the trained encoder.

        ``orders`` are those of a cross-encoder.
        """
        before = self.resolved
        dtype, quantize = before.identity.dtype, before.identity.quantize
        options = EncoderOptions(dtype=dtype, quantize=quantize, device=before.device)
        resolved = resolve(str(self.folder), options, cross=self.cross)
        made = (self.folder, resolved, self.dataset, self.task, orders, self.trained_on)
        return complete_run(*made), resolved

    def keep(self, head: Any) -> Kept:
        """Complete the run, and put the head into it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingJob(Job):
    """What is trained on right answers: triples of a graph, or dialogues.

    Attributes:
        recipe: of the head.
        start: the head that training begins from; None: a new one.
        view: the features that the head sees.
    """

    recipe: Recipe
    start: Fitted | None
    view: View

    @classmethod
    def check_data(cls, dataset: Data, task: AnyTask[Any]) -> None:
        """Raise a UserError for data that this job cannot train on."""

    @classmethod
    def of(
        cls,
        asked: TrainLoraOptions,
        task: AnyTask[Any],
        load: Callable[[Path], tuple[Fitted, dict[str, Any]]],
        check: Callable[[Recipe], object],
    ) -> Self:
        """Read and check what is asked for; ``load`` and ``check`` are those of a named head.

        Raises:
            UserError: wrong input, or a head that cannot be trained; see :func:`chosen_head`.
            LlmcondError: the encoder cannot be loaded.
        """
        refuse_rated_options(asked, task)
        recipe, prompts, start = chosen_head(asked, task, load, check)
        tuning = tune_settings(asked.tune_settings(), recipe)
        dataset = read_data(task, asked.data_options())
        cls.check_data(dataset, task)
        model, merge = asked.model, asked.merge
        resolved = resolve_trainable(model, asked.encoder_options(), tuning, merge)
        if not prompts:
            apart = {"separate": "separate", "alone": task.prompt}
            prompts = (load_prompt(str(apart.get(recipe.features, resolved.joint_prompt))),)
        check_prompts(prompts, resolved, task)
        view = view_of(recipe, prompts, subtract=False)
        view.check_texts()
        check_unrouted(prompts, resolved)
        return cls(
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
            view=view,
        )

    def keep(self, head: Fitted) -> Kept:
        """See :class:`Job`; scores are those of ``evaluate``."""
        run, resolved = self.complete()
        kept = keep_head(run, resolved, head, self.recipe, self.view)
        splits: Sequence[Split] = ("dev", "test")
        scores = [
            result
            for split in splits
            if split in run.splits
            for result in evaluate(EvaluateOptions(run=self.folder, head=[kept.name], split=split))
            if result.name == kept.name
        ]
        return replace(kept, scores=scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedJob(Job):
    """What is trained on rated rows.

    Attributes:
        stage: the last stage, on dev as well; None: there is none.
        teacher: rates further rows that are trained on; None: there are none.
    """

    task: Task
    dataset: Dataset
    stage: StageSettings | None = None
    teacher: Teacher | None = None

    def inputs(self, rows: Rows, tokenizer: InputTokenizer) -> Any:
        """Return the rated rows of a table as the model takes them."""
        raise NotImplementedError

    @property
    def trained_on(self) -> tuple[str, ...]:
        """See :class:`Job`."""
        return ("train", "dev") if self.stage is not None or self._dev_is_known else ("train",)

    @property
    def _dev_is_known(self) -> bool:
        """Return whether the teacher or the encoder has seen dev, which then says nothing."""
        if self.resolved.checkpoint.dev_of == self.dataset.digest:
            return True
        return self.teacher is not None and self.teacher.knows_dev(self.dataset)

    def about(self) -> dict[str, Any]:
        """See :class:`Job`; the teacher as people know it."""
        own = Job.about(self)
        return own if self.teacher is None else {**own, "teacher": self.teacher.about()}

    def taught_train(self) -> Rows:
        """Return train, and beside it what the teacher rates, if there is one."""
        train = self.dataset.splits["train"]
        if self.teacher is None:
            return train
        from accelerate import PartialState

        with PartialState().main_process_first():  # the others read what it leaves
            folder, device = self.folder / STATE, self.resolved.device
            taught = self.teacher.rate(train, self.seed, folder, device)
        return join_rows([train.take(train.rated), taught])

    def rated_dev(self) -> Rows | None:
        """Return dev; None if it has no rated rows, and the last weights are kept."""
        if self._dev_is_known:
            log.info("the encoder or its teacher was trained on dev, which chooses nothing then")
            return None
        dev = self.dataset.splits.get("dev")
        return dev if dev is not None and dev.rated.any() else None

    def last_stage(
        self,
        model: Any,
        tokenizer: InputTokenizer,
        start: Mapping[str, Tensor],
        accelerator: Accelerator,
        made_of: Mapping[str, Any],
    ) -> Staged | None:
        """See :class:`Job`."""
        if self.stage is None:
            return None
        from llmcond.finetune.stage import LastStage

        train, dev = stage_splits(self.dataset, self.stage)
        return run_stage(
            LastStage(
                model=model,
                inputs=lambda rows: self.inputs(rows, tokenizer),
                train=train,
                dev=dev,
                settings=self.settings,
                stage=self.stage,
                start=start,
                accelerator=accelerator,
                folder=self.folder / STATE,
                made_of=made_of,
            )
        )


def keep_head(
    run: AnyRun, resolved: ResolvedEncoder, head: Fitted, recipe: Recipe, view: View
) -> Kept:
    """Put a head that was trained into its run, beside its features; scores are still missing.

    Args:
        run: of the folder that the encoder was saved in.
        resolved: that encoder.
        head: of the size that was trained.
        recipe: what it was begun by.
        view: the features that it sees.
    """
    log.info(f"encoder -> {run.folder}; its features:")
    encoder = LazyEncoder(resolved)
    for prompt in view.prompts:
        extract_own(run, encoder, prompt)
    name = head_name(recipe.name, view)
    record = head_record(run, view, replace(recipe, settings=head.settings).to_json())
    if "dev" in run.splits:
        record[f"dev_{run.dev_metric}"] = finite(examples_of(run).on_dev(head, view))
    save_head(head, run.head_folder(name), record)
    card = partial(model_card, kind=run.kind, prompts=view.prompts, recipe=record["recipe"])
    return Kept(name, {"prompt": view.name}, card=card)


def train(job: Job) -> TrainingResult:
    """Train, or go on where the same job was stopped; nothing is done where it has ended."""
    done = finished(job.folder, job.made_of)
    if done is not None:
        return TrainingResult(done)
    check_writable(job.folder / STATE / "state.safetensors")
    return TrainingResult(_train(job))


def _train(job: Job) -> dict[str, Any]:
    from llmcond.finetune.build import load_trainable, prepare_accelerator
    from llmcond.finetune.loop import Trainer
    from llmcond.finetune.save import save_encoder

    resolved, settings = job.resolved, job.settings
    accelerator = prepare_accelerator(resolved)
    trainable = load_trainable(resolved, settings, job.seed)
    parts = job.parts(trainable)
    if parts.dev is None:
        log.info(f"no {job.unit} of dev to score: the last weights are kept")
    made_of = {**job.made_of, "processes": accelerator.num_processes}
    # The last stage may be another: what comes before it is the same.
    before = {key: value for key, value in made_of.items() if key != "then"}
    state = StateFolder(job.folder / STATE, before)
    trainer = Trainer(parts.model, parts.train, parts.dev, settings, accelerator, state)
    n_trained, n_all = trainable.counts()
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
    on_dev, metric = parts.model.on_dev, parts.model.metric
    score = metric.heading + (" of a sample" if job.of_sample else "")
    with TrainBar(key=on_dev, score=score, show=metric.show) as bar:
        trainer.run(bar.on_step)
    accelerator.wait_for_everyone()
    progress, head = trainer.progress, None
    trainer.keep_best()
    del trainer
    accelerator.free_memory()
    staged = job.last_stage(parts.model, trainable.tokenizer, state.best(), accelerator, made_of)
    accelerator.wait_for_everyone()  # each has read what the first one deletes at the end
    if accelerator.is_main_process:
        name, cross = where_model(job.model, resolved), job.cross
        dev_of = job.dataset.digest if "dev" in job.trained_on else None
        save_encoder(trainable, name, job.folder, merge=job.merge, cross=cross, dev_of=dev_of)
        head = parts.model.fitted(
            {
                "best_step": progress.best_step,
                "selected_on": None if progress.best_score is None else "dev",
                "n_parameters": n_head,
                "curve": list(progress.curve),
                **job.about(),
                **({} if staged is None else staged.record),
            }
        )
    # What is written is loaded again, and both may be too much for a GPU.
    del trainable, parts
    accelerator.free_memory()
    summary = {} if head is None else _finish(job, head, progress, weights, on_dev, staged)
    accelerator.wait_for_everyone()
    return summary


def _finish(
    job: Job,
    head: Fitted,
    progress: Progress,
    weights: Mapping[str, int],
    on_dev: str,
    staged: Staged | None,
) -> dict[str, Any]:
    """Write head, scores and card; the account of the training comes last."""
    folder, base, kept = job.folder, job.resolved, job.keep(head)
    score, best = progress.best_score, progress.best_step
    summary = {
        "run": str(folder),
        "encoder": base.checkpoint.name,
        "head": kept.name,
        **kept.takes,
        "seed": job.seed,
        "weights": weights,
        "steps": progress.step,
        "best_step": best,
        on_dev: score if staged is None else None,
        "seconds": round(progress.seconds, 1),
        **job.about(),
        # That score was of the weights before.
        **({} if staged is None else {**staged.record, f"{on_dev}_before": score}),
        "scores": [result.to_json() for result in kept.scores],
    }
    curves = {"curve": head.fit.record["curve"]}
    if staged is not None:
        curves["then_curve"] = staged.curve
    write_account(job, kept, summary, curves)
    log.info(
        f"{kept.name}: step {best:,} of {progress.step:,}"
        + ("" if staged is None else f" and {staged.steps:,} of the last stage, with dev")
        + f", trained in {duration(progress.seconds)} -> {folder}"
    )
    return summary


def write_account(
    job: Job, kept: Kept, summary: Mapping[str, Any], curves: Mapping[str, Any]
) -> None:
    """Write the card of a training and its account, which comes last; tell its scores."""
    from llmcond.finetune.save import hub_name

    folder, base = job.folder, job.resolved
    account = {
        "format": FORMAT,
        "summary": summary,
        **curves,
        "made_of": job.made_of,
        "base": {
            "model": job.model,
            "repo": hub_name(job.model, base),
            "weights": base.identity.weights,
        },
        "data": job.dataset.to_json(),
        **provenance(),
    }
    if kept.card is not None:
        write_text(folder / "README.md", kept.card(account))
    write_json(folder / RECORD, account)
    shutil.rmtree(folder / STATE, ignore_errors=True)
    for result in kept.scores:
        log.info(
            f"{result.split}: {result.primary.heading} "
            f"{estimate_text(result.primary, result.main)} on {result.counts.n:,} {job.scored}"
        )


def scores_of(
    run: Run,
    predictor: AnyPredictor | CrossEncoder,
    predicted: Callable[[Rows], NDArray[np.float32]],
) -> list[Result]:
    """Return what a predictor scores on dev and test, as ``evaluate`` gives it."""
    found: list[Result] = []
    for split in ("dev", "test"):
        if split in run.splits and run.rows(split).rated.any() and split not in run.trained_on:
            rows = run.rows(split)
            found += results_of([predictor], [predicted(rows)], rows, split, task=run.task.name)
    return found
