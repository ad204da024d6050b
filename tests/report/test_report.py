"""Results and listings as tables in a terminal."""

from dataclasses import replace
from math import nan

from helpers.terminal import render_text

from llmcond.display import Table
from llmcond.evaluation.results import Result, RowCounts
from llmcond.metrics import Estimate
from llmcond.report.tables import results_table

RESULT = Result(
    name="mlp@concat-sent-cond",
    head="mlp",
    prompts=("concat-sent-cond",),
    subtract=True,
    split="dev",
    counts=RowCounts(n=1_830, n_pairs=985, n_dropped=154, n_compared=736, n_tied=110),
    metrics={
        "spearman": Estimate(0.587, 0.555, 0.619),
        "pearson": Estimate(nan),
        "accuracy": Estimate(0.821, 0.795, 0.846),
    },
)


def test_result_shows_figures_times_100_with_intervals_and_counts():
    text = " ".join(render_text(results_table([RESULT], "runs/x")).split())
    assert "1,830 rows of 985 sentence pairs, 154 unrated dropped" in text
    assert "736 comparisons, 110 tied left out" in text
    assert "mlp concat-sent-cond yes 58.7 [55.5, 61.9] undefined 82.1 [79.5, 84.6]" in text


def test_custom_name_is_shown_in_full():
    assert "mlp@home" in render_text(results_table([replace(RESULT, name="mlp@home")], "runs/x"))


def test_intervals_are_not_cut_in_narrow_terminal():
    assert "58.7 [55.5, 61.9]" in render_text(results_table([RESULT], "runs/x"), width=90)


def test_markup_in_texts_is_shown_literally():
    assert "[red]x[/red]" in render_text(Table.of_rows([{"name": "[red]x[/red]"}]))
    assert "runs/[/x]" in render_text(results_table([RESULT], "runs/[/x]"))
