"""Train an encoder and a head together, into a run whose folder is the encoder's too."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmcond.config import build, bundled_names
from llmcond.data.datasets import DataOptions, Dataset
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.loading.quantization import require
from llmcond.errors import UserError
from llmcond.evaluation.results import Result
from llmcond.features.view import View, view_of
from llmcond.files import check_writable, read_json, write_json, write_text
from llmcond.finetune.inputs import RatedInputs
from llmcond.finetune.model import HeadPlan, TunedModel
from llmcond.finetune.settings import TuneSettings, renamed, usual_rate
from llmcond.finetune.state import Progress, StateFolder, differences
from llmcond.heads import FittedHead, Recipe, load_head, load_recipe, save_head
from llmcond.heads.objectives import ObjectiveSettings, check_contrasts
from llmcond.heads.recipes import parse_settings
from llmcond.log import log
from llmcond.metrics import Estimate
from llmcond.progress import TrainBar, duration
from llmcond.prompts import fields_of, load_prompt, prompt_from_json
from llmcond.records import RECORD as RECORDED
from llmcond.records import read_record
from llmcond.report.card import model_card
from llmcond.report.format import estimate_text
from llmcond.runs import Run, complete_run, head_name, head_record, open_run, where_model
from llmcond.runs.extraction import LazyEncoder, extract_rows, extraction_record
from llmcond.runs.features import RowFeatures
from llmcond.runs.predictors import predict, results_of
from llmcond.runs.provenance import provenance
from llmcond.runs.run import fitted_on
from llmcond.runs.trials import check_seed, sized
from llmcond.workflows.extract import check_prompts, read_dataset, task_of
from llmcond.workflows.options import HeadChoice

if TYPE_CHECKING:
    from accelerate import Accelerator

    from llmcond.finetune.build import Trainable
    from llmcond.finetune.loop import Trainer

#: Of the folder's own account of the training.
FORMAT = 1
RECORD, STATE = "training.json", "training"


@dataclass(frozen=True)
class _MadeOf:
    settings: Mapping[str, Any]
    head: Mapping[str, Any]
    objective: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Summary:
    scores: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class _Account:
    """What the account of a training holds, as far as it is read."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORDED

    made_of: _MadeOf
    summary: _Summary


