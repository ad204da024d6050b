"""Training an encoder on dialogues by the command: what comes out, and what is refused."""

import json
import shutil

import numpy as np
import pytest
from helpers.commands import ok, refused
from helpers.dialogues import write_dialogues

import llmcond
from llmcond.cli import run
from llmcond.kinds.dialogue.roles import load_roles_head

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = "--pooling mean --dtype float32 --device cpu --epochs 2 --batch-size 32 --rank 4"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dialogues(tmp_path_factory.mktemp("dialogues") / "data")


def words(data, model, folder, *arguments):
    given = ["--task", "dialogue", "--model", model, "--data", data, "--run", folder]
    return [str(word) for word in (*given, *PLAIN.split(), *arguments)]


@pytest.fixture(scope="module")
def trained(data, model, tmp_path_factory):
    """A run of an encoder that was trained with weights by distance."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run(["train-lora", *words(data, model, folder, "--head", "weighted")]) == 0
    return folder


def test_its_figures_are_those_of_evaluate(capsys, trained, model):
    summary = json.loads((trained / "training.json").read_text())["summary"]
    assert summary["head"] == "weighted@separate"
    assert [scores["split"] for scores in summary["scores"]] == ["dev", "test"]
    for scores in summary["scores"]:
        rows = ok(capsys, "evaluate", "--run", trained, "--split", scores["split"])["results"]
        assert scores in rows
    record = json.loads((trained / "heads/weighted@separate/head.json").read_text())
    assert record["dev_average_rank"] == summary["scores"][0]["average_rank"]
    # Ranks of so few are few; features in the store are float16.
    assert record["dev_average_rank"] == pytest.approx(summary["dev_score"], abs=0.1)
    curve = [entry["dev_score"] for entry in record["fit"]["curve"]]
    assert min(curve) == summary["dev_score"] >= 1
    encoder = llmcond.load_encoder(trained)
    base = llmcond.load_encoder(model, dtype="float32", pooling="mean")
    item = [llmcond.EncoderInput("", "two men ?")]
    assert not np.allclose(encoder.encode(item), base.encode(item), atol=1e-4)


def test_it_replies_and_is_done_once(capsys, trained, data, model, tmp_path):
    texts = tmp_path / "replies.txt"
    texts.write_text("sad\nthe park on red\n")
    found = ok(capsys, "reply", "two men ?", "sad", "--candidates", texts, "--run", trained)
    assert found["head"] == "weighted@separate"
    again = words(data, model, trained, "--head", "weighted")
    before = (trained / "training.json").read_text()
    assert ok(capsys, "train-lora", *again)["scores"]
    assert (trained / "training.json").read_text() == before
    assert "seed: 1, not 0" in refused(capsys, "train-lora", *again, "--seed", "1")


def test_heads_are_fitted_on_the_trained_encoder(capsys, trained, tmp_path):
    own = shutil.copytree(trained, tmp_path / "own")
    changes = ("--set", "epochs=1", "batch_size=16")
    assert ok(capsys, "fit-head", "--run", own, "--head", "rank", *changes)["name"]
    heads = [row["head"] for row in ok(capsys, "evaluate", "--run", own)["results"]]
    assert {"none", "weighted", "rank"} <= set(heads)


def test_without_a_head_the_encoder_alone_is_trained_from_python(data, model, tmp_path):
    done = llmcond.train_lora(
        model=str(model), data=data, run=tmp_path / "run", task="dialogue", head="none",
        epochs=1, rank=2, dtype="float32", pooling="mean",
    )  # fmt: skip
    (found,) = (row for row in llmcond.evaluate(run=done.run) if row.name == done.record["head"])
    assert done.metrics["average_rank"].value == found.metrics["average_rank"].value


def test_it_begins_from_a_fitted_head(capsys, data, dialogue_run, model, tmp_path):
    start = dialogue_run / "heads" / "rank@separate"
    # So small a rate that nothing moves: what comes out is where it began.
    still = ("--learning-rate", "1e-12", "--set", "learning_rate=1e-12", "--epochs", "1")
    folder = tmp_path / "run"
    ok(capsys, "train-lora", *words(data, model, folder, "--start", start, *still))
    before, _ = load_roles_head(start)
    after, record = load_roles_head(folder / "heads" / "rank@separate")
    for name, value in before.tensors.items():
        np.testing.assert_allclose(after.tensors[name], value, atol=1e-6)
    assert record["recipe"]["name"] == "rank"


@pytest.mark.parametrize(
    ("arguments", "said"),
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
def test_what_cannot_be_trained_is_told(capsys, data, model, tmp_path, arguments, said):
    arguments = [str(data) if word == "DIALOGUES" else word for word in arguments]
    given = words(data, model, tmp_path / "run", *arguments)
    assert said in refused(capsys, "train-lora", *given)
    assert not (tmp_path / "run").exists()
