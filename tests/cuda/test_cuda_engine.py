"""The engine on the stand-in for a GPU: waits, copies, launches, memory and several GPUs."""

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import checkpoints
from helpers.cases import CASES
from helpers.standin import StandIn

from llmcond.benchmark.checks import CheckEnvironment, distance
from llmcond.benchmark.shapes import csts_inputs, long_inputs
from llmcond.encoders.encoder import Encoder, load_encoder
from llmcond.encoders.loading import memory
from llmcond.encoders.loading.loading import build_on_meta, load_config
from llmcond.encoders.loading.memory import measure_footprint
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import EncoderInput, Router
from llmcond.errors import LlmcondError


def make_inputs(resolved: ResolvedEncoder, n: int = 64) -> list[EncoderInput]:
    inputs = csts_inputs(n, bool(resolved.identity.instruction_format))
    return [
        dataclasses.replace(item, text=f"{item.text} {index}") for index, item in enumerate(inputs)
    ]


def load_gpu_encoder(folder: Path, shape: str, dtype: str, **options: object) -> Encoder:
    return Encoder(CheckEnvironment("cuda:0", folder).resolve(shape, dtype, **options))


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("shape", ["minilm", "mistral-7b"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_host_waits_once_per_batch(
    gpu: StandIn, tmp_path: Path, shape: str, dtype: str, routed: bool
) -> None:
    encoder = load_gpu_encoder(tmp_path, shape, dtype, max_tokens_per_batch=400, pooling="mean")
    inputs = make_inputs(encoder.resolved)
    queries = encoder.queries(["the place", "the mood"]) if routed else None
    if routed:
        router = Router("the place", 0.05, True, True)
        inputs = [dataclasses.replace(item, instruction="", router=router) for item in inputs]
    gpu.reset()

    encoder.encode_with_counts(inputs, queries)

    assert not gpu.waits, gpu.report()
    assert not gpu.unpinned, gpu.report()
    assert gpu.events == gpu.copies["cuda to cpu"] >= 2  # one copy per batch


@pytest.mark.parametrize("shape", ["minilm", "mistral-7b"])
def test_launches_do_not_grow_with_inputs(gpu: StandIn, tmp_path: Path, shape: str) -> None:
    encoder = load_gpu_encoder(tmp_path, shape, "bfloat16")
    launches = []
    for n in (32, 256):
        gpu.reset()
        encoder.encode_with_counts(make_inputs(encoder.resolved, n))
        launches.append(gpu.n_launches)
    assert launches[1] == launches[0]


def test_launches_at_most_double_without_varlen_attention(gpu: StandIn, tmp_path: Path) -> None:
    launches = {}
    for dtype in ("float32", "bfloat16"):
        encoder = load_gpu_encoder(tmp_path, "minilm", dtype)
        inputs = make_inputs(encoder.resolved, 256)
        gpu.reset()
        encoder.encode_with_counts(inputs)
        launches[dtype] = gpu.n_launches
    assert launches["float32"] <= 2 * launches["bfloat16"]


@pytest.mark.parametrize("mode", ["paper", "hidden"])
@pytest.mark.parametrize("name", ["simcse-bert", "e5-mistral"])
def test_router_inside_encoder_matches_cpu(tmp_path: Path, name: str, mode: str) -> None:
    case = CASES[name]
    checkpoints.build_checkpoint(case.kind, tmp_path / "model", **case.checkpoint_options)
    checkpoints.change_json(tmp_path / "model/config.json", **case.config)
    options = {**case.options, "router": "csr", "router_mode": mode, "router_layers": 1}
    options["pooling"] = "mean"
    inputs = [
        EncoderInput("", text, router=Router(condition, 0.05, True, False))
        for text in ("two dogs run over wet grass", "the man sits on a bench", "a dog")
        for condition in ("the place", "how many there are")
    ]
    vectors = []
    for device in ("cpu", "cuda"):
        with StandIn():
            encoder = load_encoder(
                str(tmp_path / "model"), like=case.like, dtype="float32", device=device, **options
            )
            vectors.append(encoder.encode_with_counts(inputs).vectors)
    assert distance(*vectors) <= 1e-4
    assert distance(vectors[0][0::2], vectors[0][1::2]) > 0


def test_encoder_and_batches_free_their_memory(gpu: StandIn, tmp_path: Path) -> None:
    encoder = load_gpu_encoder(tmp_path, "minilm", "bfloat16")
    inputs = make_inputs(encoder.resolved)
    encoder.encode_with_counts(inputs)
    gc.collect()
    used_by_weights = gpu.used[0]

    for _ in range(3):
        encoder.encode_with_counts(inputs)
    gc.collect()

    assert gpu.used[0] == used_by_weights
    del encoder
    gc.collect()
    assert gpu.used[0] == 0


@pytest.mark.parametrize("quantize", ["none", "8bit", "4bit"])
@pytest.mark.parametrize("shape", ["minilm", "qwen2-7b", "nv-embed-v2"])
def test_memory_of_weights_matches_estimate(
    gpu: StandIn, tmp_path: Path, shape: str, quantize: str
) -> None:
    if quantize != "none":
        pytest.importorskip("bitsandbytes")
    resolved = CheckEnvironment("cuda:0", tmp_path).resolve(shape, "bfloat16", quantize)
    config = load_config(resolved.checkpoint, resolved.identity.attention)
    network = build_on_meta(config)
    # Each allocation is rounded up to a multiple of 512 bytes.
    rounding = 512 * (2 * len(list(network.parameters())) + 16)

    encoder = Encoder(resolved)
    gc.collect()

    expected = measure_footprint(network).weights("bfloat16", quantize)
    if resolved.identity.pooling != "pooler" and getattr(network, "pooler", None) is not None:
        expected -= 2 * sum(value.numel() for value in network.pooler.parameters())
    assert abs(gpu.used[0] - expected) <= rounding + 0.02 * expected
    del encoder


@pytest.mark.parametrize("shape", ["minilm", "qwen2-7b"])
def test_memory_of_batch_stays_within_estimate(gpu: StandIn, tmp_path: Path, shape: str) -> None:
    encoder = load_gpu_encoder(tmp_path, shape, "bfloat16", max_tokens_per_batch=2_048)
    inputs = long_inputs(8, instruct=False)
    gc.collect()
    gpu.reset()
    before = gpu.used[0]

    encoder.encode_with_counts(inputs)

    expected = measure_footprint(encoder.engine.model.network).batch("bfloat16", 2_048)
    assert 0.3 * expected <= gpu.peak[0] - before <= expected


def test_memory_cached_by_pytorch_counts_as_free(
    gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.empty(2**20, device="cuda")
    free = memory.available_memory("cuda:0")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: gpu.used[0] + 2**30)
    assert memory.available_memory("cuda:0") == free + 2**30
    del tensor


# -- several GPUs and older GPUs ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "device"),
    [
        ("bert", "float32", "auto"),
        ("bert", "bfloat16", "cuda"),
        ("mistral", "float32", "cuda"),
        ("mistral", "bfloat16", "auto"),
    ],
)
def test_encoder_on_several_gpus_packs_and_matches_cpu(
    tiny_checkpoint: Callable[..., Path], kind: str, dtype: str, device: str
) -> None:
    folder = str(tiny_checkpoint(kind, layers=8))
    inputs = csts_inputs(24, instruct=False)
    options = {"dtype": "float32", "pooling": "mean", "runtime": "torch"}
    cpu_encoder = load_encoder(folder, device="cpu", **options)
    expected = cpu_encoder.encode_with_counts(inputs).vectors
    size = measure_footprint(cpu_encoder.engine.model.network).weights(dtype, "none")

    with StandIn(gpus=2, gib=0.9 * size / 2**30) as gpu:
        encoder = load_encoder(folder, device=device, dtype=dtype, pooling="mean")
        assert min(gpu.used) > 0.1 * size
        actual = encoder.encode_with_counts(inputs).vectors
        assert encoder.engine.packs
        kernel = "varlen_attn" if dtype == "bfloat16" else "scaled_dot_product_attention"
        assert encoder.engine.kernel_name == kernel

    assert distance(actual, expected) <= (1e-4 if dtype == "float32" else 0.3)


def test_explicit_gpu_does_not_use_other_gpus(tmp_path: Path) -> None:
    with StandIn(gpus=2, gib=1e-3):
        resolved = CheckEnvironment("cuda:0", tmp_path).resolve("mistral-7b")
        options = dataclasses.replace(resolved.options, device="cuda:0")
        with pytest.raises(LlmcondError, match=r"--device auto, which uses all 2 GPUs"):
            Encoder(dataclasses.replace(resolved, options=options))


def test_quantised_weights_are_not_placed_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    from llmcond.encoders.loading import loading

    read_network = loading.read_network

    def read_to_cpu(resolved, config, arguments):
        return read_network(resolved, config, {**arguments, "device_map": "cpu"})

    with StandIn(gpus=2):
        resolved = CheckEnvironment("cuda:0", tmp_path).resolve("mistral-7b", "float32", "4bit")
        monkeypatch.setattr(loading, "read_network", read_to_cpu)
        with pytest.raises(LlmcondError, match="does not fit into the memory of cuda:0"):
            Encoder(resolved)


@pytest.mark.parametrize(
    ("capability", "dtype", "kernel"),
    [
        ((7, 5), "float16", "scaled_dot_product_attention"),
        ((8, 0), "bfloat16", "varlen_attn"),
        ((9, 0), "bfloat16", "varlen_attn"),
    ],
)
@pytest.mark.parametrize("shape", ["minilm", "mistral-7b"])
def test_dtype_and_kernel_suit_gpu(
    tmp_path: Path, shape: str, capability: tuple[int, int], dtype: str, kernel: str
) -> None:
    resolved = CheckEnvironment("cpu", tmp_path).resolve(shape)
    inputs = make_inputs(resolved, 24)
    expected = Encoder(resolved).encode_with_counts(inputs).vectors
    with StandIn(gib=16, capability=capability):
        encoder = load_gpu_encoder(tmp_path, shape, "auto")
        actual = encoder.encode_with_counts(inputs).vectors
    assert (encoder.identity.dtype, encoder.engine.kernel_name) == (dtype, kernel)
    assert distance(actual, expected) <= 0.1


def test_gpu_error_is_not_reported_as_unsupported_architecture(
    gpu: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcond.encoders.engine import engine

    def fail(*args: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.PackedForward, "hidden", fail)
    with pytest.raises(LlmcondError, match="illegal memory access"):
        load_gpu_encoder(tmp_path, "minilm", "bfloat16")


def test_missing_or_unsupported_gpu_is_rejected(tmp_path: Path) -> None:
    with StandIn(gpus=1), pytest.raises(LlmcondError, match="PyTorch sees 1 CUDA devices"):
        load_encoder("minilm", device="cuda:1")
    with (
        StandIn(capability=(12, 0), built_for=("sm_80", "sm_90")),
        pytest.raises(LlmcondError, match=r"capability 12\.0, and this PyTorch was built for"),
    ):
        load_encoder("minilm", device="cuda")
