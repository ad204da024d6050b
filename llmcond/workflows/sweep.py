"""Sweeps over settings, sizes and seeds of heads: resumable, parallel, with one results table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError
from llmcond.evaluation.results import FittedResults, SweptResult, best_first, score_results
from llmcond.features.view import recipe_view
from llmcond.files import write_json
from llmcond.heads import load_recipe
from llmcond.metrics import choose_metrics
from llmcond.runs import AnyRun, open_any_run
from llmcond.runs.examples import load_examples
from llmcond.runs.trials import Trial, TrialOutcome, aggregate_seeds, run_trials
from llmcond.system import provenance
from llmcond.workflows.fit import save_best_trial
from llmcond.workflows.options.fitting import SweepOptions


@dataclass(frozen=True)
class SweepResult(FittedResults[SweptResult]):
    """The results of a sweep, one for each combination of settings: means over seeds.

    Attributes:
        results: the results, best first, with confidence intervals.
        failures: a line for each fit that failed; its result lacks that seed.

    Example:
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


#: A result without scores, and the (seeds, n) predictions that the scores are computed from.
_Point = tuple[SweptResult, NDArray[np.float32]]


def sweep(options: SweepOptions) -> SweepResult:
    """Fit and score heads for every combination of settings, each with several seeds.

    Earlier fits with the same features, settings and versions are reused.

    Raises:
        UserError: the settings are invalid, or there is no such run.
        LlmcondError: every fit failed, or a worker process was killed.
    """
    run, metrics, device = open_any_run(Path(options.run)), options.metric, options.device
    split = run.scored_split(options.split)
    rows = load_examples(run).scored_rows(split)
    trials = list(_make_trials(run, options))
    outcomes, failures = run_trials(
        run, split, trials, "sweep", options.workers, metrics, device, options.curve_split()
    )
    points = _combine_seeds(outcomes.values(), run, split)
    selected_metrics = choose_metrics(run.task.metrics, metrics)
    results, predictions = zip(*points, strict=True)
    result = SweepResult(
        best_first(score_results(results, predictions, rows, selected_metrics)), failures
    )
    report = {**result.to_json(), "data": run.manifest["data"], **provenance()}
    write_json(run.folder / "sweep.json", report)
    if options.keep:
        save_best_trial(run, outcomes.values(), device)
    return result


def _make_trials(run: AnyRun, options: SweepOptions) -> Iterator[Trial]:
    """Yield every trial; errors in settings are raised before the first fit."""
    if not options.head:
        raise UserError("no head is named. Name one or more, such as --head mlp.")
    vary, changes = options.varied(), options.set or {}
    subtract = run.subtracts if options.subtract is None else options.subtract
    conflicts = sorted(set(vary) & set(changes))
    if conflicts:
        raise UserError(f"{conflicts[0]} is both varied and set. Give it once.")
    for head, names in itertools.product(
        dict.fromkeys(options.head), dict.fromkeys(options.prompt or (None,))
    ):
        recipe = load_recipe(head, run.task.recipes)
        recipe = recipe.with_settings(recipe.parse_changes(dict(changes), "--set"), "--set")
        for values in itertools.product(*vary.values()):
            varied = recipe.parse_changes(dict(zip(vary, values, strict=True)), "--vary")
            varied_recipe = recipe.with_settings(varied, "--vary")
            view = recipe_view(
                varied_recipe, run.find_prompts(names, varied_recipe.features), subtract
            )
            for seed in range(options.seeds):
                yield Trial(varied_recipe, varied.get("dim"), view, seed, varied)


def _combine_seeds(
    outcomes: Iterable[tuple[Trial, TrialOutcome]], run: AnyRun, split: str
) -> list[_Point]:
    """Return a result without scores, and the predictions, for each combination of settings."""
    groups: dict[str, list[tuple[Trial, TrialOutcome]]] = {}
    for trial, outcome in outcomes:
        # Recipes with the same name from different folders differ in their path or settings.
        recipe = [trial.recipe.path, asdict(trial.recipe.settings), trial.dim]
        key = json.dumps([trial.name, recipe])
        groups.setdefault(key, []).append((trial, outcome))
    points = []
    for group in groups.values():
        varied = dict(group[0][0].varied)
        points.append(aggregate_seeds(SweptResult, group, split, run.task.name, settings=varied))
    return points
