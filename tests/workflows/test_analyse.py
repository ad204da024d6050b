"""The workflow that analyses heads."""

import csv
import shutil

import numpy as np
import pytest

import llmcond
from llmcond.arrays import as_matrix
from llmcond.cli import run
from llmcond.errors import UserError
from llmcond.evaluation.analyses import impurity
from llmcond.runs import open_run
from llmcond.runs.rated import RatedExamples


@pytest.mark.parametrize("top", [0, 1])
def test_top_limits_listed_examples(fitted, tmp_path, top):
    report = llmcond.analyse(run=fitted, what=["examples"], out=tmp_path, top=top).to_json()
    (head,) = report["examples"]
    for direction in ("better", "worse"):
        assert len(head[direction]) == min(top, head[f"n_{direction}"])
    assert head["n_better"] + head["n_worse"] > 1


def test_negative_top_is_rejected(fitted):
    with pytest.raises(UserError, match=r"--top is -1; it must be at least 0"):
        llmcond.analyse(run=fitted, what=["examples"], top=-1)


def read_figure(path):
    """Return the rows of the data of a figure, by the panel and the series."""
    with path.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    by_series = {}
    for row in rows:
        by_series.setdefault((row["panel"], row["series"]), []).append(row)
    return by_series


def test_histograms_of_cosines_are_written_with_their_data(fitted, tmp_path):
    analysis = llmcond.analyse(
        run=fitted, what=["isotropy"], out=tmp_path, figure_format="svg", split="train"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"isotropy.svg", "isotropy-data.csv"}
    series = read_figure(tmp_path / "isotropy-data.csv")
    assert set(series) == {
        ("none@concat-sent-cond", "minus c"),
        ("none@concat-sent-cond", "with c"),
        ("linear@concat-sent-cond", "minus c"),
    }
    for row in analysis["isotropy"]:
        bins = series[f"{row['head']}@{row['prompt']}", "minus c" if row["subtract"] else "with c"]
        counts = np.array([int(line["vectors"]) for line in bins])
        edges = np.array([[float(line[end]) for end in ("from", "to")] for line in bins])
        assert counts.sum() == row["n"]
        # The histogram agrees with table 4 up to the width of its bins.
        width = edges[0, 1] - edges[0, 0]
        mean = (counts * edges.mean(axis=1)).sum() / counts.sum()
        assert mean == pytest.approx(row["mean_cosine"], abs=width)
        assert sum(float(line["percent"]) for line in bins) == pytest.approx(100)


@pytest.mark.parametrize("form", ["png", "pdf"])
def test_figure_format_applies_to_all_figures(fitted, tmp_path, form):
    what = ["isotropy", "clusters"]
    llmcond.analyse(run=fitted, what=what, out=tmp_path, figure_format=form, conditions=2)
    names = ("isotropy", "clusters-linear@concat-sent-cond")
    expected = {f"{name}{end}" for name in names for end in (f".{form}", "-data.csv")}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_unknown_figure_format_is_rejected(fitted):
    with pytest.raises(UserError, match="figure-format"):
        llmcond.analyse(run=fitted, what=["isotropy"], figure_format="gif")


def test_tables_say_whether_condition_is_subtracted(capsys, fitted, tmp_path):
    what = ("isotropy", "clusters", "conditions")
    options = ("--out", str(tmp_path), "--conditions", "2", "--format", "markdown")
    assert run(["analyse", "--run", str(fitted), "--what", *what, *options]) == 0
    cells = [
        [cell.strip() for cell in line.split("|")[1:3]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|")
    ]
    rows = [row for row in cells if "@" in row[0]]
    expected = [
        ["none@concat-sent-cond+c", "no"],
        ["none@concat-sent-cond", "yes"],
        ["linear@concat-sent-cond", "yes"],
    ]
    assert rows == expected * len(what)
    assert cells.count(["name", "minus c"]) == len(what)


def test_clusters_before_a_head_are_those_of_sentences_without_their_condition(heads_run, tmp_path):
    pytest.importorskip("vl_convert")
    folder = shutil.copytree(heads_run, tmp_path / "run")
    name = "low"
    options = {"run": folder, "head": [name], "split": "train", "what": ["clusters"]}
    report = llmcond.analyse(**options, sentences=3, out=tmp_path, figure_format="svg").to_json()
    zero_shot, head = report["clusters"]
    run = open_run(folder)
    rows, split = run.rows("train"), RatedExamples(run)
    sentences = as_matrix(split.rated(run.load_head(name).view, "train").first)
    conditions = rows.take(rows.rated).condition
    positions = [
        i
        for condition in head["conditions"]
        for i in [i for i, text in enumerate(conditions) if text == condition][:3]
    ]
    labels = [conditions[i] for i in positions]
    assert head["impurity_before"] == impurity(sentences.read(positions), labels, 0).value
    assert "impurity_before" not in zero_shot
    assert "</svg>" in (tmp_path / f"clusters-{name}.svg").read_text(encoding="utf-8")
    with (tmp_path / f"clusters-{name}-data.csv").open(encoding="utf-8", newline="") as stream:
        assert [row["condition"] for row in csv.DictReader(stream)] == labels
