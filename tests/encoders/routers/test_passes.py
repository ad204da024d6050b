"""Training an encoder with CSR's router in it: what comes out is the encoder that was trained."""

import json

import numpy as np
import pytest
import torch
from helpers.commands import ok, refused
from safetensors.torch import load_file

import llmcond
from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.checkpoints.adapter import read_encoder_record
from llmcond.encoders.engine.routing import embed_routed, router_inputs
from llmcond.encoders.spec import Router
from llmcond.finetune.loading import load_trainable
from llmcond.finetune.settings import TuneSettings
from llmcond.runs import open_run
from llmcond.workflows.push import _stage

pytestmark = pytest.mark.usefixtures("one_thread")

ITEMS = [
    EncoderInput("", text, router=Router(condition, 0.05, True, False))
    for text in ("two men play in the park", "a dog sits")
    for condition in ("the place", "the number of people in it")
]


@pytest.fixture
def train(tiny, write_rows, small_rows, tmp_path, capsys):
    """A caller of the command on small rows, that returns what it prints."""
    plain = "--pooling mean --normalize --dtype float32 --epochs 2 --batch-size 16 --rank 4"
    plain += " --router csr --router-layers 2 --head none --learning-rate 1e-2"
    data = write_rows(small_rows)

    def call(folder, *arguments, command=ok):
        given = ["--data", data, "--run", tmp_path / folder, *plain.split(), *arguments]
        return command(capsys, "train-lora", "--model", tiny, *given)

    return call


@pytest.mark.parametrize(
    ("mode", "how"), [("paper", ""), ("heavy", ""), ("heavy", "--merge"), ("hidden", "--rank full")]
)
def test_a_trained_router_is_the_folder_s_own(train, tmp_path, capsys, mode, how):
    done = train("run", "--router-mode", mode, "--router-strength", "4", *how.split())
    assert done["head"] == "none@routed+c"
    folder = tmp_path / "run"
    encoder = llmcond.load_encoder(folder, dtype="float32")
    assert encoder.identity.router == "csr"
    assert (encoder.identity.router_mode, encoder.identity.router_strength) == (mode, 4.0)
    assert (folder / "router.safetensors").exists() == (mode == "heavy")
    vectors = encoder.encode(ITEMS)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-6
    scores = ok(capsys, "evaluate", "--run", folder, "--split", "dev")["results"]
    (found,) = (row["spearman"] for row in scores if row["name"] == "none@routed+c")
    assert found == next(one["spearman"] for one in done["scores"] if one["split"] == "dev")
    said = refused(capsys, "models", "--check", folder, "--router", "none")
    assert "was trained with --router csr" in said
    with pytest.raises(llmcond.UserError, match="was trained with --router csr"):
        llmcond.load_encoder(folder, router="none")


def test_a_router_that_no_prompt_uses_is_refused(train, tmp_path):
    said = train("idle", "--head", "hadamard", "--prompt", "separate", command=refused)
    assert "the prompt separate names no router" in said
    assert not (tmp_path / "idle").exists()


def test_a_heavy_router_is_trained_and_follows_the_seed(train, tmp_path):
    weights = []
    for name, seed, epochs in (("a", 1, 2), ("b", 1, 2), ("c", 2, 2), ("d", 1, 1)):
        given = ["--router-mode", "heavy", "--seed", str(seed), "--epochs", str(epochs)]
        train(name, *given, "--learning-rate", "1e-2")
        weights.append(load_file(tmp_path / name / "router.safetensors"))
        account = json.loads((tmp_path / name / "training.json").read_text())
        assert account["made_of"]["encoder"]["router_mode"] == "heavy"
    assert all(torch.equal(weights[1][key], value) for key, value in weights[0].items())
    assert all(not torch.equal(weights[2][key], value) for key, value in weights[0].items())
    assert all(not torch.equal(weights[3][key], value) for key, value in weights[0].items())


def test_joint_prompts_are_refused(train):
    said = train("run", "--prompt", "concat-sent-cond", command=refused)
    assert "it puts the condition into the text, but the encoder expects it in a router" in said
    said = train("run", "--prompt", "pair-cond", command=refused)
    assert "(--prompt routed)" in said


def test_a_heavy_router_is_pushed_with_its_encoder(train, tmp_path):
    train("run", "--router-mode", "heavy", "--merge")
    folder, staged = tmp_path / "run", tmp_path / "staged"
    staged.mkdir()
    _stage(open_run(folder), read_encoder_record(folder), staged)
    mine, others = (llmcond.load_encoder(one, dtype="float32") for one in (folder, staged))
    np.testing.assert_array_equal(mine.encode(ITEMS), others.encode(ITEMS))


@pytest.mark.parametrize("mode", ["paper", "heavy", "released-tri"])
def test_activations_computed_again_give_the_same_gradients(tiny, mode):
    found = []
    for again in (False, True):
        options = EncoderOptions(
            dtype="float32", device="cpu", router="csr", router_mode=mode, router_layers=2,
            pooling=None if mode == "released-tri" else "mean",
        )  # fmt: skip
        settings = TuneSettings(rank=0, gradient_checkpointing=again)
        trainable = load_trainable(resolve(str(tiny), options), settings, seed=0)
        trainable.network.eval()
        for module in trainable.network.modules():
            module.training = hasattr(module, "gradient_checkpointing")
        tokens = trainable.tokenizer([EncoderInput("", item.text) for item in ITEMS])
        routers = router_inputs(ITEMS)
        queries = dict(zip(routers, trainable.tokenizer(list(routers.values())), strict=True))
        vectors = embed_routed(trainable.engine, ITEMS, tokens, queries)
        (vectors * torch.linspace(-1, 1, vectors.numel()).view(vectors.shape)).sum().backward()
        found.append([value.grad for value in trainable.network.parameters()])
    for first, second in zip(*found, strict=True):
        assert (first is None) == (second is None)
        if first is not None:
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)
