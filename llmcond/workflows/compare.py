"""Compare prompts on the same rows, splits, seeds and heads, with paired evidence."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.bundled import bundled_names
from llmcond.data.queries import QueryRows
from llmcond.data.rows import Rows
from llmcond.encoders import ResolvedEncoder, resolve
from llmcond.errors import UserError, nearest
from llmcond.evaluation.evidence import System, with_evidence
from llmcond.evaluation.results import ComparedResult, Counts, FittedResults
from llmcond.features.view import view_of
from llmcond.files import write_json
from llmcond.heads import Recipe, load_recipe
from llmcond.log import log
from llmcond.metrics import choose_metrics
from llmcond.prompts import Prompt, fields_of, load_prompt
from llmcond.report.comparisons import FEW_PAIRS, summary
from llmcond.report.page import Page, check_page, page_of, write_page
from llmcond.runs import AnyRun, open_any_run, run_exists
from llmcond.runs.examples import examples_of
from llmcond.runs.kind import find_kind, inputs_of
from llmcond.runs.predictors import unscored, zeroshots
from llmcond.runs.trials import Outcome, Trial, run_trials, seeded_result
from llmcond.system import provenance
from llmcond.tasks import AnyTask
from llmcond.workflows.extract import (
    check_named_once,
    check_routed,
    extract,
    prompt_obstacle,
    task_of,
    usable_prompts,
)
from llmcond.workflows.fit import keep_best
from llmcond.workflows.options.common import RunOptions
from llmcond.workflows.options.encoding import ExtractOptions
from llmcond.workflows.options.scoring import CompareOptions, ComparePromptsOptions


@dataclass(frozen=True, kw_only=True)
class Comparison(FittedResults[ComparedResult]):
    """What a comparison gave: a result for each prompt, head and subtraction.

    Attributes:
        baseline: the prompt that the others are compared with; the ``difference`` of a result is to
            the baseline's of the same head and subtraction, None for the baseline itself.
        left_out: prompt -> why it could not be compared.
    """

    baseline: str
    left_out: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return what ``compare-prompts --json`` prints."""
        own = {"baseline": self.baseline, "left_out": dict(self.left_out)}
        return {**self.results.to_json(), **own, "failures": list(self.failures)}


def compare_prompts(options: ComparePromptsOptions) -> Comparison:
    """Compare prompts on the same rows, splits, seeds and heads.

    Every prompt is compared with the baseline under the same head: the difference of each metric
    that is not secondary, with an interval from a bootstrap over sentence pairs that draws the same
    pairs for both, and Holm's correction over all comparisons (:mod:`llmcond.evaluation.paired`).
    What was extracted or fitted before is not done again; heads of the run are not touched, but
    for the one that ``keep`` asks for. The results are kept in the run as ``compare-prompts.json``.

    Raises:
        UserError: as :func:`extract` and :func:`llmcond.fit_head`; a prompt that makes
            rows of different conditions the same; a report that cannot be written.
        LlmcondError: every fit failed.
    """
    began = time.monotonic()
    if options.report is not None:
        check_page(Path(options.report))
    folder = Path(options.run)
    existing = open_any_run(folder) if run_exists(folder) else None
    task = task_of(existing, options.task)
    asked = options.part(CompareOptions)
    asked = replace(asked, heads=asked.heads or task.heads)
    recipes = _recipes(asked.heads, asked.set or {}, task.recipes)
    usable, left_out, baseline = _extract_prompts(options, existing, task, recipes)
    run = open_any_run(folder)
    metrics = choose_metrics(run.task.metrics, asked.metric)
    split = run.scored_split(asked.split)
    examples = examples_of(run)
    rows = examples.scored(split)
    counts = Counts.of(rows)
    if counts.n_pairs < FEW_PAIRS:
        log.warning(
            f"{counts.n_pairs:,} {counts.groups} are few; only large differences can be told from "
            f"chance (at least {FEW_PAIRS} are better)"
        )
    # From the run: a file that was changed meanwhile is not what was extracted.
    stored = [run.prompt(prompt.name) for prompt in usable]
    systems = _zeroshot_systems(run, stored, split)
    fitted, failures, done = _fitted_systems(run, stored, recipes, split, asked)
    systems += fitted
    results = examples.on_new_sentences(
        [system.result for system in systems],
        [system.similarity for system in systems],
        split,
        metrics,
    )
    systems = [replace(own, result=one) for own, one in zip(systems, results, strict=True)]
    comparison = Comparison(
        results=with_evidence(systems, baseline, rows, metrics),
        failures=failures,
        baseline=baseline,
        left_out=left_out,
    )
    if options.report is not None:
        similarity = {one.result.name: one.similarity.mean(axis=0) for one in systems}
        seconds = round(time.monotonic() - began, 1)
        made = {**asdict(asked), "task": options.task, "seconds": seconds}
        shown = examples.rows(split)
        write_page(_page(run, shown, comparison, similarity, made), Path(options.report))
    record = {**comparison.to_json(), "data": run.manifest["data"], **provenance()}
    write_json(run.folder / "compare-prompts.json", record)
    if asked.keep:
        keep_best(run, done, "auto")
    return comparison


