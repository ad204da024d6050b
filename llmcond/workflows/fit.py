"""Fitting a head on a run's training features, and every combination of several settings."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from llmcond.base.errors import UserError
from llmcond.base.files import check_writable, write_json
from llmcond.base.metrics import (
    Estimate,
    choose_metrics,
    estimates_json,
    finite_or_none,
    get_metric,
)
from llmcond.base.output import Displayed, FitBar, log
from llmcond.base.records import check_named_once
from llmcond.base.run_log import RunLog, log_path
from llmcond.base.system import provenance
from llmcond.evaluation.results import (
    FittedResults,
    Result,
    best_first,
    estimate_text,
    format_settings,
    score_results,
)
from llmcond.features.view import FeatureView, recipe_view
from llmcond.heads import FittedHead, Recipe, load_recipe, save_head
from llmcond.heads.numpy_heads import HeldOut, choose_settings
from llmcond.options.training import DevOptions, FitHeadOptions, SweepOptions
from llmcond.report.tables import dev_gain_text
from llmcond.runs import Run, RunHead, head_name, head_record, open_any_run
from llmcond.runs.examples import Examples, load_examples
from llmcond.runs.rated import DevFit
from llmcond.runs.trials import (
    Grid,
    Trial,
    combine_seeds,
    fit_trials,
    named_dim,
    size_recipe,
)


@dataclass(frozen=True)
class FittedResult(Displayed):
    """A fitted head that was saved in a run.

    Attributes:
        name: the name of the head.
        folder: the folder of the head.
        head: the name of the recipe.
        prompt: the names of the prompts whose features the head takes, joined by ``+``.
        subtract: whether unconditional features are subtracted from conditional ones.
        seed: the random seed of the fit.
        dim_in: the size of the features.
        dim: the size of the embeddings.
        counts: the number of rows used (``n_train``, ``n_dev``) and left out (``n_dropped``).
        record: the course of the fit: the epoch whose weights were kept, how it was chosen, and the
            learning curve.
        metrics: the score on dev, which is optimistic if dev chose the epoch.
        seconds: the wall-clock time of the fit.
        held_out: the score on dev if the epoch is chosen on nine tenths of dev, and the remaining
            tenth is predicted; empty if dev did not choose the epoch.

    Examples:
        >>> import llmcond
        >>> rows = [
        ...     dict(sentence1=f"{n} dogs run.", sentence2=f"{n} cats run.", condition=c, label=r)
        ...     for n in range(2, 12) for c, r in [("the action", 5), ("the animal", 1)]
        ... ]
        >>> features = llmcond.extract(model="minilm", run="demo", data=rows)
        >>> fitted = llmcond.fit_head(run="demo", head="linear", set={"epochs": "2"})
        >>> fitted.dim_in, fitted.dim
        (384, 384)
    """

    name: str
    folder: Path
    head: str
    prompt: str
    subtract: bool
    seed: int
    dim_in: int
    dim: int
    counts: Mapping[str, int] = field(metadata={"json": ""})
    record: Mapping[str, Any] = field(metadata={"json": ""})
    metrics: Mapping[str, Estimate] = field(metadata={"json": ""})
    seconds: float = field(metadata={"digits": 3})
    held_out: Mapping[str, Estimate] = field(default_factory=dict, metadata={"json": ""})

    @override
    def to_json(self) -> dict[str, Any]:
        return {
            **super().to_json(),
            **self.counts,
            **{key: value for key, value in self.record.items() if key != "curve"},
            **{f"dev_{name}": finite_or_none(e.value) for name, e in self.metrics.items()},
            **estimates_json({f"held_out_{name}": e for name, e in self.held_out.items()}),
        }


def fit_head(options: FitHeadOptions) -> FittedResult:
    """Fit a head on a run's training features and save it in the run."""
    run, name = open_any_run(Path(options.run)), options.name
    dev_options = options if options.with_split else None
    recipe = load_recipe(options.head, run.task.recipes).with_changes(options.set, "--set")
    prompt, subtract, dim = options.prompt, options.subtract, options.dim
    start = None
    if options.start is not None:
        start, start_folder = _load_start(run, options.start, recipe, dev_options)
        prompt = start.view.name if prompt is None else prompt
        subtract = start.view.subtract if subtract is None else subtract
        if dim is None and recipe.dim is not None and "dim" not in (options.set or {}):
            dim = getattr(start.head.settings, "dim", None)
    if dim is None:
        dim = named_dim(recipe, options.set)
    subtract = run.kind.subtracts if subtract is None else subtract
    view = recipe_view(recipe, run.find_prompts(prompt, recipe.features), subtract)
    if start is not None and view != start.view:
        raise UserError(
            f"the head to start from, {start.name}, reads other features than the new head: "
            f"{_describe_view(start.view)}, not {_describe_view(view)}. Leave out --prompt and "
            "--subtract, or start from another head."
        )
    is_reserved = name is not None and (name == "none" or name.startswith("none@"))
    if is_reserved and not recipe.is_identity:
        raise UserError(f"the name {name!r} means zero-shot. Give the head another --name.")
    name = name or head_name(recipe.name, view)
    if start is not None and start_folder.resolve() == run.head_folder(name).resolve():
        raise UserError(
            f"the new head would replace {name}, from which it starts, so that the same command "
            "would give another head the next time. Give the new head another --name."
        )
    trial = Trial(recipe, options.seed, {}, view, dim)
    return fit_and_save(run, trial, name, options.device, dev_options, start, options.log)


