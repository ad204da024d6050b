"""Encoders by OpenVINO: the vectors of PyTorch, no telemetry, and PyTorch where it cannot run."""

import json
import os
import platform
import random
import shutil
import subprocess
import sys
from itertools import count

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.adapters import tune
from helpers.vectors import near
from safetensors.torch import load_file, save_file
from transformers import BertModel, MPNetConfig, MPNetModel
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.openvino import engine, library, support
from llmcond.encoders.openvino.engine import OpenVinoEngine, plan_packed
from llmcond.encoders.openvino.graph import relative_buckets
from llmcond.encoders.openvino.tokenizer import JsonTokenizer, can_read
from llmcond.encoders.spec import Router
from llmcond.errors import LlmcondError, UserError

pytest.importorskip("openvino")
FLOAT32 = {"dtype": "float32", "device": "cpu"}
#: Three languages, spaces and signs that tokenizers treat in ways of their own.
TEXTS = [
    "A man rides a horse.",
    "two dogs",
    "Ein Mädchen fährt mit dem Fahrrad über die Brücke.",
    "两个女人在海滩上看书。",
    "naïve café — “quotes” [SEP] [MASK] </s> <mask>",
    "  spaces\tand\nlines  ",
    "x",
    "🐎 12,345.67 e-mail@example.org",
    "the man " * 30,
]


def inputs(texts=TEXTS):
    return [EncoderInput("", text) for text in texts]


def both(folder, **options):
    """Return an encoder by OpenVINO, and the same one by PyTorch."""
    made = [
        load_encoder(str(folder), **{**FLOAT32, **options, "runtime": runtime})
        for runtime in ("openvino", "torch")
    ]
    assert isinstance(made[0].engine, OpenVinoEngine)
    return made


@pytest.fixture(scope="module")
def mpnet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mpnet")
    shutil.copytree(checkpoints.make("simcse-bert", folder / "bert").folder, folder / "model")
    for name in ("pytorch_model.bin", "config.json"):
        (folder / "model" / name).unlink()
    torch.manual_seed(0)
    config = MPNetConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=520,
    )
    model = MPNetModel(config)
    for value in model.parameters():
        value.data.normal_(0, 0.3)
    model.save_pretrained(folder / "model")
    return folder / "model"


# -- the vectors of PyTorch --------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("kind", ["xlm-r", "simcse-roberta", "simcse-bert", "minilm", "mpnet"])
def test_vectors_are_those_of_pytorch(tmp_path, request, kind, pooling):
    options = {"pooling": pooling, "normalize": pooling != "cls"}
    if kind == "mpnet":
        folder = request.getfixturevalue("mpnet")
    else:
        folder = "minilm" if kind == "minilm" else checkpoints.make(kind, tmp_path / "m").folder
    if kind == "minilm":
        options.pop("normalize")
    fast, peer = both(folder, **options)
    near(fast.encode(inputs()), peer.encode(inputs()))


def test_dense_layer_on_the_first_token_is_used(tmp_path):
    folder = checkpoints.make("simcse-bert", tmp_path / "model").folder
    fast, peer = both(folder, pooling="pooler")
    near(fast.encode(inputs()), peer.encode(inputs()))


@pytest.mark.parametrize("activation", ["Identity", "Tanh", "ReLU", "GELU"])
def test_layers_behind_the_pooling_are_used(tiny_checkpoint, tmp_path, activation):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    modules = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    listed = [{"path": path, "type": f"x.{kind}"} for kind, path in modules.items()]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense/config.json").write_text(
        json.dumps({"activation_function": f"torch.nn.modules.activation.{activation}"})
    )
    weights = {"linear.weight": torch.randn(8, 32), "linear.bias": torch.randn(8)}
    save_file(weights, folder / "2_Dense/model.safetensors")
    fast, peer = both(folder)
    near(fast.encode(inputs()), peer.encode(inputs()))
    assert fast.dim == 8


def test_token_counts_from_one_to_the_longest(minilm):
    peer = load_encoder("minilm", **FLOAT32, runtime="torch")
    texts = ["horse " * length for length in (1, 2, 3, 31, 32, 33, 100, 253, 254, 255, 2_000)]
    with pytest.warns(UserWarning, match="2 of 11 inputs"):
        found = minilm.encode(inputs(texts))
    with pytest.warns(UserWarning, match="2 of 11 inputs"):
        near(found, peer.encode(inputs(texts)))


