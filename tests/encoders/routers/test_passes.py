"""Training an encoder with CSR's router: the saved encoder is the one that was trained."""

import numpy as np
import pytest
import torch
from helpers.commands import run_json, run_rejected
from helpers.flags import change_flags
from safetensors.torch import load_file

import llmcond
from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.adapter import read_encoder_record
from llmcond.encoders.spec import Router
from llmcond.encoders.tokenizing import router_inputs
from llmcond.encoders.torch.engine import embed_routed
from llmcond.finetune.encoder import load_trainable
from llmcond.finetune.settings import TuneSettings
from llmcond.runs import open_run
from llmcond.runs.portable import stage_run

pytestmark = pytest.mark.usefixtures("one_thread")

ITEMS = [
    EncoderInput("", text, router=Router(condition, 0.05, True, False))
    for text in ("two men play in the park", "a dog sits")
    for condition in ("the place", "the number of people in it")
]


@pytest.fixture
def train(tiny_bert, write_rows, small_rows, tmp_path, capsys):
    """A function that runs the command on small data and returns its output."""
    defaults = "--pooling mean --normalize --dtype float32 --epochs 2 --batch-size 16 --rank 4"
    defaults += " --router csr --router-layers 2 --head none --learning-rate 1e-2"
    data = write_rows(small_rows)

    def run_train_lora(folder, *arguments, command=run_json):
        options = ["--data", data, "--run", tmp_path / folder, *defaults.split()]
        options = change_flags(options, *arguments)
        return command(capsys, "train-lora", "--model", tiny_bert, *options)

    return run_train_lora


@pytest.mark.parametrize(
    ("mode", "options"), [("paper", ""), ("heavy", "--merge"), ("hidden", "--rank full")]
)
def test_trained_folder_records_its_router(train, tmp_path, capsys, mode, options):
    report = train("run", "--router-mode", mode, "--router-strength", "4", *options.split())
    assert report["head"] == "none@routed+c"
    folder = tmp_path / "run"
    encoder = llmcond.load_encoder(folder, dtype="float32")
    identity = encoder.identity
    assert (identity.router, identity.router_mode, identity.router_strength) == ("csr", mode, 4.0)
    assert (folder / "router.safetensors").exists() == (mode == "heavy")
    vectors = encoder.encode(ITEMS)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-6
    scores = run_json(capsys, "evaluate", "--run", folder, "--split", "dev")["results"]
    (spearman,) = (row["spearman"] for row in scores if row["name"] == "none@routed+c")
    assert spearman == next(
        score["spearman"] for score in report["scores"] if score["split"] == "dev"
    )
    with pytest.raises(llmcond.UserError, match="was trained with --router csr"):
        llmcond.load_encoder(folder, router="none")
    if "--merge" in options:  # the router is pushed with its encoder
        staged = tmp_path / "staged"
        staged.mkdir()
        stage_run(open_run(folder), read_encoder_record(folder), staged)
        pushed = llmcond.load_encoder(staged, dtype="float32").encode(ITEMS)
        np.testing.assert_array_equal(pushed, vectors)


def test_prompts_without_a_router_are_rejected(train, tmp_path):
    for prompt, message in (
        ("separate", "the prompt separate names no router"),
        ("concat-sent-cond", "it puts the condition into the text, but the encoder expects it in"),
        ("pair-cond", r"(--prompt routed)"),
    ):
        head = ["--head", "hadamard"] if prompt == "separate" else []
        assert message in train("idle", *head, "--prompt", prompt, command=run_rejected)
    assert not (tmp_path / "idle").exists()


def test_heavy_router_is_trained_and_depends_on_seed(train, tmp_path):
    weights = []
    for name, seed, epochs in (("a", 1, 2), ("b", 1, 2), ("c", 2, 2), ("d", 1, 1)):
        options = ["--router-mode", "heavy", "--seed", str(seed), "--epochs", str(epochs)]
        train(name, *options)
        weights.append(load_file(tmp_path / name / "router.safetensors"))
    for key, value in weights[0].items():
        equal = [torch.equal(other[key], value) for other in weights[1:]]
        assert equal == [True, False, False]


@pytest.mark.parametrize("mode", ["heavy", "released-tri"])
def test_gradient_checkpointing_gives_the_same_gradients(tiny_bert, mode):
    gradients = []
    for checkpointing in (False, True):
        options = EncoderOptions(
            dtype="float32", device="cpu", router="csr", router_mode=mode, router_layers=2,
            pooling=None if mode == "released-tri" else "mean",
        )  # fmt: skip
        settings = TuneSettings(rank=0, gradient_checkpointing=checkpointing)
        trainable = load_trainable(resolve(str(tiny_bert), options), settings, seed=0)
        trainable.network.eval()
        for module in trainable.network.modules():
            module.training = hasattr(module, "gradient_checkpointing")
        tokens = trainable.tokenizer([EncoderInput("", item.text) for item in ITEMS])
        routers = router_inputs(ITEMS)
        queries = dict(zip(routers, trainable.tokenizer(list(routers.values())), strict=True))
        vectors = embed_routed(trainable.engine, ITEMS, tokens, queries)
        (vectors * torch.linspace(-1, 1, vectors.numel()).view(vectors.shape)).sum().backward()
        gradients.append([value.grad for value in trainable.network.parameters()])
    for first, second in zip(*gradients, strict=True):
        assert (first is None) == (second is None)
        if first is not None:
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)