def _load_start(
    run: Run, reference: str | Path, recipe: Recipe, dev_options: DevOptions | None
) -> tuple[RunHead[Any], Path]:
    """Load the head that a fit starts from, a head of the run or of any folder, with its folder.

    Raises:
        UserError: There is no such head, it was fitted on other features than the run's, or its
            parameters cannot be the initial ones of the recipe's head.
    """
    folder = Path(reference)
    if not (folder / "head.json").is_file():
        folder = run.head_folder(run.full_head_names([str(reference)])[0])
    start = run.load_head_folder(folder)
    problem = ""
    if not recipe.family.supervised or recipe.is_identity:
        problem = f"the head {recipe.name} is not fitted by gradient descent"
    elif start.head.kind != recipe.kind:
        problem = (
            f"{start.name} is a {start.head.kind} head, and the recipe {recipe.name} is for a "
            f"{recipe.kind} head"
        )
    elif "dev" in start.trained_on:
        problem = f"{start.name} was fitted on dev as well, which is to choose the epoch"
    elif dev_options is not None:
        problem = "--with dev measures a fit that starts from new parameters"
    if problem:
        raise UserError(f"{problem}. Leave out --start, or name another head.")
    return start, folder


def _describe_view(view: FeatureView) -> str:
    return f"{view.name} ({view.features}{', minus e(c)' if view.subtract else ''})"


def fit_and_save(
    run: Run,
    trial: Trial,
    name: str,
    device: str,
    dev_options: DevOptions | None = None,
    start: RunHead[Any] | None = None,
    trackers: Sequence[str] = (),
) -> FittedResult:
    """Fit a head on a run's training features, and save it in the run.

    Args:
        run: the run.
        trial: the recipe, features and seed to fit.
        name: the name to save the head by.
        device: the device to fit on.
        dev_options: how to fit on dev as well; None: fit on train only.
        start: the head whose parameters are the initial ones; None: new ones.
        trackers: the trackers that get the records of the fit.
    """
    folder = run.head_folder(name)
    check_writable(folder / "head.json")
    examples, metric = load_examples(run), get_metric(run.dev_metric)
    counts, unit = examples.counts(), examples.unit
    view, seed = trial.view, trial.seed
    recipe = size_recipe(trial.recipe, trial.dim, examples.dim(view))
    run_log = RunLog(
        log_path(run.folder, folder.name),
        f"{run.folder.name}/{name}",
        trial.config(run, recipe),
        trackers,
    )
    bar = FitBar(examples.epoch_score_key, examples.epoch_score, metric.format)
    with run_log, bar:
        began = time.monotonic()
        on_epoch = run_log.on_epoch(bar.on_epoch)
        if dev_options is None:
            start_head = () if start is None else (start.head,)
            fitted = examples.fit(recipe, view, seed, on_epoch, device, *start_head)
        else:
            with_dev = DevFit(run, recipe, view, seed, device, dev_options.weight, on_epoch)
            fitted = _fit_with_dev(with_dev, dev_options.folds)
            # Even if the encoder was trained on dev, so that fits on train do not use it.
            counts = {**counts, "n_dev": int(run.rows("dev").rated.sum())}
        seconds, record = time.monotonic() - began, fitted.fit.record
        dev_score = math.nan if dev_options else examples.score_on_dev(fitted, view)
        held_out = examples.score_held_out([fitted.fit.held_out])
        run_log.write(
            "end",
            {
                **{key: record[key] for key in record if key not in ("curve", "members")},
                f"dev_{metric.name}": dev_score,
                **{f"held_out_{name}": estimate.value for name, estimate in held_out.items()},
                "seconds": round(seconds, 3),
            },
        )
    for text in fitted.fit.notes:
        log.info(text)
    replaced = (folder / "head.json").is_file()
    if "n_contrastive_pairs" in record:
        n_pairs = record["n_contrastive_pairs"]
        log.info(f"contrastive pairs: {n_pairs:,} in {counts['n_train']:,} rows")
    record_fields = {**head_record(run, view, recipe.to_json()), "counts": counts}
    if start is not None:
        record_fields["start"] = {
            "name": start.name,
            "weights_sha256": start.record["weights_sha256"],
        }
    record_fields[f"dev_{metric.name}"] = finite_or_none(dev_score)
    if math.isfinite(dev_score) and not recipe.is_identity:
        record_fields |= _compare_with_zero_shot(examples, view, dev_score, name)
    if held_out:
        record_fields["held_out"] = estimates_json(held_out)
    save_head(fitted, folder, record_fields)
    epoch = f", epoch {record['best_epoch']}" if "best_epoch" in record else ""
    sample = f"{examples.dev_sample} of " if examples.dev_sample else ""
    selection = f" chosen on {sample}dev" if record["selected_on"] == "dev" else ""
    score_text = f"dev {metric.heading} {metric.format(dev_score)}"
    if held_out:
        score_text += f", held-out {estimate_text(metric, held_out[metric.name])}"
    if dev_options is not None:
        unit = f"rows of train and {counts['n_dev']:,} of dev with weight {dev_options.weight}"
        score_text = "no score on dev, because the head was fitted on it"
    log.info(
        f"{name}{' (replaced)' if replaced else ''}: {fitted.dim_in} -> {fitted.dim_out} "
        f"dimensions on {counts['n_train']:,} {unit} in {seconds:.1f} s{epoch}{selection}; "
        f"{score_text}"
    )
    return FittedResult(
        name=name,
        folder=folder,
        head=recipe.name,
        prompt=view.name,
        subtract=view.subtracts,
        seed=seed,
        dim_in=fitted.dim_in,
        dim=fitted.dim_out,
        counts=counts,
        record=record,
        metrics={metric.name: Estimate(dev_score)},
        seconds=seconds,
        held_out=held_out,
    )


