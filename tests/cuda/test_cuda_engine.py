"""The engine on the stand-in for a GPU: waits, copies, launches, memory, other GPUs."""

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
from llmcond.encoders.loading.architecture import build_on_meta, load_config
from llmcond.encoders.loading.memory import measure_footprint
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import EncoderInput, Router
from llmcond.errors import LlmcondError


def inputs_of(resolved: ResolvedEncoder, n: int = 64) -> list[EncoderInput]:
    found = csts_inputs(n, bool(resolved.identity.instruction_format))
    return [dataclasses.replace(one, text=f"{one.text} {at}") for at, one in enumerate(found)]


def encoder_of(folder: Path, shape: str, dtype: str, **options: object) -> Encoder:
    return Encoder(CheckEnvironment("cuda:0", folder).resolve(shape, dtype, **options))


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("shape", ["minilm", "mistral-7b"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_host_waits_for_each_batch_only_once(
    gpu: StandIn, tmp_path: Path, shape: str, dtype: str, routed: bool
) -> None:
    encoder = encoder_of(tmp_path, shape, dtype, max_tokens_per_batch=400, pooling="mean")
    inputs = inputs_of(encoder.resolved)
    queries = encoder.queries(["the place", "the mood"]) if routed else None
    if routed:
        router = Router("the place", 0.05, True, True)
        inputs = [dataclasses.replace(one, instruction="", router=router) for one in inputs]
    gpu.reset()

    encoder.encode_counted(inputs, queries)

    assert not gpu.waits, gpu.report()
    assert not gpu.unpinned, gpu.report()
    assert gpu.events == gpu.copies["cuda to cpu"] >= 2  # batches


@pytest.mark.parametrize("shape", ["minilm", "mistral-7b"])
def test_launches_do_not_grow_with_the_inputs(gpu: StandIn, tmp_path: Path, shape: str) -> None:
    encoder = encoder_of(tmp_path, shape, "bfloat16")
    launches = []
    for n in (32, 256):
        gpu.reset()
        encoder.encode_counted(inputs_of(encoder.resolved, n))
        launches.append(gpu.n_launches)
    assert launches[1] == launches[0]


def test_without_attention_for_uneven_lengths_calls_are_few(gpu: StandIn, tmp_path: Path) -> None:
    launches = {}
    for dtype in ("float32", "bfloat16"):
        encoder = encoder_of(tmp_path, "minilm", dtype)
        inputs = inputs_of(encoder.resolved, 256)
        gpu.reset()
        encoder.encode_counted(inputs)
        launches[dtype] = gpu.n_launches
    assert launches["float32"] <= 2 * launches["bfloat16"]


@pytest.mark.parametrize("mode", ["paper", "hidden"])
@pytest.mark.parametrize("name", ["simcse-bert", "e5-mistral"])
def test_routers_inside_the_encoder_give_the_vectors_of_the_cpu(
    tmp_path: Path, name: str, mode: str
) -> None:
    case = CASES[name]
    checkpoints.make(case.kind, tmp_path / "model", **case.made)
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
            vectors.append(encoder.encode_counted(inputs).vectors)
    assert distance(*vectors) <= 1e-4
    assert distance(vectors[0][0::2], vectors[0][1::2]) > 0


def test_an_encoder_and_its_batches_leave_no_memory_behind(gpu: StandIn, tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, "minilm", "bfloat16")
    inputs = inputs_of(encoder.resolved)
    encoder.encode_counted(inputs)
    gc.collect()
    loaded = gpu.used[0]

    for _ in range(3):
        encoder.encode_counted(inputs)
    gc.collect()

    assert gpu.used[0] == loaded
    del encoder
    gc.collect()
    assert gpu.used[0] == 0


@pytest.mark.parametrize("quantize", ["none", "8bit", "4bit"])
@pytest.mark.parametrize("shape", ["minilm", "qwen2-7b", "nv-embed-v2"])
def test_weights_take_the_bytes_that_are_reckoned_with(
    gpu: StandIn, tmp_path: Path, shape: str, quantize: str
) -> None:
    if quantize != "none":
        pytest.importorskip("bitsandbytes")
    resolved = CheckEnvironment("cuda:0", tmp_path).resolve(shape, "bfloat16", quantize)
    config = load_config(resolved.checkpoint, resolved.identity.attention)
    empty = build_on_meta(config)
    blocks = 512 * (2 * len(list(empty.parameters())) + 16)  # an allocation is rounded up

    encoder = Encoder(resolved)
    gc.collect()

    expected = measure_footprint(empty).weights("bfloat16", quantize)
    if resolved.identity.pooling != "pooler" and getattr(empty, "pooler", None) is not None:
        expected -= 2 * sum(value.numel() for value in empty.pooler.parameters())
    assert abs(gpu.used[0] - expected) <= blocks + 0.02 * expected
    del encoder


@pytest.mark.parametrize("shape", ["minilm", "qwen2-7b"])
def test_a_batch_takes_no_more_than_is_reckoned_with(
    gpu: StandIn, tmp_path: Path, shape: str
) -> None:
    encoder = encoder_of(tmp_path, shape, "bfloat16", max_tokens_per_batch=2_048)
    inputs = long_inputs(8, instruct=False)
    gc.collect()
    gpu.reset()
    before = gpu.used[0]

    encoder.encode_counted(inputs)

    expected = measure_footprint(encoder.engine.model.network).batch("bfloat16", 2_048)
    assert 0.3 * expected <= gpu.peak[0] - before <= expected


def test_memory_that_pytorch_keeps_is_free(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.empty(2**20, device="cuda")
    free = memory.available_memory("cuda:0")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: gpu.used[0] + 2**30)
    assert memory.available_memory("cuda:0") == free + 2**30
    del tensor


# -- several GPUs, older ones ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "device"),
    [
        ("bert", "float32", "auto"),
        ("bert", "bfloat16", "cuda"),
        ("mistral", "float32", "cuda"),
        ("mistral", "bfloat16", "auto"),
    ],
)
def test_an_encoder_that_is_spread_is_packed_and_gives_the_same(
    tiny_checkpoint: Callable[..., Path], kind: str, dtype: str, device: str
) -> None:
    folder = str(tiny_checkpoint(kind, layers=8))
    inputs = csts_inputs(24, instruct=False)
    own = {"dtype": "float32", "pooling": "mean", "runtime": "torch"}
    on_cpu = load_encoder(folder, device="cpu", **own)
    wanted = on_cpu.encode_counted(inputs).vectors
    size = measure_footprint(on_cpu.engine.model.network).weights(dtype, "none")

    with StandIn(gpus=2, gib=0.9 * size / 2**30) as gpu:
        spread = load_encoder(folder, device=device, dtype=dtype, pooling="mean")
        assert min(gpu.used) > 0.1 * size
        found = spread.encode_counted(inputs).vectors
        assert spread.engine.packs
        kernel = "varlen_attn" if dtype == "bfloat16" else "scaled_dot_product_attention"
        assert spread.engine.kernel_name == kernel

    assert distance(found, wanted) <= (1e-4 if dtype == "float32" else 0.3)


def test_one_gpu_that_was_named_is_not_exceeded(tmp_path: Path) -> None:
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

    read = loading.read_network

    def placed(resolved, config, arguments):
        return read(resolved, config, {**arguments, "device_map": "cpu"})

    with StandIn(gpus=2):
        resolved = CheckEnvironment("cuda:0", tmp_path).resolve("mistral-7b", "float32", "4bit")
        monkeypatch.setattr(loading, "read_network", placed)
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
def test_the_type_and_the_kernel_are_those_of_the_gpu(
    tmp_path: Path, shape: str, capability: tuple[int, int], dtype: str, kernel: str
) -> None:
    on_cpu = CheckEnvironment("cpu", tmp_path).resolve(shape)
    inputs = inputs_of(on_cpu, 24)
    wanted = Encoder(on_cpu).encode_counted(inputs).vectors
    with StandIn(gib=16, capability=capability):
        encoder = encoder_of(tmp_path, shape, "auto")
        found = encoder.encode_counted(inputs).vectors
    assert (encoder.identity.dtype, encoder.engine.kernel_name) == (dtype, kernel)
    assert distance(found, wanted) <= 0.1


def test_an_error_of_the_gpu_is_not_taken_for_an_architecture(
    gpu: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcond.encoders.engine import engine

    def fail(*args: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.PackedForward, "hidden", fail)
    with pytest.raises(LlmcondError, match="illegal memory access"):
        encoder_of(tmp_path, "minilm", "bfloat16")


def test_options_name_a_gpu_that_there_is(tmp_path: Path) -> None:
    with StandIn(gpus=1), pytest.raises(LlmcondError, match="PyTorch sees 1 CUDA devices"):
        load_encoder("minilm", device="cuda:1")
    with (
        StandIn(capability=(12, 0), built_for=("sm_80", "sm_90")),
        pytest.raises(LlmcondError, match=r"capability 12\.0, and this PyTorch was built for"),
    ):
        load_encoder("minilm", device="cuda")
