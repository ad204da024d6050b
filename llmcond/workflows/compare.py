"""Comparisons of prompts, and of heads, encoders and runs, on the same rows with paired tests."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.arrays import Positions
from llmcond.base.errors import UserError, nearest, shortened_repr
from llmcond.base.files import as_json, path_exists, write_json
from llmcond.base.metrics import Metric, choose_metrics, finite_or_none, get_metric
from llmcond.base.output import Displayed, log, make_frame
from llmcond.base.package import bundled_names
from llmcond.base.records import check_named_once
from llmcond.base.system import provenance
from llmcond.data.readers import STDIN, open_source
from llmcond.encoders import ResolvedEncoder, resolve
from llmcond.evaluation.paired import MIN_PAIRS
from llmcond.evaluation.results import (
    ComparedSystem,
    FittedResults,
    Results,
    RowCounts,
    Scored,
    Subset,
    compare_with_baseline,
    take_scored,
)
from llmcond.features.view import recipe_view
from llmcond.heads import Recipe, load_recipe
from llmcond.options.common import RunOptions
from llmcond.options.encoding import ExtractOptions
from llmcond.options.scoring import CompareOptions, ComparePromptsOptions, CompareSystemsOptions
from llmcond.prompts import Prompt, list_fields, load_prompt
from llmcond.report.content import Page, describe_run, make_page
from llmcond.report.page import check_figures, check_page, write_figures, write_page
from llmcond.report.tables import FEW_PAIRS, summary
from llmcond.runs import Run, open_any_run, run_exists
from llmcond.runs.cross import CrossEncoder, load_cross_encoder
from llmcond.runs.embedder import choose_head
from llmcond.runs.examples import (
    AnyPredictor,
    Examples,
    load_examples,
    load_fitted_heads,
    result_without_metrics,
    zero_shot_heads,
)
from llmcond.runs.open import local_folder
from llmcond.runs.trials import Grid, Trial, combine_seeds, fit_trials, named_dim
from llmcond.tasks import AnyTask
from llmcond.workflows.extract import (
    check_router_used,
    extract,
    list_usable_prompts,
    prompt_obstacle,
    resolve_task,
)
from llmcond.workflows.fit import save_best_trial


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
    metrics = choose_metrics(task.metrics, settings.metric)
    usable, left_out, baseline = _extract_prompts(options, existing, task, recipes)
    run = open_any_run(folder)
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
    fitted, grid = _fit_systems(run, stored, recipes, split, settings, options.device)
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
        similarity = {system.result.name: system.similarity for system in systems}
        seconds = round(time.monotonic() - began, 1)
        page = make_page(
            run,
            examples.rows(split),
            comparison.results,
            similarity,
            run.store(),
            title=f"Prompts compared: {run.encoder_name}",
            summary=summary(comparison.results, baseline),
            settings={
                **asdict(settings),
                "task": options.task,
                "seconds": seconds,
                "baseline": baseline,
                "split": split,
                "left_out": left_out,
                "failures": comparison.failures,
            },
        )
        if options.report is not None:
            write_page(page, Path(options.report))
        if options.figures is not None:
            write_figures(page, Path(options.figures), options.figure_format)
    record = {**comparison.to_json(), "data": run.manifest["data"], **provenance()}
    write_json(run.folder / "compare-prompts.json", record)
    if settings.keep:
        save_best_trial(run, grid, options.device)
    return comparison


def _extract_prompts(
    options: ComparePromptsOptions,
    run: Run | None,
    task: AnyTask[Any],
    recipes: Sequence[Recipe],
) -> tuple[list[Prompt], dict[str, str], str]:
    """Check the prompts, and extract their features.

    Returns:
        The prompts that the encoder can use, the reasons why others are left out, and the name of
        the baseline.
    """
    named = [load_prompt(name) for name in options.prompts]
    check_named_once("prompt", [prompt.name for prompt in named])
    by_digest: dict[str, str] = {}
    for prompt in named:
        first_name = by_digest.setdefault(prompt.digest, prompt.name)
        if first_name != prompt.name:
            raise UserError(
                f"the prompts {first_name} and {prompt.name} are the same template under two "
                "names. Leave one of them out."
            )
    resolved = resolve(options.model, options.encoder_options())
    usable, left_out = _select_usable(named, resolved, task)
    check_router_used(usable, options, task)
    baseline = _choose_baseline(options.baseline, usable, resolved)
    for recipe, prompt in itertools.product(recipes, usable):
        recipe_view(recipe, (prompt,), subtract=recipe.features != "alone")
    if str(options.data) == STDIN or isinstance(options.data, Iterator):
        # They can be read only once, and the extraction reads the data again.
        options = replace(options, data=open_source(options.data, read=options.read_options()))
    # Checked before hours of encoding: no prompt may make different conditions identical.
    data = (
        run.data if run else task.read(replace(options.data_options(), extra=list_fields(usable)))
    )
    for prompt in usable:
        inputs = task.inputs(data, prompt)
        if hasattr(inputs, "check_distinct"):
            inputs.check_distinct()
    # Extraction gets the paths as given, because a file's name does not name a bundled prompt.
    names = dict(zip([prompt.name for prompt in named], options.prompts, strict=True))
    paths = [names.get(prompt.name, prompt.name) for prompt in usable]
    extract(ExtractOptions(**vars(options.select(RunOptions)), prompt=paths))
    return usable, left_out, baseline


def _load_recipes(
    heads: Sequence[str], changes: Mapping[str, str], task: str | None
) -> list[Recipe]:
    recipes = [load_recipe(name, task) for name in dict.fromkeys(heads) if name != "none"]
    check_named_once("head", [recipe.name for recipe in recipes])
    changed = []
    unknown = set(changes)
    for recipe in recipes:
        head_changes = {
            key: text for key, text in changes.items() if key in asdict(recipe.settings)
        }
        unknown -= set(head_changes)
        changed.append(recipe.with_changes(head_changes, "--set"))
    if unknown:
        known = sorted({key for recipe in recipes for key in asdict(recipe.settings)})
        key = min(unknown)
        raise UserError(f"--set: none of the heads has a setting {key!r}. {nearest(key, known)}")
    return changed


def _select_usable(
    prompts: Sequence[Prompt], resolved: ResolvedEncoder, task: AnyTask[Any]
) -> tuple[list[Prompt], dict[str, str]]:
    """Return the prompts that an encoder can use in a task, and why the others are left out."""
    bundled = [load_prompt(name) for name in bundled_names("prompts")]
    usable, left_out = [], {}
    for prompt in prompts or bundled:
        reason = prompt_obstacle(prompt, resolved, task)
        if not prompts and prompt.separate and not reason and task.has_conditions:
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


def _score_zeroshots(run: Run, prompts: Sequence[Prompt], split: str) -> list[ComparedSystem]:
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
    run: Run,
    prompts: Sequence[Prompt],
    recipes: Sequence[Recipe],
    split: str,
    settings: CompareOptions,
    device: str,
) -> tuple[list[ComparedSystem], Grid[Trial]]:
    """Fit every head with every seed; return the systems and the grid."""
    trials = [
        [
            Trial(
                recipe,
                seed,
                {},
                recipe_view(recipe, (prompt,), zeroshot.view.subtract),
                named_dim(recipe, settings.set),
            )
            for seed in range(settings.seeds)
        ]
        for recipe, prompt in itertools.product(recipes, prompts)
        for zeroshot in zero_shot_heads(run, prompt)
        if settings.plain or zeroshot.view.subtract == run.kind.subtracts
    ]
    grid = fit_trials(run, split, trials, "comparisons", settings.workers, device=device)
    systems = []
    for fits in grid.finished():
        trial = fits[0][0]
        control = trial.view.prompts[0].control or ""
        result, similarity = combine_seeds(fits, split, {"control": control})
        group = (trial.recipe.name, trial.view.subtract)
        systems.append(ComparedSystem(group, result, similarity))
    return systems, grid


Predictor: TypeAlias = AnyPredictor | CrossEncoder


@dataclass(frozen=True, kw_only=True)
class SystemComparison(Displayed):
    """The results of compared systems on the same rows.

    Attributes:
        results: the results, best first.
        baseline: the name of the system that the others are compared with.

    Examples:
        >>> import llmcond
        >>> rows = [
        ...     dict(sentence1=f"{n} dogs run.", sentence2=f"{n} cats run.", condition=c, label=r)
        ...     for n in range(2, 22) for c, r in [("the action", 5), ("the animal", 1)]
        ... ]
        >>> features = llmcond.extract(model="minilm", run="demo", data=rows, prompt=["routed"])
        >>> comparison = llmcond.compare(
        ...     systems=["demo:none@routed", "demo:none@routed+c"], split="train"
        ... )
        >>> [result.name for result in comparison.results if result.difference is None]
        ['demo:none@routed']
    """

    results: Results
    baseline: str

    @override
    def to_json(self) -> dict[str, Any]:
        return {**self.results.to_json(), "baseline": self.baseline, **provenance()}

    def to_pandas(self) -> Any:
        """Convert the scores and differences to a pandas DataFrame.

        Returns:
            A DataFrame with one row for each system and metric: ``system``, ``baseline``, the
            number of ``seeds``, ``metric``, its ``value`` with the interval from ``low`` to
            ``high``, and the fields of the difference, which the baseline does not have.

        Raises:
            LlmcondError: pandas is not installed.
        """
        return make_frame(
            {
                "system": result.name,
                "baseline": self.baseline,
                "seeds": len(result.seeds),
                "metric": name,
                "value": finite_or_none(estimate.value),
                "low": finite_or_none(estimate.low),
                "high": finite_or_none(estimate.high),
                **{
                    f"difference_{key}": value
                    for key, value in as_json((result.difference or {}).get(name, {})).items()
                },
            }
            for result in self.results
            for name, estimate in result.metrics.items()
            if not get_metric(name).secondary
        )

    @override
    def _displayed(self) -> dict[str, Any]:
        return {"baseline": self.baseline, **self.results._displayed()}


@dataclass(frozen=True)
class _Member:
    """A head of a run, or a cross-encoder.

    Attributes:
        source: the run as the user named it.
        run: the run.
        predictor: the head, or the cross-encoder.
    """

    source: str
    run: Run
    predictor: Predictor

    @property
    def name(self) -> str:
        is_cross = isinstance(self.predictor, CrossEncoder)
        return self.source if is_cross else f"{self.source}:{self.predictor.name}"

    @property
    def trained_on(self) -> tuple[str, ...]:
        """The splits that the head, its encoder or the cross-encoder was trained on."""
        predictor = self.predictor
        of_head = () if isinstance(predictor, CrossEncoder) else predictor.trained_on
        return (*self.run.trained_on, *of_head)

    @property
    def configuration(self) -> dict[str, str]:
        """Everything that determines the head except for the encoder, the data and the seed.

        The keys are the names of the settings, and the values are JSON.
        """
        predictor = self.predictor
        if isinstance(predictor, CrossEncoder):
            return {"recipe": predictor.name, "orders": json.dumps(predictor.orders)}
        view = predictor.view
        settings = asdict(predictor.head.settings) if predictor.is_fitted else {}
        parts = {
            "recipe": predictor.recipe,
            **settings,
            "prompt": [f"{prompt.name} ({prompt.digest})" for prompt in view.prompts],
            "subtract": view.subtract,
            "features": view.features,
        }
        return {
            name: json.dumps(value, sort_keys=True, default=str) for name, value in parts.items()
        }


@dataclass(frozen=True)
class _System:
    """A system to compare: one head, or the fits of one recipe with several seeds."""

    reference: str
    members: Sequence[_Member]

    @property
    def name(self) -> str:
        if len(self.members) == 1:
            return self.members[0].name
        return f"{self.reference}, {len(self.members)} seeds"

    def predict(
        self, examples: Mapping[str, Examples], orders: Mapping[str, Positions], split: str
    ) -> ComparedSystem:
        """Return the system's predictions in the order of the first run's examples."""
        results, predictions = [], []
        for member in self.members:
            own_examples, predictor = examples[member.source], member.predictor
            if isinstance(predictor, CrossEncoder):
                rows: Any = own_examples.rows(split)
                predicted = predictor.predict(rows)
            else:
                predicted = own_examples.predict(predictor, split)
            predictions.append(predicted[orders[member.source]])
            results.append(result_without_metrics(predictor, split, member.run.task.name))
        result = replace(
            results[0],
            name=self.name,
            seeds=tuple(seed for result in results for seed in result.seeds),
            fits=tuple(fit for result in results for fit in result.fits),
            about={
                "control": "",
                "heads": [{"run": m.source, "head": m.predictor.name} for m in self.members],
                "encoder": self.members[0].run.encoder_name,
            },
        )
        return ComparedSystem(("", True), result, np.stack(predictions))


def compare_systems(options: CompareSystemsOptions) -> SystemComparison:
    """Compare every system with the baseline on the same rows.

    Raises:
        UserError: a run or head does not exist, the heads of a system differ in more than their
            seed, or the runs have different tasks or rows.
    """
    if options.report is not None:
        check_page(Path(options.report))
    references = [reference.strip() for reference in options.systems]
    if len(references) < 2:
        raise UserError(
            f"{len(references)} system is named, and a comparison needs two or more. Name another "
            "one: RUN, RUN:HEAD, or RUN:none for zero-shot."
        )
    runs: dict[str, Run] = {}
    parsed = [_parse_reference(reference) for reference in references]
    for parts in parsed:
        for source, _ in parts:
            if source not in runs:
                # A name that is neither a folder nor a bundled model is not looked up on the hub.
                runs[source] = open_any_run(local_folder(source), cross=True)
    split = _choose_split(runs, options.split)
    systems = [
        _find_system(reference, parts, runs, split, options.device)
        for reference, parts in zip(references, parsed, strict=True)
    ]
    baseline = _find_baseline(systems, options.baseline)
    task = next(iter(runs.values())).task
    metrics = choose_metrics(task.metrics, options.metric)
    examples = {source: load_examples(run) for source, run in runs.items()}
    orders = _match_rows(examples, split)
    first = next(iter(examples.values()))
    rows = first.scored_rows(split)
    log.info(f"comparing {len(systems):,} systems on {RowCounts.of(rows).text} of {split}")
    predicted = [system.predict(examples, orders, split) for system in systems]
    name = systems[baseline].name
    trained_on = {part for system in systems for one in system.members for part in one.trained_on}
    masks = first.subsets(split, trained_on, list(runs.values()))
    subsets = _compare_subsets(predicted, name, rows, masks, metrics[0])
    compared = [
        replace(
            result,
            subsets={"subsets": {key: parts[result.name] for key, parts in subsets.items()}},
        )
        for result in compare_with_baseline(predicted, name, rows, metrics)
    ]
    comparison = SystemComparison(results=Results(tuple(compared)), baseline=name)
    if options.report is not None:
        similarity = {system.result.name: system.similarity for system in predicted}
        settings = {**asdict(options.select(CompareSystemsOptions)), "split": split}
        described = {
            source: describe_run(run, run.prompts().values()) for source, run in runs.items()
        }
        page = Page(
            title=f"{len(compared)} systems compared on {split}",
            summary=summary(compared, name),
            results=compared,
            rows=first.rows(split),
            scale=first.run.rating_range,
            similarity=similarity,
            provenance={"settings": settings, "runs": described, **provenance()},
            dev_metric=first.run.dev_metric,
        )
        write_page(page, Path(options.report))
    return comparison


# -- the systems -------------------------------------------------------------------------------


def _parse_reference(reference: str) -> list[tuple[str, str | None]]:
    """Return the runs and heads of a system, which are separated by commas.

    A head that follows the head of a run is one of the same run.

    Raises:
        UserError: a run or a head is missing.
    """
    if path_exists(Path(reference)):
        return [(reference, None)]
    parts: list[tuple[str, str | None]] = []
    for part in (part.strip() for part in reference.split(",")):
        # A path may contain colons, so the last one precedes the head, whose name has no slashes.
        source, colon, head = part.rpartition(":")
        if path_exists(Path(part)) or not colon or "/" in head or "\\" in head:
            source, head = part, ""
        if not source or (colon and part.endswith(":")):
            raise UserError(
                f"{reference!r} is not a system. Expected RUN, RUN:HEAD, or RUN:none for zero-shot."
            )
        if not head and parts and parts[-1][1] and not path_exists(Path(part)):
            source, head = parts[-1][0], part
        parts.append((source, head or None))
    return parts


def _choose_split(runs: Mapping[str, Run], split: str | None) -> str:
    """Check that all runs have the same task, and return the split to score.

    Raises:
        UserError: the tasks or the default splits differ.
    """
    tasks = {source: run.task.name for source, run in runs.items()}
    if len(set(tasks.values())) > 1:
        named = ", ".join(f"{source} of {task}" for source, task in tasks.items())
        raise UserError(f"the runs have different tasks: {named}. Compare runs of one task.")
    splits = {source: run.scored_split(split) for source, run in runs.items()}
    if len(set(splits.values())) > 1:
        named = ", ".join(f"{default} of {source}" for source, default in splits.items())
        raise UserError(f"the default splits differ: {named}. Name one with --split.")
    return next(iter(splits.values()))


def _find_system(
    reference: str,
    parts: Sequence[tuple[str, str | None]],
    runs: Mapping[str, Run],
    split: str,
    device: str,
) -> _System:
    """Load the heads of a system, and check that they differ in their seeds only."""
    members = [
        _Member(source, runs[source], predictor)
        for source, head in parts
        for predictor in _load_predictors(runs[source], head, split, device)
    ]
    names = ", ".join(member.name for member in members)
    _check_configurations(reference, members)
    seeds = [member.predictor.head.seed for member in members if member.predictor.is_fitted]
    if len(members) > 1 and len(set(seeds)) < len(members):
        raise UserError(
            f"{reference} names several heads that were not fitted with different seeds: {names}. "
            "Name heads with different seeds, or one of them."
        )
    return _System(reference, members)


def _check_configurations(reference: str, members: Sequence[_Member]) -> None:
    """Check that the heads of a system differ in their seeds only.

    Raises:
        UserError: they differ in settings, which the message names.
    """
    configurations = [member.configuration for member in members]
    values = {
        key: dict.fromkeys(configuration.get(key, "none") for configuration in configurations)
        for key in dict.fromkeys(key for configuration in configurations for key in configuration)
    }
    different = [f"{key} ({' or '.join(v)})" for key, v in values.items() if len(v) > 1]
    if not different:
        return
    groups = [
        [member.name for member in members if member.configuration == configuration]
        for configuration in configurations
    ]
    largest: list[str] = max(groups, key=len)
    raise UserError(
        f"{reference} names heads that differ in more than their seed: "
        f"{', '.join(member.name for member in members)}. They differ in {', '.join(different)}. "
        f"Name heads with equal settings, separated by commas: {','.join(largest)}"
    )


def _load_predictors(run: Run, name: str | None, split: str, device: str) -> Sequence[Predictor]:
    if run.cross:
        cross = load_cross_encoder(run.folder, device=device)
        if name not in (None, cross.name):
            raise UserError(
                f"{run.folder} holds a cross-encoder, which has no head {name!r}. Name the "
                "run only."
            )
        return [cross]
    if name is None:
        default = run.default_head()
        name = default[0] if default else "none"
        log.info(f"{run.folder}: {f'{name} ({default[1]})' if default else 'zero-shot'}")
    if name.startswith("none@") and name in run.head_names():
        return run.find_heads([name])  # An encoder trained without a head has a seed.
    if name == "none" or name.startswith("none@"):
        named = [z.name for p in run.prompts().values() for z in zero_shot_heads(run, p)]
        if name == "none" and len(run.prompts()) > 1:
            raise UserError(
                f"{run.folder} has features of {len(run.prompts())} prompts, so that :none is "
                f"ambiguous. Name one of {', '.join(f'{run.folder}:{zero}' for zero in named)}."
            )
        return [choose_head(run, name)]
    heads = load_fitted_heads(run, [name], split)
    if not heads:
        raise UserError(
            f"the head {name} of {run.folder} leaves features unchanged. Name RUN:none instead."
        )
    return heads


def _find_baseline(systems: Sequence[_System], reference: str | None) -> int:
    """Return the position of the baseline, and check that the systems differ."""
    names = [system.name for system in systems]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UserError(f"{repeated[0]} is named twice. Name different systems.")
    if reference is None:
        return 0
    for position, system in enumerate(systems):
        if reference in (system.reference, system.name):
            return position
    references = [system.reference for system in systems]
    raise UserError(
        f"the baseline {reference} is not among the systems. {nearest(reference, references)}"
    )


# -- the rows ----------------------------------------------------------------------------------


def _match_rows(examples: Mapping[str, Examples], split: str) -> dict[str, Positions]:
    """Return, for each run, the position of each of the first run's examples.

    Raises:
        UserError: the runs have different examples, candidates or known answers.
    """
    (first, reference), *others = examples.items()
    keys = reference.keys(split)
    orders = {first: np.arange(len(keys))}
    for source, other in others:
        digests = [part.run.manifest["data"]["digest"] for part in (reference, other)]
        if digests[0] == digests[1]:
            orders[source] = orders[first]
            continue
        other_keys = other.keys(split)
        missing, added = Counter(keys) - Counter(other_keys), Counter(other_keys) - Counter(keys)
        if missing or added:
            example = next(iter(missing or added))
            raise UserError(
                f"{first} and {source} have different rows in {split}: {missing.total():,} are "
                f"only in the first, {added.total():,} only in the second, such as "
                f"{shortened_repr(example, 120)}. Compare runs that were extracted from the same "
                "data."
            )
        if reference.pool_keys() != other.pool_keys():
            raise UserError(
                f"{first} and {source} rank other candidates, or leave out other known answers. "
                "Compare runs that were extracted from the same data."
            )
        orders[source] = np.empty(len(keys), dtype=np.int64)
        orders[source][_sorted_positions(keys)] = _sorted_positions(other_keys)
    return orders


def _sorted_positions(keys: Sequence[tuple[Any, ...]]) -> Positions:
    # By text, because a rating may be missing, and None is not comparable.
    return np.array(sorted(range(len(keys)), key=lambda i: repr(keys[i])), dtype=np.int64)


def _compare_subsets(
    systems: Sequence[ComparedSystem],
    baseline: str,
    rows: Scored,
    masks: Mapping[str, NDArray[np.bool_]],
    metric: Metric,
) -> dict[str, dict[str, Subset]]:
    """Return the figures of each system, by its name, on each subset of the examples.

    Subsets with too few examples, or with all of them, are left out.
    """
    subsets = {}
    for name, mask in masks.items():
        selected = mask & rows.rated
        part = take_scored(rows, selected)
        if len(np.unique(part.pair)) < MIN_PAIRS or selected.sum() == rows.rated.sum():
            continue
        members = [replace(s, similarity=s.similarity[:, selected]) for s in systems]
        subsets[name] = {
            result.name: Subset(
                len(part.pair),
                result.metrics,
                difference=(result.difference or {}).get(metric.name),
            )
            for result in compare_with_baseline(members, baseline, part, [metric])
        }
    return subsets
