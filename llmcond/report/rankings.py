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


def is_ranking(results: Sequence[Result]) -> TypeGuard[Sequence[RankedResult]]:
    """Return whether results are of rankings."""
    return all(isinstance(result, RankedResult) for result in results)


def ranking_table(results: Sequence[RankedResult], run: object) -> Table:
    """Return how right answers rank, a row for each system, and the main figure of each part."""
    first = results[0]
    metrics = [metric_of(name) for name in first.metrics]
    sizes = ", ".join(f"{part.n:,} {name}" for name, part in first.parts.items() if part.n)
    title = (
        f"{run}, {first.split}: {first.counts.text}{f' ({sizes})' if sizes else ''}, ranks "
        f"{first.ties}, filtered. {factors_text(metrics)}{caveats(results)}"
    )
    table = identity_table(title)
    table.add_column("with", overflow="fold")
    add_figures(table, *(metric.heading for metric in metrics))
    named = [name for name, part in first.parts.items() if part.n]
    add_figures(table, *(f"{first.primary.heading} {name}" for name in named))
    for result in results:
        cells = [
            estimate_text(metric, result.metrics[metric.name])
            if metric == first.primary
            else metric.show(result.metrics[metric.name].value)
            for metric in metrics
        ]
        cells += [
            first.primary.show(result.parts[name].metrics[first.primary.name].value)
            for name in named
        ]
        table.add_row(*identity_cells(result, result.title), plain(result.told_by), *cells)
    return table
