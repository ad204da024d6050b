"""Encoders run by OpenVINO: same vectors as PyTorch, fallback to PyTorch, and no telemetry."""

import json
import os
import platform
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.adapters import save_adapter
from helpers.processes import Command
from helpers.vectors import assert_close
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertModel

import llmcond
from llmcond.base.errors import LlmcondError, UserError
from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.openvino import engine, support
from llmcond.encoders.openvino.engine import OpenVinoEngine, plan_packed, read_tokenizer
from llmcond.encoders.spec import Router
from llmcond.runs import open_run

pytest.importorskip("openvino")
pytestmark = pytest.mark.processor
in_bfloat16 = pytest.mark.skipif(not support.computes_bfloat16(), reason="no bfloat16 on this CPU")
FLOAT32 = {"dtype": "float32", "device": "cpu"}
#: Three languages, spaces and symbols that tokenizers treat in different ways.
TEXTS = [
    "two dogs",
    "Ein Mädchen fährt mit dem Fahrrad über die Brücke.",
    "两个女人在海滩上看书。",
    "naïve café — “quotes” [SEP] [MASK] </s> <mask>",
    "  spaces\tand\nlines  ",
    "🐎 12,345.67 e-mail@example.org",
    "the man " * 30,
]
INPUTS = [EncoderInput("", text) for text in TEXTS]


def check_runtimes(folder, items=INPUTS, **options):
    """Check that OpenVINO computes the vectors of PyTorch; return both encoders."""
    encoder, reference = (
        load_encoder(str(folder), **{**FLOAT32, **options, "runtime": runtime})
        for runtime in ("openvino", "torch")
    )
    assert isinstance(encoder.engine, OpenVinoEngine)
    assert_close(encoder.encode(items), reference.encode(items))
    return encoder, reference


@pytest.fixture
def bert(tiny_checkpoint):
    """A folder with a small BERT, which a test may change."""
    return tiny_checkpoint()


# -- vectors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "pooling", "normalize"),
    [
        ("xlm-r", "mean", True),
        ("simcse-roberta", "cls", False),
        ("simcse-bert", "pooler", True),
        ("mpnet", "mean", True),
        ("gemma", "mean", True),
    ],
)
def test_vectors_match_pytorch(tmp_path, kind, pooling, normalize):
    folder = checkpoints.build_checkpoint(kind, tmp_path / "model").folder
    items = [EncoderInput("", "man " * n) for n in (1, 31, 32, 33, 200)]
    check_runtimes(folder, [*INPUTS, *items], pooling=pooling, normalize=normalize)


@pytest.mark.parametrize("activation", ["Tanh", "ReLU", "GELU"])
def test_dense_layers_after_pooling_match_pytorch(bert, activation):
    checkpoints.write_modules(bert, "Dense")
    weights = {"linear.weight": torch.randn(8, 32), "linear.bias": torch.randn(8)}
    checkpoints.write_dense(bert / "2_Dense", weights, f"activation.{activation}")
    assert check_runtimes(bert)[0].dim == 8


def test_windows_pairs_and_routers_match_pytorch():
    router = Router("the number of animals", 0.3, centre=True, standardize=True)
    plain_router = Router("the place", 1.0, centre=False, standardize=False)
    long = "two dogs run after a ball " * 20
    items = [
        EncoderInput("", long),
        EncoderInput("", "the number of people", context="two women ride in the park"),
        EncoderInput("", "the number of people", context=""),
        EncoderInput("", "two dogs", router=router),
        EncoderInput("", long, router=router),
        EncoderInput("", "two dogs", router=plain_router),
        EncoderInput("", "the place"),
    ]
    check_runtimes("minilm", items, long_texts="windows", max_length=32)