def test_windows_pairs_and_routers_are_those_of_pytorch():
    fast, peer = both("minilm", long_texts="windows", max_length=32)
    router = Router("the number of animals", 0.3, centre=True, standardize=True)
    plain = Router("the place", 1.0, centre=False, standardize=False)
    items = [
        EncoderInput("", "two dogs run after a ball " * 20),
        EncoderInput("", "the number of people", context="two women ride in the park"),
        EncoderInput("", "the number of people", context=""),
        EncoderInput("", "two dogs", router=router),
        EncoderInput("", "two dogs run after a ball " * 20, router=router),
        EncoderInput("", "two dogs", router=plain),
        EncoderInput("", "the place"),
    ]
    near(fast.encode(items), peer.encode(items))


@pytest.mark.parametrize("rslora", [False, True])
def test_adapter_is_added_by_arithmetic(tiny_checkpoint, tmp_path, rslora):
    network = BertModel.from_pretrained(tiny_checkpoint(), add_pooling_layer=False)
    targets = ["query", "dense"]
    tune(network, tmp_path / "tuned", tiny_checkpoint(), target_modules=targets, use_rslora=rslora)
    fast, peer = both(tmp_path / "tuned")
    near(fast.encode(inputs()), peer.encode(inputs()))
    plain = load_encoder(str(tiny_checkpoint()), **FLOAT32).encode(inputs())
    assert np.abs(fast.encode(inputs()) - plain).max() > 0.01


def test_bundled_models_need_no_pytorch(minilm):
    for name in ("minilm-conditions", "minilm-csts"):
        fast, peer = both(name)
        near(fast.encode(inputs()), peer.encode(inputs()))
        assert fast.identity == peer.identity


def test_weights_in_16_bit_and_of_older_names_are_read(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file({k: v.bfloat16() for k, v in weights.items()}, folder / "model.safetensors")
    fast, peer = both(folder)
    near(fast.encode(inputs()), peer.encode(inputs()))
    (folder / "model.safetensors").unlink()
    old = {
        f"bert.{k}".replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): v
        for k, v in weights.items()
    }
    torch.save({**old, "cls.predictions.bias": torch.ones(3)}, folder / "pytorch_model.bin")
    found = load_encoder(str(folder), **FLOAT32, runtime="openvino").encode(inputs())
    near(found, load_encoder(str(tiny_checkpoint()), **FLOAT32).encode(inputs()))


