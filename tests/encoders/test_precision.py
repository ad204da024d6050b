"""The type that encoders compute in: never an emulated one, and always that of the identity."""

import numpy as np
import pytest
import torch
from helpers import checkpoints

import llmcond
from llmcond.base.errors import LlmcondError, UserError
from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder, load_encoder
from llmcond.encoders.openvino import support
from llmcond.encoders.resolve import _log_emulated
from llmcond.runs.open import open_run

pytestmark = pytest.mark.processor
#: The features of four processors: one of 2015, one with AVX-512 but without 16 bit, a server's,
#: and one of ARM.
AVX2, AVX512 = "sse4_2 avx avx2 fma f16c", "avx2 avx512f avx512_vnni"
SERVER, ARM = "avx2,avx512f,avx512_bf16,amx_bf16", "fp asimd fphp asimdhp bf16"
TEXTS = ["A man rides a horse.", "two dogs", "Ein Mädchen fährt Rad.", "x", "the man " * 30]


@pytest.fixture
def gemma(tmp_path):
    return str(checkpoints.build_checkpoint("gemma", tmp_path / "gemma").folder)


@pytest.mark.parametrize(
    ("features", "dtype", "expected"),
    [
        (AVX2, "auto", "float32"),
        (AVX2, "float16", "float32"),
        (AVX512, "bfloat16", "float32"),
        (SERVER, "auto", "bfloat16"),
        (SERVER, "bfloat16", "bfloat16"),
        ("avx512_fp16", "float16", "float16"),
        ("avx512_fp16", "auto", "float32"),
        (ARM, "float16", "float16"),
    ],
)
def test_cpu_computes_in_native_type(monkeypatch, caplog, features, dtype, expected):
    monkeypatch.setenv("LLMCOND_CPU_FEATURES", features)
    _log_emulated.cache_clear()
    caplog.set_level("INFO")
    for quantize in ("none", "4bit", "8bit"):
        options = EncoderOptions(dtype=dtype, device="cpu", quantize=quantize)
        assert resolve("minilm", options).identity.dtype == expected
    reported = [line for line in caplog.messages if "this CPU has no instructions for" in line]
    assert len(reported) == (dtype not in ("auto", expected))


@pytest.mark.parametrize(
    ("capability", "dtype", "expected", "expected_of_gemma"),
    [
        ((7, 5), "auto", "float16", "float32"),
        ((7, 5), "bfloat16", "float32", "float32"),
        ((8, 0), "auto", "bfloat16", "bfloat16"),
        ((9, 0), "float16", "float16", None),
    ],
)
def test_gpu_computes_in_native_type(
    monkeypatch, gemma, capability, dtype, expected, expected_of_gemma
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    options = EncoderOptions(dtype=dtype)
    assert resolve("minilm", options, device="cuda:0").identity.dtype == expected
    if expected_of_gemma is not None:
        assert resolve(gemma, options, device="cuda:0").identity.dtype == expected_of_gemma
    else:
        with pytest.raises(UserError, match=r"does not work in float16: activations of .*overflow"):
            resolve(gemma, options, device="cuda:0")


def test_type_on_another_machine(monkeypatch):
    """A cluster may have several kinds of processors and GPUs."""
    monkeypatch.setenv("LLMCOND_CPU_FEATURES", SERVER)
    resolved = resolve("minilm", EncoderOptions(dtype="bfloat16", device="cpu"))
    monkeypatch.setenv("LLMCOND_CPU_FEATURES", AVX2)
    assert not support.computes_bfloat16()  # OpenVINO follows these features
    with pytest.raises(LlmcondError, match="bfloat16, which cpu of this machine would emulate"):
        Encoder(resolved)
    # Actors on GPUs are started by a machine that may have none.
    options = EncoderOptions(dtype="bfloat16")
    assert resolve("minilm", options, device="cuda:0").identity.dtype == "bfloat16"


# -- runs --------------------------------------------------------------------------------------


def test_run_in_bfloat16_is_usable_without_bfloat16(
    monkeypatch, caplog, tmp_path, tiny_checkpoint, write_rows, small_rows
):
    """Its vectors are computed in float32, and are not stored as if they were in bfloat16."""
    monkeypatch.setenv("LLMCOND_CPU_FEATURES", SERVER)
    folder = tmp_path / "run"
    model, data = str(tiny_checkpoint()), str(write_rows(small_rows))
    options = {"model": model, "device": "cpu", "run": folder, "prompt": ["concat-cond-sent"]}
    llmcond.extract(**options, data=data, dtype="bfloat16", runtime="torch")
    run = open_run(folder)
    assert run.identity.dtype == "bfloat16"
    n_stored = len(run.store())
    monkeypatch.setenv("LLMCOND_CPU_FEATURES", AVX2)
    _log_emulated.cache_clear()
    caplog.set_level("INFO")
    embedder = llmcond.load_embedder(folder, head="none", device="cpu")
    assert embedder.encoder.identity.dtype == "float32"
    assert any("extracted in bfloat16 with torch, and this" in line for line in caplog.messages)
    texts = tmp_path / "texts.csv"
    texts.write_text("text\nA new text.\n")
    out = tmp_path / "out.npy"
    llmcond.embed(texts=texts, out=out, run=folder, condition="the place", head="none")
    expected = embedder.encode(["A new text."], "the place")
    np.testing.assert_allclose(np.load(out), expected, atol=2e-3)
    assert len(run.store()) == n_stored
    with pytest.raises(UserError, match="dtype: 'float32', not 'bfloat16'"):
        llmcond.extract(**{**options, "prompt": ["concat-sent-cond"]}, dtype="bfloat16")


# -- batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        # OpenVINO and bfloat16 where the CPU has it, otherwise float32.
        ({"runtime": "auto", "dtype": "bfloat16"}, 0),
        ({"runtime": "torch", "dtype": "float32"}, 1e-6),
        # The exceptions of docs/encoders.md.
        pytest.param({"quantize": "4bit", "dtype": "auto"}, 0.01, marks=pytest.mark.slow),
        pytest.param({"quantize": "8bit", "dtype": "auto"}, 0.05, marks=pytest.mark.slow),
    ],
)
def test_vector_does_not_depend_on_batch(options, difference):
    pytest.importorskip("bitsandbytes" if "quantize" in options else "openvino")
    items = [EncoderInput("", f"{text} {number}") for text in TEXTS for number in range(12)]
    encoder = load_encoder("minilm", device="cpu", **options)
    expected = encoder.encode_with_counts(items).vectors
    encoded = [encoder.encode_with_counts(items, threads=True).vectors]
    encoder.engine.budget = 100
    encoded.append(encoder.encode(items[::-1])[::-1])
    for vectors in encoded:
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=difference)
    single_vectors = np.concatenate([encoder.encode([item]) for item in items[::7]])
    np.testing.assert_allclose(single_vectors, expected[::7], rtol=0, atol=difference)
