"""Encoders run by OpenVINO: same vectors as PyTorch, fallback to PyTorch, and no telemetry."""

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
from helpers.adapters import save_adapter
from helpers.processes import Command
from helpers.vectors import assert_close
from safetensors.torch import load_file, save_file
from transformers import BertModel, MPNetConfig, MPNetModel
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.openvino import engine, support
from llmcond.encoders.openvino.engine import OpenVinoEngine, plan_packed, relative_buckets
from llmcond.encoders.openvino.tokenizer import JsonTokenizer, can_read
from llmcond.encoders.spec import Router
from llmcond.errors import LlmcondError, UserError
from llmcond.runs import open_run

pytest.importorskip("openvino")
pytestmark = pytest.mark.processor
FLOAT32 = {"dtype": "float32", "device": "cpu"}
#: Three languages, spaces and symbols that tokenizers treat in different ways.
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


def make_inputs(texts=TEXTS):
    return [EncoderInput("", text) for text in texts]


def load_both_runtimes(folder, **options):
    """Load an encoder with OpenVINO, and the same encoder with PyTorch."""
    encoders = [
        load_encoder(str(folder), **{**FLOAT32, **options, "runtime": runtime})
        for runtime in ("openvino", "torch")
    ]
    assert isinstance(encoders[0].engine, OpenVinoEngine)
    return encoders


@pytest.fixture(scope="module")
def mpnet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mpnet")
    shutil.copytree(
        checkpoints.build_checkpoint("simcse-bert", folder / "bert").folder, folder / "model"
    )
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


# -- vectors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("kind", ["xlm-r", "simcse-roberta", "simcse-bert", "minilm", "mpnet"])
def test_vectors_match_pytorch(tmp_path, request, kind, pooling):
    options = {"pooling": pooling, "normalize": pooling != "cls"}
    if kind == "mpnet":
        folder = request.getfixturevalue("mpnet")
    else:
        folder = (
            "minilm"
            if kind == "minilm"
            else checkpoints.build_checkpoint(kind, tmp_path / "m").folder
        )
    if kind == "minilm":
        options.pop("normalize")
    encoder, reference = load_both_runtimes(folder, **options)
    assert_close(encoder.encode(make_inputs()), reference.encode(make_inputs()))


def test_pooler_pooling_matches_pytorch(tmp_path):
    folder = checkpoints.build_checkpoint("simcse-bert", tmp_path / "model").folder
    encoder, reference = load_both_runtimes(folder, pooling="pooler")
    assert_close(encoder.encode(make_inputs()), reference.encode(make_inputs()))


@pytest.mark.parametrize("activation", ["Identity", "Tanh", "ReLU", "GELU"])
def test_dense_layers_after_pooling_match_pytorch(tiny_checkpoint, tmp_path, activation):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    module_paths = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    modules = [{"path": path, "type": f"x.{kind}"} for kind, path in module_paths.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense/config.json").write_text(
        json.dumps({"activation_function": f"torch.nn.modules.activation.{activation}"})
    )
    weights = {"linear.weight": torch.randn(8, 32), "linear.bias": torch.randn(8)}
    save_file(weights, folder / "2_Dense/model.safetensors")
    encoder, reference = load_both_runtimes(folder)
    assert_close(encoder.encode(make_inputs()), reference.encode(make_inputs()))
    assert encoder.dim == 8


def test_vectors_match_pytorch_for_all_token_counts(minilm):
    reference = load_encoder("minilm", **FLOAT32, runtime="torch")
    texts = ["horse " * length for length in (1, 2, 3, 31, 32, 33, 100, 253, 254, 255, 2_000)]
    with pytest.warns(UserWarning, match="2 of 11 inputs"):
        vectors = minilm.encode(make_inputs(texts))
    with pytest.warns(UserWarning, match="2 of 11 inputs"):
        assert_close(vectors, reference.encode(make_inputs(texts)))


