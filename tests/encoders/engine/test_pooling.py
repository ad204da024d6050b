"""Custom pooling functions: their tokens, padding and packing, and their source in the identity."""

import numpy as np
import pytest
import torch

from llmcond import extract, load_encoder, plugins
from llmcond.cli import run
from llmcond.encoders import EncoderInput, EncoderOptions
from llmcond.encoders.checkpoints.checkpoint import Checkpoint
from llmcond.encoders.engine.forward import find_pooling
from llmcond.encoders.known import find_model
from llmcond.encoders.resolve import resolve_checkpoint
from llmcond.encoders.spec import POOLINGS
from llmcond.errors import UserError
from llmcond.files import write_json
from llmcond.runs import open_run

SOURCE = """
def custom_mean(hidden, counted):
    return hidden[counted].mean(dim=0)

def sink(hidden, counted):
    assert len(hidden) == len(counted)
    return hidden[0] + hidden[-1] - counted.sum() * hidden[counted][-1]

def wrong_shape(hidden, counted):
    return hidden[0, :3]

def failing(hidden, counted):
    return hidden[10_000]

LEVEL = 3
"""
OPTIONS = {"dtype": "float32", "device": "cpu", "runtime": "torch"}
INPUTS = [
    *(EncoderInput("", text) for text in ("two dogs", "a man reads in the park", "hat")),
    EncoderInput("", "the number of people", context="two women ride"),
]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "custom_poolings.py"
    path.write_text(SOURCE)
    yield path
    plugins._REGISTERED.clear()


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("pool_over", ["all", "text"])
@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_custom_mean_matches_mean_pooling(tiny_checkpoint, source, packs, pool_over, kind):
    options = {**OPTIONS, "pool_over": pool_over}
    inputs = INPUTS if kind == "bert" else INPUTS[:3]
    vectors = []
    for pooling in ("mean", f"{source}:custom_mean"):
        encoder = load_encoder(str(tiny_checkpoint(kind)), pooling=pooling, **options)
        encoder.engine.packs &= packs
        assert encoder.engine.packs is packs
        vectors.append(encoder.encode(inputs))
    np.testing.assert_allclose(vectors[1], vectors[0], rtol=0, atol=1e-6)


def test_custom_pooling_gets_all_tokens_padded_and_packed(tiny_checkpoint, source):
    encoder = load_encoder(str(tiny_checkpoint()), pooling=f"{source}:sink", **OPTIONS)
    assert encoder.engine.packs
    packed = encoder.encode(INPUTS)
    encoder.engine.packs = False
    np.testing.assert_allclose(encoder.encode(INPUTS), packed, rtol=0, atol=1e-5)
    hidden = encoder.engine.model.network(torch.tensor([encoder._tokenizer(INPUTS[:1])[0].ids]))
    states = hidden.last_hidden_state[0]
    expected = states[0] + states[-1] - len(states) * states[-1]
    expected = torch.nn.functional.normalize(expected, dim=0)
    np.testing.assert_allclose(packed[0], expected.numpy(), rtol=0, atol=1e-5)


def test_identity_records_function_and_digest_of_file(tiny_checkpoint, source):
    folder, pooling = str(tiny_checkpoint()), f"{source}:custom_mean"
    first = load_encoder(folder, pooling=pooling, **OPTIONS).identity
    name, digest = first.pooling.split("@")
    assert name == "custom_poolings.py:custom_mean"
    assert len(digest) == 16
    assert load_encoder(folder, pooling=pooling, **OPTIONS).identity == first
    # The name that an identity records loads the same function.
    assert load_encoder(folder, pooling=first.pooling, **OPTIONS).identity == first
    source.write_text(SOURCE.replace("mean(dim=0)", "amax(dim=0)"))
    changed = load_encoder(folder, pooling=pooling, **OPTIONS).identity
    assert changed.fingerprint != first.fingerprint
    with pytest.raises(UserError, match=r"custom_poolings\.py has changed since"):
        load_encoder(folder, pooling=first.pooling, **OPTIONS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wrong_shape", r"returned \(3,\) for an input; expected a tensor of shape \(32,\)"),
        ("failing", r"custom_poolings\.py:failing@\w+ failed: index 10000 is out of bounds"),
        ("LEVEL", "is not a function that is defined in a Python file"),
        ("custom_meen", "has no 'custom_meen'"),
    ],
)
def test_invalid_pooling_functions_report_the_problem(tiny_checkpoint, source, name, expected):
    with pytest.raises(UserError, match=expected):
        load_encoder(str(tiny_checkpoint()), pooling=f"{source}:{name}", **OPTIONS).encode(INPUTS)


def test_known_model_with_latent_block_rejects_custom_pooling(source):
    known = find_model("nvidia/NV-Embed-v2")
    checkpoint = Checkpoint("NV", source.parent, known)
    write_json(source.parent / "config.json", dict(known.architecture))
    options = EncoderOptions(pooling=f"{source}:custom_mean", **OPTIONS)
    with pytest.raises(UserError, match="only supports latent"):
        resolve_checkpoint(checkpoint, options, "cpu", identify=False)


def test_run_with_custom_pooling_needs_its_code_to_encode(
    capsys, tiny_checkpoint, write_rows, small_rows, source, tmp_path
):
    options = EncoderOptions(pooling=f"{source}:custom_mean", **OPTIONS)
    data = str(write_rows(small_rows))
    extract(
        model=str(tiny_checkpoint()),
        **vars(options),
        run=tmp_path / "run",
        data=data,
        prompt=["concat-sent-cond"],
    )
    assert (
        open_run(tmp_path / "run")
        .resolve_encoder("cpu")
        .identity.pooling.startswith("custom_poolings.py:custom_mean@")
    )
    plugins._REGISTERED.clear()
    # Extracted features can be read without the code.
    assert run(["evaluate", "--run", str(tmp_path / "run"), "--json"]) == 0
    with pytest.raises(UserError, match=r"needs your code custom_poolings\.py:custom_mean"):
        open_run(tmp_path / "run").resolve_encoder("cpu")
    plugins.load(f"{source}:custom_mean")
    assert open_run(tmp_path / "run").resolve_encoder("cpu")


@pytest.mark.parametrize("name", POOLINGS)
def test_pooling_reads_the_tokens_it_declares(name):
    states, counted = torch.randn(1, 6, 4), torch.tensor([[False, True, True, True, False, False]])
    first, last = POOLINGS[name].tokens(1, 4, 6)
    states.requires_grad_(True)
    find_pooling(name)(states, counted, [6]).sum().backward()
    read_indices = states.grad[0].abs().sum(dim=1).nonzero()[:, 0].tolist()
    assert read_indices == list(range(first, last))