def test_types_of_paired_texts_match_pytorch(bert):
    path = bert / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    special = {"[CLS]": 0, "[SEP]": 0}, {"[SEP]": 1}  # as in published checkpoints of BERT
    parts = [[{"SpecialToken": {"id": t, "type_id": i}} for t, i in s.items()] for s in special]
    texts = [{"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB")]
    (first, separator), last = parts
    tokenizer["post_processor"]["pair"] = [first, texts[0], separator, texts[1], *last]
    path.write_text(json.dumps(tokenizer))
    items = [EncoderInput("", text, context="the number of people") for text in TEXTS[:2]]
    encoder, _ = check_runtimes(bert, items)
    untyped = [EncoderInput("", item.text) for item in items]
    assert np.abs(encoder.encode(items) - encoder.encode(untyped)).max() > 0.01


def test_adapters_and_bundled_models_match_pytorch(bert, tmp_path):
    network = BertModel.from_pretrained(bert, add_pooling_layer=False)
    targets = {"target_modules": ["query", "dense"], "use_rslora": True}
    save_adapter(network, tmp_path / "tuned", bert, **targets)
    encoder, _ = check_runtimes(tmp_path / "tuned")
    base_vectors = load_encoder(str(bert), **FLOAT32).encode(INPUTS)
    assert np.abs(encoder.encode(INPUTS) - base_vectors).max() > 0.01
    encoder, reference = check_runtimes("minilm-csts")
    assert encoder.identity == reference.identity


def test_16_bit_weights_and_legacy_names_are_read(bert):
    path, expected = bert / "model.safetensors", load_encoder(str(bert), **FLOAT32).encode(INPUTS)
    weights = load_file(path)
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, path)
    check_runtimes(bert)
    path.unlink()
    legacy_weights = {"cls.predictions.bias": torch.ones(3)}
    for name, tensor in weights.items():
        legacy_name = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
        legacy_weights[f"bert.{legacy_name}"] = tensor
    torch.save(legacy_weights, bert / "pytorch_model.bin")
    encoder = load_encoder(str(bert), **FLOAT32, runtime="openvino")
    assert_close(encoder.encode(INPUTS), expected)


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


def test_too_little_memory_halves_the_batch(minilm, monkeypatch):
    items = [EncoderInput("", f"two dogs {number}") for number in range(10)]
    expected, idle, sizes = minilm.encode(items), OpenVinoEngine._idle_requests, []

    class LimitedRequest:
        def __init__(self, request):
            self.request, self.get_output_tensor = request, request.get_output_tensor

        def start_async(self, inputs, **options):
            self.size = len(inputs[-1])  # the rows of the mask
            self.request.start_async(inputs, **options)

        def wait(self):
            self.request.wait()
            sizes.append(self.size)
            if self.size > max_size:
                raise RuntimeError("Cannot allocate memory")

    monkeypatch.setattr(
        OpenVinoEngine, "_idle_requests", lambda self: [LimitedRequest(r) for r in idle(self)]
    )
    max_size = 2
    np.testing.assert_array_equal(minilm.encode(items), expected)
    assert max(sizes) > 2
    max_size = 0
    with pytest.raises(LlmcondError, match="out of memory with a single input"):
        minilm.encode(items)


# -- tokenizers --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["minilm", "xlm-r", "gemma"])
def test_tokenizer_matches_transformers(tmp_path, minilm, kind):
    folder = minilm.resolved.checkpoint.folder
    if kind != "minilm":
        folder = checkpoints.build_checkpoint(kind, tmp_path / "model").folder
    tokenizer, reference = read_tokenizer(folder, kind), AutoTokenizer.from_pretrained(folder)
    for name in ("unk_token_id", "sep_token_id", "pad_token_id", "eos_token_id", "unk_token"):
        assert getattr(tokenizer, name) == getattr(reference, name)
    options = {"add_special_tokens": False, "return_offsets_mapping": True}
    encoding, expected = tokenizer(TEXTS, **options), reference(TEXTS, truncation=False, **options)
    for key in ("input_ids", "offset_mapping"):
        assert encoding[key] == expected[key]
    assert tokenizer(*TEXTS[:2])["input_ids"] == reference(*TEXTS[:2])["input_ids"]
    for method, argument in (("convert_ids_to_tokens", [5, 6]), ("convert_tokens_to_ids", "no?")):
        assert getattr(tokenizer, method)(argument) == getattr(reference, method)(argument)


