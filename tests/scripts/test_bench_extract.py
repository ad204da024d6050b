"""The extraction benchmark: the implementations that it times, their batches and inputs."""

from argparse import Namespace
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
from helpers.paths import ROOT

from llmcond.encoders import EncoderInput, EncoderOptions, resolve

pytestmark = pytest.mark.script("bench_extract")

GRAPHS = ("openvino", "onnx", "int8")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return import_module("bench_extract")


@pytest.mark.parametrize(
    ("pooling", "weights"),
    [
        ("mean", [[0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]),
        ("last", [[0, 1, 0], [0, 0, 1]]),
        ("cls", [[1, 0, 0], [1, 0, 0]]),
    ],
)
def test_batch_is_padded_and_has_pooling_weights(script, pooling, weights):
    ids, mask, pooling_weights = script.make_batch([[5, 6], [7, 8, 9]], pooling)
    assert ids.tolist() == [[5, 6, 0], [7, 8, 9]]
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    np.testing.assert_allclose(pooling_weights, weights, rtol=1e-6)


def test_short_inputs_are_joined_to_target_lengths(script):
    short = [EncoderInput("", text) for text in "abcde"]
    joined = script.join_inputs(short, [6, 6, 6, 11, 3], 10)
    assert [item.text for item in joined] == ["a b", "c", "d"]


def test_ways_left_out_are_reported_with_reason(script, tiny_checkpoint, capsys):
    resolved = resolve(str(tiny_checkpoint()), EncoderOptions(), identify=False)
    options = Namespace(ways=[*script.WAYS], dtype="float16", skip_peers=False)
    ways = script.choose_ways(options, resolved, {})
    assert ways["llmcond, PyTorch, packed"] == ("packed", "float16")
    messages = capsys.readouterr().err
    assert (
        "llmcond, PyTorch, shared prefixes is left out: the model shares no prefixes." in messages
    )
    for name in ("OpenVINO", "ONNX Runtime, float32", "ONNX Runtime, int8"):
        assert f"{name} is left out: " in messages
        assert name not in ways
    options.skip_peers = True
    ways = script.choose_ways(options, resolved, {})
    assert all(name.startswith("llmcond") for name in ways)


def test_unknown_model_is_rejected(script):
    with pytest.raises(
        SystemExit, match=r"nothing is neither a known model .* mpnet-base, xlm-r-base\."
    ):
        script.find_checkpoint(Namespace(model="nothing", set=[], folder=None))


@pytest.mark.parametrize(
    ("shape", "ways"),
    [
        ("mpnet-base", ["llmcond", "packed", *GRAPHS]),
        ("xlm-r-base", ["llmcond", "packed", *GRAPHS]),
        ("Salesforce/SFR-Embedding-Mistral", ["packed", "openvino"]),
    ],
)
@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("onnx", "onnxruntime", "openvino")),
    reason="needs onnx, onnxruntime and openvino",
)
def test_other_libraries_compute_same_vectors(script, shape, ways, tmp_path, monkeypatch):
    monkeypatch.setattr("bench.run_in_process", lambda function, *args: function(*args))
    sizes = "vocab_size=9000 hidden_size=32 intermediate_size=64 num_hidden_layers=2"
    sizes += " num_attention_heads=2 num_key_value_heads=2"
    options = Namespace(model=shape, set=sizes.split(), folder=tmp_path / "models")
    folder, like = script.find_checkpoint(options)
    task = dict.fromkeys(("max_length", "max_tokens_per_batch"))
    task |= {"checkpoint": str(folder), "dtype": "float32", "quantize": "none", "device": "cpu"}
    resolved = resolve(str(folder), EncoderOptions(like=like), identify=False)
    assert (resolved.runtime == "openvino") == ("llmcond" in ways)
    graphs = script.export_graphs(resolved, {*GRAPHS}, tmp_path)
    assert [*graphs] == [way for way in ways if way in GRAPHS]
    task |= {"like": like, "threads": 1, "graphs": graphs}
    inputs = [EncoderInput("", text) for text in ("a man rides", "two women read a book", "")]
    vectors = {}
    for kind in ("loop", *ways):
        way = script.PEERS.get(kind, script.LlmcondWay)({**task, "kind": kind})
        vectors[kind] = way.encode(inputs)
        assert way.count_computed(inputs) >= sum(len(row.ids) for row in way.tokenizer(inputs))
    for kind in ways:
        if kind == "int8":
            assert (vectors["int8"] * vectors["loop"]).sum(axis=1).min() > 0.9
        else:
            np.testing.assert_allclose(vectors[kind], vectors["loop"], atol=1e-5)


def test_inputs_have_about_requested_number_of_tokens(script, tiny_checkpoint):
    task = dict.fromkeys(("like", "max_tokens_per_batch"))
    task |= {"kind": "packed", "checkpoint": str(tiny_checkpoint()), "dtype": "float32"}
    task |= {"quantize": "none", "device": "cpu", "max_length": 40}
    options = Namespace(tokens=40, inputs=3)
    [(inputs, label)] = script.make_cases(options, task, instruct=False)
    assert label == "inputs of about 40 tokens"
    lengths = [len(ids) for ids in script.tokenize(task, inputs)]
    assert len(lengths) == 3
    assert all(15 < length <= 40 for length in lengths)
