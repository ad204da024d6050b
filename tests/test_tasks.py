"""Tasks define how rows are read, which texts have a condition, and which metric is the first."""

import json
from pathlib import Path

import pytest
from helpers.commands import run_json

from llmcond.base import package as plugins
from llmcond.base.errors import UserError
from llmcond.data.datasets import Columns, DataOptions, RatingScale
from llmcond.data.rows import load_rows, save_rows
from llmcond.encoders.spec import EncoderInput
from llmcond.prompts import load_prompt
from llmcond.prompts.template import SplitInputs, render_rows
from llmcond.tasks import find_task

# -- reading and rendering ----------------------------------------------------------------------

ANSWERS = """
from llmcond.data.datasets import Columns, RatingScale
from llmcond.tasks import Task


class Answers(Task):
    columns = Columns(
        sentence1="question", sentence2="answer", condition="topic", label="relevance"
    )
    scale = RatingScale(low=0, high=1, unrated=-1)
    conditioned = (True, False)
    metrics = ("accuracy",)
"""
ROWS = [
    {"question": f"q{i}", "answer": f"a{i}", "topic": "rain", "relevance": i % 2, "note": f"n{i}"}
    for i in range(8)
]


@pytest.fixture
def answers(tmp_path: Path) -> str:
    (tmp_path / "my_task.py").write_text(ANSWERS)
    return f"{tmp_path}/my_task.py:Answers"


def test_custom_task_has_columns_scale_and_unconditioned_texts(answers):
    task = find_task(answers)
    assert task.name == "my_task.py:Answers"
    scored = [{**row, "score": row["relevance"] + 1} for row in ROWS]
    # Columns and bounds that the user does not name are those of the task.
    dataset = task.read(DataOptions(scored, columns={"label": "score"}, scale={"high": 3}))
    assert dataset.columns == Columns("question", "answer", "topic", "score")
    assert dataset.scale == RatingScale(low=0, high=3, unrated=-1)
    dataset = task.read(DataOptions(ROWS))
    rows = dataset.splits["train"]
    assert dataset.source == "rows in memory"
    assert set(rows.sentence1) < {row["question"] for row in ROWS}
    assert set(rows.rating) <= {0.0, 1.0}
    sample = find_task("csts").read(DataOptions())
    assert (sample.source, sample.splits["train"].conditioned) == ("sample", (True, True))
    # Texts without a condition are encoded unchanged, and nothing is subtracted from them.
    assert rows.conditioned == (True, False)
    inputs = render_rows(rows, load_prompt("concat-sent-cond"))
    assert inputs.second == [EncoderInput("", text) for text in rows.sentence2]
    assert inputs.second_unconditional == inputs.second
    assert all("rain" in item.text for item in inputs.first)
    split_inputs = set(SplitInputs([rows], load_prompt("concat-sent-cond")))
    assert split_inputs == {*inputs.first, *inputs.first_unconditional, *inputs.second}


def test_template_may_render_unconditioned_texts_and_read_extra_columns(answers, tmp_path):
    path = tmp_path / "t.toml"
    template = (
        'description = "d"\nsource = "s"\nfields = ["note"]\n'
        '[conditional]\ntext = "{sentence} ({note}) {condition}"\n'
        '[unconditional]\ntext = "{condition}"\n[plain]\ntext = "Answer: {sentence}"\n'
    )
    path.write_text(template)
    prompt = load_prompt(str(path))
    task = find_task(answers)
    rows = task.read(DataOptions(ROWS, extra=prompt.fields)).splits["train"]
    save_rows(tmp_path / "rows.parquet", {"train": rows})
    loaded = load_rows(tmp_path / "rows.parquet", task.conditioned)["train"]
    for split_rows in (rows, loaded):
        number = split_rows.sentence1[0].removeprefix("q")
        inputs = render_rows(split_rows, prompt)
        assert inputs.first[0].text == f"q{number} (n{number}) rain"
        assert inputs.second[0].text == f"Answer: {rows.sentence2[0]}"
    with pytest.raises(UserError, match=r"'note'.*read without it"):
        render_rows(task.read(DataOptions(ROWS)).splits["train"], prompt)
    for changed, message in (
        (template.replace("({note})", "({nite})"), r"nite.*note.*fields"),
        (template.replace("Answer: {sentence}", "{condition}"), "plain"),
    ):
        path.write_text(changed)
        with pytest.raises(UserError, match=message):
            load_prompt(str(path))


