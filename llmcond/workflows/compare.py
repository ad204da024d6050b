"""Comparison of prompts on the same rows, splits, seeds and heads, with paired tests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.bundled import bundled_names
from llmcond.data.rows import QueryRows, Rows
from llmcond.encoders import ResolvedEncoder, resolve
from llmcond.errors import UserError, nearest
from llmcond.evaluation.results import (
    ComparedSystem,
    FittedResults,
    RowCounts,
    compare_with_baseline,
)
from llmcond.features.view import recipe_view
from llmcond.files import write_json
from llmcond.heads import Recipe, load_recipe
from llmcond.log import log
from llmcond.metrics import choose_metrics
from llmcond.prompts import Prompt, list_fields, load_prompt
from llmcond.report.page import (
    Page,
    check_figures,
    check_page,
    make_page,
    write_figures,
    write_page,
)
from llmcond.report.tables import FEW_PAIRS, summary
from llmcond.runs import AnyRun, open_any_run, run_exists
from llmcond.runs.examples import load_examples
from llmcond.runs.kind import build_inputs, find_kind
from llmcond.runs.predictors import result_without_metrics, zero_shot_heads
from llmcond.runs.trials import Grid, Trial, combine_seeds, fit_trials
from llmcond.system import provenance
from llmcond.tasks import AnyTask
from llmcond.workflows.extract import (
    check_named_once,
    check_router_used,
    extract,
    list_usable_prompts,
    prompt_obstacle,
    resolve_task,
)
from llmcond.workflows.fit import save_best_trial
from llmcond.workflows.options.common import RunOptions
from llmcond.workflows.options.encoding import ExtractOptions
from llmcond.workflows.options.scoring import CompareOptions, ComparePromptsOptions


@dataclass(frozen=True, kw_only=True)
class Comparison(FittedResults):
    """The results of a comparison: one for each prompt, head and choice of subtraction.

    Attributes:
        results: the results, best first.
        failures: a line for each fit that failed; its result lacks that seed.
        baseline: the prompt that the others are compared with. A result's ``difference`` is to the
            baseline's result with the same head and subtraction; None for the baseline itself.
        left_out: the prompts that could not be compared, with the reasons.

    Examples:
        >>> import llmcond
        >>> rows = [
        ...     dict(sentence1=f"{n} dogs run.", sentence2=f"{n} cats run.", condition=c, label=r)
        ...     for n in range(2, 12) for c, r in [("the action", 5), ("the animal", 1)]
        ... ]
        >>> prompts = ["concat-sent-cond", "routed"]
        >>> comparison = llmcond.compare_prompts(
        ...     model="minilm", run="demo", data=rows, prompts=prompts, heads=["none"]
        ... )
        >>> comparison.baseline
        'routed'
        >>> comparison.results[0].head
        'none'
    """

    baseline: str
    left_out: Mapping[str, str]

    @override
    def to_json(self) -> dict[str, Any]:
        fields = {"baseline": self.baseline, "left_out": dict(self.left_out)}
        return {**self.results.to_json(), **fields, "failures": list(self.failures)}


def compare_prompts(options: ComparePromptsOptions) -> Comparison:
    """Compare prompts on the same rows, splits, seeds and heads.

    Every prompt is compared with the baseline under the same head, by the difference of each metric
    that is not secondary. Its interval comes from a bootstrap over sentence pairs that resamples
    the same pairs for both, with Holm's correction over all comparisons (see
    ``llmcond.evaluation.paired``). Features and fits from earlier calls are reused. The run's heads
    stay as they are, except for the one that ``keep`` saves. The results are saved in the run as
    ``compare-prompts.json``.

    Raises:
        UserError: as ``extract`` and ``llmcond.fit_head``; or a prompt makes rows with different
            conditions identical, or the report cannot be written.
        LlmcondError: every fit failed.
    """
    began = time.monotonic()
    if options.report is not None:
        check_page(Path(options.report))
    if options.figures is not None:
        check_figures(Path(options.figures), options.figure_format)
    folder = Path(options.run)
    existing = open_any_run(folder) if run_exists(folder) else None
    task = resolve_task(existing, options.task)
    settings = options.select(CompareOptions)
    settings = replace(settings, heads=settings.heads or task.heads)
    recipes = _load_recipes(settings.heads, settings.set or {}, task.recipes)
    usable, left_out, baseline = _extract_prompts(options, existing, task, recipes)
    run = open_any_run(folder)
    metrics = choose_metrics(run.task.metrics, settings.metric)
    split = run.scored_split(settings.split)
    examples = load_examples(run)
    rows = examples.scored_rows(split)
    counts = RowCounts.of(rows)
    if counts.n_pairs < FEW_PAIRS:
        log.warning(
            f"{counts.n_pairs:,} {counts.groups} are few, so only large differences can be "
            f"distinguished from chance (use {FEW_PAIRS} or more)"
        )
    # The run's copies of the prompts, because a template file may have changed since extraction.
    stored = [run.prompt(prompt.name) for prompt in usable]
    systems = _score_zeroshots(run, stored, split)
    fitted, grid = _fit_systems(run, stored, recipes, split, settings)
    systems += fitted
    results = examples.add_new_sentences(
        [system.result for system in systems],
        [system.similarity for system in systems],
        split,
        metrics,
    )
    systems = [
        replace(system, result=result) for system, result in zip(systems, results, strict=True)
    ]
    comparison = Comparison(
        results=compare_with_baseline(systems, baseline, rows, metrics),
        failures=list(grid.failures.values()),
        baseline=baseline,
        left_out=left_out,
    )
    if options.report is not None or options.figures is not None:
        similarity = {system.result.name: system.similarity.mean(axis=0) for system in systems}
        seconds = round(time.monotonic() - began, 1)
        page_settings = {**asdict(settings), "task": options.task, "seconds": seconds}
        shown_rows = examples.rows(split)
        page = _build_page(run, shown_rows, comparison, similarity, page_settings)
        if options.report is not None:
            write_page(page, Path(options.report))
        if options.figures is not None:
            write_figures(page, Path(options.figures), options.figure_format)
    record = {**comparison.to_json(), "data": run.manifest["data"], **provenance()}
    write_json(run.folder / "compare-prompts.json", record)
    if settings.keep:
        save_best_trial(run, grid.finished(grid.trials), "auto")
    return comparison


def _extract_prompts(
    options: ComparePromptsOptions,
    run: AnyRun | None,
    task: AnyTask[Any],
    recipes: Sequence[Recipe],
) -> tuple[list[Prompt], dict[str, str], str]:
    """Check the prompts, and extract their features.

    Returns:
        The prompts that the encoder can use, the reasons why others are left out, and the name of
        the baseline.
    """
    named = [load_prompt(name) for name in options.prompts]
    _check_different(named)
    resolved = resolve(options.model, options.encoder_options())
    usable, left_out = _select_usable(named, resolved, task)
    check_router_used(usable, options, task)
    baseline = _choose_baseline(options.baseline, usable, resolved)
    for recipe, prompt in itertools.product(recipes, usable):
        recipe_view(recipe, (prompt,), subtract=recipe.features != "alone")
    # Checked before hours of encoding: no prompt may make different conditions identical.
    data = (
        run.data if run else task.read(replace(options.data_options(), extra=list_fields(usable)))
    )
    for prompt in usable:
        build_inputs(task, data, prompt).check_distinct()
    # Extraction gets the paths as given, because a file's name does not name a bundled prompt.
    names = dict(zip([prompt.name for prompt in named], options.prompts, strict=True))
    paths = [names.get(prompt.name, prompt.name) for prompt in usable]
    extract(ExtractOptions(**vars(options.select(RunOptions)), prompt=paths))
    return usable, left_out, baseline


def _load_recipes(
    heads: Sequence[str], changes: Mapping[str, str], task: str | None
) -> list[Recipe]:
    recipes = [load_recipe(name, task) for name in dict.fromkeys(heads) if name != "none"]
    changed = []
    unknown = set(changes)
    for recipe in recipes:
        head_changes = {
            key: text for key, text in changes.items() if key in asdict(recipe.settings)
        }
        unknown -= set(head_changes)
        changed.append(recipe.with_settings(recipe.parse_changes(head_changes, "--set"), "--set"))
    if unknown:
        known = sorted({key for recipe in recipes for key in asdict(recipe.settings)})
        key = min(unknown)
        raise UserError(f"--set: none of the heads has a setting {key!r}. {nearest(key, known)}")
    return changed


def _check_different(prompts: Sequence[Prompt]) -> None:
    check_named_once(prompts)
    by_digest: dict[str, str] = {}
    for prompt in prompts:
        first_name = by_digest.setdefault(prompt.digest, prompt.name)
        if first_name != prompt.name:
            raise UserError(
                f"the prompts {first_name} and {prompt.name} are the same template under two "
                "names. Leave one of them out."
            )


def _select_usable(
    prompts: Sequence[Prompt], resolved: ResolvedEncoder, task: AnyTask[Any]
) -> tuple[list[Prompt], dict[str, str]]:
    """Return the prompts that an encoder can use in a task, and why the others are left out."""
    bundled = [load_prompt(name) for name in bundled_names("prompts")]
    usable, left_out = [], {}
    for prompt in prompts or bundled:
        reason = prompt_obstacle(prompt, resolved, task)
        if not prompts and prompt.separate and not reason and find_kind(task.kind).has_conditions:
            reason = "it gives separate features for tri-encoder heads (name it to compare it)"
        if reason:
            left_out[prompt.name] = reason
            log.info(f"{prompt.name} is left out: {reason}")
        else:
            usable.append(prompt)
    if not usable:
        raise UserError(
            f"none of the prompts can be used with {resolved.checkpoint.name} in the task "
            f"{task.name}. "
            f"{list_usable_prompts(resolved, task)}"
        )
    return usable, left_out


def _choose_baseline(name: str | None, usable: Sequence[Prompt], resolved: ResolvedEncoder) -> str:
    names = [prompt.name for prompt in usable]
    if name is None:
        return resolved.default_prompt if resolved.default_prompt in names else names[0]
    prompt_name = Path(name).stem if name.endswith(".toml") else name
    if prompt_name not in names:
        raise UserError(
            f"the baseline {name} is not among the prompts to compare. "
            f"{nearest(prompt_name, names)} Compared: {', '.join(names)}."
        )
    return prompt_name


def _score_zeroshots(run: AnyRun, prompts: Sequence[Prompt], split: str) -> list[ComparedSystem]:
    systems = []
    for prompt in prompts:
        # New examples for each prompt, so that memory holds the features of one prompt at a time.
        examples = load_examples(run)
        for zeroshot in zero_shot_heads(run, prompt):
            predicted = examples.predict(zeroshot, split)
            control = prompt.control or ""
            about = {"control": control}
            result = result_without_metrics(zeroshot, split, run.task.name, about=about)
            systems.append(
                ComparedSystem(("none", zeroshot.view.subtract), result, predicted[None])
            )
    return systems


def _fit_systems(
    run: AnyRun,
    prompts: Sequence[Prompt],
    recipes: Sequence[Recipe],
    split: str,
    settings: CompareOptions,
) -> tuple[list[ComparedSystem], Grid[Trial]]:
    """Fit every head with every seed; return the systems and the grid."""
    trials = [
        [
            Trial(recipe, seed, {}, recipe_view(recipe, (prompt,), zeroshot.view.subtract))
            for seed in range(settings.seeds)
        ]
        for recipe, prompt in itertools.product(recipes, prompts)
        for zeroshot in zero_shot_heads(run, prompt)
        if settings.plain or zeroshot.view.subtract == run.subtracts
    ]
    flat = [trial for seeded in trials for trial in seeded]
    grid = fit_trials(run, split, flat, "comparisons", settings.workers)
    systems = []
    for seeded in trials:
        fits = grid.finished(dict.fromkeys(trial.digest(run, split) for trial in seeded))
        if fits:
            trial = fits[0][0]
            control = trial.view.prompts[0].control or ""
            result, similarity = combine_seeds(fits, split, {"control": control})
            group = (trial.recipe.name, trial.view.subtract)
            systems.append(ComparedSystem(group, result, similarity))
    return systems, grid


def _build_page(
    run: AnyRun,
    rows: Rows | QueryRows,
    comparison: Comparison,
    similarity: Mapping[str, NDArray[np.float32]],
    settings: Mapping[str, Any],
) -> Page:
    best = comparison.results[0]
    key = (comparison.baseline, best.head, best.subtract)
    names = (r.name for r in comparison.results if (r.prompt, r.head, r.subtract) == key)
    page = make_page(
        run,
        rows,
        comparison.results,
        similarity,
        title=f"Prompts compared: {run.encoder_name}",
        summary=summary(comparison.results, comparison.baseline),
        settings={
            **settings,
            "baseline": comparison.baseline,
            "split": best.split,
            "left_out": comparison.left_out,
            "failures": comparison.failures,
        },
    )
    return replace(page, baseline=next(names, None))
