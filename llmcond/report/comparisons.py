"""A comparison of prompts in words, and as a table with its intervals drawn."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from llmcond.errors import plural
from llmcond.evaluation.paired import Difference
from llmcond.evaluation.results import ComparedResult
from llmcond.metrics import METRICS, Metric, finite, metric_of
from llmcond.report.format import (
    caveats,
    estimate_text,
    extreme,
    factors_text,
    interval_text,
    new_sentences_heading,
    probability,
    sentences_text,
)
from llmcond.report.terminal import add_figures, identity_cells, identity_table

Compared = Sequence[ComparedResult]

#: More prompts than that are counted, not named, where nothing was found about them.
_NAMED = 3
#: Characters of an interval's bar.
_BAR = 21
#: Fewer sentence pairs than that tell next to nothing.
FEW_PAIRS = 30


def summary(results: Compared, baseline: str) -> list[str]:
    """Return what a comparison shows, in sentences, the verdict first."""
    counts, split = results[0].counts, results[0].split
    prompts = {result.prompt for result in results}
    heads = sorted({result.head for result in results} - {"none"})
    with_heads = f" and with {_listed(heads)}" if heads else ""
    sentences = _headline([result for result in results if not result.control], baseline)
    for head in ["none", *heads]:
        sentences += _verdicts([r for r in results if r.head == head], head, baseline)
    if counts.n_pairs < FEW_PAIRS:
        sentences.append(
            f"{counts.n_pairs:,} {counts.groups} are few: only large differences can be told from "
            "chance."
        )
    sentences += _controls(results)
    sentences.append(
        f"{plural(len(prompts), 'prompt')}, zero-shot{with_heads}, on {counts.text} of {split}."
    )
    return sentences


def _headline(results: Compared, baseline: str) -> list[str]:
    """Return what scores highest, never without whether a prompt is shown to be better."""
    if not results or finite(results[0].main.value) is None:
        return []
    first = results[0]
    figure = estimate_text(first.primary, first.main)
    top = f"{extreme(first.primary)}: {_system(first)}, {first.primary.heading} {figure}"
    found, own = [_main_difference(result) for result in results], _main_difference(first)
    if not any(found):
        return [f"{top}."]
    if not any(one.verdict == "better" for one in found if one):
        return [f"No prompt is shown to be better than {baseline}. {top}."]
    if own is None:
        return [f"{top}, the baseline." if first.prompt == baseline else f"{top}."]
    if own.verdict == "better":
        return [f"{top}, better than {baseline} by {_difference_text(first.primary, own)}."]
    return [f"{top}, not shown to be better than {baseline}."]


def _main_difference(result: ComparedResult) -> Difference | None:
    return result.difference.get(result.primary.name) if result.difference else None


def _verdicts(results: Compared, head: str, baseline: str) -> list[str]:
    """Return how prompts compare with the baseline under one head."""
    compared = [
        (result, found)
        for result in results
        if (found := _main_difference(result)) is not None and not result.control
    ]
    if not compared:
        return []
    start = "Zero-shot" if head == "none" else f"With {head}"
    parts = []
    for verdict in ("better", "worse"):
        named = [
            f"{_prompt(result)} by {_difference_text(result.primary, found)}"
            for result, found in compared
            if found.verdict == verdict
        ]
        if named:
            parts.append(f"{verdict} than {baseline}: {_listed(named)}")
    unsure = [one for one in compared if one[1].verdict == "no evidence"]
    if unsure:
        metric = unsure[0][0].primary
        minima = [low for _, one in unsure if (low := finite(one.minimum)) is not None]
        could = f" (these rows would show {metric.show(max(minima))} or more)" if minima else ""
        few = len(unsure) <= _NAMED
        which = _listed([_prompt(one) for one, _ in unsure]) if few else f"the other {len(unsure)}"
        parts.append(f"no evidence of a difference to {baseline} for {which}{could}")
    return [f"{start}: {'; '.join(parts)}."]


def _controls(results: Compared) -> list[str]:
    """Return whether controls are at chance."""
    metric = METRICS["accuracy"]
    controls = [
        (result, found)
        for result in results
        if result.control
        and (found := result.metrics.get(metric.name)) is not None
        and finite(found.low) is not None
    ]
    if not controls:
        return []
    off = [(result, found) for result, found in controls if not found.low <= 0.5 <= found.high]
    if not off:
        return [
            "The controls are at chance, as they should be: the interval of their accuracy holds "
            f"{metric.show(0.5)} each time."
        ]
    named = _listed([f"{_system(one)} ({estimate_text(metric, found)})" for one, found in off])
    return [
        f"Of {plural(len(controls), 'control')}, {len(off)} are not at chance: {named}. One in "
        "twenty is to be expected; more than that means that something beside the condition "
        "predicts which of two rows is rated higher."
    ]


def _system(result: ComparedResult) -> str:
    return f"{'zero-shot' if result.head == 'none' else result.head} on {_prompt(result)}"


def _prompt(result: ComparedResult) -> str:
    return result.prompt + ("" if result.subtract else " (c kept)")


def _difference_text(metric: Metric, found: Difference) -> str:
    interval = interval_text(metric, found.low, found.high)
    return f"{metric.show(found.value, signed=True)} {interval}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# -- the table ---------------------------------------------------------------------------------


def comparison_table(results: Compared, baseline: str, run: object, *, bars: bool = True) -> Table:
    """Return a comparison, a row for each prompt, head and subtraction.

    ``bars`` is whether there is a column of intervals as bars of characters.
    """
    first, primary = results[0], results[0].primary
    metrics = [metric for name in first.metrics if not (metric := metric_of(name)).secondary]
    title = (
        f"{run}, {first.split}: {first.counts.text}. {sentences_text(first)}{factors_text(metrics)}"
        f"{caveats(results)} "
        f"Differences are to {baseline} with the same head; p after Holm's correction."
    )
    table = identity_table(title)
    add_figures(table, primary.heading, "seeds ±")
    ends_of_all = [end for r in results for end in (r.main.value, r.main.low, r.main.high)]
    known = [end for end in ends_of_all if finite(end) is not None] or [0.0, 1.0]
    least, most = min(known), max(known)
    if bars:
        ends = (f"{primary.factor * end:.0f}" for end in (least, most))
        table.add_column(" to ".join(ends), no_wrap=True)
    add_figures(table, "difference", "p")
    table.add_column("verdict", no_wrap=True)
    others = [metric for metric in metrics if metric.name != primary.name]
    add_figures(table, *(metric.heading for metric in others))
    if first.new_sentences is not None:
        add_figures(table, new_sentences_heading(first))
    for result in results:
        table.add_row(
            *identity_cells(result, result.head, " (control)" if result.control else ""),
            estimate_text(primary, result.main),
            primary.show(result.seed_sd.get(primary.name)),
            *([_bar(result, least, most)] if bars else []),
            *_evidence(result, baseline),
            *(estimate_text(metric, result.metrics[metric.name]) for metric in others),
            *([estimate_text(primary, part.main)] if (part := result.new_sentences) else []),
        )
    return table


def _evidence(result: ComparedResult, baseline: str) -> tuple[str, str, str]:
    """Return the cells of the difference to the baseline."""
    found, metric = _main_difference(result), result.primary
    if found is None:
        return "", "", "baseline" if result.prompt == baseline else "–"
    return _difference_text(metric, found), probability(found.p_holm), found.verdict


def _bar(result: ComparedResult, least: float, most: float) -> str:
    """Return an interval as a line of characters, with the value on it."""
    found = result.main
    if finite(found.value) is None:
        return ""

    def place(at: float) -> int:
        share = (at - least) / (most - least) if most > least else 0.5
        return min(_BAR - 1, max(0, round(share * (_BAR - 1))))

    cells = [" "] * _BAR
    if finite(found.low) is not None and finite(found.high) is not None:
        for i in range(place(found.low), place(found.high) + 1):
            cells[i] = "─"
    cells[place(found.value)] = "●"
    return "".join(cells).rstrip()