def test_windows_pairs_and_routers_match_pytorch():
    encoder, reference = load_both_runtimes("minilm", long_texts="windows", max_length=32)
    router = Router("the number of animals", 0.3, centre=True, standardize=True)
    plain_router = Router("the place", 1.0, centre=False, standardize=False)
    items = [
        EncoderInput("", "two dogs run after a ball " * 20),
        EncoderInput("", "the number of people", context="two women ride in the park"),
        EncoderInput("", "the number of people", context=""),
        EncoderInput("", "two dogs", router=router),
        EncoderInput("", "two dogs run after a ball " * 20, router=router),
        EncoderInput("", "two dogs", router=plain_router),
        EncoderInput("", "the place"),
    ]
    assert_close(encoder.encode(items), reference.encode(items))


@pytest.mark.parametrize("rslora", [False, True])
def test_adapter_is_merged_without_peft(tiny_checkpoint, tmp_path, rslora):
    network = BertModel.from_pretrained(tiny_checkpoint(), add_pooling_layer=False)
    targets = ["query", "dense"]
    save_adapter(
        network, tmp_path / "tuned", tiny_checkpoint(), target_modules=targets, use_rslora=rslora
    )
    encoder, reference = load_both_runtimes(tmp_path / "tuned")
    assert_close(encoder.encode(make_inputs()), reference.encode(make_inputs()))
    base_vectors = load_encoder(str(tiny_checkpoint()), **FLOAT32).encode(make_inputs())
    assert np.abs(encoder.encode(make_inputs()) - base_vectors).max() > 0.01


def test_bundled_models_match_pytorch(minilm):
    for name in ("minilm-conditions", "minilm-csts"):
        encoder, reference = load_both_runtimes(name)
        assert_close(encoder.encode(make_inputs()), reference.encode(make_inputs()))
        assert encoder.identity == reference.identity


def test_16_bit_weights_and_legacy_names_are_read(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors"
    )
    encoder, reference = load_both_runtimes(folder)
    assert_close(encoder.encode(make_inputs()), reference.encode(make_inputs()))
    (folder / "model.safetensors").unlink()
    legacy_weights = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in weights.items()
    }
    torch.save(
        {**legacy_weights, "cls.predictions.bias": torch.ones(3)}, folder / "pytorch_model.bin"
    )
    vectors = load_encoder(str(folder), **FLOAT32, runtime="openvino").encode(make_inputs())
    assert_close(vectors, load_encoder(str(tiny_checkpoint()), **FLOAT32).encode(make_inputs()))


def test_relative_position_buckets_match_transformers():
    distances = torch.arange(600) - torch.arange(600)[:, None]
    expected = MPNetEncoder.relative_position_bucket(distances, num_buckets=32)
    np.testing.assert_array_equal(relative_buckets(600, 32), expected.numpy())


def test_batches_have_similar_lengths_and_fill_all_streams():
    rng = random.Random(0)
    lengths = [rng.choice([5, 20, 30, 40, 400]) for _ in range(200)]
    for budget, streams in ((1_000, 2), (300, 1), (10**6, 2), (1, 3)):
        batches = plan_packed(lengths, budget, streams)
        assert sorted(index for batch in batches for index in batch) == list(range(200))
        for batch in batches:
            batch_lengths = [lengths[index] for index in batch]
            assert sum(batch_lengths) <= budget or len(batch_lengths) == 1
            assert min(batch_lengths) >= max(batch_lengths) / 2 - 16
    assert len(plan_packed([25] * 60, 2_000, 2)) == 2
    assert len(plan_packed([25] * 6, 2_000, 2)) == 1
    assert plan_packed([], 9, 2) == []


# -- dtypes ------------------------------------------------------------------------------------


@pytest.mark.skipif(not support.computes_bfloat16(), reason="no bfloat16 on this CPU")
def test_bfloat16_identity_differs_from_pytorch():
    encoder, reference = load_both_runtimes("minilm", dtype="bfloat16")
    assert encoder.identity.differences(reference.identity) == ["runtime: 'openvino', not 'torch'"]
    expected = load_encoder("minilm", **FLOAT32).encode(make_inputs())
    assert (encoder.encode(make_inputs()) * expected).sum(axis=1).min() > 0.9995


