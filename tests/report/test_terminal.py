"""Tables in terminals: no word or number is cut, and omitted columns are named."""

import logging
import re

import pytest

from llmcond.report.terminal import (
    add_figure_columns,
    identity_table,
    print_table,
    rows_table,
    titled_table,
)

TEXT = "The kettle leaks after a week and nobody answers, see https://example.org/support/19."
ROWS = [
    {"rank": i, "score": 0.9169, "text": TEXT, "id": "0b33f2dfa735dcd7", "kind": "kettle"}
    | {"customer_identifier": f"customer-{i:06}", "channel": "marketplace", "sentiment": "neutral"}
    for i in range(3)
]


def build_figures_table():
    table = identity_table("Clusters beside known labels.", subtracts=False)
    add_figure_columns(table, "V-measure", "plain embeddings", "difference", "ARI")
    cells = [
        "100.0 [94.9, 100.0]",
        "58.5 [43.3, 73.7]",
        "+41.5 (+26.3 to +56.7)",
        "45.7 [23, 68]",
    ]
    table.add_row("the product", "kind", *cells)
    return table


TABLES = {"hits": lambda: rows_table(ROWS), "figures": build_figures_table}


def print_and_check(capsys, table):
    words = {
        word
        for column in table.columns
        for text in (str(column.header), *map(str, column.cells))
        for word in text.split()
    }
    title = str(table.title or "").split()
    print_table(table)
    out = capsys.readouterr().out
    assert set(re.findall(r"[^\s─]+", out)) <= {*words, *title}
    return out


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("columns", [40, 80, 120, 160])
def test_narrow_line_omits_columns_and_names_them(capsys, monkeypatch, caplog, name, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    caplog.set_level(logging.INFO, "llmcond")
    table = TABLES[name]()
    headings = [str(column.header) for column in table.columns]
    out = print_and_check(capsys, table)
    assert max(map(len, out.splitlines())) <= columns
    omitted = headings[len(table.columns) :]
    message = (
        f"because a line has only {columns} characters: {', '.join(omitted)} (--json or a wider"
    )
    assert (message in caplog.text) == bool(omitted)
    assert bool(omitted) == (columns < {"hits": 140, "figures": 110}[name])


@pytest.mark.parametrize("name", TABLES)
def test_piped_table_is_not_wrapped(capsys, monkeypatch, name):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = TABLES[name]()
    out = print_and_check(capsys, table)
    for row in zip(*(column.cells for column in table.columns), strict=True):
        assert any(all(str(cell) in line for cell in row) for line in out.splitlines())


def test_figures_are_shown_before_prose_is_comfortable(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    table = titled_table("", "head", "with")
    add_figure_columns(table, "MRR")
    table.add_row("hypernet-full", "neighbours, reversed edge", "36.6 [31.3, 42.0]")
    assert "36.6 [31.3, 42.0]" in print_and_check(capsys, table)
    # Prose without figures gets the space.
    monkeypatch.setenv("COLUMNS", "40")
    table = titled_table("", "name", "description", "source")
    table.add_row("hypernet-full", "a hypernetwork of full rank", "the paper of its authors")
    assert "paper" not in print_and_check(capsys, table)


def test_unbreakable_texts_leave_room_for_other_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    address = "https://example.org/" + 60 * "a"
    table = rows_table([{"id": 1, "text": 60 * "漢字", "source": address, "kind": "page"}])
    print_table(table)
    assert [str(column.header) for column in table.columns] == ["id", "text", "source"]
    # A single column stays, however long its texts are.
    table = rows_table([{"source": address}])
    print_table(table)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("values", "cells"),
    [
        ([0.778, 0.7749, -0.06146], ["0.7780", "0.7749", "-0.0615"]),
        ([1.0000001, 0.5], ["1.0000", "0.5000"]),
        ([12.25, 0.5, float("nan")], ["12.25", "0.50", "nan"]),
        ([1e-6, 2.5e-5], ["1e-06", "2.5e-05"]),
        ([float("inf"), 123456.0], ["inf", "1.235e+05"]),
        ([True, 3, None], ["yes", "3", ""]),
    ],
)
def test_figures_of_a_column_have_equal_decimals(values, cells):
    table = rows_table([{"score": value} for value in values])
    assert [str(cell) for cell in table.columns[0].cells] == cells


def test_columns_of_numbers_are_right_aligned_in_latex(capsys):
    rows = [
        {"name": "a1", "texts": 1_200, "score": 0.5, "kind": "5 of 6", "missing": None},
        {"name": "7", "texts": 3, "score": -1e-9, "kind": "x", "missing": 2},
    ]
    print_table(rows_table(rows), "latex")
    assert "{lrrlr}" in capsys.readouterr().out
