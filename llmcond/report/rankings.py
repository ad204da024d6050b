"""Rankings as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from rich.table import Table

from llmcond.evaluation.ranked import DialogueResult, PlanResult, RankedResult
from llmcond.evaluation.results import Result
from llmcond.metrics import Metric, metric_of
from llmcond.report.format import caveats, estimate_text, factors_text
from llmcond.report.terminal import (
    add_figures,
    identity_cells,
    identity_table,
    plain,
    results_table,
)

#: Parts of the queries that stand beside each other; ``--json`` has all.
_PAIRS = (("forward", "backward"), ("reversible", "rest"))


def evaluation_table(results: Sequence[Result], run: object) -> Table:
    """Return the table of an evaluation, whatever was evaluated."""
    first = results[0]
    if isinstance(first, RankedResult):
        return ranking_table(cast(Sequence[RankedResult], results), run)
    if isinstance(first, DialogueResult):
        return dialogue_table(cast(Sequence[DialogueResult], results), run)
    if isinstance(first, PlanResult):
        return plan_table(cast(Sequence[PlanResult], results), run)
    return results_table(results, run)


def ranking_table(results: Sequence[RankedResult], run: object) -> Table:
    """Return how right answers rank, a row for each system, and the main figure of each part."""
    first, primary, metrics = results[0], results[0].primary, _shown(results)
    found = [pair for pair in _PAIRS if all(name in first.parts for name in pair)]
    title = (
        f"{run}, {first.split}: {first.counts.text}, ranks {first.ties}, filtered. "
        f"{factors_text(metrics)}{caveats(results)}"
    )
    table = identity_table(title)
    table.add_column("with", overflow="fold")
    add_figures(table, *(metric.heading for metric in metrics))
    add_figures(table, *(f"{primary.heading}: {' / '.join(pair)}" for pair in found))
    for result in results:
        cells = _cells(result, metrics)
        for pair in found:
            own = (result.parts[name].metrics[primary.name].value for name in pair)
            cells.append(" / ".join(map(primary.show, own)))
        table.add_row(*identity_cells(result, result.title), plain(result.variant[1]), *cells)
    return table


def dialogue_table(results: Sequence[DialogueResult], run: object) -> Table:
    """Return how next turns rank, a row for each system and score."""
    first, metrics = results[0], _shown(results)
    histories = list(first.by_history)
    ends = list(dict.fromkeys((histories[0], histories[-1])))
    title = (
        f"{run}, {first.split}: {first.counts.text} after {' to '.join(ends)} turns, "
        f"candidates {first.candidates}, ranks {first.ties}. {factors_text(metrics)}"
        f"{caveats(results)}"
    )
    table = identity_table(title, subtracts=False)
    table.add_column("score", no_wrap=True)
    add_figures(table, *(metric.heading for metric in metrics), "median rank")
    add_figures(table, f"{first.primary.heading} after {' / '.join(ends)}")
    for result in results:
        own = (result.by_history[name].metrics[first.primary.name].value for name in ends)
        table.add_row(
            *identity_cells(result, _title(result))[:2],
            plain(result.score),
            *_cells(result, metrics),
            f"{result.median_rank:.0f}",
            " / ".join(map(first.primary.show, own)),
        )
    return table


def plan_table(results: Sequence[PlanResult], run: object) -> Table:
    """Return how turns that lead to a goal rank, two rows for each system: with it, and without."""
    first, metrics = results[0], _shown(results)
    title = (
        f"{run}, {first.split}: {first.counts.text}, candidates {first.plan}, ranks {first.ties}. "
        f"Means over {len(first.cells)} cells of turns before + turns to the goal. "
        f"{factors_text(metrics)}{caveats(results)}"
    )
    table = identity_table(title, subtracts=False)
    table.add_column("goal", no_wrap=True)
    add_figures(table, *(metric.heading for metric in metrics))
    for result in results:
        cells = identity_cells(result, _title(result))[:2]
        table.add_row(*cells, result.variant[1], *_cells(result, metrics))
    return table


def _title(result: Result) -> str:
    """Return the head of one of a system's results, which a column tells apart."""
    return replace(result, name=result.name.partition(" ")[0]).title


def _shown(results: Sequence[Result]) -> list[Metric]:
    return [metric for name in results[0].metrics if not (metric := metric_of(name)).secondary]


def _cells(result: Result, metrics: Sequence[Metric]) -> list[str]:
    """Return figures as text, that of the primary metric with its interval."""
    return [
        estimate_text(metric, result.metrics[metric.name])
        if metric is result.primary
        else metric.show(result.metrics[metric.name].value)
        for metric in metrics
    ]
