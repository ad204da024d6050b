"""The table of an evaluation, of rated rows or of rankings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from rich.table import Table

from llmcond.evaluation.ranking import QuerySubset
from llmcond.evaluation.ranking_results import DialogueResult, PlanResult, QueryResult, RankedResult
from llmcond.evaluation.results import Result
from llmcond.metrics import get_metric
from llmcond.report.format import estimate_text, factors_text, interval_notes
from llmcond.report.terminal import (
    add_figure_columns,
    identity_cells,
    identity_table,
    plain_text,
    results_table,
)

#: Pairs of query subsets that share a column; ``--json`` has all subsets.
_SUBSET_PAIRS = (("forward", "backward"), ("reversible", "rest"))

#: Heading of a further column -> function that formats its cell for a result.
_Columns = Mapping[str, Callable[[Any], str]]


def evaluation_table(results: Sequence[Result], run: object) -> Table:
    """Return the table of an evaluation of any kind, with a row for each result."""
    first = results[0]
    if not isinstance(first, QueryResult):
        return results_table(results, run)
    description, columns = _describe_ranking(first)
    subtracts = isinstance(first, RankedResult)
    metrics = [metric for name in first.metrics if not (metric := get_metric(name)).secondary]
    title = f"{run}, {first.split}: {first.counts.text}{description} "
    table = identity_table(f"{title}{factors_text(metrics)}{interval_notes(results)}", subtracts)
    table.add_column(first.variant[0], overflow="fold", no_wrap=not subtracts)
    add_figure_columns(table, *(metric.heading for metric in metrics), *columns)
    for result in cast(Sequence[QueryResult], results):
        # The results of one system have a common prefix; the variant column distinguishes them.
        name = result.name if subtracts else result.name.partition(" ")[0]
        table.add_row(
            *identity_cells(result, replace(result, name=name).title)[: 2 + subtracts],
            plain_text(result.variant[1]),
            *(
                estimate_text(metric, result.metrics[metric.name])
                if metric is result.primary
                else metric.format(result.metrics[metric.name].value)
                for metric in metrics
            ),
            *(format_cell(result) for format_cell in columns.values()),
        )
    return table


def _describe_ranking(first: QueryResult) -> tuple[str, _Columns]:
    """Return how the queries were ranked, for the title, and the columns after the metrics."""
    primary = first.primary

    def join_scores(parts: Mapping[str, QuerySubset], names: Sequence[str]) -> str:
        return " / ".join(primary.format(parts[name].metrics[primary.name].value) for name in names)

    if isinstance(first, DialogueResult):
        histories = list(first.by_history)
        ends = list(dict.fromkeys((histories[0], histories[-1])))
        description = f" after {' to '.join(ends)} turns, candidates: {first.candidates}"
        return f"{description}, tied ranks: {first.ties}.", {
            "median rank": lambda result: f"{result.median_rank:.0f}",
            f"{primary.heading} after {' / '.join(ends)}": lambda result: join_scores(
                result.by_history, ends
            ),
        }
    if isinstance(first, PlanResult):
        cells = f"Means over {len(first.cells)} pairs of turns before + turns to the goal."
        return f", candidates: {first.plan}, tied ranks: {first.ties}. {cells}", {}
    subsets = cast(RankedResult, first).parts
    return f", filtered, tied ranks: {first.ties}.", {
        f"{primary.heading}: {' / '.join(pair)}": lambda result, pair=pair: join_scores(
            result.parts, pair
        )
        for pair in _SUBSET_PAIRS
        if all(name in subsets for name in pair)
    }
