"""Tables in terminals: no word or number is cut, and omitted columns are named."""

import logging
import re

import pytest

from llmcond.display import Column, Table

TEXT = "The kettle leaks after a week and nobody answers, see https://example.org/support/19."
ROWS = [
    {"rank": i, "score": 0.9169, "text": TEXT, "id": "0b33f2dfa735dcd7", "kind": "kettle"}
    | {"customer_identifier": f"customer-{i:06}", "channel": "marketplace", "sentiment": "neutral"}
    for i in range(3)
]


def build_figures_table():
    figures = {
        "V-measure": "100.0 [94.9, 100.0]",
        "plain embeddings": "58.5 [43.3, 73.7]",
        "difference": "+41.5 (+26.3 to +56.7)",
        "ARI": "45.7 [23, 68]",
    }
    texts = [Column("head", ["the product"]), Column("prompt", ["kind"])]
    columns = [Column(heading, [cell], "figures") for heading, cell in figures.items()]
    return Table([*texts, *columns], "Clusters beside known labels.")


TABLES = {"hits": lambda: Table.of_rows(ROWS), "figures": build_figures_table}


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


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("columns", [40, 80, 120, 160])
def test_narrow_line_omits_columns_and_names_them(capsys, monkeypatch, caplog, name, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    caplog.set_level(logging.INFO, "llmcond")
    table = TABLES[name]()
    out = print_and_check(capsys, table)
    assert max(map(len, out.splitlines())) <= columns
    omitted = table.terminal(columns)[1]
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
    for row in table.rows:
        assert any(all(str(cell) in line for cell in row) for line in out.splitlines())


def test_figures_are_shown_before_prose_is_comfortable(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    texts = [Column("head", ["hypernet-full"]), Column("with", ["neighbours, reversed edge"])]
    table = Table([*texts, Column("MRR", ["36.6 [31.3, 42.0]"], "figures")])
    assert "36.6 [31.3, 42.0]" in print_and_check(capsys, table)
    # Prose without figures gets the space.
    monkeypatch.setenv("COLUMNS", "40")
    row = {
        "head": "hypernet-full",
        "description": "a hypernetwork of full rank",
        "source": "the paper of its authors",
    }
    table = Table.of_rows([row])
    assert "paper" not in print_and_check(capsys, table)


def test_unbreakable_texts_leave_room_for_other_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    address = "https://example.org/" + 60 * "a"
    table = Table.of_rows([{"id": 1, "text": 60 * "漢字", "source": address, "kind": "page"}])
    table.print()
    assert table.terminal(80)[1] == ["kind"]
    # A single column stays, however long its texts are.
    table = Table.of_rows([{"source": address}])
    table.print()
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
    table = Table.of_rows([{"score": value} for value in values])
    assert [str(cell) for cell in table.columns[0].cells] == cells


def test_columns_of_numbers_are_right_aligned_in_latex(capsys):
    rows = [
        {"name": "a1", "texts": 1_200, "score": 0.5, "kind": "5 of 6", "missing": None},
        {"name": "7", "texts": 3, "score": -1e-9, "kind": "x", "missing": 2},
    ]
    Table.of_rows(rows).print("latex")
    assert "{lrrlr}" in capsys.readouterr().out