def _compare_with_zero_shot(
    examples: Examples, view: FeatureView, dev_score: float, name: str
) -> dict[str, Any]:
    """Return the score of zero-shot on dev for head.json; log it if the head is not better."""
    run, metric = examples.run, get_metric(examples.run.dev_metric)
    zero_shot, score = examples.score_zero_shot_on_dev(view)
    if not math.isfinite(score):
        return {}
    if metric.best(score, dev_score) == score:
        log.info(
            f"{name} is not better on dev than zero-shot ({zero_shot}, {metric.heading} "
            f"{metric.format(score)}), so it does not become the default. To use it: --head "
            f"{name}, or llmcond heads --run {run.folder} --default {name}"
        )
    return {"zero_shot": {"name": zero_shot, f"dev_{metric.name}": score}}


def _fit_with_dev(with_dev: DevFit, folds: int) -> FittedHead:
    """Fit on train and dev; with folds, also measure the gain from dev and record it."""
    log.info(
        f"dev is part of the training data, so it cannot choose an epoch: the fit runs all "
        f"{with_dev.recipe.settings.epochs:,} epochs of the recipe (--set epochs=N)"
    )
    if not folds:
        return with_dev.fit()
    fold_results = with_dev.folds(folds)
    log.info(dev_gain_text(fold_results))
    head = with_dev.fit()
    record = {**head.fit.record, "folds": fold_results}
    return replace(head, fit=replace(head.fit, record=record))


def save_best_trial(run: Run, grid: Grid[Trial], device: str) -> None:
    """Save the trial with the best score on dev as a head of the run, without control prompts."""
    scored = [
        (record.dev_score, trial)
        for fits in grid.finished()
        for trial, record in fits
        if record.dev_score is not None and not any(prompt.control for prompt in trial.view.prompts)
    ]
    if not scored:
        log.warning("no fit has a score on dev, so none is saved")
        return
    best = get_metric(run.dev_metric).best(scored, key=lambda pair: pair[0])[1]
    log.info(f"saving the best on dev: {best.label}")
    # On a CPU, fitting with the same seed gives the same head.
    fit_and_save(run, best, best.name, device)


