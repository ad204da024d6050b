"""Kinds of task: the bundled ones, and one that an installed package adds."""

import json
import sys

import pytest

from llmcond import cli, metrics
from llmcond.errors import UserError
from llmcond.runs.open import open_any_run
from llmcond.tasks import KINDS, find_kind

#: A package that adds a kind of task, a task of this kind, a head and a metric.
PACKAGE = """
from llmcond import Task
from llmcond.heads.dense import Linear


class Answers(Task):
    name, kind, metrics = "answers", "pairs", ("pearson",)


class Scaled(Linear):
    pass


def overlap(prediction, rating, group):
    return float((prediction > 0) @ (rating > 0)) / len(rating)
"""
ENTRY_POINTS = """
[llmcond.kinds]
pairs = pairs_kind:Answers
[llmcond.tasks]
answers = pairs_kind:Answers
[llmcond.heads]
scaled = pairs_kind:Scaled
[llmcond.metrics]
overlap = pairs_kind:overlap
gone = pairs_kind:Gone
"""
RECIPE = """
kind = "scaled"
description = "A linear head of another package."
source = "these tests"
dim = 8
dropout = 0.1
learning_rate = 1e-3
batch_size = 8
epochs = 1
patience = 1
"""


@pytest.mark.parametrize("name", KINDS)
def test_kind_has_name_of_its_entry(name):
    assert find_kind(name).kind == name


def test_misspelled_kind_suggests_nearest():
    with pytest.raises(UserError, match=r"no kind of task 'rankin'.*'ranking'"):
        find_kind("rankin")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package with entry points in the test's folder, and work there."""
    (tmp_path / "pairs_kind.py").write_text(PACKAGE)
    metadata = tmp_path / "pairs_kind-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pairs-kind\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pairs_kind", raising=False)
    monkeypatch.setattr(metrics, "METRICS", dict(metrics.METRICS))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("package")
def test_package_adds_kind_task_head_and_metric(tmp_path, capsys, tiny_checkpoint):
    subjects = ("men", "women", "dogs")
    rows = [
        f"two {a} play,two {b} play,the place,{1 + (a == b) * 4}"
        for a in subjects
        for b in subjects
    ]
    for split in ("train", "dev", "test"):
        (tmp_path / f"{split}.csv").write_text(
            "\n".join(["sentence1,sentence2,condition,label", *rows, ""])
        )
    (tmp_path / "scaled.toml").write_text(RECIPE)
    model = ["--model", str(tiny_checkpoint()), "--pooling", "mean", "--device", "cpu"]
    options = ["--run", "run", "--prompt", "pair-cond", "--task", "answers"]
    assert cli.run(["extract", *model, *options, "--data", str(tmp_path)]) == 0
    assert open_any_run(tmp_path / "run").kind.kind == "pairs"
    assert cli.run(["fit-head", "--head", "scaled.toml", "--run", "run"]) == 0
    capsys.readouterr()
    assert cli.run(["evaluate", "--run", "run", "--metric", "overlap", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [row["head"] for row in results].count("scaled") == 1
    for row in results:
        assert (row["n"], row["task"]) == (9, "answers")
        assert "pearson" in row
        assert 0 <= row["overlap"] <= 1


@pytest.mark.usefixtures("package")
def test_missing_name_of_package_is_reported():
    with pytest.raises(UserError, match=r"metric 'gone' of an installed package, pairs_kind:Gone"):
        metrics.choose_metrics((), ["gone"])
