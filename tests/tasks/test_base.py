"""The first metric of a task selects epochs and heads, whether higher or lower is better."""

import csv
import json
import shutil

import numpy as np
import pytest
from helpers.commands import run_json

from llmcond import plugins
from llmcond.cli import run
from llmcond.metrics import get_metric

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
def test_first_metric_of_task_selects_epoch(folder, capsys, tiny_checkpoint, task, name, best):
    task = f"my_tasks.py:{task}"
    run_json(
        capsys, "extract", "--model", tiny_checkpoint(), *DATA, "mean", "--task", task, "--run", "r"
    )
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
    before = run_json(capsys, "evaluate", "--run", "r", *page)["results"]
    # Earlier versions selected the epoch of every head by Spearman.
    head.write_text(head.read_text().replace(f"dev_{name}", "dev_spearman"))
    shutil.rmtree("r/reports", ignore_errors=True)
    assert run_json(capsys, "evaluate", "--run", "r", *page)["results"] == before


def test_first_metric_of_task_selects_checkpoint_in_training(folder, capsys, tiny_checkpoint):
    arguments = ["--model", tiny_checkpoint(), "--task", "my_tasks.py:ByError", "--run", "t"]
    arguments += ["--epochs", "2", "--batch-size", "16", "--rank", "2", "--head", "none"]
    summary = run_json(capsys, "train-lora", *arguments, *DATA, "mean")
    curve = json.loads((folder / "t/training.json").read_text())["curve"]
    scores = [entry["dev_mean_error"] for entry in curve]
    assert summary["dev_mean_error"] == min(scores)
    assert curve[scores.index(min(scores))]["step"] == summary["best_step"]
    assert "dev_spearman" not in summary


@pytest.mark.parametrize(("task", "name"), [("ByAccuracy", "accuracy"), ("ByError", "mean_error")])
def test_folds_and_subsets_of_dev_use_first_metric(
    folder, capsys, tiny_checkpoint, write_rows, small_rows, task, name
):
    heading, head = name.replace("_", " "), "linear@concat-sent-cond"
    write_rows(small_rows[:40], "data/train.csv")
    dev = [
        (a, b, c if i // 2 % 3 else f"the mood {i % 2}", r)
        for i, (a, b, c, r) in enumerate(small_rows[40:])
    ]
    # Two pairs share a sentence with train.
    write_rows([*dev, *((small_rows[0][0], *row[1:]) for row in small_rows[2:6])], "data/dev.csv")
    arguments = ("--data", "data", *DATA[2:], "mean", "--task", f"my_tasks.py:{task}", "--run", "r")
    run_json(capsys, "extract", "--model", tiny_checkpoint(), *arguments)
    fit = ["fit-head", "--head", "linear", *SMALL, "--run", "r"]
    assert run([*fit, "--with", "dev", "--folds", "2", "--name", "both", "--json"]) == 0
    captured = capsys.readouterr()
    folds = json.loads(captured.out)["folds"]
    for gain in (folds, *folds["by_condition"].values()):
        assert {*gain["trained"], *gain["without"]} == {name, f"{name}_ci"}
    assert f"(44 rows): {heading} " in captured.err
    run_json(capsys, *fit)

    options = ("--run", "r", "--head", head, "--split", "dev")
    report = ("--predictions", "p.csv", "--report", "page.html")
    result = run_json(capsys, "evaluate", *options, *report)["results"][-1]
    with (folder / "p.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    predicted, rating = (np.array([float(row[key]) for row in rows]) for key in (head, "rating"))
    pair = np.unique([row["sentence1"] + row["sentence2"] for row in rows], return_inverse=True)[1]
    new_condition = np.array([row["condition"].startswith("the mood") for row in rows])
    new_sentences = np.array([row["sentence1"] != small_rows[0][0] for row in rows])
    metric = get_metric(name)
    for kind, selected in (("seen", ~new_condition), ("unseen", new_condition)):
        expected = metric(predicted[selected], rating[selected], pair[selected])
        assert set(result[kind]) == {"n", name}
        assert result[kind][name] == pytest.approx(expected, abs=1e-5)
    expected = metric(predicted[new_sentences], rating[new_sentences], pair[new_sentences])
    assert result["n_unseen_sentences"] == 40
    assert result["unseen_sentences"][name] == pytest.approx(expected, abs=1e-5)
    (row,) = [
        row
        for row in run_json(capsys, "analyse", *options, "--what", "conditions")["conditions"]
        if row["name"] == head
    ]
    assert row["metric"] == name
    assert row["overall"] == pytest.approx(result[name])
    assert [row[kind] for kind in ("seen", "unseen")] == [
        result[kind][name] for kind in ("seen", "unseen")
    ]
    shown = (folder / "page.html").read_text()
    for part in ("seen conditions", "unseen conditions", "unseen sentences"):
        assert f">{heading}, {part}<" in shown
    for form in ("table", "markdown", "latex"):
        assert run(["evaluate", *options, "--format", form]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"{heading} by condition: seen / unseen" in shown
        assert f"{heading}, unseen sentences" in shown
        assert run(["analyse", *options, "--what", "conditions", "--format", form]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"section 5.3): {heading}, 95" in shown
        assert "Spearman" not in shown


def test_folds_of_last_stage_use_first_metric(folder, capsys, tiny_checkpoint):
    arguments = ["--model", tiny_checkpoint(), "--task", "my_tasks.py:ByError", "--run", "t"]
    arguments += ["--epochs", "1", "--batch-size", "16", "--rank", "2", "--head", "none"]
    summary = run_json(
        capsys, "train-lora", *arguments, *DATA, "mean", "--then", "dev", "--folds", "2"
    )
    without, trained = (summary["then"]["folds"][key] for key in ("without", "trained"))
    assert {*without, *trained} == {"mean_error", "mean_error_ci"}
    card = (folder / "t/README.md").read_text()
    assert f"The mean error is {100 * trained['mean_error']:.1f} [" in " ".join(card.split())