def test_float32_identity_equals_pytorch(minilm):
    assert minilm.identity == load_encoder("minilm", **FLOAT32, runtime="torch").identity
    assert minilm.resolved.runtime == "openvino"


# -- tokenizers --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["minilm", "xlm-r"])
def test_tokenizer_matches_transformers(tmp_path, minilm, kind):
    from transformers import AutoTokenizer

    folder = minilm.resolved.checkpoint.folder
    if kind != "minilm":
        folder = checkpoints.build_checkpoint(kind, tmp_path / "model").folder
    assert can_read(folder)
    tokenizer, reference = JsonTokenizer(folder, kind), AutoTokenizer.from_pretrained(folder)
    for name in ("unk_token_id", "sep_token_id", "pad_token_id", "eos_token_id", "unk_token"):
        assert getattr(tokenizer, name) == getattr(reference, name)
    options = {"add_special_tokens": False, "return_offsets_mapping": True}
    encoding, expected = tokenizer(TEXTS, **options), reference(TEXTS, truncation=False, **options)
    assert encoding["input_ids"] == expected["input_ids"]
    assert encoding["offset_mapping"] == expected["offset_mapping"]
    assert tokenizer(*TEXTS[:2])["input_ids"] == reference(*TEXTS[:2])["input_ids"]
    assert tokenizer.convert_ids_to_tokens([5, 6]) == reference.convert_ids_to_tokens([5, 6])
    assert tokenizer.convert_tokens_to_ids("nonsense?") == reference.convert_tokens_to_ids(
        "nonsense?"
    )


def test_tokenizer_rebuilt_by_transformers_is_left_to_transformers(minilm, tmp_path):
    folder = shutil.copytree(minilm.resolved.checkpoint.folder, tmp_path / "model")
    checkpoints.change_json(folder / "tokenizer_config.json", do_lower_case=False)
    assert not can_read(folder)
    encoder, reference = load_both_runtimes(folder)  # OpenVINO still runs the network
    assert_close(encoder.encode(make_inputs()), reference.encode(make_inputs()))


# -- what is left to PyTorch -------------------------------------------------------------------


def test_missing_openvino_falls_back_to_pytorch_with_log_line(monkeypatch, caplog):
    monkeypatch.setattr(support, "is_installed", lambda name: False)
    caplog.set_level("INFO")
    encoder = load_encoder("minilm", **FLOAT32)
    assert encoder.resolved.runtime == "torch"
    (line,) = [text for text in caplog.messages if "OpenVINO" in text]
    assert "runs in PyTorch on this CPU: OpenVINO is not installed" in line
    with pytest.raises(
        UserError, match=r"runtime is 'openvino', .* not installed .*Leave --runtime out"
    ):
        load_encoder("minilm", **FLOAT32, runtime="openvino")


def test_cpu_on_which_openvino_lacks_bfloat16_uses_pytorch(monkeypatch):
    monkeypatch.setenv("LLMCOND_CPU_FEATURES", "avx512_bf16")
    monkeypatch.setattr(support, "_supports_bfloat16", lambda: False)
    resolved = resolve("minilm", EncoderOptions(dtype="bfloat16", device="cpu"))
    assert resolved.runtime == "torch"
    assert "does not compute bfloat16 on this CPU" in resolved.openvino_obstacle


@pytest.mark.usefixtures("native_16_bit")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"router": "csr"}, "router"),
        ({"runtime": "torch"}, ""),
    ],
)
def test_unsupported_settings_use_pytorch(tiny_checkpoint, options, reason):
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
def test_unsupported_checkpoint_is_reported_with_reason(tiny_checkpoint, tmp_path, change, reason):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    resolved = resolve(str(folder), EncoderOptions(**FLOAT32))
    checkpoints.change_json(folder / "config.json", **change)
    config = json.loads((folder / "config.json").read_text())
    actual_reason = support.find_reason_against(resolved.checkpoint, resolved.identity, config)
    assert reason in str(actual_reason)


