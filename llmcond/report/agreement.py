"""Tables of the agreement between two raters."""

from __future__ import annotations

from rich.table import Table

from llmcond.evaluation.agreement import STEPS, Agreement
from llmcond.metrics import format_number, get_metric
from llmcond.report.format import estimate_text
from llmcond.report.terminal import (
    add_figure_columns,
    plain_text,
    print_sentences,
    print_table,
    titled_table,
)

#: The number of conditions that the table shows; ``--json`` has all.
_MAX_CONDITIONS = 10


def show_agreement(agreement: Agreement, model: str, form: str = "table") -> None:
    """Print how well a model's ratings agree with those of people.

    Args:
        agreement: the agreement of the two raters.
        model: the model's name.
        form: the format of the tables, one of ``FORMATS``.
    """
    figures = (
        f"{get_metric(name).heading} {estimate_text(get_metric(name), estimate)}"
        for name, estimate in agreement.metrics.items()
    )
    sentences = [f"{model} and people: {agreement.n:,} rows that both rated."]
    if agreement.n:
        sentences.append(
            f"{', '.join(figures)}, times 100, with 95 % confidence intervals over sentence pairs."
        )
    print_sentences([" ".join(sentences)], form)
    print_table(_confusion_table(agreement), form)
    if agreement.by_condition:
        print_table(_conditions_table(agreement), form)


def _confusion_table(agreement: Agreement) -> Table:
    table = titled_table(
        "Number of rows by people's rating (rows) and the model's (columns)", "people"
    )
    names = [*map(str, range(1, STEPS + 1)), "ill-defined"]
    add_figure_columns(table, *names)
    for name, counts in zip(names, agreement.confusion.tolist(), strict=True):
        table.add_row(name, *(f"{count:,}" for count in counts))
    return table


def _conditions_table(agreement: Agreement) -> Table:
    shown = agreement.by_condition[:_MAX_CONDITIONS]
    title = f"By condition: the {len(shown):,} most frequent of {len(agreement.by_condition):,}"
    table = titled_table(title, "condition")
    add_figure_columns(table, "rows", "people's mean", "model's mean", "Spearman")
    for subset in shown:
        means = (format_number(mean, 2) for mean in (subset.human, subset.model))
        score = get_metric("spearman").format(subset.spearman)
        table.add_row(plain_text(subset.condition), f"{subset.n:,}", *means, score)
    return table
