"""Tables of the agreement between two raters."""

from __future__ import annotations

from rich.table import Table

from llmcond.evaluation.agreement import STEPS, Agreement
from llmcond.metrics import metric_of, number
from llmcond.report.format import estimate_text
from llmcond.report.terminal import add_figures, plain, say, show, titled_table

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
        f"{metric_of(name).heading} {estimate_text(metric_of(name), estimate)}"
        for name, estimate in agreement.metrics.items()
    )
    sentences = [f"{model} and people: {agreement.n:,} rows that both rated."]
    if agreement.n:
        sentences.append(
            f"{', '.join(figures)}, times 100, with 95 % confidence intervals over sentence pairs."
        )
    say([" ".join(sentences)], form)
    show(_confusion_table(agreement), form)
    if agreement.by_condition:
        show(_conditions_table(agreement), form)


def _confusion_table(agreement: Agreement) -> Table:
    table = titled_table(
        "Number of rows by people's rating (rows) and the model's (columns)", "people"
    )
    names = [*map(str, range(1, STEPS + 1)), "ill-defined"]
    add_figures(table, *names)
    for name, counts in zip(names, agreement.confusion.tolist(), strict=True):
        table.add_row(name, *(f"{count:,}" for count in counts))
    return table


def _conditions_table(agreement: Agreement) -> Table:
    shown = agreement.by_condition[:_MAX_CONDITIONS]
    title = f"By condition: the {len(shown):,} most frequent of {len(agreement.by_condition):,}"
    table = titled_table(title, "condition")
    add_figures(table, "rows", "people's mean", "model's mean", "Spearman")
    for subset in shown:
        means = (number(mean, 2) for mean in (subset.human, subset.model))
        score = metric_of("spearman").show(subset.spearman)
        table.add_row(plain(subset.condition), f"{subset.n:,}", *means, score)
    return table
