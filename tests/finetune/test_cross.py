"""Cross-encoders: training, exact resumption, evaluation, similarity, and invalid input."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected
from helpers.flags import change_flags
from helpers.serving import serve
from safetensors.torch import load_file, save_file

import llmcond
from llmcond.base.errors import UserError
from llmcond.base.metrics import METRICS
from llmcond.cli import run
from llmcond.data.datasets import read_dataset
from llmcond.encoders import EncoderOptions, resolve
from llmcond.finetune.encoder import load_trainable
from llmcond.finetune.model import CrossInputs, CrossModel
from llmcond.finetune.settings import TuneSettings
from llmcond.heads.conditioned import RegressionSettings
from llmcond.serving.model_server import load_model
from llmcond.serving.settings import ServedSource

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = "--pooling mean --dtype float32 --epochs 2 --batch-size 16 --rank 4 --learning-rate 1e-2"
FIRST, SECOND = "two men play in the park", "two dogs sit at the beach"


@pytest.fixture(scope="module")
def cross_run(tiny_bert, tiny_run, tmp_path_factory) -> Path:
    folder, rows = tmp_path_factory.mktemp("cross") / "run", tiny_run.parent / "rows.csv"
    command = f"train-cross --model {tiny_bert} --data {rows} --run {folder}"
    assert run([*command.split(), *PLAIN.split()]) == 0
    return folder


@pytest.fixture
def train(tiny_bert, data, tmp_path, monkeypatch, capsys):
    """Return a function that runs ``train-cross`` on small rows and returns its output."""
    monkeypatch.chdir(tmp_path)

    def call(folder, *arguments, command=run_json):
        options = ["--model", tiny_bert, "--data", data, "--run", folder, *PLAIN.split()]
        return command(capsys, "train-cross", *change_flags(options, *arguments))

    return call


# -- training ----------------------------------------------------------------------------------


def test_loss_is_squared_error_of_randomly_ordered_pairs(tiny_bert, data):
    options = EncoderOptions(dtype="float32", device="cpu", pooling="mean", normalize=False)
    trainable = load_trainable(resolve(str(tiny_bert), options), TuneSettings(rank=4), seed=5)
    inputs = CrossInputs.from_rows(
        read_dataset(str(data)).splits["train"], "both", trainable.tokenizer
    )
    model = CrossModel(trainable.engine, RegressionSettings(), 5, 0.5, METRICS["spearman"]).eval()
    rows = np.arange(12)

    def predict(order_index):
        vectors = model.vectors([inputs.orders[order_index][i] for i in rows])
        head = model.fitted_head()
        assert head.tensors["weight_bias"] == 0.5
        return head.transform(vectors)[:, 0]

    errors = [(predict(order) - inputs.rating[rows]) ** 2 for order in (0, 1)]
    order = np.random.Generator(np.random.SFC64([5, 0])).integers(2, size=12)
    assert 0 < order.sum() < 12
    loss = float(model(inputs, rows, [5, 0]).detach())
    assert loss == pytest.approx(np.where(order, errors[1], errors[0]).mean(), abs=1e-6)
    mean = model.predict(inputs, lambda n, compute: compute(np.arange(n)))
    np.testing.assert_allclose(mean[rows], (predict(0) + predict(1)) / 2, atol=1e-6)


def test_vectors_that_are_too_long_are_reported(train, tiny_bert, tmp_path, caplog):
    model = shutil.copytree(tiny_bert, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    (name,) = (key for key in weights if key.endswith("layer.1.output.LayerNorm.weight"))
    save_file(weights | {name: 50 * weights[name]}, model / "model.safetensors")
    for normalized in (False, True):
        caplog.clear()
        train(f"run-{normalized}", "--model", model, *["--normalize"] * normalized)
        assert ("add --normalize" in caplog.text) is not normalized


def test_weights_follow_seed_and_finished_training_is_not_repeated(train, tmp_path):
    options = ("--epochs", 1, "--orders", "given", "--seed")
    first, repeated, other = (train(n, *options, s) for n, s in (("a", 3), ("b", 3), ("c", 4)))
    assert first["dev_spearman"] == repeated["dev_spearman"] != other["dev_spearman"]
    weights = [next((tmp_path / n).glob("heads/cross/*.safetensors")).read_bytes() for n in "abc"]
    assert weights[0] == weights[1] != weights[2]
    assert train("a", *options, 3) == first
    assert "seed: 5, not 3" in train("a", *options, 5, command=run_rejected)
    assert first["orders"] == llmcond.load_cross_encoder(tmp_path / "a").orders == "given"


# -- the trained run ---------------------------------------------------------------------------


def test_records_and_scores_match_evaluate_and_similarity(cross_run, tmp_path, capsys):
    record = json.loads((cross_run / "training.json").read_text())
    config, summary = record["made_of"], record["summary"]
    assert config["orders"] == summary["orders"] == "both"
    head = {"dropout": 0.1, "learning_rate": 1e-3, "weight_decay": 0.01}
    assert config["head"] == {"kind": "regression", **head}
    assert config["encoder"]["normalize"] is False
    assert json.loads((cross_run / "run.json").read_text())["cross_encoder"] == {"orders": "both"}
    suffixes = {path.suffix for path in cross_run.rglob("*")}
    assert not suffixes & {".bin", ".pt", ".pkl"}
    assert summary["scores"][0]["spearman"] == pytest.approx(summary["dev_spearman"], abs=1e-9)
    outputs = ["--predictions", tmp_path / "p.csv", "--report", tmp_path / "page.html"]
    for scores in summary["scores"]:
        command = ("evaluate", "--run", cross_run, "--split", scores["split"], *outputs)
        (row,) = run_json(capsys, *command)["results"]
        assert {**row, "seen": 0, "unseen": 0} == {**scores, "seen": 0, "unseen": 0}
    with (tmp_path / "p.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    columns = [[row[name] for row in rows] for name in ("sentence1", "sentence2", "condition")]
    similarities = llmcond.load_cross_encoder(cross_run).similarity(*columns)
    np.testing.assert_allclose([float(row["cross"]) for row in rows], similarities, atol=2e-6)
    assert "cross" in (tmp_path / "page.html").read_text()


def test_server_offers_similarity_only(cross_run):
    texts = [FIRST, SECOND, "children walk"]
    model = load_model(ServedSource(run=cross_run, device="cpu"))
    with serve(model) as (client, _):
        ranking = {"query": FIRST, "documents": texts, "condition": "the place"}
        results = client.post("/v1/rerank", ranking).json["results"]
        response = client.post("/v1/embeddings", {"input": texts, "condition": "the place"})
    expected = model.model.similarity([FIRST] * 3, texts, "the place")
    assert [result["index"] for result in results] == np.argsort(-expected).tolist()
    scores = [result["relevance_score"] for result in results]
    assert scores == pytest.approx(sorted(expected, reverse=True), abs=1e-6)
    assert (response.status, response.error["code"]) == (404, "not_served")


def test_similarity_averages_both_orders_in_any_batch(cross_run):
    both = llmcond.load_cross_encoder(cross_run)
    in_given_order = llmcond.load_cross_encoder(cross_run, orders="given")
    first, second = [FIRST, "a dog", SECOND], [SECOND, FIRST, f"{FIRST} {SECOND}"]
    conditions = ["the place", "the mood", "the number of people"]
    sides = (first, second), (second, first)
    forward, backward = (in_given_order.similarity(*side, conditions) for side in sides)
    assert np.abs(forward - backward).min() > 1e-5
    mean = (forward + backward) / 2
    np.testing.assert_allclose(both.similarity(first, second, conditions), mean, atol=1e-6)
    single = [both.similarity(*row) for row in zip(second, first, conditions, strict=True)]
    np.testing.assert_allclose(single, mean, atol=1e-5)
    wordings = both.similarity(first, second, "the place | the mood | the place")
    parts = [both.similarity(first, second, text) for text in ("the place", "the mood")]
    np.testing.assert_allclose(wordings, np.mean(parts, axis=0), atol=1e-5)
    with pytest.raises(
        UserError, match="a cross-encoder has no embeddings, so 'the place, ignoring"
    ):
        both.similarity(FIRST, SECOND, llmcond.Condition("the place", ignore=["the mood"]))


def test_truncation_keeps_condition(cross_run):
    loaded = llmcond.load_cross_encoder(cross_run)
    long_text = " ".join([FIRST] * 40)
    with pytest.warns(UserWarning, match="their sentences were cut, their conditions were not"):
        similarities = loaded.similarity([long_text] * 2, [SECOND] * 2, ["the place", "the mood"])
    assert abs(similarities[0] - similarities[1]) > 1e-5


# -- commands that need embeddings -------------------------------------------------------------


def test_commands_that_need_embeddings_reject_cross_encoder(
    cross_run, tiny_bert, data, tmp_path, capsys
):
    before = sorted(cross_run.rglob("*"))
    for command in (
        f"extract --model {tiny_bert} --data {data}",
        "fit-head --head linear",
        "analyse",
        f"embed {data} --out {tmp_path}/x.parquet --text sentence1",
        "push ada/cross",
    ):
        message = run_rejected(capsys, *command.split(), "--run", cross_run)
        assert "is a cross-encoder: it compares two texts and has no embeddings" in message
        assert "llmcond train-lora" in message
    assert sorted(cross_run.rglob("*")) == before
    other = ["--model", cross_run, "--data", data, "--run", tmp_path / "other"]
    for command in ("extract", "train-lora --head none", "train-cross"):
        assert "has no embeddings" in run_rejected(capsys, *command.split(), *other)
    assert not (tmp_path / "other").exists()
    for load in (llmcond.load_embedder, llmcond.load_features, llmcond.load_encoder):
        with pytest.raises(UserError, match="has no embeddings"):
            load(cross_run)


# -- invalid input -----------------------------------------------------------------------------


def test_invalid_options_are_rejected_in_one_line(train, tmp_path):
    for arguments, message in (
        ("--set dim=3", "--set: unknown key 'dim'"),
        ("--router csr", "so a router would have no effect"),
        ("--long-texts windows", "windows are only for frozen encoders"),
        ("--max-length 8", "which leave no room for two sentences"),
    ):
        assert message in train("bad", *arguments.split(), command=run_rejected)
    assert not (tmp_path / "bad").exists()


def test_heads_prompts_and_runs_of_another_kind_are_rejected(
    train, tiny_run, cross_run, tmp_path, tiny_bert, data, capsys
):
    shutil.copytree(tiny_run, tmp_path / "frozen")
    assert "holds features of" in train("frozen", command=run_rejected)
    with pytest.raises(UserError, match=r"holds no cross-encoder\. .*: llmcond train-cross"):
        llmcond.load_cross_encoder(tmp_path / "frozen")
    command = ["train-lora", "--model", tiny_bert, "--data", data, "--run"]
    message = run_rejected(capsys, *command, cross_run, "--head", "none")
    assert "holds a cross-encoder, which is a different kind of model" in message
    message = run_rejected(capsys, *command, tmp_path / "new", "--start", cross_run / "heads/cross")
    assert "the head of a cross-encoder" in message
    message = run_rejected(capsys, "evaluate", "--run", cross_run, "--head", "linear")
    assert "Leave out --head" in message


def test_similarity_rejects_invalid_texts(cross_run):
    loaded = llmcond.load_cross_encoder(cross_run)
    for texts, message in [
        ((["a"], ["b", "c"], "c"), "sentences1 has 1 texts and sentences2 has 2"),
        (("a", "b", ["c"]), "Give two texts, or two lists"),
        ((["a"], [" "], "c"), "sentence 1 of 1 is empty"),
        ((["a"], ["b"], ["c", "d"]), "1 sentences and 2 conditions"),
    ]:
        with pytest.raises(UserError, match=message):
            loaded.similarity(*texts)
    with pytest.raises(UserError, match="expected 'both' or 'given'"):
        llmcond.load_cross_encoder(cross_run, orders="any")
