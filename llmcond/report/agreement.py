"""Agreement of two raters as tables for people."""

from __future__ import annotations

from rich.table import Table

from llmcond.evaluation.agreement import STEPS, Agreement
from llmcond.metrics import metric_of, number
from llmcond.report.format import estimate_text
from llmcond.report.terminal import add_figures, plain, say, show, titled_table

#: Conditions that are shown; ``--json`` has all.
_SHOWN = 10


def show_agreement(found: Agreement, model: str, form: str = "table") -> None:
    """Print how a model's ratings agree with people's, on standard output."""
    figures = (
        f"{metric_of(name).heading} {estimate_text(metric_of(name), one)}"
        for name, one in found.metrics.items()
    )
    said = [f"{model} and people, {found.n:,} rows that both rated."]
    if found.n:
        said.append(f"{', '.join(figures)}, times 100, with 95 % intervals over sentence pairs.")
    say([" ".join(said)], form)
    show(_confusion(found), form)
    if found.by_condition:
        show(_conditions(found), form)


def _confusion(found: Agreement) -> Table:
    table = titled_table("Rows by people's rating (down) and the model's", "people")
    names = [*map(str, range(1, STEPS + 1)), "ill-defined"]
    add_figures(table, *names)
    for name, counts in zip(names, found.confusion.tolist(), strict=True):
        table.add_row(name, *(f"{count:,}" for count in counts))
    return table


def _conditions(found: Agreement) -> Table:
    shown = found.by_condition[:_SHOWN]
    title = f"By condition, {len(shown):,} of {len(found.by_condition):,}, the most frequent first"
    table = titled_table(title, "condition")
    add_figures(table, "rows", "people's mean", "model's mean", "Spearman")
    for own in shown:
        means = (number(one, 2) for one in (own.human, own.model))
        score = metric_of("spearman").show(own.spearman)
        table.add_row(plain(own.condition), f"{own.n:,}", *means, score)
    return table
