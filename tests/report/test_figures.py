"""Figures: their files, the data beside them, and what the charts specify."""

import csv
import shutil
import sys

import numpy as np
import pytest

import llmcond
from llmcond.base.errors import UserError
from llmcond.base.files import check_figure
from llmcond.report.figures import MapPanel, plot_curve, plot_maps

NAMES = [
    r"The price in $ of the ticket, whether paid in $ or in \euro, as told by the person standing "
    "at the counter of the station in the rain",
    r"$\frac{broken$",
    "_hidden_^",
    "\x1b[31mred",
    *(f"the number of things of kind {i}" for i in range(6)),
]


def draw_clusters(path, n=60, names=NAMES):
    rng = np.random.default_rng(0)
    labels, clusters = np.arange(n) % len(names), dict(enumerate(names))
    panels = [MapPanel(t, rng.random(size=(n, 2)), labels, clusters) for t in ("before", "after")]
    plot_maps(panels, [f"text {i}" for i in range(n)], path, "a caption")


def draw_curves(path, log_x=True, x=(4096, 64, 512, 128, 256, 1024), names=NAMES):
    x = np.array(x, dtype=np.float64)
    mean = 0.7 - 1 / x
    scores = {name: (mean - i / 50, mean - i / 40, mean) for i, name in enumerate(names)}
    series = {name: zip(x, *columns, strict=True) for name, columns in scores.items()}
    plot_curve(series, path, "dimensions $d$", "Spearman, $times$ 100", log_x)


@pytest.mark.parametrize("draw", [draw_clusters, draw_curves])
def test_figure_file_is_complete_and_reproducible(draw, tmp_path):
    for name, start, end in (
        ("figure.PNG", b"\x89PNG", b"IEND\xaeB`\x82"),
        ("new/figure.svg", b"<svg", b"</svg>"),
        ("figure.pdf", b"%PDF", b"%%EOF"),
    ):
        path = tmp_path / name
        draw(path)
        content = path.read_bytes()
        assert content.startswith(start)
        assert content.rstrip().endswith(end)
        draw(path)
        # The library that writes PDF files sorts their objects differently in each of them.
        assert path.read_bytes() == content or path.suffix == ".pdf"
        assert (path.parent / "figure-data.csv").is_file()


def read_data(path):
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.reader(stream))


def test_figure_data_has_the_plotted_points(tmp_path):
    plot_curve({"b": [(2, 0.5, 0.4, 0.6), (1, 0.25, 0, 1)]}, tmp_path / "curve.svg", "steps", "MRR")
    headings, *rows = read_data(tmp_path / "curve-data.csv")
    assert headings == ["series", "steps", "MRR", "low", "high"]
    assert rows == [["b", "1", "0.25", "0", "1"], ["b", "2", "0.5", "0.4", "0.6"]]
    points = np.array([[0.5, 1.0], [2.0, 3.0]])
    panel = MapPanel("before", points, np.array([1, 0]), dict(enumerate(NAMES[:2])))
    plot_maps([panel], ["a", "b"], tmp_path / "x.png", "")
    headings, *rows = read_data(tmp_path / "x-data.csv")
    assert headings == ["map", "x", "y", "cluster", "name", "text"]
    assert rows[0] == ["before", "0.5", "1.0", "1", NAMES[1], "a"]
    assert rows[1] == ["before", "2.0", "3.0", "0", NAMES[0], "b"]


def test_analyses_work_without_chart_libraries(monkeypatch, tmp_path, tiny_run, caplog):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    caplog.set_level("INFO")
    run = shutil.copytree(tiny_run, tmp_path / "run")
    results = llmcond.analyse(run=run, what=["clusters"], conditions=2, split="train")
    assert results["clusters"]
    assert "no pictures: Altair and vl-convert, which draw figures, are not both" in caplog.text
    assert not (run / "analyses").exists()
    with pytest.raises(UserError, match=r"pip install 'llmcond\[report\]'"):
        check_figure(tmp_path / "figure.png")
