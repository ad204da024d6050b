"""Training an encoder on dialogues with ``train-lora``: outputs and rejected arguments."""

import json
import shutil

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected
from helpers.dialogues import write_dialogues
from helpers.flags import change_flags

import llmcond
from llmcond.cli import run
from llmcond.kinds.dialogue.heads import load_roles_head
from llmcond.run_log import TRAINING, log_path, read_log

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = "--pooling mean --dtype float32 --device cpu --epochs 2 --batch-size 32 --rank 4"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dialogues(tmp_path_factory.mktemp("dialogues") / "data")


def make_arguments(data, model, folder, *arguments):
    common = ["--task", "dialogue", "--model", model, "--data", data, "--run", folder]
    return list(map(str, change_flags([*common, *OPTIONS.split()], *arguments)))


@pytest.fixture(scope="module")
def trained(data, model, tmp_path_factory):
    """A run of an encoder that was trained with the head ``weighted``."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run(["train-lora", *make_arguments(data, model, folder, "--head", "weighted")]) == 0
    return folder


def test_summary_matches_evaluate(capsys, trained, model):
    summary = json.loads((trained / "training.json").read_text())["summary"]
    assert summary["head"] == "weighted@separate"
    assert [scores["split"] for scores in summary["scores"]] == ["dev", "test"]
    for scores in summary["scores"]:
        rows = run_json(capsys, "evaluate", "--run", trained, "--split", scores["split"])["results"]
        assert scores in rows
    record = json.loads((trained / "heads/weighted@separate/head.json").read_text())
    assert record["dev_average_rank"] == summary["scores"][0]["average_rank"]
    # Few dialogues give few distinct ranks, and stored features are float16.
    assert record["dev_average_rank"] == pytest.approx(summary["dev_score"], abs=0.1)
    curve = [entry["dev_score"] for entry in record["fit"]["curve"]]
    assert min(curve) == summary["dev_score"] >= 1
    end = read_log(log_path(trained, TRAINING))[-1]
    assert end["test_average_rank"] == summary["scores"][1]["average_rank"]
    encoder = llmcond.load_encoder(trained)
    base = llmcond.load_encoder(model, dtype="float32", pooling="mean")
    item = [llmcond.EncoderInput("", "two men ?")]
    assert not np.allclose(encoder.encode(item), base.encode(item), atol=1e-4)


def test_trained_run_replies_and_is_not_trained_again(capsys, trained, data, model, tmp_path):
    texts = tmp_path / "replies.txt"
    texts.write_text("sad\nthe park on red\n")
    reply = run_json(capsys, "reply", "two men ?", "sad", "--candidates", texts, "--run", trained)
    assert reply["head"] == "weighted@separate"
    arguments = make_arguments(data, model, trained, "--head", "weighted")
    before = (trained / "training.json").read_text()
    assert run_json(capsys, "train-lora", *arguments)["scores"]
    assert (trained / "training.json").read_text() == before
    assert "seed: 1, not 0" in run_rejected(capsys, "train-lora", *arguments, "--seed", "1")


def test_heads_are_fitted_on_the_trained_encoder(capsys, trained, tmp_path):
    run_copy = shutil.copytree(trained, tmp_path / "copy")
    settings = ("--set", "epochs=1", "batch_size=16")
    assert run_json(capsys, "fit-head", "--run", run_copy, "--head", "rank", *settings)["name"]
    heads = [row["head"] for row in run_json(capsys, "evaluate", "--run", run_copy)["results"]]
    assert {"none", "weighted", "rank"} <= set(heads)


def test_encoder_is_trained_from_python_without_head(data, model, tmp_path):
    result = llmcond.train_lora(
        model=str(model), data=data, run=tmp_path / "run", task="dialogue", head="none",
        epochs=1, rank=2, dtype="float32", pooling="mean",
    )  # fmt: skip
    (expected,) = (
        row for row in llmcond.evaluate(run=result.run) if row.name == result.record["head"]
    )
    assert result.metrics["average_rank"].value == expected.metrics["average_rank"].value


def test_training_starts_from_fitted_head(capsys, data, dialogue_run, model, tmp_path):
    start = dialogue_run / "heads" / "rank@separate"
    # The learning rate is so small that the trained head equals the one it started from.
    tiny_steps = ("--learning-rate", "1e-12", "--set", "learning_rate=1e-12", "--epochs", "1")
    folder = tmp_path / "run"
    run_json(
        capsys, "train-lora", *make_arguments(data, model, folder, "--start", start, *tiny_steps)
    )
    before, _ = load_roles_head(start)
    after, record = load_roles_head(folder / "heads" / "rank@separate")
    for name, value in before.tensors.items():
        np.testing.assert_allclose(after.tensors[name], value, atol=1e-6)
    assert record["recipe"]["name"] == "rank"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no head is named"),
        (("--head", "linear"), "unknown head 'linear'"),
        (("--head", "rank", "--dim", "8"), "have the size of the features"),
        (("--head", "none", "--dim", "8"), "have the size of the features"),
        (("--head", "weighted", "--set", "window=2"), "must be at least 3"),
        (("--head", "weighted", "--set", "mse=1"), "no setting 'mse'"),
        (("--head", "rank", "--prompt", "separate", "separate"), "Give one --prompt"),
        (("--head", "rank", "--subtract"), "nothing can be subtracted"),
        (("--head", "rank", "--prompt", "concat-sent-cond"), "without its condition"),
        (("--start", "DIALOGUES"), "does not exist"),
        (("--head", "rank", "--drop-leaks", "--columns", "label=x"), "for rated rows"),
    ],
)
def test_invalid_arguments_are_rejected(capsys, data, model, tmp_path, arguments, message):
    arguments = [str(data) if argument == "DIALOGUES" else argument for argument in arguments]
    command = make_arguments(data, model, tmp_path / "run", *arguments)
    assert message in run_rejected(capsys, "train-lora", *command)
    assert not (tmp_path / "run").exists()
