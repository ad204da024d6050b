"""Fit a head on a run's training features."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcond.display import Displayed
from llmcond.errors import UserError
from llmcond.features.view import view_of
from llmcond.files import check_writable
from llmcond.heads import FittedHead, load_recipe, save_head
from llmcond.log import log
from llmcond.metrics import Estimate, finite, metric_of
from llmcond.progress import FitBar
from llmcond.report.format import folds_text
from llmcond.runs import AnyRun, head_name, head_record, open_any_run
from llmcond.runs.examples import examples_of
from llmcond.runs.trials import Outcome, Trial, sized
from llmcond.runs.with_dev import WithDev
from llmcond.workflows.options.fitting import DevOptions, FitHeadOptions


@dataclass(frozen=True)
class FittedResult(Displayed):
    """A head that was fitted, and kept in the run.

    Attributes:
        head: the recipe's name; ``name`` is the head's own.
        prompt: names of the prompts whose features it takes, joined by +.
        dim_in: size of the features; ``dim`` that of the embeddings.
        counts: rows that were used, and left out, by split.
        record: how fitting went: the epoch kept, what chose it, the learning curve.
        metrics: its score on dev, which is optimistic where dev chose the epoch.
    """

    name: str
    folder: Path
    head: str
    prompt: str
    subtract: bool
    seed: int
    dim_in: int
    dim: int
    counts: Mapping[str, int]
    record: Mapping[str, Any]
    metrics: Mapping[str, Estimate]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        names = ("name", "head", "prompt", "subtract", "seed", "dim_in", "dim")
        return {
            **{name: getattr(self, name) for name in names},
            "folder": str(self.folder),
            **self.counts,
            **{key: value for key, value in self.record.items() if key != "curve"},
            **{f"dev_{name}": finite(one.value) for name, one in self.metrics.items()},
            "seconds": round(self.seconds, 3),
        }


def fit_head(asked: FitHeadOptions) -> FittedResult:
    """Fit a head on a run's training features and save it in the run."""
    run, name = open_any_run(Path(asked.run)), asked.name
    dev = asked if asked.with_split else None
    recipe = load_recipe(asked.head, run.task.recipes)
    recipe = recipe.with_settings(recipe.parse_changes(dict(asked.set or {}), "--set"), "--set")
    subtract = run.subtracts if asked.subtract is None else asked.subtract
    view = view_of(recipe, run.find_prompts(asked.prompt, recipe.features), subtract)
    reserved = name is not None and (name == "none" or name.startswith("none@"))
    if reserved and not recipe.is_identity:
        raise UserError(f"{name!r} would be taken for zero-shot. Give the head another --name.")
    trial = Trial(recipe, asked.dim, view, asked.seed, {})
    return fit_and_save(run, trial, name or head_name(recipe.name, view), asked.device, dev)


def fit_and_save(
    run: AnyRun, trial: Trial, name: str, device: str, dev: DevOptions | None = None
) -> FittedResult:
    """Fit a head on a run's training features, and save it in the run.

    ``dev`` says how dev is fitted on too; None: it is not.
    """
    folder = run.head_folder(name)
    check_writable(folder / "head.json")
    examples, metric = examples_of(run), metric_of(run.dev_metric)
    counts, unit = examples.counts(), examples.unit
    view, seed = trial.view, trial.seed
    recipe = sized(trial.recipe, trial.dim, examples.dim(view))
    began = time.monotonic()
    with FitBar(score=examples.epoch_score, show=metric.show) as bar:
        if dev is None:
            fitted = examples.fit(recipe, view, seed, bar.on_epoch, device)
        else:
            both = examples.with_dev(recipe, view, seed, device, dev.weight, bar.on_epoch)
            fitted = _fit_with_dev(both, dev.folds)
    seconds, record = time.monotonic() - began, fitted.fit.record
    for text in fitted.fit.notes:
        log.info(text)
    replaced = (folder / "head.json").is_file()
    if "n_contrastive_pairs" in record:
        n_pairs = record["n_contrastive_pairs"]
        log.info(f"contrastive pairs: {n_pairs:,} in {counts['n_train']:,} rows")
    on_dev = math.nan if dev else examples.on_dev(fitted, view)
    made = {**head_record(run, view, recipe.to_json()), "counts": counts}
    save_head(fitted, folder, {**made, f"dev_{metric.name}": finite(on_dev)})
    epoch = f", epoch {record['best_epoch']}" if "best_epoch" in record else ""
    sample = f"{examples.dev_sample} of " if examples.dev_sample else ""
    chosen = f" chosen on {sample}dev" if record["selected_on"] == "dev" else ""
    score = f"dev {metric.heading} {metric.show(on_dev)}"
    if dev is not None:
        unit = f"rows of train and {counts['n_dev']:,} of dev, {dev.weight} times,"
        score = "no score on dev, which it was fitted on"
    log.info(
        f"{name}{' (replaced)' if replaced else ''}: {fitted.dim_in} -> {fitted.dim_out} "
        f"dimensions on {counts['n_train']:,} {unit} in {seconds:.1f} s{epoch}{chosen}; {score}"
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
        metrics={metric.name: Estimate(on_dev)},
        seconds=seconds,
    )


def _fit_with_dev(both: WithDev, folds: int) -> FittedHead:
    """Fit on train and dev; told and recorded by folds what dev brings, where that is asked for."""
    log.info(
        f"dev is fitted on too, so it chooses no epoch: all {both.recipe.settings.epochs:,} of the "
        "recipe are taken (--set epochs=N)"
    )
    if not folds:
        return both.fit()
    folded = both.folds(folds)
    log.info(folds_text(folded))
    head = both.fit()
    record = {**head.fit.record, "folds": folded.to_json()}
    return replace(head, fit=replace(head.fit, record=record))


def keep_best(run: AnyRun, done: Iterable[tuple[Trial, Outcome]], device: str) -> None:
    """Keep the trial with the best score on dev as a head of the run; controls do not count."""
    scored = [
        (outcome.dev, trial)
        for trial, outcome in done
        if outcome.dev is not None and not any(prompt.control for prompt in trial.view.prompts)
    ]
    if not scored:
        log.warning("no fit has a score on dev, so none is kept")
        return
    best = metric_of(run.dev_metric).best(scored, key=lambda one: one[0])[1]
    log.info(f"kept, as the best on dev: {best.label}")
    # A seed gives the same head again.
    fit_and_save(run, best, best.name, device)
