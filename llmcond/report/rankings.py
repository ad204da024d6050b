"""Rankings as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from rich.table import Table

from llmcond.evaluation.ranked import DialogueResult, PlanResult, QueryResult, RankedResult
from llmcond.evaluation.ranking import Part
from llmcond.evaluation.results import Result
from llmcond.metrics import metric_of
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

#: What a column beside the metrics shows of a result, by its heading.
_Columns = Mapping[str, Callable[[Any], str]]


def evaluation_table(results: Sequence[Result], run: object) -> Table:
    """Return the table of an evaluation, whatever was evaluated, with a row for each result."""
    first = results[0]
    if not isinstance(first, QueryResult):
        return results_table(results, run)
    about, columns = _about(first)
    subtracts = isinstance(first, RankedResult)
    metrics = [metric for name in first.metrics if not (metric := metric_of(name)).secondary]
    title = f"{run}, {first.split}: {first.counts.text}{about} "
    table = identity_table(f"{title}{factors_text(metrics)}{caveats(results)}", subtracts)
    table.add_column(first.variant[0], overflow="fold", no_wrap=not subtracts)
    add_figures(table, *(metric.heading for metric in metrics), *columns)
    for result in cast(Sequence[QueryResult], results):
        # The names of the results of one system begin alike; a column tells these apart.
        name = result.name if subtracts else result.name.partition(" ")[0]
        table.add_row(
            *identity_cells(result, replace(result, name=name).title)[: 2 + subtracts],
            plain(result.variant[1]),
            *(
                estimate_text(metric, result.metrics[metric.name])
                if metric is result.primary
                else metric.show(result.metrics[metric.name].value)
                for metric in metrics
            ),
            *(shown(result) for shown in columns.values()),
        )
    return table


def _about(first: QueryResult) -> tuple[str, _Columns]:
    """Return what the title says of how the queries were ranked, and further columns."""
    primary = first.primary

    def beside(parts: Mapping[str, Part], names: Sequence[str]) -> str:
        return " / ".join(primary.show(parts[name].metrics[primary.name].value) for name in names)

    if isinstance(first, DialogueResult):
        histories = list(first.by_history)
        ends = list(dict.fromkeys((histories[0], histories[-1])))
        about = f" after {' to '.join(ends)} turns, candidates {first.candidates}"
        return f"{about}, ranks {first.ties}.", {
            "median rank": lambda result: f"{result.median_rank:.0f}",
            f"{primary.heading} after {' / '.join(ends)}": lambda result: beside(
                result.by_history, ends
            ),
        }
    if isinstance(first, PlanResult):
        cells = f"Means over {len(first.cells)} cells of turns before + turns to the goal."
        return f", candidates {first.plan}, ranks {first.ties}. {cells}", {}
    parts = cast(RankedResult, first).parts
    return f", ranks {first.ties}, filtered.", {
        f"{primary.heading}: {' / '.join(pair)}": lambda result, pair=pair: beside(
            result.parts, pair
        )
        for pair in _PAIRS
        if all(name in parts for name in pair)
    }
