"""Sweeps over settings, sizes and seeds of heads: resumable, parallel, with one results table."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from llmcond.errors import UserError
from llmcond.evaluation.results import (
    FittedResults,
    Result,
    SettingsChoice,
    best_first,
    score_results,
)
from llmcond.features.view import recipe_view
from llmcond.files import write_json
from llmcond.heads import load_recipe
from llmcond.heads.pairs import choose_settings
from llmcond.metrics import choose_metrics, get_metric
from llmcond.runs import Run, open_any_run
from llmcond.runs.examples import Examples, load_examples
from llmcond.runs.trials import Trial, TrialRecord, combine_seeds, fit_trials, format_settings
from llmcond.system import provenance
from llmcond.workflows.fit import save_best_trial
from llmcond.workflows.options.fitting import SweepOptions


@dataclass(frozen=True)
class SweepResult(FittedResults):
    """The results of a sweep, one for each combination of settings: means over seeds.

    Attributes:
        results: the results, best first, with confidence intervals.
        failures: a line for each fit that failed; its result lacks that seed.
        choice: the held-out score of the choice of the best result; None if dev is not scored, if
            there is one result only, or if the epoch of a fit was not chosen on dev.

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

    choice: SettingsChoice | None = None

    @override
    def to_json(self) -> dict[str, Any]:
        choice = {} if self.choice is None else {"held_out_choice": self.choice.to_json()}
        return {**FittedResults.to_json(self), **choice}


_Fit = tuple[Trial, TrialRecord]


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
    trials = list(_make_trials(run, options))
    grid = fit_trials(
        run,
        split,
        trials,
        "sweep",
        options.workers,
        metrics,
        device,
        options.curve_split(),
        options.log,
    )
    finished = grid.finished(grid.trials)
    groups = _group_seeds(finished)
    points = [combine_seeds(group, split) for group in groups]
    selected_metrics = choose_metrics(run.task.metrics, metrics)
    results, predictions = zip(*points, strict=True)
    scored, choice = score_results(results, predictions, rows, selected_metrics), None
    if split == "dev":
        scored = [
            _add_held_out(result, group, examples)
            for result, group in zip(scored, groups, strict=True)
        ]
        choice = _score_choice(scored, groups, examples)
    result = SweepResult(best_first(scored), list(grid.failures.values()), choice)
    report = {**result.to_json(), "data": run.manifest["data"], **provenance()}
    write_json(run.folder / "sweep.json", report)
    if options.keep:
        save_best_trial(run, finished, device)
    return result


def _make_trials(run: Run, options: SweepOptions) -> Iterator[Trial]:
    """Yield every trial; errors in settings are raised before the first fit."""
    if not options.head:
        raise UserError("no head is named. Name one or more, such as --head mlp.")
    vary, changes = options.varied(), options.set or {}
    subtract = run.kind.subtracts if options.subtract is None else options.subtract
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
                yield Trial(varied_recipe, seed, varied, view, varied.get("dim"))


def _group_seeds(fits: Iterable[_Fit]) -> list[list[_Fit]]:
    """Return the fits of each combination of settings, which differ in their seeds."""
    groups: dict[str, list[_Fit]] = {}
    for trial, record in fits:
        # Recipes with the same name from different folders differ in their path or settings.
        recipe = [trial.recipe.path, asdict(trial.recipe.settings), trial.dim]
        key = json.dumps([trial.name, recipe])
        groups.setdefault(key, []).append((trial, record))
    return list(groups.values())


def _add_held_out(result: Result, group: Sequence[_Fit], examples: Examples) -> Result:
    scores = examples.score_held_out([record.held_out_arrays for _, record in group])
    return replace(result, held_out=scores.get(result.primary.name))


def _score_choice(
    results: Sequence[Result], groups: Sequence[Sequence[_Fit]], examples: Examples
) -> SettingsChoice | None:
    """Score the choice of the best result on dev by held-out predictions."""
    held_out = [[record.held_out_arrays for _, record in group] for group in groups]
    complete = [[part for part in parts if part is not None] for parts in held_out]
    if len(groups) < 2 or {len(parts) for parts in complete} != {len(held_out[0])}:
        return None
    rows = examples.scored_rows("dev")
    metric = get_metric(examples.run.dev_metric)
    predicted, selected = choose_settings(complete, metric, rows.pair[rows.rated])
    (score,) = examples.score_held_out(predicted).values()
    labels = [f"{result.name} {format_settings(result.settings)}".rstrip() for result in results]
    return SettingsChoice(metric, score, Counter(labels[i] for i in selected))