def test_record_alone_never_runs_code(answers, monkeypatch):
    monkeypatch.setattr(plugins, "_REGISTERED", {})
    with pytest.raises(UserError, match="--plugin"):
        find_task("my_task.py:Answers", "the run r")
    find_task(answers)
    assert find_task("my_task.py:Answers", "the run r").metrics == ("accuracy",)


def test_invalid_task_names_are_rejected():
    for name, message in (
        ("kitchen", "there is no task 'kitchen'"),
        ("json:loads", "is not a task"),
        (":x", "is not a name of code"),
    ):
        with pytest.raises(UserError, match=message):
            find_task(name)


# -- the first metric ---------------------------------------------------------------------------

ERROR_TASK = """
import numpy as np
from llmcond.base.metrics import Metric
from llmcond.tasks import Task


def error(prediction, rating, group):
    return float(np.abs(prediction - rating).mean())


mean_error = Metric("mean_error", error, "mean error", higher_is_better=False)


class ByError(Task):
    metrics = ("my_tasks.py:mean_error", "spearman")
"""
PROMPT = ("--prompt", "concat-sent-cond", "--dtype", "float32", "--pooling", "mean")
FIT = ("--dim", "4", "--set", "batch_size=16", "learning_rate=0.05", "epochs=12", "patience=12")


@pytest.fixture
def folder(tmp_path, monkeypatch, one_thread):
    """An empty folder with a task whose first metric is an error, of which less is better."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_REGISTERED", {})
    (tmp_path / "my_tasks.py").write_text(ERROR_TASK)
    return tmp_path


def test_first_metric_selects_checkpoint_and_measures_last_stage(folder, capsys, data, model):
    command = ["train-lora", "--model", model, "--data", data, "--task", "my_tasks.py:ByError"]
    command += ["--run", "t", "--epochs", "2", "--batch-size", "16", "--rank", "2"]
    command += ["--head", "none", *PROMPT, "--then", "dev", "--folds", "2"]
    summary = run_json(capsys, *command)
    curve = json.loads((folder / "t/training.json").read_text())["curve"]
    scores = [entry["dev_mean_error"] for entry in curve]
    assert curve[scores.index(min(scores))]["step"] == summary["best_step"]
    evaluated = run_json(capsys, "evaluate", "--run", "t", "--split", "test")["results"]
    (expected,) = (row["mean_error"] for row in evaluated if row["name"] == summary["head"])
    assert summary["scores"][0]["mean_error"] == pytest.approx(expected, abs=1e-3)
    without, trained = (summary["then"]["folds"][key] for key in ("without", "trained"))
    assert {*without, *trained} == {"mean_error", "mean_error_ci"}
    card = " ".join((folder / "t/README.md").read_text().split())
    assert f"The mean error is {100 * trained['mean_error']:.1f} [" in card


def test_first_metric_selects_epoch_and_scores_subsets(
    folder, capsys, model, write_rows, small_rows
):
    head = "linear@concat-sent-cond"
    write_rows(small_rows[:40], "data/train.csv")
    dev = [
        (a, b, c if i // 2 % 3 else f"the mood {i % 2}", r)
        for i, (a, b, c, r) in enumerate(small_rows[40:])
    ]
    # Two pairs share a sentence with train.
    write_rows([*dev, *((small_rows[0][0], *row[1:]) for row in small_rows[2:6])], "data/dev.csv")
    extract = ("extract", "--model", model, "--data", "data", "--task", "my_tasks.py:ByError")
    run_json(capsys, *extract, *PROMPT, "--run", "r")
    fit = ["fit-head", "--head", "linear", *FIT, "--run", "r"]
    run_json(capsys, *fit)
    record = json.loads((folder / f"r/heads/{head}/head.json").read_text())
    scores = [epoch["dev_mean_error"] for epoch in record["fit"]["curve"]]
    assert scores.index(min(scores)) == record["fit"]["best_epoch"] - 1
    assert record["dev_mean_error"] == pytest.approx(min(scores), abs=1e-4)
    folds = run_json(capsys, *fit, "--with", "dev", "--folds", "2", "--name", "both")["folds"]
    for gain in (folds, *folds["by_condition"].values()):
        assert {*gain["trained"], *gain["without"]} == {"mean_error", "mean_error_ci"}

    options = ("--run", "r", "--head", head, "--split", "dev")
    (_, _, result) = run_json(capsys, "evaluate", *options)["results"]
    assert result["n_unseen_sentences"] == 40
    assert result["unseen_sentences"]["mean_error"] != result["mean_error"]
