"""Tables in terminals: figures of results, and no word or number that is cut."""

import logging
import re
from dataclasses import replace
from io import StringIO
from math import nan

import pytest
from rich.console import Console

from llmcond.base.metrics import METRICS, Estimate
from llmcond.base.output import Column, Table
from llmcond.evaluation.results import Result, RowCounts, interval_text
from llmcond.report.tables import p_value_text, results_table

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


def render_text(table, width=120):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table.terminal()[0])
    return capture.get()


def test_result_shows_figures_times_100_with_intervals_and_counts():
    text = " ".join(render_text(results_table([RESULT], "runs/[/x]")).split())
    assert "1,830 rows of 985 sentence pairs, 154 unrated dropped" in text
    assert "736 comparisons, 110 tied left out" in text
    assert "mlp concat-sent-cond yes 58.7 [55.5, 61.9] 82.1 [79.5, 84.6] –" in text
    assert "runs/[/x]" in text  # markup is shown literally
    named = results_table([replace(RESULT, name="mlp@home")], "runs/x")
    narrow = render_text(named, width=90)
    assert "mlp@home" in narrow
    assert "58.7 [55.5, 61.9]" in narrow


def test_figures_are_formatted_for_readers():
    metric = METRICS["spearman"]
    assert interval_text(metric, Estimate(0.1, 0.1, nan)) == ""
    assert interval_text(metric, Estimate(0.1, -0.1, 0.2)) == "[-10.0, 20.0]"
    assert [p_value_text(p) for p in (0.0004, 0.0312, nan)] == ["< 0.001", "0.031", "–"]
    for values, cells in (
        ([0.778, 0.7749, -0.06146], ["0.7780", "0.7749", "-0.0615"]),
        ([12.25, 0.5, nan], ["12.25", "0.50", "nan"]),
        ([1e-6, 2.5e-5], ["1e-06", "2.5e-05"]),
        ([True, 3, None], ["yes", "3", ""]),
    ):
        (column,) = Table.of_rows([{"score": value} for value in values]).columns
        assert [str(cell) for cell in column.cells] == cells


TEXT = "The kettle leaks after a week and nobody answers, see https://example.org/support/19."


def print_and_check(capsys, table):
    words = {
        word
        for column in table.columns
        for text in (column.heading, *map(str, column.cells))
        for word in text.split()
    }
    title = table.note.split()
    table.print()
    out = capsys.readouterr().out
    assert set(re.findall(r"[^\s─]+", out)) <= {*words, *title}
    return out


@pytest.mark.parametrize(("columns", "has_all"), [(80, False), (160, True)])
def test_narrow_line_omits_columns_and_names_them(capsys, monkeypatch, caplog, columns, has_all):
    monkeypatch.setenv("COLUMNS", str(columns))
    caplog.set_level(logging.INFO, "llmcond")
    row = {"rank": 1, "score": 0.9169, "text": TEXT, "id": "0b33f2dfa735dcd7", "kind": "kettle"}
    table = Table.of_rows([row | {"customer": f"customer-{i:06}", "sentiment": "x"} for i in "12"])
    out = print_and_check(capsys, table)
    assert max(map(len, out.splitlines())) <= columns
    omitted = table.terminal(columns)[1]
    assert bool(omitted) == (not has_all)
    message = f"because a line has only {columns} characters: {', '.join(omitted)} (--json or"
    assert (message in caplog.text) == bool(omitted)


def test_narrow_table_cuts_no_word_and_a_wide_one_wraps_no_heading():
    columns = [
        Column("system", ["runs/minilm:none@pair-cond, 3 seeds"]),
        Column("mean of all cosines", ["0.5"], "figures"),
        Column("text", ["many words that can be wrapped between any two of them"]),
    ]
    for width in (60, 130):
        console = Console(width=width, record=True, file=StringIO())
        console.print(Table(columns).terminal(width)[0])
        lines = console.export_text()
        assert "runs/minilm:none@pair-cond" in lines
        assert ("mean of all cosines" in lines) == (width == 130)
        assert max(map(len, lines.splitlines())) <= width


def test_intervals_have_a_heading_and_differences_name_the_baseline_prompt():
    others = [replace(RESULT, about={"control": ""}, against=RESULT.name), RESULT]
    plain = replace(RESULT, name="none", head="none", prompts=("pair-cond",))
    table = results_table([*others, plain, replace(others[0], against="none")], bars=True)
    assert all(column.heading for column in table.columns)
    assert "Differences are from concat-sent-cond with the same head." in table.note