@dataclass(frozen=True)
class SweepResult(FittedResults):
    """The results of a sweep, one for each combination of settings: means over seeds.

    Attributes:
        results: the results, best first, with confidence intervals.
        failures: a line for each fit that failed; its result lacks that seed.
        choice: the score on dev if settings and epochs are chosen on nine tenths of dev, and the
            remaining tenth is predicted, as JSON; ``folds``: how many of the tenths each result was
            chosen for. None if dev is not scored, if there is one result only, or if the epoch of a
            fit was not chosen on dev.

    Examples:
        >>> import llmcond
        >>> rows = [
        ...     dict(sentence1=f"{n} dogs run.", sentence2=f"{n} cats run.", condition=c, label=r)
        ...     for n in range(2, 12) for c, r in [("the action", 5), ("the animal", 1)]
        ... ]
        >>> features = llmcond.extract(model="minilm", run="demo", data=rows)
        >>> sweep = llmcond.sweep(
        ...     run="demo", head=["linear"], vary={"dim": "16,32"}, set={"epochs": "1"}, seeds=1,
        ...     workers=1,
        ... )
        >>> sorted(result.settings["dim"] for result in sweep.results)
        [16, 32]
    """

    choice: Mapping[str, Any] | None = None

    @override
    def to_json(self) -> dict[str, Any]:
        choice = {} if self.choice is None else {"held_out_choice": dict(self.choice)}
        return {**FittedResults.to_json(self), **choice}


def sweep(options: SweepOptions) -> SweepResult:
    """Fit and score heads for every combination of settings, each with several seeds.

    Earlier fits with the same features, settings and versions are reused.

    Raises:
        UserError: the settings are invalid, or there is no such run.
        LlmcondError: every fit failed, or a worker process was killed.
    """
    run, metrics, device = open_any_run(Path(options.run)), options.metric, options.device
    split = run.scored_split(options.split)
    examples = load_examples(run)
    rows = examples.scored_rows(split)
    grid = fit_trials(
        run,
        split,
        list(_make_trials(run, options)),
        "sweep",
        options.workers,
        metrics,
        device,
        options.curve_split(),
        options.log,
    )
    groups = grid.finished()
    results, predictions = zip(*(combine_seeds(group, split) for group in groups), strict=True)
    computed = choose_metrics(run.task.metrics, metrics)
    scored, choice = score_results(results, predictions, rows, computed), None
    if split == "dev":
        held_out = [[record.held_out_arrays for _, record in group] for group in groups]
        scored = [
            replace(result, held_out=examples.score_held_out(parts).get(result.primary.name))
            for result, parts in zip(scored, held_out, strict=True)
        ]
        choice = _score_choice(scored, held_out, examples)
    result = SweepResult(best_first(scored), list(grid.failures.values()), choice)
    report = {**result.to_json(), "data": run.manifest["data"], **provenance()}
    write_json(run.folder / "sweep.json", report)
    if options.keep:
        save_best_trial(run, grid, device)
    return result


def _make_trials(run: Run, options: SweepOptions) -> Iterator[list[Trial]]:
    """Yield the trials of each combination, one for each seed; check all before the first fit."""
    if not options.head:
        raise UserError("no head is named. Name one or more, such as --head mlp.")
    vary, changes = options.varied(), options.set or {}
    subtract = run.kind.subtracts if options.subtract is None else options.subtract
    conflicts = sorted(set(vary) & set(changes))
    if conflicts:
        raise UserError(f"{conflicts[0]} is both varied and set. Give it once.")
    recipes = [
        load_recipe(head, run.task.recipes).with_changes(changes, "--set")
        for head in dict.fromkeys(options.head)
    ]
    check_named_once("head", [recipe.name for recipe in recipes])
    for recipe, names in itertools.product(recipes, dict.fromkeys(options.prompt or (None,))):
        for values in itertools.product(*vary.values()):
            varied_recipe = recipe.with_changes(dict(zip(vary, values, strict=True)), "--vary")
            varied = {key: getattr(varied_recipe.settings, key) for key in vary}
            view = recipe_view(
                varied_recipe, run.find_prompts(names, varied_recipe.features), subtract
            )
            dim = varied.get("dim", named_dim(varied_recipe, changes))
            yield [Trial(varied_recipe, seed, varied, view, dim) for seed in range(options.seeds)]


def _score_choice(
    results: Sequence[Result], held_out: Sequence[Sequence[HeldOut | None]], examples: Examples
) -> dict[str, Any] | None:
    """Score the choice of the best result on dev by the held-out predictions of their seeds."""
    complete = [[part for part in parts if part is not None] for parts in held_out]
    if len(results) < 2 or {len(parts) for parts in complete} != {len(held_out[0])}:
        return None
    rows = examples.scored_rows("dev")
    metric = get_metric(examples.run.dev_metric)
    predicted, selected = choose_settings(complete, metric, rows.pair[rows.rated])
    (score,) = examples.score_held_out(predicted).values()
    labels = [f"{result.name} {format_settings(result.settings)}".rstrip() for result in results]
    folds = Counter(labels[i] for i in selected)
    return {**estimates_json({metric.name: score}), "folds": dict(folds)}