@dataclass(frozen=True)
class Trained:
    """An encoder that was trained, with its head: the run, the head's name, steps and scores."""

    record: Mapping[str, Any]

    @property
    def run(self) -> Path:
        """Return the folder of the run, which is the encoder's too."""
        return Path(self.record["run"])

    @property
    def metrics(self) -> dict[str, Estimate]:
        """Return the scores on test if there is one, else on dev; empty without rated rows."""
        scores = self.record.get("scores", ())[-1:]
        return {
            name: Estimate.of_json(row[name], row[f"{name}_ci"])
            for row in scores
            for name in row
            if f"{name}_ci" in row
        }

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return dict(self.record)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is trained on what, into which folder; ``made_of`` decides the weights that come out."""

    model: str
    resolved: ResolvedEncoder
    folder: Path
    task: str
    dataset: Dataset
    plan: HeadPlan
    settings: TuneSettings
    merge: bool
    view: View
    made_of: Mapping[str, Any]


def train_lora(
    model: str,
    options: EncoderOptions,
    run_folder: Path,
    data: DataOptions,
    choice: HeadChoice,
    settings: Mapping[str, Any],
    merge: bool = False,
    task: str | None = None,
) -> Trained:
    """Train an encoder's adapters, or all of its weights, and a head behind it.

    Stopped at any step, the same call goes on from the last checkpoint, and ends as if it had not
    been stopped: on one CPU with the same number of threads to the last bit.

    Arguments as in :class:`llmcond.commands.train_lora.TrainLora`; ``settings`` are those of
    :class:`TuneSettings` that differ from its defaults.

    Raises:
        UserError: wrong input, a run of something else, or a loss that became NaN.
        LlmcondError: the encoder cannot be loaded or trained.
    """
    check_seed(choice.seed)
    plan = _plan(choice)
    tuning = _settings(settings, plan.recipe)
    chosen_task = task_of(None, task)
    dataset = read_dataset(chosen_task, replace(data, extra=fields_of(plan.prompts)))
    _check_rated(dataset)
    if options.long_texts == "windows":
        raise UserError(
            "windows are for frozen encoders: training reads each text once. Leave out "
            "--long-texts windows, or shorten the texts."
        )
    resolved = resolve(model, options)
    for assumption in resolved.assumed:
        log.info(f"assumed: {assumption}")
    plan, view = _with_prompts(plan, resolved)
    require("training an encoder", "accelerate", "peft", extra="lora")
    from llmcond.finetune.build import check_trainable

    check_trainable(resolved, tuning, merge)
    made_of = {
        "encoder": resolved.identity.to_json(),
        "data": dataset.digest,
        "prompts": {prompt.name: prompt.digest for prompt in plan.prompts},
        "subtract": plan.subtract,
        "head": {"kind": plan.recipe.kind, **asdict(plan.recipe.settings)},
        "objective": asdict(plan.objective),
        "start": choice.start and read_json(choice.start / "head.json")["weights_sha256"],
        "seed": plan.seed,
        "settings": tuning.to_json(),
        "merge": merge,
    }
    done = _finished(run_folder, made_of)
    if done is not None:
        log.info(f"{run_folder} is trained already, with the same settings; nothing is done")
        return Trained(done)
    check_writable(run_folder / STATE / "state.safetensors")
    name = chosen_task.name
    job = _Job(model, resolved, run_folder, name, dataset, plan, tuning, merge, view, made_of)
    return Trained(_train(job))


def _settings(given: Mapping[str, Any], recipe: Recipe) -> TuneSettings:
    """Return the settings that were given, else those of the recipe, else the defaults."""
    usual = renamed(recipe.finetune)
    build(TuneSettings, usual, f"{recipe.path}: [finetune]")
    values = {**usual, **renamed(given)}
    if isinstance(values.get("rank"), int):
        values.setdefault("learning_rate", usual_rate(values["rank"]))
    return build(TuneSettings, values, "train-lora")


def _plan(choice: HeadChoice) -> HeadPlan:
    start = None
    subtract, prompts = bool(choice.subtract), [load_prompt(name) for name in choice.prompt]
    if choice.start is not None:
        if choice.head is not None or choice.dim is not None:
            raise UserError(
                "a head that was fitted has its kind and size already: with --start, leave out "
                "--head and --dim."
            )
        start, record = load_head(choice.start)
        where = str(choice.start / "head.json")
        record = fitted_on(record, where)
        prompts = prompts or [prompt_from_json(own, where) for own in record["prompts"]]
        subtract = record["subtract"] if choice.subtract is None else choice.subtract
        about: dict[str, Any] = {
            key: record["recipe"][key] for key in ("name", "description", "source")
        }
        recipe = Recipe(**about, kind=start.kind, family=start.family, settings=start.settings)
    elif choice.head is not None:
        recipe = load_recipe(choice.head)
    else:
        raise UserError("no head was named. Give --head (none: nothing behind the encoder).")
    recipe, objective = _changed(recipe, dict(choice.set or {}), choice.dim)
    return HeadPlan(recipe, objective, choice.seed, tuple(prompts), subtract, start)


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


def _check_rated(dataset: Dataset) -> None:
    train = dataset.splits["train"]
    if int(train.rated.sum()) < 2:
        raise UserError(
            f"{train.file} has {int(train.rated.sum())} rated rows among its {len(train):,}; "
            "training needs pairs of sentences with ratings. Name another --data, or its label "
            "column: --columns label=COLUMN"
        )
    if len(set(train.rating[train.rated].tolist())) < 2:
        raise UserError(
            f"all rated rows of {train.file} have the same rating, so there is nothing to learn."
        )


def _with_prompts(plan: HeadPlan, resolved: ResolvedEncoder) -> tuple[HeadPlan, View]:
    """Return the plan with prompts, those named or what suits encoder and head, and its view."""
    apart, joint = [load_prompt("separate")], [load_prompt(resolved.default_prompt)]
    suits = {"separate": apart, "joint": joint, "both": [*joint, *apart]}
    prompts = plan.prompts or tuple(suits[plan.recipe.features])
    check_prompts(prompts, resolved)
    # Separate features stand last: heads that take both kinds find them there.
    ordered = tuple(sorted(prompts, key=lambda prompt: prompt.separate))
    view = view_of(plan.recipe, ordered, plan.subtract)
    view.check_texts()
    return replace(plan, prompts=ordered), view


def _finished(folder: Path, made_of: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the summary of a training that has ended in a folder; None where there is none."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder with --run.")
    if (folder / RECORD).is_file():
        record = read_record(folder / RECORD, _Account, "Train into a new --run.")
        shutil.rmtree(folder / STATE, ignore_errors=True)  # left by a kill at the very end
        found = differences(_upgraded(record["made_of"]), made_of)
        if found:
            raise UserError(
                f"{folder} holds an encoder that was trained with other settings: "
                f"{'; '.join(found)}. Name another --run."
            )
        summary: dict[str, Any] = record["summary"]
        return {**summary, "run": str(folder)}
    if (folder / "run.json").is_file() and not (folder / STATE).is_dir():
        name = open_run(folder).encoder_name
        raise UserError(
            f"{folder} holds features of {name}, frozen. A trained encoder is another one: name "
            "another --run."
        )
    other = [path.name for path in folder.iterdir() if path.name not in {STATE, ".lock"}]
    if other and not (folder / STATE).is_dir():
        raise UserError(f"{folder} holds other files ({other[0]}). Name another --run.")
    return None


def _upgraded(made_of: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an older version recorded by the names that settings have now."""
    upgraded = {**made_of, "settings": renamed(made_of.get("settings", {}))}
    added = {"objective": "", "objective_weight": 1.0}
    for part in ("head", "objective"):
        if "mse" in made_of.get(part, {}):
            upgraded[part] = {**added, **made_of[part]}
    return upgraded


