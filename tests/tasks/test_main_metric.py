"""The first metric of a task chooses epochs and heads, whichever direction is better."""

import json
import shutil

import pytest
from helpers.commands import ok

from llmcond import plugins
from llmcond.cli import run

pytestmark = pytest.mark.usefixtures("one_thread")

TASKS = """
import numpy as np
from llmcond.metrics import Metric
from llmcond.tasks import Task


def error(prediction, rating, group):
    return float(np.abs(prediction - rating).mean())


mean_error = Metric("mean_error", error, "mean error", higher_is_better=False)


class ByError(Task):
    metrics = ("my_tasks.py:mean_error", "spearman")


class ByAccuracy(Task):
    metrics = ("accuracy", "spearman")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, small_rows):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_REGISTERED", {})
    (tmp_path / "my_tasks.py").write_text(TASKS)
    lines = ["sentence1,sentence2,condition,label", *(",".join(map(str, r)) for r in small_rows)]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


DATA = ("--data", "rows.csv", "--prompt", "concat-sent-cond", "--dtype", "float32", "--pooling")
SMALL = ("--dim", "4", "--set", "batch_size=16", "learning_rate=0.05", "epochs=12", "patience=12")


@pytest.mark.parametrize(
    ("task", "name", "best"), [("ByAccuracy", "accuracy", max), ("ByError", "mean_error", min)]
)
def test_the_first_metric_of_the_task_chooses(folder, capsys, tiny_checkpoint, task, name, best):
    task = f"my_tasks.py:{task}"
    ok(capsys, "extract", "--model", tiny_checkpoint(), *DATA, "mean", "--task", task, "--run", "r")
    fit = ["fit-head", "--head", "linear", *SMALL, "--run", "r"]
    assert run(fit) == 0
    assert f"dev {name.replace('_', ' ')} " in capsys.readouterr().err
    head = folder / "r/heads/linear@concat-sent-cond/head.json"
    record = json.loads(head.read_text())
    scores = [epoch[f"dev_{name}"] for epoch in record["fit"]["curve"]]
    assert scores.index(best(scores)) == record["fit"]["best_epoch"] - 1
    assert record[f"dev_{name}"] == pytest.approx(best(scores), abs=1e-4)
    assert "dev_spearman" not in head.read_text()
    page = ("--report", "page.html")
    before = ok(capsys, "evaluate", "--run", "r", *page)["results"]
    # A head whose epoch was chosen by Spearman, as every head of earlier versions.
    head.write_text(head.read_text().replace(f"dev_{name}", "dev_spearman"))
    shutil.rmtree("r/reports", ignore_errors=True)
    assert ok(capsys, "evaluate", "--run", "r", *page)["results"] == before


def test_training_an_encoder_is_decided_by_it_too(folder, capsys, tiny_checkpoint):
    words = ["--model", tiny_checkpoint(), "--task", "my_tasks.py:ByError", "--run", "t"]
    words += ["--epochs", "2", "--batch-size", "16", "--rank", "2", "--head", "none"]
    done = ok(capsys, "train-lora", *words, *DATA, "mean")
    curve = json.loads((folder / "t/training.json").read_text())["curve"]
    scores = [entry["dev_mean_error"] for entry in curve]
    assert done["dev_mean_error"] == min(scores)
    assert curve[scores.index(min(scores))]["step"] == done["best_step"]
    assert "dev_spearman" not in done
