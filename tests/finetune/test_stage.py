"""The last stage of training, on train and dev: rows, folds, exact resumption, and records."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected
from helpers.flags import change_flags

from llmcond.cli import run
from llmcond.data.datasets import read_dataset
from llmcond.data.rows import fold_of_pair
from llmcond.files import digest_file
from llmcond.finetune.loop import STATE, stage_rows
from llmcond.finetune.settings import StageSettings
from llmcond.progress import FitBar
from llmcond.run_log import TRAINING, log_path, read_log

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = "--head none --pooling mean --dtype float32 --rank 2 --batch-size 16 --epochs 2"
STAGE = "--learning-rate 1e-2 --then dev --then-share 0.5 --folds 2 --checkpoint-steps 1"


@pytest.fixture(scope="module")
def command(tiny_checkpoint, small_rows, tmp_path_factory) -> list[str]:
    """A command that trains a tiny BERT on small rows, with a last stage on dev and two folds."""
    data = tmp_path_factory.mktemp("data") / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    lines += [",".join(str(value) for value in row) for row in small_rows]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    arguments = ["train-lora", "--model", str(tiny_checkpoint()), "--data", str(data)]
    return [*arguments, *PLAIN.split(), *STAGE.split()]


@pytest.fixture(scope="module")
def staged(command, tmp_path_factory) -> Path:
    """The run that the command writes."""
    folder = tmp_path_factory.mktemp("staged") / "run"
    assert run([*command, "--run", str(folder)]) == 0
    return folder


def test_stage_rows_are_share_of_train_pairs_and_repeated_dev(command):
    splits = read_dataset(command[command.index("--data") + 1]).splits
    train, dev = splits["train"], splits["dev"]
    stage = StageSettings(then="dev", then_share=0.25, then_weight=3)
    rows = stage_rows(train, dev, stage, seed=1)
    train_rows = rows.take(np.arange(len(rows) - 3 * len(dev)))
    assert len(train_rows.pair_keys()) == round(0.25 * len(train.pair_keys()))
    assert set(train_rows.pair_keys()) < set(train.pair_keys())
    assert len(train_rows) == 2 * len(train_rows.pair_keys())
    for copy in range(3):
        dev_rows = rows.take(
            np.arange(len(train_rows) + copy * len(dev), len(train_rows) + (copy + 1) * len(dev))
        )
        assert dev_rows.texts == dev.texts
        assert dev_rows.rating.tolist() == dev.rating.tolist()
    assert stage_rows(train, dev, stage, seed=1).texts == rows.texts
    assert stage_rows(train, dev, stage, seed=2).texts != rows.texts


def test_folds_keep_pairs_together_and_have_similar_sizes(command):
    train = read_dataset(command[command.index("--data") + 1]).splits["train"]
    fold = fold_of_pair(train, 5, seed=0)
    assert all(len(set(fold[train.pair == pair])) == 1 for pair in np.unique(train.pair))
    assert np.ptp(np.bincount(fold)) <= 2
    assert fold.tolist() != fold_of_pair(train, 5, seed=1).tolist()


class Stopped(Exception):  # noqa: N818 - it stands in for a kill
    pass


def test_stage_stopped_in_any_training_resumes_bit_equal(
    command, staged, tmp_path, monkeypatch, capsys
):
    on_step, stops = FitBar.on_step, ["training 2", "fold-1 2", "then 3"]
    names: list[str] = []

    class Bar(FitBar):
        def __init__(self, *args, name="training", **options):
            super().__init__(*args, name=name, **options)
            names.append(name)

        def on_step(self, done, steps, loss):
            on_step(self, done, steps, loss)
            if stops and f"{names[-1]} {done.step}" == stops[0]:
                stops.pop(0)
                raise Stopped

    monkeypatch.setattr("llmcond.workflows.train_job.FitBar", Bar)
    monkeypatch.setattr("llmcond.finetune.loop.FitBar", Bar)
    folder = tmp_path / "run"
    while stops:
        with pytest.raises(Stopped):
            run([*command, "--run", str(folder)])
    assert (folder / "training" / "then" / STATE).is_file()
    message = run_rejected(capsys, *command, "--then-weight", 3, "--run", folder)
    assert "training/fold-0 holds a training that was begun with other settings" in message
    assert "then.then_weight: 3, not 2" in message
    assert run([*command, "--run", str(folder)]) == 0
    weights = [digest_file(each / "adapter_model.safetensors") for each in (folder, staged)]
    assert weights[0] == weights[1]
    summaries = [
        json.loads((each / "training.json").read_text())["summary"] for each in (folder, staged)
    ]
    assert summaries[0]["then"]["folds"] == summaries[1]["then"]["folds"]
    assert summaries[0]["scores"] == summaries[1]["scores"]
    assert not (folder / "training").exists()
    logs = [without_times(read_log(log_path(each, TRAINING))) for each in (folder, staged)]
    assert logs[0] == logs[1]
    steps = [(record.get("stage"), record["step"]) for record in logs[0] if "loss" in record]
    assert steps.count(("then", 3)) == 1 < steps.count((None, 4))  # a step, and its evaluation


def without_times(records):
    """Return the records of a log that two equal trainings have in common."""
    return [
        {key: value for key, value in record.items() if key not in ("time", "name", "seconds")}
        for record in records
        if record["event"] != "resume"
    ]


def test_stage_starts_from_best_checkpoint_and_changes_weights(command, staged, tmp_path):
    """A stage with a learning rate near zero gives the weights of a training without a stage."""
    idle = change_flags(command, "--then-learning-rate", "1e-12", "--folds", "0")
    plain = command[: command.index("--then")]
    summaries = []
    for name, arguments in (("plain", plain), ("idle", idle)):
        assert run([*arguments, "--run", str(tmp_path / name)]) == 0
        summaries.append(json.loads((tmp_path / name / "training.json").read_text())["summary"])
    summaries.append(json.loads((staged / "training.json").read_text())["summary"])
    before = [summaries[0]["dev_spearman"]] + [
        each["dev_spearman_before"] for each in summaries[1:]
    ]
    assert len(set(before)) == 1
    without_stage, idle_stage, stage = (each["scores"][-1]["spearman"] for each in summaries)
    assert without_stage == pytest.approx(idle_stage, abs=1e-3)
    assert abs(stage - without_stage) > 1e-3


def test_records_and_card_state_training_on_dev(staged):
    record = json.loads((staged / "training.json").read_text())
    summary = record["summary"]
    assert summary["trained_on"] == ["train", "dev"]
    assert summary["dev_spearman"] is None
    assert [scores["split"] for scores in summary["scores"]] == ["test"]
    assert summary["then"]["learning_rate"] == pytest.approx(5e-3)
    assert summary["then"]["steps"] == record["then_curve"][-1]["step"]
    folds = summary["then"]["folds"]
    assert (folds["folds"], folds["n"], folds["n_pairs"]) == (2, 12, 6)
    gain = folds["trained"]["spearman"] - folds["without"]["spearman"]
    assert folds["difference"]["spearman"] == pytest.approx(gain)
    head = json.loads(next(staged.glob("heads/*/head.json")).read_text())
    assert head["fit"]["trained_on"] == ["train", "dev"]
    assert json.loads((staged / "run.json").read_text())["trained_on"] == ["train", "dev"]
    card = " ".join((staged / "README.md").read_text().split())
    assert "also trained on dev, each row 2 times, and on 50 % of train," in card
    assert "so dev is no valid test of these weights" in card


def test_dev_is_not_used_for_scores_or_selection(staged, tmp_path, capsys):
    folder = shutil.copytree(staged, tmp_path / "run")
    results = run_json(capsys, "evaluate", "--run", folder)["results"]
    assert {row["split"] for row in results} == {"test"}
    message = run_rejected(capsys, "evaluate", "--run", folder, "--split", "dev")
    assert "was trained on dev" in message
    options = "--head linear --dim 4 --set epochs=3"
    summary = run_json(capsys, "fit-head", "--run", folder, *options.split())
    assert (summary["n_dev"], summary["dev_spearman"], summary["selected_on"]) == (0, None, None)
    assert summary["best_epoch"] == 3


def test_dev_is_not_scored_in_another_run_of_the_encoder(command, staged, tmp_path, capsys):
    data, other = command[command.index("--data") + 1], tmp_path / "other"
    options = ["--model", staged, "--dtype", "float32"]
    run_json(capsys, "extract", *options, "--data", data, "--run", other)
    message = run_rejected(capsys, "evaluate", "--run", other, "--split", "dev")
    assert "was trained on dev" in message
    with Path(data).open() as lines:
        (tmp_path / "rows.csv").write_text("".join(list(lines)[:-4]))
    third = tmp_path / "third"
    run_json(capsys, "extract", *options, "--data", tmp_path / "rows.csv", "--run", third)
    run_json(capsys, "evaluate", "--run", third, "--split", "dev")


def test_invalid_options_are_rejected_in_one_line(command, tmp_path, capsys):
    base = [*command[: command.index("--then")], "--run", tmp_path / "bad"]
    for options, message in (
        ("--then dev --folds 7", "dev has 6 sentence pairs with ratings, which are too few for 7"),
        ("--then dev --folds 1", "--folds is 1"),
        ("--then dev --then-share 1.5", "--then-share is 1.5; it must be at least 0 and at most 1"),
        ("--then test", "Legal: dev"),
        ("--folds 5", "--folds needs --then dev. Add it"),
        ("--then dev --task kgc", "is for rated pairs"),
    ):
        assert message in run_rejected(capsys, *base, *options.split())
    assert not (tmp_path / "bad").exists()
