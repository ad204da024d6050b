"""The GPU memory table of the documentation."""

from importlib import import_module

import pytest
from helpers.paths import ROOT

GIB = 2**30


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return import_module("memory_table")


def test_page_contains_current_table(script):
    table = script.table()
    assert table in script.PAGE.read_text(encoding="utf-8")
    assert len(table.splitlines()) == len(script.MODELS) + 2
    assert "| nvidia/NV-Embed-v2 " in table


@pytest.mark.parametrize(
    ("loading", "weights", "batch", "card"),
    [(4, 4, 2, 12), (4, 10, 2, 16), (15.5, 10, 2, 24), (30, 30, 2, 80), (79, 70, 12, None)],
)
def test_smallest_card_fits_weights_with_batch_and_peak_of_loading(
    script, loading, weights, batch, card
):
    sizes = (int(size * GIB) for size in (loading, weights, batch))
    assert script.smallest_card(*sizes) == card