def _extract_prompts(
    options: ComparePromptsOptions,
    run: AnyRun | None,
    task: AnyTask[Any],
    recipes: Sequence[Recipe],
) -> tuple[list[Prompt], dict[str, str], str]:
    """Check and extract the prompts.

    Return those that the encoder can use, why the others are left out, and the baseline.
    """
    named = [load_prompt(name) for name in options.prompts]
    _check_different(named)
    resolved = resolve(options.model, options.encoder_options())
    usable, left_out = _usable(named, resolved, task)
    check_routed(usable, options, task)
    baseline = _baseline(options.baseline, usable, resolved)
    for recipe, prompt in itertools.product(recipes, usable):
        view_of(recipe, (prompt,), subtract=recipe.features != "alone")
    # Before hours of encoding: that no prompt makes different conditions the same.
    data = run.data if run else task.read(replace(options.data_options(), extra=fields_of(usable)))
    for prompt in usable:
        inputs_of(task, data, prompt).check_differ()
    # By the paths that were given: names of files are not those of bundled prompts.
    given = dict(zip([prompt.name for prompt in named], options.prompts, strict=True))
    paths = [given.get(prompt.name, prompt.name) for prompt in usable]
    extract(ExtractOptions(**vars(options.part(RunOptions)), prompt=paths))
    return usable, left_out, baseline


def _recipes(heads: Sequence[str], changes: Mapping[str, str], task: str | None) -> list[Recipe]:
    recipes = [load_recipe(name, task) for name in dict.fromkeys(heads) if name != "none"]
    changed = []
    unknown = set(changes)
    for recipe in recipes:
        own = {key: text for key, text in changes.items() if key in asdict(recipe.settings)}
        unknown -= set(own)
        changed.append(recipe.with_settings(recipe.parse_changes(own, "--set"), "--set"))
    if unknown:
        known = sorted({key for recipe in recipes for key in asdict(recipe.settings)})
        key = min(unknown)
        raise UserError(f"--set: none of the heads has a setting {key!r}. {nearest(key, known)}")
    return changed


def _check_different(prompts: Sequence[Prompt]) -> None:
    check_named_once(prompts)
    by_digest: dict[str, str] = {}
    for prompt in prompts:
        other = by_digest.setdefault(prompt.digest, prompt.name)
        if other != prompt.name:
            raise UserError(
                f"the prompts {other} and {prompt.name} are the same template under two names. "
                "Leave one of them out."
            )