def _train(job: _Job) -> dict[str, Any]:
    from llmcond.finetune.build import load_trainable, prepare_accelerator
    from llmcond.finetune.save import save_encoder

    accelerator = prepare_accelerator(job.resolved)
    trainable = load_trainable(job.resolved, job.settings, job.plan.seed)
    trainer = _trainer(job, trainable, accelerator)
    n_trained, n_all = trainable.counts()
    n_head = sum(value.numel() for value in trainer.model.head.parameters())
    weights = {"trained": n_trained, "of": n_all, "head": n_head}
    quantize = job.resolved.identity.quantize
    log.info(
        f"training {n_trained:,} weights of {job.resolved.checkpoint.name} "
        f"({100 * n_trained / n_all:.1f} % of {n_all:,}) and {n_head:,} of the head "
        f"{job.plan.recipe.name} in {job.resolved.identity.dtype}"
        + ("" if quantize == "none" else f" ({quantize})")
        + f" on {job.resolved.device}: {trainer.steps:,} steps"
        + (f", from step {trainer.progress.step:,}" if trainer.progress.step else "")
    )
    with TrainBar() as bar:
        trainer.run(bar.on_step)
    accelerator.wait_for_everyone()
    progress, recipe, head = trainer.progress, trainer.model.plan.recipe, None
    if accelerator.is_main_process:
        trainer.keep_best()
        save_encoder(trainable, where_model(job.model, job.resolved), job.folder, merge=job.merge)
        head = trainer.model.fitted(
            {
                "best_step": progress.best_step,
                "selected_on": None if progress.best_score is None else "dev",
                "n_parameters": n_head,
                "curve": [dict(entry) for entry in progress.curve],
            }
        )
    # What is written is loaded again, and both may be too much for a GPU.
    del trainable, trainer
    accelerator.free_memory()
    summary = {} if head is None else _finish(job, head, recipe, progress, weights)
    accelerator.wait_for_everyone()
    return summary


