"""Fit many heads on one store: settings, sizes and seeds; resumable, in parallel, in one table."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmcond.errors import LlmcondError, UserError
from llmcond.features.view import view_of
from llmcond.files import read_json, write_json
from llmcond.heads import load_recipe
from llmcond.log import log
from llmcond.report.terminal import best_first
from llmcond.runs import Run, head_name, open_run
from llmcond.runs.provenance import provenance
from llmcond.workflows.evaluate import check_scorable
from llmcond.workflows.fit import check_seed, prompts_for
from llmcond.workflows.sweep_fits import Point, fit_all

#: Of the interval around a mean over seeds.
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep gave.

    Attributes:
        results: a row for each combination: mean, deviation and interval over seeds, best first.
        failures: a line for each fit that failed; its row lacks that seed.
    """

    results: list[dict[str, Any]]
    failures: list[str]


def sweep(
    run_folder: Path,
    heads: Sequence[str],
    vary: Mapping[str, Sequence[str]],
    *,
    prompts: Sequence[str | None] = (None,),
    subtract: bool = True,
    changes: Mapping[str, str] | None = None,
    seeds: int = 3,
    split: str | None = None,
    workers: int | None = None,
) -> SweepResult:
    """Fit and score heads for every combination of settings, each with several seeds.

    What was fitted before, with the same features, settings and versions, is not fitted again.

    Args:
        run_folder: a run with extracted features.
        heads: recipes.
        vary: setting (or ``dim``) -> values, as text.
        prompts: whose features, several side by side joined by ``+``; None: as in
            :func:`llmcond.workflows.fit_head`.
        subtract: whether unconditional features are subtracted.
        changes: other settings, for all fits.
        seeds: 0 to so many, less one.
        split: what is scored; None: test if the run has one, else dev, which also chose the epochs.
        workers: fits at a time, each with its share of the cores; None: one a core, at most eight.

    Raises:
        UserError: settings that cannot be, or no such run.
        LlmcondError: every fit failed, or a process was ended from outside.
    """
    run = open_run(run_folder)
    if workers is not None and workers < 1:
        raise UserError(f"workers is {workers}; it must be at least 1.")
    split = split or run.default_split()
    check_scorable(run.rows(split), run, other=False)
    points = _points(run, heads, vary, prompts, subtract, changes or {}, seeds)
    folder = run.folder / "sweep"
    # What is the same fit, as where a value is named twice, is one.
    paths = {point.digest(run, split): point for point in points}
    results = {digest: _read(folder / f"{digest}.json") for digest in paths}
    missing = [digest for digest, result in results.items() if result is None]
    log.info(f"{len(paths):,} fits, {len(paths) - len(missing):,} of them done before")
    failures: list[str] = []
    # Closed here and now: an interrupt would leave it, and its processes, to the traceback.
    with closing(fit_all(run, split, {d: paths[d] for d in missing}, workers)) as outcomes:
        for digest, outcome in outcomes:
            if isinstance(outcome, str):
                failures.append(f"{paths[digest].label}: {outcome}")
                log.info(f"failed: {failures[-1]}")
                continue
            write_json(folder / f"{digest}.json", outcome)
            results[digest] = outcome
    if failures and not any(results.values()):
        raise LlmcondError(f"every fit failed; the first one: {failures[0]}")
    done = [(paths[digest], result) for digest, result in results.items() if result is not None]
    swept = SweepResult(_summarise(done), failures)
    report = {**asdict(swept), "data": run.manifest["data"], **provenance()}
    write_json(run.folder / "sweep.json", report)
    return swept


# -- what is fitted ----------------------------------------------------------------------------


def _points(
    run: Run,
    heads: Sequence[str],
    vary: Mapping[str, Sequence[str]],
    prompts: Sequence[str | None],
    subtract: bool,
    changes: Mapping[str, str],
    seeds: int,
) -> Iterator[Point]:
    """Yield every fit; all that can be wrong in settings is found before the first one."""
    if not heads:
        raise UserError("no head was named. Name one or more: --head mlp")
    if seeds < 1:
        raise UserError(f"the number of seeds is {seeds}; it must be at least 1.")
    check_seed(seeds - 1)
    empty = [key for key, values in vary.items() if not values]
    if empty:
        raise UserError(f"{empty[0]} is varied without a value. Give some: --vary {empty[0]}=A,B")
    twice = sorted(set(vary) & set(changes))
    if twice:
        raise UserError(f"{twice[0]} is both varied and set. Give it once.")
    for head, names in itertools.product(dict.fromkeys(heads), dict.fromkeys(prompts)):
        recipe = load_recipe(head)
        recipe = recipe.with_settings(recipe.parse_changes(dict(changes), "--set"), "--set")
        for values in itertools.product(*vary.values()):
            varied = recipe.parse_changes(dict(zip(vary, values, strict=True)), "--vary")
            dim = varied.get("dim")
            changed = recipe.with_settings(varied, "--vary")
            view = view_of(changed, prompts_for(run, changed, names), subtract)
            for seed in range(seeds):
                yield Point(changed, dim, view, seed, varied)


def _read(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


# -- the table ---------------------------------------------------------------------------------


def _summarise(done: Sequence[tuple[Point, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each combination of head, prompt and settings, best mean first."""
    groups: dict[str, list[tuple[Point, Mapping[str, Any]]]] = {}
    for point, result in done:
        # Recipes of one name, from different folders, are told apart by all that they set.
        recipe = [point.recipe.path, asdict(point.recipe.settings), point.dim]
        key = json.dumps([head_name(point.recipe.name, point.view), recipe])
        groups.setdefault(key, []).append((point, result))
    rows = [_row(group) for group in groups.values()]
    return best_first(rows)


def _row(group: Sequence[tuple[Point, Mapping[str, Any]]]) -> dict[str, Any]:
    point, first = group[0]
    return {
        "name": first["name"],
        "head": first["head"],
        "prompt": first["prompt"],
        "subtract": first["subtract"],
        "split": first["split"],
        "n": first["n"],
        "dim": first["dim"],
        "settings": dict(point.varied),
        **_over_seeds("spearman", [result["spearman"] for _, result in group]),
        **_over_seeds("accuracy", [result["accuracy"] for _, result in group]),
        "seeds": [result["seed"] for _, result in group],
        "best_epochs": [result["fit"].get("best_epoch") for _, result in group],
        "curves": [result["fit"].get("curve") for _, result in group],
        "steps_per_epoch": first["fit"].get("steps_per_epoch"),
    }


def _over_seeds(name: str, values: Sequence[float | None]) -> dict[str, Any]:
    """Return mean, deviation and Student's interval of the mean over seeds."""
    found = [value for value in values if value is not None]
    if len(found) < len(values) or not found:
        return {name: None, f"{name}_sd": None, f"{name}_ci": [None, None]}
    mean = statistics.fmean(found)
    if len(found) == 1:
        return {name: mean, f"{name}_sd": None, f"{name}_ci": [None, None]}
    from scipy.stats import t

    deviation = statistics.stdev(found)
    half = float(t.ppf((1 + _CONFIDENCE) / 2, len(found) - 1)) * deviation / len(found) ** 0.5
    return {name: mean, f"{name}_sd": deviation, f"{name}_ci": [mean - half, mean + half]}
