"""Cross-encoders: training, exact resumption, what scores and compares, what is refused."""

import csv
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.commands import ok, refused
from helpers.serving import served
from helpers.training import on_cpu, resumed

import llmcond
from llmcond import plugins
from llmcond.cli import run
from llmcond.data.datasets import read_dataset
from llmcond.encoders import EncoderOptions, resolve
from llmcond.errors import LlmcondError, UserError
from llmcond.finetune.cross import CrossInputs, CrossModel
from llmcond.finetune.loading import load_trainable
from llmcond.finetune.loop import Trainer
from llmcond.finetune.settings import TuneSettings
from llmcond.finetune.state import TrainingState
from llmcond.heads.dense import RegressionSettings
from llmcond.metrics import METRICS
from llmcond.serving.model_server import load_model
from llmcond.serving.settings import ServedSource

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = "--pooling mean --dtype float32 --epochs 2 --batch-size 16 --rank 4 --learning-rate 1e-2"
FIRST, SECOND = "two men play in the park", "two dogs sit at the beach"


@pytest.fixture(scope="module")
def cross(tiny, small_rows, tmp_path_factory) -> Path:
    """A trained cross-encoder."""
    folder = tmp_path_factory.mktemp("cross")
    with (folder / "rows.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("sentence1", "sentence2", "condition", "label")])
        csv.writer(stream).writerows(small_rows)
    given = f"train-cross --model {tiny} --data {folder / 'rows.csv'} --run {folder / 'run'}"
    assert run([*given.split(), *PLAIN.split()]) == 0
    return folder / "run"


@pytest.fixture
def train(tiny, data, tmp_path, monkeypatch, capsys):
    """A caller of the command on small rows, that returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def call(folder, *arguments, command=ok):
        given = ["--model", tiny, "--data", data, "--run", folder, *PLAIN.split(), *arguments]
        return command(capsys, "train-cross", *given)

    return call


# -- training ----------------------------------------------------------------------------------


def trainer_of(tiny, data, folder, orders="both", **settings):
    tuning = TuneSettings(rank=4, batch_size=16, checkpoint_steps=3, **settings)
    options = EncoderOptions(dtype="float32", device="cpu", pooling="mean", normalize=False)
    trainable = load_trainable(resolve(str(tiny), options), tuning, seed=5)
    splits = read_dataset(str(data)).splits
    rows, dev = (
        CrossInputs.from_rows(splits[s], orders, trainable.tokenizer) for s in ("train", "dev")
    )
    start = float(rows.rating.mean())
    model = CrossModel(trainable.engine, RegressionSettings(), 5, start, METRICS["spearman"])
    state = TrainingState(folder, {"settings": tuning.to_json()})
    return Trainer(model, rows, dev, tuning, on_cpu(), state)


def test_stopped_after_any_step_it_ends_bit_equal(tiny, data, tmp_path):
    settings = {"epochs": 2, "adapter_dropout": 0.1, "gradient_accumulation_steps": 2}
    whole = trainer_of(tiny, data, tmp_path / "whole", **settings)
    whole.run(lambda *_: None)
    expected = {name: value.clone() for name, value in whole.model.trained_parameters().items()}
    for stop in (2, 5, 7):
        again = resumed(partial(trainer_of, tiny, data, tmp_path / str(stop), **settings), stop)
        assert again.progress.step == max(s for s in (0, 3, 4, 6) if s < stop)
        again.run(lambda *_: None)
        assert again.progress.curve == whole.progress.curve
        for name, value in again.model.trained_parameters().items():
            assert torch.equal(value, expected[name]), (stop, name)


def test_the_loss_is_the_squared_error_of_orders_that_are_drawn(tiny, data, tmp_path):
    trainer = trainer_of(tiny, data, tmp_path)
    model, inputs = trainer.model.eval(), trainer._train
    rows = np.arange(12)

    def predicted(order):
        vectors = model.vectors([inputs.orders[order][i] for i in rows])
        return model.fitted_head().transform(vectors)[:, 0]

    errors = [(predicted(order) - inputs.rating[rows]) ** 2 for order in (0, 1)]
    order = np.random.Generator(np.random.SFC64([5, 0])).integers(2, size=12)
    assert 0 < order.sum() < 12
    loss = float(model(inputs, rows, [5, 0]).detach())
    assert loss == pytest.approx(np.where(order, errors[1], errors[0]).mean(), abs=1e-6)
    mean = model.predict(inputs, lambda n, compute: compute(np.arange(n)))
    np.testing.assert_allclose(mean[rows], (predicted(0) + predicted(1)) / 2, atol=1e-6)


def test_a_seed_gives_the_same_again_and_another_does_not(train, tmp_path):
    one, two, other = (train(name, "--seed", seed) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    assert one["dev_spearman"] == two["dev_spearman"] != other["dev_spearman"]
    weights = [next((tmp_path / n).glob("heads/cross/*.safetensors")).read_bytes() for n in "abc"]
    assert weights[0] == weights[1] != weights[2]
    assert train("a", "--seed", 3) == one  # which is not done again
    assert "seed: 5, not 3" in train("a", "--seed", 5, command=refused)


def test_it_learns_what_hangs_on_both_a_sentence_and_the_condition(
    train, write_rows, small_rows, tmp_path
):
    def label(first, condition):
        return 5 if condition == "the place" else 3 if "dogs" in first else 1

    write_rows([(*row[:3], label(row[0], row[2])) for row in small_rows])
    given = "--epochs 20 --rank full --learning-rate 3e-3 --batch-size 8 --orders given"
    scores = train("run", *given.split())["scores"]
    assert all(score["pearson"] > 0.7 for score in scores)


# -- what comes out ----------------------------------------------------------------------------


def test_the_record_says_what_made_it(cross):
    account = json.loads((cross / "training.json").read_text())
    made_of = account["made_of"]
    assert made_of["orders"] == account["summary"]["orders"] == "both"
    assert made_of["head"] == {
        "kind": "regression", "dropout": 0.1, "learning_rate": 1e-3, "weight_decay": 0.01,
    }  # fmt: skip
    assert made_of["encoder"]["normalize"] is False
    assert [entry["epoch"] for entry in account["curve"]] == [1, 2]
    assert json.loads((cross / "run.json").read_text())["cross_encoder"] == {"orders": "both"}
    assert json.loads((cross / "encoder.json").read_text())["cross"] is True
    assert not list(cross.rglob("*.bin")) + list(cross.rglob("*.pt")) + list(cross.rglob("*.pkl"))


def test_its_figures_are_those_of_evaluate_and_of_similarity(cross, tmp_path, capsys):
    account = json.loads((cross / "training.json").read_text())["summary"]
    for scores in account["scores"]:
        (row,) = ok(capsys, "evaluate", "--run", cross, "--split", scores["split"])["results"]
        assert {**row, "seen": 0, "unseen": 0} == {**scores, "seen": 0, "unseen": 0}
    assert account["scores"][0]["spearman"] == pytest.approx(account["dev_spearman"], abs=1e-9)

    given = ["--predictions", tmp_path / "p.csv", "--report", tmp_path / "page.html"]
    ok(capsys, "evaluate", "--run", cross, "--split", "dev", *given)
    with (tmp_path / "p.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    columns = [[row[name] for row in rows] for name in ("sentence1", "sentence2", "condition")]
    found = llmcond.load_cross_encoder(cross).similarity(*columns)
    np.testing.assert_allclose([float(row["cross"]) for row in rows], found, atol=2e-6)
    assert "cross" in (tmp_path / "page.html").read_text()


def test_it_is_served_for_similarity_only(cross):
    texts = [FIRST, SECOND, "children walk"]
    model = load_model(ServedSource(run=cross, device="cpu"))
    asked = {"sentence1": FIRST, "sentence2": texts, "condition": "the place"}
    with served(model) as (client, _):
        found = client.post("/v1/similarity", asked).json["similarities"]
        assert client.get("/readyz").status == 200
        refused = client.post("/v1/embeddings", {"input": texts, "condition": "the place"})
    wanted = model.model.similarity([FIRST] * 3, texts, "the place")
    assert found == pytest.approx(wanted.tolist(), abs=1e-6)
    assert (refused.status, refused.error["code"]) == (404, "not_served")
    with pytest.raises(UserError, match="neither heads nor prompts"):
        load_model(ServedSource(run=cross, head="mlp", device="cpu"))


def test_other_rows_are_scored(cross, write_rows, small_rows, capsys):
    rows = write_rows(small_rows[:20], "other.csv")
    (row,) = ok(capsys, "evaluate", "--run", cross, "--data", rows)["results"]
    assert (row["n"], row["head"], row["prompt"], row["dim"]) == (20, "cross", "", None)
    assert run(["evaluate", "--run", str(cross), "--data", str(rows)]) == 0
    assert "cross" in capsys.readouterr().out


def test_both_orders_are_averaged_so_that_the_order_does_not_matter(cross):
    both = llmcond.load_cross_encoder(cross)
    given = llmcond.load_cross_encoder(cross, orders="given")
    there, back = (
        given.similarity(*row, "the place") for row in ((FIRST, SECOND), (SECOND, FIRST))
    )
    assert abs(there - back) > 1e-4
    assert both.similarity(FIRST, SECOND, "the place") == pytest.approx(
        (there + back) / 2, abs=1e-6
    )
    assert both.similarity(SECOND, FIRST, "the place") == pytest.approx(
        (there + back) / 2, abs=1e-6
    )
    assert repr(given).endswith("orders given)")


def test_a_batch_of_one_is_as_a_batch_of_many(cross):
    loaded = llmcond.load_cross_encoder(cross)
    first, second = [FIRST, "a dog", SECOND], [SECOND, FIRST, f"{FIRST} {SECOND}"]
    conditions = ["the place", "the mood", "the number of people"]
    together = loaded.similarity(first, second, conditions)
    alone = [loaded.similarity(*row) for row in zip(first, second, conditions, strict=True)]
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_a_long_text_keeps_its_condition(cross):
    loaded = llmcond.load_cross_encoder(cross)
    long = " ".join([FIRST] * 40)
    with pytest.warns(UserWarning, match="their sentences were cut, their conditions were not"):
        found = loaded.similarity([long] * 2, [SECOND] * 2, ["the place", "the mood"])
    assert abs(found[0] - found[1]) > 1e-5


def test_similarity_says_what_compared(cross, capsys):
    words = ["similarity", FIRST, SECOND, "--condition", "the place", "--run", cross]
    said = ok(capsys, *words)
    assert (said["head"], said["orders"]) == ("cross", "both")
    expected = llmcond.load_cross_encoder(cross).similarity(FIRST, SECOND, "the place")
    assert said["similarities"][0]["similarity"] == pytest.approx(expected, abs=1e-5)
    assert run([str(word) for word in words]) == 0
    assert "orders both, trained on" in capsys.readouterr().err


def test_one_order_is_recorded(train, tmp_path):
    assert train("given", "--orders", "given")["orders"] == "given"
    loaded = llmcond.load_cross_encoder(tmp_path / "given")
    assert loaded.orders == "given"
    assert loaded.similarity(FIRST, SECOND, "the place") != loaded.similarity(
        SECOND, FIRST, "the place"
    )


def test_it_can_be_moved_and_merged(train, tmp_path):
    apart, merged = train("apart"), train("merged", "--merge")
    for first, second in zip(apart["scores"], merged["scores"], strict=True):
        assert first["spearman"] == pytest.approx(second["spearman"], abs=0.02)
    moved = Path(shutil.move(tmp_path / "merged", tmp_path / "moved"))
    (moved / "rows.parquet").unlink()
    loaded = [llmcond.load_cross_encoder(folder) for folder in (tmp_path / "apart", moved)]
    values = [one.similarity(FIRST, SECOND, "the place") for one in loaded]
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    with pytest.raises(UserError, match="moved is a cross-encoder"):
        llmcond.load_encoder(moved)


def test_a_decoder_that_pools_the_last_token_is_trained(train, tiny_checkpoint, tmp_path):
    model = ("--model", tiny_checkpoint("mistral"), "--pooling", "last", "--epochs", "1")
    scores = train("run", *model)["scores"]
    (result,) = llmcond.evaluate(run=tmp_path / "run", split="dev")
    assert result.metrics["spearman"].value == scores[0]["spearman"]
    loaded = llmcond.load_cross_encoder(tmp_path / "run")
    both = loaded.similarity([FIRST, SECOND], [SECOND, FIRST], ["the place", "the mood"])
    alone = loaded.similarity(SECOND, FIRST, "the mood")
    assert both[1] == pytest.approx(alone, abs=1e-5)


def test_from_python(tiny, data, tmp_path):
    trained = llmcond.train_cross(
        model=str(tiny), data=data, run=tmp_path / "run", epochs=1, rank=2, dtype="float32"
    )
    (result,) = llmcond.evaluate(run=trained.run)
    assert trained.metrics["spearman"].value == result.metrics["spearman"].value


# -- what it has not ---------------------------------------------------------------------------

NEEDS_EMBEDDINGS = {
    "extract": "--model {model} --data {data}",
    "fit-head": "--head linear",
    "sweep": "--head linear",
    "compare-prompts": "--model {model}",
    "analyse": "",
    "embed": "{data} --out {folder}/x.parquet --sentence sentence1",
    "heads": "",
    "push": "ada/cross",
}


@pytest.mark.parametrize("command", NEEDS_EMBEDDINGS)
def test_commands_that_need_embeddings_refuse(cross, tiny, data, tmp_path, capsys, command):
    given = NEEDS_EMBEDDINGS[command].format(model=tiny, data=data, folder=tmp_path).split()
    before = sorted(cross.rglob("*"))
    said = refused(capsys, command, *given, "--run", cross)
    assert "is a cross-encoder: it compares two texts and has no embeddings" in said
    assert "llmcond train-lora" in said
    assert sorted(cross.rglob("*")) == before


@pytest.mark.parametrize("command", ["extract", "train-lora --head none", "train-cross"])
def test_it_is_no_encoder_for_another_run(cross, data, tmp_path, capsys, command):
    given = [*command.split(), "--model", cross, "--data", data, "--run", tmp_path / "other"]
    assert "has no embeddings" in refused(capsys, *given)
    assert not (tmp_path / "other").exists()


def test_python_refuses_alike(cross):
    for load in (llmcond.load_embedder, llmcond.load_features, llmcond.load_encoder):
        with pytest.raises(UserError, match="has no embeddings"):
            load(cross)
    assert not hasattr(llmcond.load_cross_encoder(cross), "encode")


def test_a_recipe_cannot_name_its_head(tmp_path, tiny_run, capsys):
    recipe = tmp_path / "own.toml"
    recipe.write_text('kind = "regression"\ndescription = "d"\nsource = "s"\n')
    said = refused(capsys, "fit-head", "--head", recipe, "--run", tiny_run)
    assert "llmcond train-cross" in said


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rank", "full", "--quantize", "4bit"], "cannot be trained"),
        (["--merge", "--quantize", "4bit"], "Leave out --merge"),
        (["--target", "q_proj"], "Legal: auto, attention, mlp"),
        (["--orders", "any"], "Legal: both, given"),
        (["--set", "dim=3"], "a cross-encoder has no setting 'dim'"),
        (["--set", "dropout=1"], "'dropout' is 1.0: it must be below 1"),
        (["--seed", "-1"], "at least 0"),
        (["--router", "csr"], "so a router would have no effect"),
        (["--long-texts", "windows"], "windows are only for frozen encoders"),
        (["--max-length", "8"], "which leave no room for two sentences"),
        (["--batch-size", "2", "--gradient-accumulation-steps", "4"], "too few"),
    ],
)
def test_bad_input_is_refused_in_one_line(train, tmp_path, arguments, said):
    assert said in train("bad", *arguments, command=refused)
    assert not (tmp_path / "bad").exists()


def test_rows_without_ratings_are_refused(train, write_rows, small_rows):
    write_rows([(*row[:3], -1) for row in small_rows])
    assert "0 rated rows" in train("run", command=refused)


def test_runs_of_another_kind_are_refused(train, tiny_run, cross, tmp_path, tiny, data, capsys):
    shutil.copytree(tiny_run, tmp_path / "frozen")
    assert "holds features of" in train("frozen", command=refused)
    with pytest.raises(UserError, match=r"holds no cross-encoder\. .*: llmcond train-cross"):
        llmcond.load_cross_encoder(tmp_path / "frozen")
    given = ["train-lora", "--model", tiny, "--data", data, "--run", cross, "--head", "none"]
    assert "holds a cross-encoder, which is a different kind of model" in refused(capsys, *given)
    given = ["train-lora", "--model", tiny, "--data", data, "--run", tmp_path / "new"]
    said = refused(capsys, *given, "--start", cross / "heads/cross")
    assert "the head of a cross-encoder" in said


@pytest.mark.parametrize("arguments", [["--head", "linear"], ["--prompt", "cond"]])
def test_it_has_neither_heads_nor_prompts(cross, capsys, arguments):
    words = ["similarity", FIRST, SECOND, "--condition", "the place", "--run", cross]
    assert "neither heads nor prompts" in refused(capsys, *words, *arguments)
    if arguments[0] == "--head":
        assert "Leave out --head" in refused(capsys, "evaluate", "--run", cross, *arguments)


ONE_SIDED = """
from llmcond.tasks import Task


class Answers(Task):
    conditioned = (True, False)
"""


def test_where_one_side_has_the_condition_the_order_is_given(train, tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "_REGISTERED", {})
    monkeypatch.setattr(plugins, "_LOADED", [])
    (tmp_path / "own_task.py").write_text(ONE_SIDED)
    task = ("--task", "own_task.py:Answers")
    assert "only its first text" in train("one", *task, command=refused)
    assert train("one", *task, "--orders", "given")["orders"] == "given"


def test_texts_that_are_none_are_refused(cross):
    loaded = llmcond.load_cross_encoder(cross)
    for given, said in [
        ((["a"], ["b", "c"], "c"), "sentences1 has 1 texts and sentences2 has 2"),
        (("a", ["b"], "c"), "Give two texts, or two lists"),
        (("a", "b", ["c"]), "Give two texts, or two lists"),
        ((["a"], [" "], "c"), "the sentence at position 0 is empty"),
        ((["a"], ["b"], ["c", "d"]), "1 sentences and 2 conditions"),
    ]:
        with pytest.raises(UserError, match=said):
            loaded.similarity(*given)
    with pytest.raises(UserError, match="expected 'both' or 'given'"):
        llmcond.load_cross_encoder(cross, orders="any")


def test_a_damaged_folder_is_told(cross, tiny, tmp_path):
    folder = Path(shutil.copytree(cross, tmp_path / "run"))
    head = next(folder.glob("heads/cross/*.safetensors"))
    whole = head.read_bytes()
    head.write_bytes(whole[:-4] + b"\0\0\0\1")
    with pytest.raises(LlmcondError, match="is damaged"):
        llmcond.load_cross_encoder(folder)
    head.unlink()
    with pytest.raises(LlmcondError, match="cannot be read"):
        llmcond.load_cross_encoder(folder)
    head.write_bytes(whole)
    record = folder / "heads/cross/head.json"
    kept = record.read_text()
    identity = json.loads(kept)["encoder"]["identity"]
    encoder = {**json.loads(kept)["encoder"], "identity": {**identity, "pooling": "cls"}}
    checkpoints.change_json(record, encoder=encoder)
    with pytest.raises(UserError, match="trained with another encoder: pooling: 'cls', not 'mean'"):
        llmcond.load_cross_encoder(folder)
    record.write_text(kept)
    checkpoints.change_json(folder / "run.json", cross_encoder={"orders": "any"})
    with pytest.raises(LlmcondError, match=r"was damaged: 'cross_encoder.orders' is 'any'"):
        llmcond.load_cross_encoder(folder)


def test_it_has_a_last_stage_on_dev_too(train, tmp_path, capsys):
    summary = train("staged", "--epochs", 1, "--then", "dev", "--folds", 2)
    assert summary["trained_on"] == ["train", "dev"]
    assert summary["then"]["folds"]["folds"] == 2
    assert [scores["split"] for scores in summary["scores"]] == ["test"]
    line = refused(capsys, "evaluate", "--run", "staged", "--split", "dev")
    assert "was trained on dev" in line