def test_tokenizer_rebuilt_by_transformers_is_left_to_transformers(minilm, tmp_path):
    folder = shutil.copytree(minilm.resolved.checkpoint.folder, tmp_path / "model")
    checkpoints.change_json(folder / "tokenizer_config.json", do_lower_case=False)
    assert read_tokenizer(folder, "minilm") is None
    check_runtimes(folder)  # OpenVINO still runs the network
    folder = checkpoints.build_checkpoint("gemma", tmp_path / "gemma").folder
    checkpoints.change_json(folder / "tokenizer_config.json", add_eos_token=False)
    assert read_tokenizer(folder, "gemma") is None


# -- what is left to PyTorch -------------------------------------------------------------------


def test_missing_openvino_falls_back_to_pytorch_with_log_line(monkeypatch, caplog):
    monkeypatch.setattr(support, "is_installed", lambda name: False)
    caplog.set_level("INFO")
    assert load_encoder("minilm", **FLOAT32).resolved.runtime == "torch"
    (line,) = [text for text in caplog.messages if "OpenVINO" in text]
    assert "runs in PyTorch on this CPU: OpenVINO is not installed" in line
    message = r"runtime is 'openvino', .* not installed .*Leave --runtime out"
    with pytest.raises(UserError, match=message):
        load_encoder("minilm", **FLOAT32, runtime="openvino")