def test_config_without_size_is_reported_before_download(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    resolved = resolve(str(folder), EncoderOptions(**FLOAT32))
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    assert support.find_reason_against(resolved.checkpoint, resolved.identity, config) is None
    del config["hidden_size"]
    reason = support.find_reason_against(resolved.checkpoint, resolved.identity, config)
    assert "lacks a size ('hidden_size')" in str(reason)


def test_damaged_weights_raise_same_error_as_pytorch(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(LlmcondError, match=r"weights of .* cannot be loaded"):
        load_encoder(str(folder), **FLOAT32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_shortage_falls_back_to_pytorch_or_raises_error(tiny_checkpoint, monkeypatch, dtype):
    resolved = resolve(str(tiny_checkpoint()), EncoderOptions(dtype=dtype, device="cpu"))
    monkeypatch.setattr("llmcond.encoders.openvino.engine.free_memory", lambda: 0)
    if resolved.identity.runtime == "torch":
        encoder = load_encoder(str(tiny_checkpoint()), dtype=dtype, device="cpu")
        assert not isinstance(encoder.engine, OpenVinoEngine)
    else:  # PyTorch would compute different vectors
        with pytest.raises(LlmcondError, match=r"cannot be run by OpenVINO.*--runtime torch"):
            load_encoder(str(tiny_checkpoint()), dtype=dtype, device="cpu")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of other CPUs")
def test_cpu_unsupported_by_openvino_uses_pytorch(tmp_path, write_rows, small_rows):
    """On a CPU without AVX, the network compiles but cannot run."""
    run, data = tmp_path / "run", write_rows(small_rows[:24])
    command = ("extract", "--data", data, "--run", run, "--model", "minilm", "--device", "cpu")
    old_cpu = {"ONEDNN_MAX_CPU_ISA": "SSE41"}
    status, _, messages = Command(tmp_path, [*command, "--dtype", "float32"], old_cpu).finish()
    assert status == 0, messages
    assert "runs in PyTorch on this CPU: OpenVINO cannot run it" in messages
    assert open_run(run).identity.runtime == "torch"
    assert len(open_run(run).store()) > 24


def test_too_little_memory_halves_the_batch(minilm, monkeypatch):
    items = make_inputs([f"two dogs {number}" for number in range(10)])
    expected, finish, sizes = minilm.encode(items), engine._RunningBatch.finish, []

    def finish_or_fail(running_batch):
        sizes.append(len(running_batch.batch))
        states = finish(running_batch)
        if len(running_batch.batch) > max_size:
            raise RuntimeError("Cannot allocate memory")
        return states

    monkeypatch.setattr(engine._RunningBatch, "finish", finish_or_fail)
    max_size = 2
    np.testing.assert_array_equal(minilm.encode(items), expected)
    assert max(sizes) > 2
    max_size = 0
    with pytest.raises(LlmcondError, match="out of memory with a single input"):
        minilm.encode(items)


def test_interrupted_run_leaves_nothing_running(minilm, monkeypatch):
    monkeypatch.setattr(minilm.engine, "budget", 64)
    tokens = minilm._tokenizer(make_inputs(["horse " * length for length in range(1, 40)]))

    def interrupt():
        if next(calls) == 7:
            raise KeyboardInterrupt

    calls = count()
    with pytest.raises(KeyboardInterrupt):
        list(minilm.engine.run(tokens, interrupt))
    assert_close(
        minilm.encode(make_inputs()), load_encoder("minilm", **FLOAT32).encode(make_inputs())
    )


# -- telemetry ---------------------------------------------------------------------------------

SPY = """
import sys

def forbid(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise SystemExit(f"telemetry: {event} {arguments}")

sys.addaudithook(forbid)
import threading
before = set(threading.enumerate())
from llmcond.encoders.openvino.architectures import import_openvino
openvino = import_openvino()
started = [thread for thread in threading.enumerate() if thread not in before]
print([name for name in sys.modules if name.startswith("openvino_telemetry")], started)
openvino.Core()
import openvino_telemetry  # it is installed, but OpenVINO did not import it
"""


def test_importing_openvino_sends_nothing(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path), "CI": ""}
    result = subprocess.run(
        [sys.executable, "-c", SPY], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout.strip() == "[] []"
    assert not list(tmp_path.rglob("*"))  # no user identifier is stored either
