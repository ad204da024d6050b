"""Pooling functions: the tokens they read, and custom ones in the identity of an encoder."""

import numpy as np
import pytest
import torch
from helpers.vectors import assert_close

from llmcond import extract, load_encoder
from llmcond.base import package as plugins
from llmcond.base.errors import UserError
from llmcond.cli import run
from llmcond.encoders import EncoderInput
from llmcond.encoders.spec import POOLINGS
from llmcond.encoders.torch.forward import find_pooling
from llmcond.runs import open_run

SOURCE = """
def sink(hidden, counted):
    assert len(hidden) == len(counted)
    return hidden[0] + hidden[-1] - counted.sum() * hidden[counted].mean(dim=0)

def wrong_shape(hidden, counted):
    return hidden[0, :3]

def failing(hidden, counted):
    return hidden[10_000]

LEVEL = 3
"""
OPTIONS = {"dtype": "float32", "device": "cpu", "runtime": "torch"}
INPUTS = [EncoderInput("", text) for text in ("two dogs", "a man reads in the park", "hat")]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "custom_poolings.py"
    path.write_text(SOURCE)
    yield path
    plugins._REGISTERED.clear()


@pytest.mark.parametrize(
    ("kind", "pool_over"), [("bert", "all"), ("bert", "text"), ("mistral", "text")]
)
def test_custom_pooling_gets_all_tokens_padded_and_packed(tiny_checkpoint, source, kind, pool_over):
    options = {**OPTIONS, "pool_over": pool_over, "normalize": False}
    encoder = load_encoder(str(tiny_checkpoint(kind)), pooling=f"{source}:sink", **options)
    expected = []
    for row in encoder._tokenizer(INPUTS):
        with torch.no_grad():
            states = encoder.engine.model.network(torch.tensor([row.ids])).last_hidden_state[0]
        counted = states[row.first : row.last]
        expected.append(states[0] + states[-1] - counted.sum(dim=0))
    assert encoder.engine.packs
    assert_close(encoder.encode(INPUTS), np.stack(expected))
    encoder.engine.packs = False
    assert_close(encoder.encode(INPUTS), np.stack(expected))


def test_identity_records_function_and_digest_of_file(tiny_bert, source):
    folder, pooling = str(tiny_bert), f"{source}:sink"
    first = load_encoder(folder, pooling=pooling, **OPTIONS).identity
    name, digest = first.pooling.split("@")
    assert (name, len(digest)) == ("custom_poolings.py:sink", 16)
    # The name that an identity records loads the same function.
    assert load_encoder(folder, pooling=first.pooling, **OPTIONS).identity == first
    source.write_text(SOURCE.replace("mean(dim=0)", "amax(dim=0)"))
    changed = load_encoder(folder, pooling=pooling, **OPTIONS).identity
    assert changed.fingerprint != first.fingerprint
    with pytest.raises(UserError, match=r"custom_poolings\.py has changed since"):
        load_encoder(folder, pooling=first.pooling, **OPTIONS)


def test_invalid_pooling_functions_report_the_problem(tiny_bert, source):
    for name, message in (
        ("wrong_shape", r"returned \(3,\) for an input; .* of shape \(32,\)"),
        ("failing", r"custom_poolings\.py:failing@\w+ failed: index 10000 is out of"),
        ("LEVEL", "is not a function that is defined in a Python file"),
        ("sinc", "has no 'sinc'"),
    ):
        with pytest.raises(UserError, match=message):
            load_encoder(str(tiny_bert), pooling=f"{source}:{name}", **OPTIONS).encode(INPUTS)


def test_run_with_custom_pooling_needs_its_code_to_encode(
    capsys, tiny_bert, write_rows, small_rows, source, tmp_path
):
    options = {**OPTIONS, "pooling": f"{source}:sink", "prompt": ["concat-sent-cond"]}
    data, folder = str(write_rows(small_rows)), tmp_path / "run"
    extract(model=str(tiny_bert), run=folder, data=data, **options)
    plugins._REGISTERED.clear()
    # Extracted features can be read without the code.
    assert run(["evaluate", "--run", str(folder), "--json"]) == 0
    with pytest.raises(UserError, match=r"needs your code custom_poolings\.py:sink"):
        open_run(folder).resolve_encoder("cpu")
    plugins.load(f"{source}:sink")
    pooling = open_run(folder).resolve_encoder("cpu").identity.pooling
    assert pooling.startswith("custom_poolings.py:sink@")


@pytest.mark.parametrize("name", POOLINGS)
def test_pooling_reads_the_tokens_it_declares(name):
    states, counted = torch.randn(1, 6, 4), torch.tensor([[False, True, True, True, False, False]])
    first, last = POOLINGS[name].tokens(1, 4, 6)
    states.requires_grad_(True)
    find_pooling(name)(states, counted, [6]).sum().backward()
    read_indices = states.grad[0].abs().sum(dim=1).nonzero()[:, 0].tolist()
    assert read_indices == list(range(first, last))
