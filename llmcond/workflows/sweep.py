"""Fit many heads on one store: settings, sizes and seeds; resumable, in parallel, in one table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError
from llmcond.evaluation.results import FittedResults, SweptResult, best_first, score
from llmcond.features.view import view_of
from llmcond.files import write_json
from llmcond.heads import load_recipe
from llmcond.metrics import choose_metrics
from llmcond.runs import AnyRun, open_any_run
from llmcond.runs.examples import examples_of
from llmcond.runs.trials import Outcome, Trial, run_trials, seeded_result
from llmcond.system import provenance
from llmcond.workflows.fit import keep_best
from llmcond.workflows.options.fitting import SweepOptions


@dataclass(frozen=True)
class SweepResult(FittedResults[SweptResult]):
    """What a sweep gave, a result for each combination: means over seeds, with intervals."""


#: A result without figures, and the (seeds, n) predictions that they are computed from.
_Point = tuple[SweptResult, NDArray[np.float32]]


def sweep(asked: SweepOptions) -> SweepResult:
    """Fit and score heads for every combination of settings, each with several seeds.

    What was fitted before, with the same features, settings and versions, is not fitted again.

    Raises:
        UserError: settings that cannot be, or no such run.
        LlmcondError: every fit failed, or a process was ended from outside.
    """
    run, metrics, device = open_any_run(Path(asked.run)), asked.metric, asked.device
    split = run.scored_split(asked.split)
    rows = examples_of(run).scored(split)
    trials = list(_grid(run, asked))
    done, failures = run_trials(run, split, trials, "sweep", asked.workers, metrics, device=device)
    points = _summarise(done.values(), run, split)
    computed = choose_metrics(run.task.metrics, metrics)
    results, predicted = zip(*points, strict=True)
    swept = SweepResult(best_first(score(results, predicted, rows, computed)), failures)
    report = {**swept.to_json(), "data": run.manifest["data"], **provenance()}
    write_json(run.folder / "sweep.json", report)
    if asked.keep:
        keep_best(run, done.values(), device)
    return swept


def _grid(run: AnyRun, asked: SweepOptions) -> Iterator[Trial]:
    """Yield every trial; all that can be wrong in settings is found before the first fit."""
    if not asked.head:
        raise UserError("no head was named. Name one or more: --head mlp")
    vary, changes = asked.varied(), asked.set or {}
    subtract = run.subtracts if asked.subtract is None else asked.subtract
    empty = [key for key, values in vary.items() if not values]
    if empty:
        raise UserError(f"{empty[0]} is varied without a value. Give some: --vary {empty[0]}=A,B")
    twice = sorted(set(vary) & set(changes))
    if twice:
        raise UserError(f"{twice[0]} is both varied and set. Give it once.")
    for head, names in itertools.product(
        dict.fromkeys(asked.head), dict.fromkeys(asked.prompt or (None,))
    ):
        recipe = load_recipe(head, run.task.recipes)
        recipe = recipe.with_settings(recipe.parse_changes(dict(changes), "--set"), "--set")
        for values in itertools.product(*vary.values()):
            varied = recipe.parse_changes(dict(zip(vary, values, strict=True)), "--vary")
            changed = recipe.with_settings(varied, "--vary")
            view = view_of(changed, run.find_prompts(names, changed.features), subtract)
            for seed in range(asked.seeds):
                yield Trial(changed, varied.get("dim"), view, seed, varied)


def _summarise(done: Iterable[tuple[Trial, Outcome]], run: AnyRun, split: str) -> list[_Point]:
    """Return a result, without figures, and predictions for each combination of settings."""
    groups: dict[str, list[tuple[Trial, Outcome]]] = {}
    for trial, outcome in done:
        # Recipes of one name, from different folders, are told apart by all that they set.
        recipe = [trial.recipe.path, asdict(trial.recipe.settings), trial.dim]
        key = json.dumps([trial.name, recipe])
        groups.setdefault(key, []).append((trial, outcome))
    points = []
    for group in groups.values():
        varied = dict(group[0][0].varied)
        points.append(seeded_result(SweptResult, group, split, run.task.name, settings=varied))
    return points