def _usable(
    named: Sequence[Prompt], resolved: ResolvedEncoder, task: AnyTask[Any]
) -> tuple[list[Prompt], dict[str, str]]:
    """Return the prompts that an encoder can use in a task, and why not of the others."""
    bundled = [load_prompt(name) for name in bundled_names("prompts")]
    usable, left_out = [], {}
    for prompt in named or bundled:
        reason = prompt_obstacle(prompt, resolved, task)
        if not named and prompt.separate and not reason and find_kind(task.kind).has_conditions:
            reason = "it gives separate features, for tri-encoder heads (name it to compare it)"
        if reason:
            left_out[prompt.name] = reason
            log.info(f"{prompt.name} is left out: {reason}")
        else:
            usable.append(prompt)
    if not usable:
        raise UserError(
            f"none of the prompts goes with {resolved.checkpoint.name} in the task {task.name}. "
            f"{usable_prompts(resolved, task)}"
        )
    return usable, left_out


def _baseline(name: str | None, usable: Sequence[Prompt], resolved: ResolvedEncoder) -> str:
    names = [prompt.name for prompt in usable]
    if name is None:
        return resolved.default_prompt if resolved.default_prompt in names else names[0]
    stem = Path(name).stem if name.endswith(".toml") else name
    if stem not in names:
        raise UserError(
            f"the baseline {name} is none of the prompts that are compared. "
            f"{nearest(stem, names)} Compared: {', '.join(names)}."
        )
    return stem


def _zeroshot_systems(run: AnyRun, prompts: Sequence[Prompt], split: str) -> list[System]:
    systems = []
    for prompt in prompts:
        # Anew for each prompt: memory holds one prompt's features at a time.
        examples = examples_of(run)
        for zeroshot in zeroshots(run, prompt):
            predicted = examples.predict(zeroshot, split)
            control = prompt.control or ""
            result = unscored(ComparedResult, zeroshot, split, run.task.name, control=control)
            systems.append(System(("none", zeroshot.view.subtract), result, predicted[None]))
    return systems


def _fitted_systems(
    run: AnyRun,
    prompts: Sequence[Prompt],
    recipes: Sequence[Recipe],
    split: str,
    asked: CompareOptions,
) -> tuple[list[System], list[str], list[tuple[Trial, Outcome]]]:
    """Return the predictions of every head over seeds, what failed, and all that did not."""
    trials = [
        [
            Trial(recipe, None, view_of(recipe, (prompt,), zeroshot.view.subtract), seed, {})
            for seed in range(asked.seeds)
        ]
        for recipe, prompt in itertools.product(recipes, prompts)
        for zeroshot in zeroshots(run, prompt)
        if asked.plain or zeroshot.view.subtract == run.subtracts
    ]
    flat = [trial for seeded in trials for trial in seeded]
    done, failures = run_trials(run, split, flat, "comparisons", asked.workers)
    systems = []
    for seeded in trials:
        digests = dict.fromkeys(trial.digest(run, split) for trial in seeded)
        found = [done[digest] for digest in digests if digest in done]
        if not found:
            continue
        trial, task = found[0][0], run.task.name
        control = trial.view.prompts[0].control or ""
        result, similarity = seeded_result(ComparedResult, found, split, task, control=control)
        systems.append(System((trial.recipe.name, trial.view.subtract), result, similarity))
    return systems, failures, list(done.values())


def _page(
    run: AnyRun,
    rows: Rows | QueryRows,
    comparison: Comparison,
    similarity: Mapping[str, NDArray[np.float32]],
    made: Mapping[str, Any],
) -> Page:
    best = comparison.results[0]
    wanted = (comparison.baseline, best.head, best.subtract)
    same = (r.name for r in comparison.results if (r.prompt, r.head, r.subtract) == wanted)
    page = page_of(
        run,
        rows,
        comparison.results,
        similarity,
        title=f"Prompts compared: {run.encoder_name}",
        summary=summary(comparison.results, comparison.baseline),
        settings={
            **made,
            "baseline": comparison.baseline,
            "split": best.split,
            "left_out": comparison.left_out,
            "failures": comparison.failures,
        },
    )
    return replace(page, baseline=next(same, None))
