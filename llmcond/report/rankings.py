"""Rankings as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from rich.table import Table

from llmcond.evaluation.ranked import RankedResult
from llmcond.evaluation.results import Result
from llmcond.metrics import metric_of
from llmcond.report.format import caveats, estimate_text, factors_text
from llmcond.report.terminal import add_figures, identity_cells, identity_table, plain

#: Parts of the queries that stand beside each other; ``--json`` has all.
_PAIRS = (("forward", "backward"), ("reversible", "rest"))


def is_ranking(results: Sequence[Result]) -> TypeGuard[Sequence[RankedResult]]:
    """Return whether results are of rankings."""
    return all(isinstance(result, RankedResult) for result in results)


def ranking_table(results: Sequence[RankedResult], run: object) -> Table:
    """Return how right answers rank, a row for each system, and the main figure of each part."""
    first, primary = results[0], results[0].primary
    metrics = [metric for name in first.metrics if not (metric := metric_of(name)).secondary]
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
        cells = [
            estimate_text(metric, result.metrics[metric.name])
            if metric is primary
            else metric.show(result.metrics[metric.name].value)
            for metric in metrics
        ]
        for pair in found:
            own = (result.parts[name].metrics[primary.name].value for name in pair)
            cells.append(" / ".join(map(primary.show, own)))
        table.add_row(*identity_cells(result, result.title), plain(result.terms), *cells)
    return table