def test_buckets_of_distances_are_those_of_transformers():
    distance = torch.arange(600) - torch.arange(600)[:, None]
    expected = MPNetEncoder.relative_position_bucket(distance, num_buckets=32)
    np.testing.assert_array_equal(relative_buckets(600, 32), expected.numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_vector_depends_on_its_input_alone(dtype):
    items = inputs([f"{text} {number}" for text in TEXTS[:6] for number in range(60)])
    encoder = load_encoder("minilm", dtype=dtype, device="cpu")
    found = encoder.encode_counted(items).vectors
    np.testing.assert_array_equal(encoder.encode_counted(items, threads=True).vectors, found)
    encoder.engine.budget = 100
    np.testing.assert_array_equal(encoder.encode(items[::-1])[::-1], found)
    alone = np.concatenate([encoder.encode([item]) for item in items[::7]])
    np.testing.assert_array_equal(alone, found[::7])


def test_batches_are_of_like_lengths_and_shared_among_streams():
    chance = random.Random(0)
    lengths = [chance.choice([5, 20, 30, 40, 400]) for _ in range(200)]
    for budget, streams in ((1_000, 2), (300, 1), (10**6, 2), (1, 3)):
        batches = plan_packed(lengths, budget, streams)
        assert sorted(index for batch in batches for index in batch) == list(range(200))
        for batch in batches:
            own = [lengths[index] for index in batch]
            assert sum(own) <= budget or len(own) == 1
            assert min(own) >= max(own) / 2 - 16
    assert len(plan_packed([25] * 60, 2_000, 2)) == 2
    assert len(plan_packed([25] * 6, 2_000, 2)) == 1
    assert plan_packed([], 9, 2) == []


# -- number types ------------------------------------------------------------------------------


@pytest.mark.skipif(not library.computes_bfloat16(), reason="no bfloat16 on this CPU")
def test_bfloat16_is_another_identity_than_that_of_pytorch():
    fast, peer = both("minilm", dtype="bfloat16")
    assert fast.identity.differences(peer.identity) == ["runtime: 'openvino', not 'torch'"]
    assert "runtime" not in peer.identity.to_json()
    exact = load_encoder("minilm", **FLOAT32).encode(inputs())
    assert (fast.encode(inputs()) * exact).sum(axis=1).min() > 0.9995


def test_float32_is_the_identity_of_pytorch(minilm):
    assert minilm.identity == load_encoder("minilm", **FLOAT32, runtime="torch").identity
    assert minilm.resolved.runtime == "openvino"


# -- tokenizers --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["minilm", "xlm-r"])
def test_tokenizer_reads_what_transformers_reads(tmp_path, minilm, kind):
    from transformers import AutoTokenizer

    folder = minilm.resolved.checkpoint.folder
    if kind != "minilm":
        folder = checkpoints.make(kind, tmp_path / "model").folder
    assert can_read(folder)
    own, theirs = JsonTokenizer(folder, kind), AutoTokenizer.from_pretrained(folder)
    for name in ("unk_token_id", "sep_token_id", "pad_token_id", "eos_token_id", "unk_token"):
        assert getattr(own, name) == getattr(theirs, name)
    options = {"add_special_tokens": False, "return_offsets_mapping": True}
    found, expected = own(TEXTS, **options), theirs(TEXTS, truncation=False, **options)
    assert found["input_ids"] == expected["input_ids"]
    assert found["offset_mapping"] == expected["offset_mapping"]
    assert own(*TEXTS[:2])["input_ids"] == theirs(*TEXTS[:2])["input_ids"]
    assert own.convert_ids_to_tokens([5, 6]) == theirs.convert_ids_to_tokens([5, 6])
    assert own.convert_tokens_to_ids("nonsense?") == theirs.convert_tokens_to_ids("nonsense?")


def test_tokenizer_that_transformers_builds_anew_is_left_to_it(minilm, tmp_path):
    folder = shutil.copytree(minilm.resolved.checkpoint.folder, tmp_path / "model")
    checkpoints.change_json(folder / "tokenizer_config.json", do_lower_case=False)
    assert not can_read(folder)
    fast, peer = both(folder)  # it is run by OpenVINO all the same
    near(fast.encode(inputs()), peer.encode(inputs()))


# -- what OpenVINO does not run ----------------------------------------------------------------


def test_without_openvino_pytorch_computes_and_one_line_says_so(monkeypatch, caplog):
    monkeypatch.setattr(library, "is_installed", lambda: False)
    caplog.set_level("INFO")
    encoder = load_encoder("minilm", **FLOAT32)
    assert encoder.resolved.runtime == "torch"
    (line,) = [text for text in caplog.messages if "OpenVINO" in text]
    assert "runs in PyTorch on this CPU: OpenVINO is not installed" in line
    with pytest.raises(
        UserError, match=r"runtime is 'openvino', .* not installed .*Leave --runtime out"
    ):
        load_encoder("minilm", **FLOAT32, runtime="openvino")


def test_cpu_without_bfloat16_computes_it_by_pytorch(monkeypatch):
    monkeypatch.setattr(library, "computes_bfloat16", lambda: False)
    resolved = resolve("minilm", EncoderOptions(dtype="bfloat16", device="cpu"))
    assert resolved.runtime == "torch"
    assert "does not compute bfloat16 on this CPU" in resolved.openvino_obstacle


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"router": "csr"}, "router"),
        ({"runtime": "torch"}, ""),
    ],
)
def test_settings_that_are_left_to_pytorch(tiny_checkpoint, options, reason):
    resolved = resolve(str(tiny_checkpoint()), EncoderOptions(**{**FLOAT32, **options}))
    assert resolved.runtime == "torch"
    assert reason in resolved.openvino_obstacle


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"intermediate_size": 48}, "another shape"),
        ({"intermediate_size": None}, "lacks a size"),
        ({"num_attention_heads": 0}, "0 heads"),
        ({"num_hidden_layers": 1}, "have the tensor encoder.layer.1"),
        ({"num_hidden_layers": 3}, "lack the tensor encoder.layer.2"),
        ({"model_type": ["bert"]}, "architecture"),
    ],
)
def test_reasons_against_a_checkpoint(tiny_checkpoint, tmp_path, change, reason):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    identity = resolve(str(folder), EncoderOptions(**FLOAT32))
    checkpoints.change_json(folder / "config.json", **change)
    config = json.loads((folder / "config.json").read_text())
    found = support.find_reason_against(identity.checkpoint, identity.identity, config)
    assert reason in str(found)