@pytest.mark.usefixtures("native_16_bit")
def test_unsupported_settings_and_checkpoints_use_pytorch(bert, monkeypatch):
    monkeypatch.setattr(support, "_supports_bfloat16", lambda: False)
    for options, reason in (
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "does not compute bfloat16 on this CPU"),
        ({"router": "csr"}, "router"),
    ):
        resolved = resolve(str(bert), EncoderOptions(**{**FLOAT32, **options}))
        assert resolved.runtime == "torch"
        assert reason in resolved.openvino_obstacle
    resolved = resolve(str(bert), EncoderOptions(**FLOAT32))
    config = json.loads((bert / "config.json").read_text())

    def find_reason(**changes):
        changed = {**config, **changes}
        return support.find_reason_against(resolved.checkpoint, resolved.identity, changed)

    for changes, reason in (
        ({"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"intermediate_size": 48}, "its weights differ from its config in the tensor"),
        ({"num_hidden_layers": 1}, "in the tensor encoder.layer.1"),
        ({"num_hidden_layers": 3}, "in the tensor encoder.layer.2"),
        ({"model_type": ["bert"]}, "architecture"),
    ):
        assert reason in find_reason(**changes)
    roberta = {"model_type": "roberta", "type_vocab_size": 1}
    assert find_reason(**roberta, pad_token_id=0) == "its config.json has pad_token_id = 0"
    # The config is checked before the weights are downloaded.
    (bert / "model.safetensors").unlink()
    assert find_reason() is None
    assert "lacks a size" in find_reason(hidden_size=None)


def test_gemma_with_other_settings_uses_pytorch(tmp_path):
    folder = checkpoints.build_checkpoint("gemma", tmp_path / "model").folder
    resolved = resolve(str(folder), EncoderOptions(**FLOAT32))
    assert resolved.runtime == "openvino"
    config = json.loads((folder / "config.json").read_text())
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    for changes, reason in (
        ({"rope_parameters": {**config["rope_parameters"], "full_attention": scaled}}, "scaled"),
        ({"rope_parameters": None, "rope_theta": 1e6}, "rope_local_base_freq"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"layer_types": ["full_attention"]}, "1 types"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked"),
    ):
        obstacle = support.find_reason_against(
            resolved.checkpoint, resolved.identity, {**config, **changes}
        )
        assert reason in obstacle


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_shortage_falls_back_to_pytorch_or_raises_error(bert, monkeypatch, dtype):
    runtime = resolve(str(bert), EncoderOptions(dtype=dtype, device="cpu")).identity.runtime
    monkeypatch.setattr(engine, "free_memory", lambda: 0)
    if runtime == "torch":
        encoder = load_encoder(str(bert), dtype=dtype, device="cpu")
        assert not isinstance(encoder.engine, OpenVinoEngine)
    else:  # PyTorch would compute different vectors
        with pytest.raises(LlmcondError, match=r"cannot be run by OpenVINO.*--runtime torch"):
            load_encoder(str(bert), dtype=dtype, device="cpu")


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


# -- the runtime of a run ------------------------------------------------------------------------


@pytest.fixture
def extract(tmp_path, bert, write_rows, small_rows):
    """Function that extracts a few rows into a run with a runtime and a dtype."""
    options = {"model": str(bert), "data": str(write_rows(small_rows)), "device": "cpu"}

    def extract_run(runtime, dtype, prompt="concat-cond-sent"):
        folder = tmp_path / "run"
        llmcond.extract(**options, runtime=runtime, dtype=dtype, prompt=[prompt], run=folder)
        return open_run(folder)

    return extract_run


def encode_with_run(run):
    """Return a vector of the run's encoder, and its runtime."""
    options = {"head": "none", "device": "cpu", "prompt": "concat-cond-sent"}
    embedder = llmcond.load_embedder(run.folder, **options)
    vectors = embedder.encode(["two men play in the park"], "the place")
    return vectors, embedder.encoder.resolved.runtime


@in_bfloat16
def test_16_bit_run_keeps_its_runtime(extract):
    run = extract("torch", "bfloat16")
    assert run.manifest["encoder"]["identity"]["runtime"] == "torch"
    assert encode_with_run(run)[1] == "torch"
    assert len(extract("auto", "bfloat16", "concat-sent-cond").prompts()) == 2
    with pytest.raises(UserError, match="runtime: 'openvino', not 'torch'"):
        extract("openvino", "bfloat16", "routed")


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=in_bfloat16), "float32"])
def test_run_is_usable_without_openvino(extract, monkeypatch, caplog, dtype):
    run = extract("auto", dtype)
    expected, runtime = encode_with_run(run)
    assert runtime == "openvino"
    monkeypatch.setattr(support, "is_installed", lambda name: False)
    caplog.set_level("INFO")
    vectors, runtime = encode_with_run(run)
    assert runtime == "torch"
    np.testing.assert_allclose(vectors, expected, atol=1e-5 if dtype == "float32" else 0.1)
    if dtype == "bfloat16":
        assert any("differ by rounding" in line for line in caplog.messages)
        with pytest.raises(UserError, match=r"runtime is 'openvino'.*OpenVINO is not installed"):
            extract("auto", dtype, "concat-sent-cond")


# -- the process -------------------------------------------------------------------------------

SIGNAL = """
import gc, signal, llmcond

signal.signal(signal.SIGTERM, lambda *_: print("handled"))
models = [llmcond.load_embedder(name) for name in ("minilm-csts", "minilm-conditions")]
while models:  # the one that was loaded first is deleted first
    del models[0]
    gc.collect()
signal.raise_signal(signal.SIGTERM)
"""


def test_signals_are_handled_after_several_models_are_deleted():
    result = subprocess.run(
        [sys.executable, "-c", SIGNAL], capture_output=True, text=True, check=True
    )
    assert result.stdout == "handled\n"


# -- telemetry ---------------------------------------------------------------------------------

SPY = """
import sys

def forbid(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise SystemExit(f"telemetry: {event} {arguments}")

sys.addaudithook(forbid)
import threading
before = set(threading.enumerate())
from llmcond.encoders.spec import import_openvino
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