def _trainer(job: _Job, trainable: Trainable, accelerator: Accelerator) -> Trainer:
    from llmcond.finetune.loop import Trainer

    plan, splits, view = job.plan, job.dataset.splits, job.view
    dim = trainable.engine.dim
    dims = dim * len(view.prompts), dim if view.conditioned else 0
    if plan.start is None:
        plan = replace(plan, recipe=sized(plan.recipe, None, dims[0]))
    train = RatedInputs.of(splits["train"], view, trainable.tokenizer)
    has_dev = "dev" in splits and bool(splits["dev"].rated.any())
    dev = RatedInputs.of(splits["dev"], view, trainable.tokenizer) if has_dev else None
    if dev is None:
        log.info("no rated dev rows: the last weights are kept")
    counts = check_contrasts(train.pair, train.rating, plan.objective)
    if counts:
        log.info(f"contrastive pairs: {counts['n_contrastive_pairs']:,} in {len(train):,} rows")
    made_of = {**job.made_of, "processes": accelerator.num_processes}
    state = StateFolder(job.folder / STATE, made_of)
    model = TunedModel(trainable.engine, plan, dims)
    return Trainer(model, train, dev, job.settings, accelerator, state)


def _finish(
    job: _Job, head: FittedHead, recipe: Recipe, progress: Progress, weights: Mapping[str, int]
) -> dict[str, Any]:
    """Write head, features, scores and card; the account of the training comes last."""
    from llmcond.finetune.save import hub_name

    folder, base, run = job.folder, job.resolved, _run_of(job)
    name = head_name(recipe.name, job.view)
    save_head(head, run.head_folder(name), head_record(run, job.view, recipe.to_json()))
    scores = _scores(run, name)
    summary = {
        "run": str(folder),
        "encoder": base.checkpoint.name,
        "head": name,
        "prompt": job.view.name,
        "subtract": job.view.subtracts,
        "seed": job.plan.seed,
        "weights": weights,
        "steps": progress.step,
        "best_step": progress.best_step,
        "dev_spearman": progress.best_score,
        "seconds": round(progress.seconds, 1),
        "scores": [result.to_json() for result in scores],
    }
    account = {
        "format": FORMAT,
        "summary": summary,
        "curve": head.fit.record["curve"],
        "made_of": job.made_of,
        "base": {
            "model": job.model,
            "repo": hub_name(job.model, base),
            "weights": base.identity.weights,
        },
        "data": job.dataset.to_json(),
        **provenance(),
    }
    write_text(folder / "README.md", model_card(account, job.view.prompts, recipe.to_json()))
    write_json(folder / RECORD, account)
    shutil.rmtree(folder / STATE, ignore_errors=True)
    for result in scores:
        log.info(
            f"{result.split}: {result.primary.heading} "
            f"{estimate_text(result.primary, result.main)} on {result.counts.n:,} rows"
        )
    log.info(
        f"{name}: step {progress.best_step:,} of {progress.step:,}, trained in "
        f"{duration(progress.seconds)} -> {folder}"
    )
    return summary


def _run_of(job: _Job) -> Run:
    """Make the folder a run of the encoder that lies in it, with its features of all rows."""
    identity = job.resolved.identity
    options = EncoderOptions(
        dtype=identity.dtype, quantize=identity.quantize, device=job.resolved.device
    )
    resolved = resolve(str(job.folder), options)
    run = complete_run(job.folder, resolved, job.dataset, job.task)
    log.info(f"encoder -> {job.folder}; its features:")
    encoder = LazyEncoder(resolved)
    for prompt in job.view.prompts:
        done = extract_rows(run.store(), encoder, prompt, [run.rows(name) for name in run.splits])
        run.record_prompt(prompt, extraction_record(done, resolved))
    return run


def _scores(run: Run, name: str) -> list[Result]:
    """Return the head's scores on dev and test, as ``evaluate`` gives them."""
    saved = run.load_head(name)
    found: list[Result] = []
    for split in ("dev", "test"):
        if split in run.splits and run.rows(split).rated.any():
            rows = run.rows(split)
            pairs = RowFeatures(rows, run.store()).pairs(saved.view)
            predicted = [predict(saved, pairs)]
            found += results_of([saved], predicted, rows, split, task=run.task.name)
    return found
