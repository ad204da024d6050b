"""Training an encoder on a graph with ``train-lora``: outputs and rejected arguments."""

import json
import re

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected
from helpers.flags import change_flags

import llmcond
from llmcond.cli import run
from llmcond.kinds.ranking.heads import load_query_head
from llmcond.run_log import TRAINING, log_path, read_log

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = "--pooling mean --dtype float32 --device cpu --epochs 2 --batch-size 14 --rank 4"
FAST_FIT = ("--set", "epochs=3", "batch_size=16")


def make_arguments(graph, model, folder, *arguments):
    common = ["--task", "kgc", "--model", model, "--data", graph, "--run", folder, *OPTIONS.split()]
    return list(map(str, change_flags(common, *arguments)))


@pytest.fixture(scope="module")
def trained(graph, model, tmp_path_factory):
    """A run of an encoder that was trained with a hypernetwork."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert (
        run(["train-lora", *make_arguments(graph, model, folder, "--head", "hypernet-full")]) == 0
    )
    return folder


def test_summary_matches_evaluate(capsys, trained):
    training_record = json.loads((trained / "training.json").read_text())
    summary = training_record["summary"]
    assert summary["head"] == "hypernet-full@separate"
    assert 0 < summary["dev_score"] <= 1
    assert [scores["split"] for scores in summary["scores"]] == ["dev", "test"]
    for scores in summary["scores"]:
        rows = run_json(capsys, "evaluate", "--run", trained, "--split", scores["split"])["results"]
        assert scores in rows
        assert "rule:reverse" in [row["head"] for row in rows]
    record = json.loads((trained / "heads/hypernet-full@separate/head.json").read_text())
    # The graph is so small that the sample which selected the weights holds all of dev.
    assert record["dev_mrr"] == summary["scores"][0]["mrr"]
    assert record["dev_mrr"] == pytest.approx(summary["dev_score"], abs=1e-4)  # float16 in store
    assert [entry["epoch"] for entry in record["fit"]["curve"]] == [1, 2]
    end = read_log(log_path(trained, TRAINING))[-1]
    assert end["test_mrr"] == summary["scores"][1]["mrr"]


def test_run_has_card_but_cannot_be_pushed_without_graph(capsys, trained):
    card = re.sub(" +", " ", (trained / "README.md").read_text())
    scores = json.loads((trained / "training.json").read_text())["summary"]["scores"]
    assert "| split | queries | MRR | 95 % interval |" in card
    assert f"| dev | {scores[0]['n']} | {100 * scores[0]['mrr']:.1f} |" in card
    assert 'llmcond.load_completer("FOLDER")' in card
    assert "data, which is never pushed" in run_rejected(
        capsys, "push", "ada/graph", "--run", trained
    )


def test_finished_run_is_not_trained_again(capsys, trained, graph, model):
    arguments = make_arguments(graph, model, trained, "--head", "hypernet-full")
    before = (trained / "training.json").read_text()
    assert run_json(capsys, "train-lora", *arguments)["scores"]
    assert (trained / "training.json").read_text() == before
    assert "seed: 1, not 0" in run_rejected(capsys, "train-lora", *arguments, "--seed", "1")


def test_heads_are_fitted_on_the_trained_encoder(capsys, trained, graph, model, tmp_path):
    fit = ("fit-head", "--run", trained, "--head", "hypernet-full", *FAST_FIT)
    result = run_json(capsys, *fit, "neighbours=true", "--name", "near")
    assert result["name"] == "near"
    rows = run_json(capsys, "evaluate", "--run", trained, "--reverse")["results"]
    assert {row["name"]: row["neighbours"] for row in rows}["near"] is True
    encoder = llmcond.load_encoder(trained)
    base = llmcond.load_encoder(model, dtype="float32", pooling="mean")
    item = [llmcond.EncoderInput("", "two men, number 1")]
    assert not np.allclose(encoder.encode(item), base.encode(item), atol=1e-4)


@pytest.mark.parametrize("head", ["none", "linear", "matrices"])
def test_bi_encoder_and_free_matrices_are_trained(capsys, graph, model, tmp_path, head):
    folder = tmp_path / "run"
    result = run_json(
        capsys, "train-lora", *make_arguments(graph, model, folder, "--head", head, "--epochs", "1")
    )
    prompt = "separate" if head == "matrices" else "concat-sent-cond"
    assert result["prompt"] == prompt
    rows = run_json(capsys, "evaluate", "--run", folder)["results"]
    assert result["scores"][-1]["mrr"] in [row["mrr"] for row in rows if row["head"] == head]


CSR = ("--router", "csr", "--router-layers", "1")


@pytest.mark.parametrize(
    ("router", "has_weights"),
    [((), False), (CSR, False), ((*CSR, "--router-mode", "heavy"), True)],
    ids=["routed pooling", "csr", "csr-heavy"],
)
def test_router_is_trained(capsys, graph, model, tmp_path, router, has_weights):
    folder = tmp_path / "run"
    arguments = ("--head", "none", "--prompt", "routed", *router)
    result = run_json(capsys, "train-lora", *make_arguments(graph, model, folder, *arguments))
    assert result["prompt"] == "routed"
    record = json.loads((folder / "heads" / result["head"] / "head.json").read_text())
    # Extraction encodes the inputs as training did; features are stored in float16.
    assert record["dev_mrr"] == pytest.approx(result["dev_score"], abs=1e-4)
    assert (folder / "router.safetensors").is_file() == has_weights


def test_training_starts_from_fitted_head(capsys, graph, model, tmp_path):
    options = ["--task", "kgc", "--data", graph, "--model", model, "--run", tmp_path / "frozen"]
    encoder_options = ("--pooling", "mean", "--dtype", "float32", "--device", "cpu")
    run_json(capsys, "extract", *options, *encoder_options)
    run_json(
        capsys, "fit-head", "--run", tmp_path / "frozen", "--head", "hypernet", *FAST_FIT, "rank=8"
    )
    start = tmp_path / "frozen" / "heads" / "hypernet@separate"
    # The learning rate is so small that the trained head equals the one it started from.
    tiny_steps = ("--learning-rate", "1e-12", "--set", "learning_rate=1e-12", "--epochs", "1")
    folder = tmp_path / "run"
    run_json(
        capsys, "train-lora", *make_arguments(graph, model, folder, "--start", start, *tiny_steps)
    )
    before, _ = load_query_head(start)
    after, record = load_query_head(folder / "heads" / "hypernet@separate")
    for name, value in before.tensors.items():
        np.testing.assert_allclose(after.tensors[name], value, atol=1e-6)
    assert record["recipe"]["name"] == "hypernet"
    scores = [
        next(
            r
            for r in run_json(capsys, "evaluate", "--run", path)["results"]
            if r["head"] == "hypernet"
        )
        for path in (tmp_path / "frozen", folder)
    ]
    assert scores[0]["mrr"] == pytest.approx(scores[1]["mrr"], abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no head is named"),
        (("--head", "towers"), "unknown head 'towers'"),
        (
            ("--head", "hypernet", "--set", "neighbours=true"),
            "then fit a head on the features of the trained encoder",
        ),
        (("--head", "hypernet", "--set", "mse=1"), "no setting 'mse'"),
        (("--head", "hypernet", "--set", "queue=2"), "Set queue to 0"),
        (("--head", "hypernet", "--set", "members=2"), "Give --set members=1"),
        (
            ("--head", "hypernet", "--prompt", "concat-sent-cond"),
            "the head takes separate features",
        ),
        (("--head", "linear", "--prompt", "concat-sent-cond", "cond"), "Give one --prompt"),
        (("--head", "linear", "--subtract"), "nothing can be subtracted"),
        (("--head", "concat", "--router", "csr"), "the prompt separate names no router"),
    ],
)
def test_invalid_arguments_are_rejected(capsys, graph, model, tmp_path, arguments, message):
    command = make_arguments(graph, model, tmp_path / "run", *arguments)
    assert message in run_rejected(capsys, "train-lora", *command)
    assert not (tmp_path / "run").exists()


def test_cross_encoder_is_rejected_for_graph(capsys, graph, model, tmp_path):
    message = run_rejected(capsys, "train-cross", *make_arguments(graph, model, tmp_path / "run"))
    assert "ranks candidates" in message
    assert "llmcond train-lora" in message


def test_encoder_is_trained_from_python(graph, model, tmp_path):
    training = llmcond.train_lora(
        model=str(model), data=graph, run=tmp_path / "run", task="kgc", head="hadamard", epochs=1,
        rank=2, dtype="float32",
    )  # fmt: skip
    (_, _, result) = llmcond.evaluate(run=training.run)
    assert training.metrics["mrr"].value == result.metrics["mrr"].value