def test_config_without_a_size_is_told_before_weights_are_there(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    resolved = resolve(str(folder), EncoderOptions(**FLOAT32))
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    assert support.find_reason_against(resolved.checkpoint, resolved.identity, config) is None
    del config["hidden_size"]
    found = support.find_reason_against(resolved.checkpoint, resolved.identity, config)
    assert "lacks a size ('hidden_size')" in str(found)


def test_broken_weights_are_told_as_pytorch_tells_them(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(LlmcondError, match=r"weights of .* cannot be loaded"):
        load_encoder(str(folder), **FLOAT32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_turns_out_late_is_told(tiny_checkpoint, monkeypatch, dtype):
    resolved = resolve(str(tiny_checkpoint()), EncoderOptions(dtype=dtype, device="cpu"))
    monkeypatch.setattr("llmcond.encoders.openvino.engine.free_memory", lambda: 0)
    if resolved.identity.runtime == "torch":
        load = load_encoder(str(tiny_checkpoint()), dtype=dtype, device="cpu")
        assert not isinstance(load.engine, OpenVinoEngine)
    else:  # the vectors of PyTorch would be others
        with pytest.raises(LlmcondError, match=r"cannot be run by OpenVINO.*--runtime torch"):
            load_encoder(str(tiny_checkpoint()), dtype=dtype, device="cpu")


OLD_CPU = """
import logging
import llmcond
logging.basicConfig(level="INFO")
encoder = llmcond.load_encoder("minilm", dtype="float32", device="cpu")
print(encoder.engine.__class__.__module__, encoder.encode(["a dog"]).shape)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of other CPUs")
def test_cpu_that_openvino_fails_on_is_left_to_pytorch():
    """As one without AVX is: there the network compiles, and cannot be run."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "SSE41"}
    done = subprocess.run(
        [sys.executable, "-c", OLD_CPU], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "llmcond.encoders.engine.engine (1, 384)"
    assert "runs in PyTorch on this CPU: OpenVINO cannot run it" in done.stderr


def test_too_little_memory_halves_the_batch(minilm, monkeypatch):
    items = inputs([f"two dogs {number}" for number in range(10)])
    expected, finish, sizes = minilm.encode(items), engine._RunningBatch.finish, []

    def short(begun):
        sizes.append(len(begun.batch))
        states = finish(begun)
        if len(begun.batch) > most:
            raise RuntimeError("Cannot allocate memory")
        return states

    monkeypatch.setattr(engine._RunningBatch, "finish", short)
    most = 2
    np.testing.assert_array_equal(minilm.encode(items), expected)
    assert max(sizes) > 2
    most = 0
    with pytest.raises(LlmcondError, match="out of memory with a single input"):
        minilm.encode(items)


def test_work_that_is_given_up_leaves_nothing_running(minilm, monkeypatch):
    monkeypatch.setattr(minilm.engine, "budget", 64)
    tokens = minilm._tokenizer(inputs(["horse " * length for length in range(1, 40)]))

    def stop():
        if next(calls) == 7:
            raise KeyboardInterrupt

    calls = count()
    with pytest.raises(KeyboardInterrupt):
        list(minilm.engine.run(tokens, stop))
    near(minilm.encode(inputs()), load_encoder("minilm", **FLOAT32).encode(inputs()))


# -- telemetry ---------------------------------------------------------------------------------

SPY = """
import sys

def forbid(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise SystemExit(f"telemetry: {event} {arguments}")

sys.addaudithook(forbid)
import threading
before = set(threading.enumerate())
from llmcond.encoders.openvino.library import import_openvino
openvino = import_openvino()
started = [thread for thread in threading.enumerate() if thread not in before]
print([name for name in sys.modules if name.startswith("openvino_telemetry")], started)
openvino.Core()
import openvino_telemetry  # it is there, and stays out of the way
"""


def test_importing_openvino_sends_nothing(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path), "CI": ""}
    done = subprocess.run(
        [sys.executable, "-c", SPY], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "[] []"
    assert not list(tmp_path.rglob("*"))  # nor is an identifier of the user made up and kept
