"""A comparison of prompts as a summary in words and as a table with interval bars."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from llmcond.errors import format_count
from llmcond.evaluation.paired import PairedDifference
from llmcond.evaluation.results import ComparedResult, SystemResult
from llmcond.metrics import METRICS, Metric, finite_or_none, get_metric
from llmcond.report.format import (
    estimate_text,
    factors_text,
    highest_or_lowest,
    interval_notes,
    interval_text,
    new_sentences_heading,
    p_value_text,
    sentences_text,
)
from llmcond.report.terminal import (
    add_figure_columns,
    identity_cells,
    identity_table,
    plain_text,
    titled_table,
)

Compared = Sequence[ComparedResult]

#: Up to this many prompts without evidence of a difference are named; more are only counted.
_MAX_NAMED = 3
#: The width of an interval's bar in characters.
_BAR_WIDTH = 21
#: The note on p-values of several comparisons, for titles.
CORRECTION_NOTE = (
    "p and the verdict are after Holm's correction, and intervals are not: an interval without 0 "
    "may have no evidence."
)
#: With fewer sentence pairs than this, only large differences are significant.
FEW_PAIRS = 30


def summary(results: Compared, baseline: str) -> list[str]:
    """Summarise a comparison in sentences, the verdict first.

    Args:
        results: the compared results, best first.
        baseline: the name of the baseline prompt.
    """
    counts, split = results[0].counts, results[0].split
    prompts = {result.prompt for result in results}
    heads = sorted({result.head for result in results} - {"none"})
    with_heads = f" and with {_join_names(heads)}" if heads else ""
    sentences = _summarise_best([result for result in results if not result.control], baseline)
    for head in ["none", *heads]:
        sentences += _summarise_verdicts([r for r in results if r.head == head], head, baseline)
    if counts.n_pairs < FEW_PAIRS:
        sentences.append(
            f"{counts.n_pairs:,} {counts.groups} are few: only large differences can be "
            "distinguished from chance."
        )
    sentences += _summarise_controls(results)
    sentences.append(
        f"{format_count(len(prompts), 'prompt')}, zero-shot{with_heads}, on {counts.text} of "
        f"{split}."
    )
    return sentences


def _summarise_best(results: Compared, baseline: str) -> list[str]:
    """Name the best score, and say whether any prompt is significantly better than the baseline."""
    if not results or finite_or_none(results[0].main.value) is None:
        return []
    first = results[0]
    figure = estimate_text(first.primary, first.main)
    direction = highest_or_lowest(first.primary)
    top = f"{direction}: {_name_system(first)}, {first.primary.heading} {figure}"
    differences = [_main_difference(result) for result in results]
    margin = _main_difference(first)
    if not any(differences):
        return [f"{top}."]
    if not any(difference.verdict == "better" for difference in differences if difference):
        return [f"No prompt is shown to be better than {baseline}. {top}."]
    if margin is None:
        return [f"{top}, the baseline." if first.prompt == baseline else f"{top}."]
    if margin.verdict == "better":
        return [f"{top}, better than {baseline} by {_format_difference(first.primary, margin)}."]
    return [f"{top}, not shown to be better than {baseline}."]


def _main_difference(result: ComparedResult) -> PairedDifference | None:
    return result.difference.get(result.primary.name) if result.difference else None


def _summarise_verdicts(results: Compared, head: str, baseline: str) -> list[str]:
    """Say how the prompts compare with the baseline under one head."""
    compared = [
        (result, difference)
        for result in results
        if (difference := _main_difference(result)) is not None and not result.control
    ]
    if not compared:
        return []
    start = "Zero-shot" if head == "none" else f"With {head}"
    parts = []
    for verdict in ("better", "worse"):
        named = [
            f"{_name_prompt(result)} by {_format_difference(result.primary, difference)}"
            for result, difference in compared
            if difference.verdict == verdict
        ]
        if named:
            parts.append(f"{verdict} than {baseline}: {_join_names(named)}")
    uncertain = [pair for pair in compared if pair[1].verdict == "no evidence"]
    if uncertain:
        metric = uncertain[0][0].primary
        minima = [low for _, diff in uncertain if (low := finite_or_none(diff.minimum)) is not None]
        detectable = (
            f" (these rows can detect {metric.format(max(minima))} or more)" if minima else ""
        )
        few = len(uncertain) <= _MAX_NAMED
        prompt_names = (
            _join_names([_name_prompt(result) for result, _ in uncertain])
            if few
            else f"the other {len(uncertain)}"
        )
        parts.append(f"no evidence of a difference from {baseline} for {prompt_names}{detectable}")
    return [f"{start}: {'; '.join(parts)}."]


def _summarise_controls(results: Compared) -> list[str]:
    """Say whether the accuracy of the controls is at chance."""
    metric = METRICS["accuracy"]
    controls = [
        (result, estimate)
        for result in results
        if result.control
        and (estimate := result.metrics.get(metric.name)) is not None
        and finite_or_none(estimate.low) is not None
    ]
    if not controls:
        return []
    off_chance = [
        (result, estimate)
        for result, estimate in controls
        if not estimate.low <= 0.5 <= estimate.high
    ]
    if not off_chance:
        return [
            "The controls are at chance, as they should be: the interval of each accuracy contains "
            f"{metric.format(0.5)}."
        ]
    names = _join_names(
        [
            f"{_name_system(result)} ({estimate_text(metric, estimate)})"
            for result, estimate in off_chance
        ]
    )
    return [
        f"Of {format_count(len(controls), 'control')}, {len(off_chance)} are not at chance: "
        f"{names}. One "
        "in twenty is expected; more mean that something other than the condition predicts which "
        "of two rows is rated higher."
    ]


def _name_system(result: ComparedResult) -> str:
    return f"{'zero-shot' if result.head == 'none' else result.head} on {_name_prompt(result)}"


def _name_prompt(result: ComparedResult) -> str:
    return result.prompt + ("" if result.subtract else " (no subtraction)")


def _format_difference(metric: Metric, difference: PairedDifference) -> str:
    interval = interval_text(metric, difference.low, difference.high)
    return f"{metric.format(difference.value, signed=True)} {interval}"


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# -- systems of several runs -------------------------------------------------------------------


def systems_summary(results: Sequence[SystemResult], baseline: str) -> list[str]:
    """Summarise a comparison of systems in sentences, the verdicts first.

    Args:
        results: the results, best first.
        baseline: the name of the baseline.
    """
    first, sentences = results[0], []
    metric = first.primary
    for result in results:
        difference = _main_difference(result)
        if difference is None:
            continue
        figure = (
            f"{metric.heading} {_format_difference(metric, difference)}, "
            f"p = {p_value_text(difference.p_holm)}".replace("p = <", "p <")
        )
        if difference.verdict == "no evidence":
            minimum = finite_or_none(difference.minimum)
            detectable = (
                f" These rows can detect {metric.format(minimum)} or more." if minimum else ""
            )
            sentences.append(
                f"There is no evidence that {result.name} and {baseline} differ: {figure}."
                f"{detectable}"
            )
        else:
            sentences.append(f"{result.name} is {difference.verdict} than {baseline}: {figure}.")
    single = [result.name for result in results if len(result.seeds) == 1]
    if single:
        sentences.append(
            f"{_join_names(single)}: one fit, so that the result holds for this seed only. Fit "
            "several seeds to include their variance."
        )
    counts = first.counts
    if counts.n_pairs < FEW_PAIRS:
        sentences.append(
            f"{counts.n_pairs:,} {counts.groups} are few: only large differences can be "
            "distinguished from chance."
        )
    sentences.append(f"{len(results):,} systems, on {counts.text} of {first.split}.")
    return sentences


def systems_table(results: Sequence[SystemResult], baseline: str) -> Table:
    """Return the table of a comparison of systems, with one row per system, best first."""
    first, primary = results[0], results[0].primary
    metrics = [metric for name in first.metrics if not (metric := get_metric(name)).secondary]
    correction = f". {CORRECTION_NOTE}" if len(results) > 2 else "."
    title = (
        f"{first.split}: {first.counts.text}. {factors_text(metrics)}{interval_notes(results)} "
        f"Differences are from {baseline}{correction}"
    )
    table = titled_table(title, "system", "encoder", "prompt")
    add_figure_columns(table, "seeds", primary.heading, "seeds ±", "difference", "p")
    table.add_column("verdict", no_wrap=True)
    others = [metric for metric in metrics if metric.name != primary.name]
    for metric in others:
        add_figure_columns(table, metric.heading, "difference")
    for result in results:
        is_baseline = result.name == baseline
        cells = _difference_cells(result, is_baseline)
        other_cells: list[str] = []
        for metric in others:
            difference = (result.difference or {}).get(metric.name)
            other_cells += [
                estimate_text(metric, result.metrics[metric.name]),
                _format_difference(metric, difference) if difference else "",
            ]
        table.add_row(
            plain_text(result.name),
            plain_text(result.encoder),
            plain_text(result.prompt + (" minus c" if result.subtract else "")),
            str(len(result.seeds) or "–"),
            estimate_text(primary, result.main),
            primary.format(result.seed_sd.get(primary.name)),
            *cells,
            *other_cells,
        )
    return table


def subset_differences_table(results: Sequence[SystemResult], baseline: str) -> Table:
    """Return the differences on subsets of the rows, one row per subset and system."""
    primary = results[0].primary
    table = titled_table(
        f"{primary.heading} on subsets. p is not corrected, so that these are hints for further "
        "experiments.",
        "rows",
        "system",
    )
    add_figure_columns(table, "n", primary.heading, "baseline", "difference", "p")
    (reference,) = (result for result in results if result.name == baseline)
    for name, part in reference.subsets.items():
        for result in results:
            subset = result.subsets[name]
            if subset.difference is not None:
                table.add_row(
                    name,
                    plain_text(result.name),
                    f"{subset.n:,}",
                    estimate_text(primary, subset.main),
                    primary.format(part.main.value),
                    _format_difference(primary, subset.difference),
                    p_value_text(subset.difference.p),
                )
    return table


# -- the table ---------------------------------------------------------------------------------


def comparison_table(results: Compared, baseline: str, run: object, *, bars: bool = True) -> Table:
    """Return the table of a comparison, with one row per prompt, head and subtraction.

    Args:
        results: the compared results, best first.
        baseline: the name of the baseline prompt.
        run: the name of the run, for the title.
        bars: whether to add a column that shows the intervals as bars.
    """
    first, primary = results[0], results[0].primary
    metrics = [metric for name in first.metrics if not (metric := get_metric(name)).secondary]
    title = (
        f"{run}, {first.split}: {first.counts.text}. {sentences_text(first)}{factors_text(metrics)}"
        f"{interval_notes(results)} "
        f"Differences are from {baseline} with the same head. {CORRECTION_NOTE}"
    )
    table = identity_table(title)
    add_figure_columns(table, primary.heading, "seeds ±")
    ends_of_all = [end for r in results for end in (r.main.value, r.main.low, r.main.high)]
    known = [end for end in ends_of_all if finite_or_none(end) is not None] or [0.0, 1.0]
    least, most = min(known), max(known)
    if bars:
        ends = (f"{primary.factor * end:.0f}" for end in (least, most))
        table.add_column(" to ".join(ends), no_wrap=True)
    add_figure_columns(table, "difference", "p")
    table.add_column("verdict", no_wrap=True)
    others = [metric for metric in metrics if metric.name != primary.name]
    add_figure_columns(table, *(metric.heading for metric in others))
    if first.new_sentences is not None:
        add_figure_columns(table, new_sentences_heading(first))
    for result in results:
        table.add_row(
            *identity_cells(result, result.head, " (control)" if result.control else ""),
            estimate_text(primary, result.main),
            primary.format(result.seed_sd.get(primary.name)),
            *([_draw_bar(result, least, most)] if bars else []),
            *_difference_cells(result, result.prompt == baseline),
            *(estimate_text(metric, result.metrics[metric.name]) for metric in others),
            *([estimate_text(primary, part.main)] if (part := result.new_sentences) else []),
        )
    return table


def _difference_cells(result: ComparedResult, is_baseline: bool) -> tuple[str, str, str]:
    """Return the cells of the difference from the baseline: difference, p-value and verdict."""
    difference, metric = _main_difference(result), result.primary
    if difference is None:
        return "", "", "baseline" if is_baseline else "–"
    return (
        _format_difference(metric, difference),
        p_value_text(difference.p_holm),
        difference.verdict,
    )


def _draw_bar(result: ComparedResult, least: float, most: float) -> str:
    """Draw an interval as a line of characters, with the value on it."""
    estimate = result.main
    if finite_or_none(estimate.value) is None:
        return ""

    def position_of(figure: float) -> int:
        share = (figure - least) / (most - least) if most > least else 0.5
        return min(_BAR_WIDTH - 1, max(0, round(share * (_BAR_WIDTH - 1))))

    cells = [" "] * _BAR_WIDTH
    if finite_or_none(estimate.low) is not None and finite_or_none(estimate.high) is not None:
        for position in range(position_of(estimate.low), position_of(estimate.high) + 1):
            cells[position] = "─"
    cells[position_of(estimate.value)] = "●"
    return "".join(cells).rstrip()
