"""Training an encoder with a roles head on dialogues: loss, dev score, resumption and the run."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from helpers.commands import run_json
from helpers.dialogues import write_dialogues
from helpers.flags import change_flags
from helpers.training import cpu_accelerator, resume_training

import llmcond
from llmcond.cli import run
from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.finetune.encoder import load_trainable
from llmcond.finetune.loop import Trainer, TrainingState
from llmcond.finetune.settings import TuneSettings
from llmcond.heads import load_recipe
from llmcond.kinds.dialogue.data import Turns
from llmcond.kinds.dialogue.heads import distinct_utterances
from llmcond.kinds.dialogue.train import DialogueInputs, TurnModel

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = "men play park dogs run beach place mood women read book red blue old new tall".split()
TEXTS = [f"two {first} {second}" for first in WORDS[:6] for second in WORDS[8:12]]
N = len(TEXTS)
#: Dialogues of five different utterances, each of which follows from the two before it.
DIALOGUES = [[k * i % N for k in (1, 3, 4, 7, 11)] for i in range(1, 60) if i % 2 and i % 3]
TRAIN, DEV = Turns.from_lists(DIALOGUES[:12]), Turns.from_lists(DIALOGUES[12:])


def make_recipe(name, **changes):
    sizes = {"window": 4} if name != "none" else {}
    return load_recipe(name, "dialogue").with_settings({**sizes, **changes}, "test")


def make_model(tiny_bert, name="weighted", start=None, tuning=None, **changes):
    settings = tuning or TuneSettings(rank=4)
    options = EncoderOptions(dtype="float32", device="cpu", pooling="mean")
    trainable = load_trainable(resolve(str(tiny_bert), options), settings, seed=5)
    model = TurnModel(trainable.engine, make_recipe(name, **changes), 5, start)
    tokens = trainable.tokenizer([EncoderInput("", text) for text in TEXTS])
    inputs = (DialogueInputs(turns, tokens, model.head.settings) for turns in (TRAIN, DEV))
    return model, *inputs


def test_loss_matches_cached_features(tiny_bert):
    model, inputs, _ = make_model(tiny_bert, "weighted", dropout=0.0)
    # Three of five turns have at least two turns before them.
    np.testing.assert_array_equal(model.groups(inputs), np.repeat(np.arange(len(TRAIN)), 3))
    np.testing.assert_array_equal(inputs.windows(np.array([0]))[0], [-1, *DIALOGUES[0][:3]])
    model.eval()
    rows = np.flatnonzero(np.isin(model.groups(inputs), [0, 4, 7]))
    loss = model(inputs, rows, [5, 0])
    used, positions = distinct_utterances(inputs.windows(rows))
    features = torch.nn.functional.normalize(torch.from_numpy(model.vectors(inputs.tokens)))
    rng = np.random.Generator(np.random.SFC64([5, 0]))
    groups = torch.from_numpy(model.groups(inputs)[rows])
    expected = model.head.loss(features[used], torch.from_numpy(positions), rng, groups)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    parameters = model.trained_parameters().items()
    trained_parts = {key.split(".")[0] for key, value in parameters if value.grad is not None}
    assert trained_parts == {"encoder", "head"}


def make_trainer(tiny_bert, folder, name="weighted", changes=(), **settings):
    tuning = TuneSettings(rank=4, **{"batch_size": 12, "checkpoint_steps": 2, **settings})
    model, train, dev = make_model(tiny_bert, name, tuning=tuning, **dict(changes))
    state = TrainingState(folder, {"settings": tuning.to_json()})
    return Trainer(model, train, dev, tuning, cpu_accelerator(), state)


def test_resumed_training_is_bit_identical(tiny_bert, tmp_path):
    # The loss of ccl does not use all roles, so that some weights have no optimizer state.
    changes, settings = {"dropout": 0.2}, {"epochs": 2, "adapter_dropout": 0.1}
    uninterrupted = make_trainer(tiny_bert, tmp_path / "whole", "ccl", changes, **settings)
    uninterrupted.run(lambda *_: None)
    assert uninterrupted.steps == 8
    expected = uninterrupted.model.trained_parameters()
    for stop in (1, 5):  # before the first checkpoint, and after one within an epoch
        folder = tmp_path / str(stop)
        make = partial(make_trainer, tiny_bert, folder, "ccl", changes, **settings)
        restarted = resume_training(make, stop)
        assert restarted.progress.step == stop - 1
        restarted.run(lambda *_: None)
        assert restarted.progress.curve == uninterrupted.progress.curve
        for key, value in restarted.model.trained_parameters().items():
            assert torch.equal(value, expected[key]), (stop, key)


# -- the command -------------------------------------------------------------------------------

OPTIONS = "--pooling mean --dtype float32 --device cpu --epochs 2 --batch-size 32 --rank 4"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dialogues(tmp_path_factory.mktemp("dialogues") / "data")


def make_arguments(data, model, folder, *arguments):
    common = ["--task", "dialogue", "--model", model, "--data", data, "--run", folder]
    return list(map(str, change_flags([*common, *OPTIONS.split()], *arguments)))


def test_trained_run_has_figures_of_evaluate_and_replies(capsys, data, model, tmp_path):
    trained = tmp_path / "run"
    arguments = make_arguments(data, model, trained, "--head", "weighted")
    assert run(["train-lora", *arguments]) == 0
    capsys.readouterr()
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
    assert min(entry["dev_score"] for entry in record["fit"]["curve"]) == summary["dev_score"]
    base = llmcond.load_encoder(model, dtype="float32", pooling="mean")
    item = [llmcond.EncoderInput("", "two men ?")]
    trained_vectors = llmcond.load_encoder(trained).encode(item)
    assert not np.allclose(trained_vectors, base.encode(item), atol=1e-4)

    texts = tmp_path / "replies.txt"
    texts.write_text("sad\nthe park on red\n")
    reply = run_json(capsys, "reply", "two men ?", "sad", "--candidates", texts, "--run", trained)
    assert reply["head"] == "weighted@separate"
