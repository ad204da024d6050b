"""The code for GPUs on the stand-in for one: same results as on the CPU, waits, copies, memory."""

import dataclasses
import gc
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import run_json
from helpers.serving import serve
from helpers.standin import StandIn
from helpers.training import build_trainer

from llmcond.base.errors import LlmcondError
from llmcond.benchmark import checks
from llmcond.benchmark.checks import CheckEnvironment, distance
from llmcond.benchmark.shapes import csts_inputs, long_inputs
from llmcond.encoders import EncoderOptions, loading
from llmcond.encoders.encoder import Encoder, load_encoder
from llmcond.encoders.loading import measure_footprint
from llmcond.encoders.spec import Router
from llmcond.encoders.torch import engine, forward
from llmcond.runs.embedder import load_embedder
from llmcond.serving.model import ServedModel

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ("--set", "epochs=2", "batch_size=16", "dropout=0")


@pytest.fixture
def gpu():
    with StandIn(gpus=1, gib=80) as gpu:
        yield gpu


def load_gpu_encoder(folder, shape, dtype, **options):
    return Encoder(CheckEnvironment("cuda:0", folder).resolve(shape, dtype, **options))


def make_inputs(n=64, conditions=()):
    inputs = [
        dataclasses.replace(item, text=f"{item.text} {index}")
        for index, item in enumerate(csts_inputs(n, False))
    ]
    routers = [Router(condition, 0.05, True, True) for condition in conditions]
    return [
        dataclasses.replace(item, router=router) for item in inputs for router in routers or [None]
    ]


# -- what the stand-in detects -------------------------------------------------------------------


def test_tensor_left_on_cpu_is_detected(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(forward, "move_to_device", lambda values, device: values)
    with pytest.raises(LlmcondError, match="Expected all tensors to be on the same device"):
        load_gpu_encoder(tmp_path, "minilm", "bfloat16")


def test_wrong_copies_and_waits_are_detected(gpu, tmp_path, monkeypatch):
    encoder, inputs = load_gpu_encoder(tmp_path, "minilm", "bfloat16"), make_inputs(8)
    copy_to_cpu, finish = engine.copy_to_cpu, engine.Engine.finish
    with monkeypatch.context() as patch:
        patch.setattr(engine, "copy_to_cpu", lambda values: (copy_to_cpu(values)[0], None))
        with pytest.raises(RuntimeError, match="read before its event, encoders/torch/engine"):
            encoder.encode_with_counts(inputs)

    def finish_with_wait(instance, pooled):
        assert pooled.isfinite().all()
        return finish(instance, pooled)

    with monkeypatch.context() as patch:
        patch.setattr(engine.Engine, "finish", finish_with_wait)
        gpu.reset()
        encoder.encode_with_counts(inputs)
        assert gpu.waits.total() == 1

    def copy_unpinned(values, device):
        return values.to(device, non_blocking=True)

    monkeypatch.setattr(forward, "move_to_device", copy_unpinned)
    with pytest.raises(RuntimeError, match="memory that is not pinned"):
        encoder.encode_with_counts(inputs)


# -- the engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "conditions"),
    [("mistral-7b", "float32", ()), ("minilm", "bfloat16", ("the place", "the mood"))],
)
def test_host_waits_once_per_batch(gpu, tmp_path, shape, dtype, conditions):
    encoder = load_gpu_encoder(tmp_path, shape, dtype, max_tokens_per_batch=400, pooling="mean")
    queries = encoder.queries(conditions) if conditions else None
    gpu.reset()
    encoder.encode_with_counts(make_inputs(conditions=conditions), queries)
    assert not gpu.waits
    assert not gpu.unpinned
    assert gpu.events == gpu.copies["cuda to cpu"] >= 2  # one copy per batch


def test_launches_do_not_grow_with_inputs_or_routers(gpu, tmp_path):
    launches, encoder = {}, load_gpu_encoder(tmp_path, "minilm", "bfloat16")
    for n, conditions in ((32, ""), (256, ""), (16, "a"), (128, "a"), (16, "abcdefgh")):
        queries = encoder.queries([*conditions])
        gpu.reset()
        encoder.encode_with_counts(make_inputs(n, conditions), queries)
        launches[n, len(conditions)] = gpu.n_launches
    assert launches[256, 0] == launches[32, 0]
    assert max(launches[128, 1], launches[16, 8]) <= 1.1 * launches[16, 1]


@pytest.mark.parametrize("router", ["none", "csr"])
def test_routed_vectors_and_weights_match_cpu(tiny_checkpoint, router):
    items = make_inputs(6, ("the place", "how many there are"))
    options = {"dtype": "float32", "pooling": "mean", "router": router, "runtime": "torch"}
    options |= {"router_layers": 1} if router == "csr" else {}
    results = []
    for device in ("cpu", "cuda"):
        with StandIn():
            encoder = load_encoder(tiny_checkpoint("mistral"), device=device, **options)
            weights = encoder.token_weights(items[0]).weights
            results.append((encoder.encode_with_counts(items).vectors, weights))
    for on_cpu, on_gpu in zip(*results, strict=True):
        np.testing.assert_allclose(on_gpu, on_cpu, atol=1e-4)
    assert distance(results[0][0][0::2], results[0][0][1::2]) > 1e-4


def test_encoder_and_batches_free_their_memory(gpu, tmp_path):
    encoder = load_gpu_encoder(tmp_path, "minilm", "bfloat16")
    gc.collect()
    used_by_weights = gpu.used[0]
    encoder.encode_with_counts(make_inputs())
    gc.collect()
    assert gpu.used[0] == used_by_weights
    del encoder
    gc.collect()
    assert gpu.used[0] == 0


@pytest.mark.parametrize(
    ("shape", "quantize"), [("minilm", "none"), ("qwen2-7b", "4bit"), ("nv-embed-v2", "8bit")]
)
def test_memory_matches_estimate(gpu, tmp_path, shape, quantize):
    if quantize != "none":
        pytest.importorskip("bitsandbytes")
    resolved = CheckEnvironment("cuda:0", tmp_path).resolve(
        shape, "bfloat16", quantize, max_tokens_per_batch=2_048
    )
    config = loading.load_config(resolved.checkpoint, resolved.identity.attention)
    network = loading.build_on_meta(config)
    encoder = Encoder(resolved)
    gc.collect()
    footprint = measure_footprint(network)
    expected = footprint.weights("bfloat16", quantize)
    if resolved.identity.pooling != "pooler" and getattr(network, "pooler", None) is not None:
        expected -= 2 * sum(value.numel() for value in network.pooler.parameters())
    # Each allocation is rounded up to a multiple of 512 bytes.
    rounding = 512 * (2 * len(list(network.parameters())) + 16)
    assert abs(gpu.used[0] - expected) <= rounding + 0.02 * expected
    if quantize == "none":
        gpu.reset()
        before = gpu.used[0]
        encoder.encode_with_counts(long_inputs(8, instruct=False))
        expected = footprint.batch("bfloat16", 2_048)
        assert 0.3 * expected <= gpu.peak[0] - before <= expected


def test_memory_cached_by_pytorch_counts_as_free(gpu, monkeypatch):
    free = loading.available_memory("cuda:0")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: gpu.used[0] + 2**30)
    assert loading.available_memory("cuda:0") == free + 2**30


# -- several GPUs and older GPUs -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "device", "kernel"),
    [
        ("bert", "bfloat16", "cuda", "varlen_attn"),
        ("mistral", "float32", "auto", "scaled_dot_product_attention"),
    ],
)
def test_encoder_on_several_gpus_packs_and_matches_cpu(
    tiny_checkpoint, kind, dtype, device, kernel
):
    folder = str(tiny_checkpoint(kind, layers=8))
    inputs = csts_inputs(24, instruct=False)
    options = {"pooling": "mean", "runtime": "torch"}
    cpu_encoder = load_encoder(folder, device="cpu", dtype="float32", **options)
    expected = cpu_encoder.encode_with_counts(inputs).vectors
    size = measure_footprint(cpu_encoder.engine.model.network).weights(dtype, "none")
    with StandIn(gpus=2, gib=0.9 * size / 2**30) as gpu:
        encoder = load_encoder(folder, device=device, dtype=dtype, **options)
        assert min(gpu.used) > 0.1 * size
        actual = encoder.encode_with_counts(inputs).vectors
        assert encoder.engine.packs
        assert encoder.engine.kernel_name == kernel
    assert distance(actual, expected) <= (1e-4 if dtype == "float32" else 0.3)


def test_encoder_that_does_not_fit_on_a_gpu_is_rejected(tmp_path):
    with StandIn(gpus=2, gib=1e-3):
        resolved = CheckEnvironment("cuda:0", tmp_path).resolve("mistral-7b")
        options = dataclasses.replace(resolved.options, device="cuda:0")
        with pytest.raises(LlmcondError, match=r"--device auto, which uses all 2 GPUs"):
            Encoder(dataclasses.replace(resolved, options=options))


def test_missing_unsupported_or_failing_gpu_is_reported(tmp_path, monkeypatch):
    with StandIn(gpus=1), pytest.raises(LlmcondError, match="PyTorch sees 1 CUDA devices"):
        load_encoder("minilm", device="cuda:1")
    with (
        StandIn(capability=(12, 0), built_for=("sm_80", "sm_90")),
        pytest.raises(LlmcondError, match=r"capability 12\.0, and this PyTorch was built for"),
    ):
        load_encoder("minilm", device="cuda")

    def fail(*args):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.PackedForward, "hidden", fail)
    with StandIn(), pytest.raises(LlmcondError, match="illegal memory access"):
        load_gpu_encoder(tmp_path, "minilm", "bfloat16")


# -- llmcond bench -------------------------------------------------------------------------------


def list_checks(folder):
    # The last check starts processes, which have no stand-in.
    listed = list(checks._list_checks(CheckEnvironment("cuda:0", folder)))[:-1]
    return [check for check in listed if "LoRA" not in check[0]]


DEFAULT_CHECKS = (
    "minilm: CUDA = CPU",
    "mistral-7b: packed = padded, 16 bit",
    "a head fitted on CUDA = on the CPU",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DEFAULT_CHECKS else pytest.mark.slow)
        for name, *_ in list_checks(Path())
    ],
)
def test_each_check_passes_on_gpu(gpu, tmp_path, name):
    (check,) = (check for check in list_checks(tmp_path) if check[0] == name)
    result = checks.run_check(*check)
    assert result.passed, result
    assert gpu.n_launches > 0
    if "16 bit" in name:
        assert result.note == "varlen_attn"


# -- commands ------------------------------------------------------------------------------------


def test_extract_fit_and_evaluate_match_cpu(
    tmp_path, capsys, tiny_checkpoint, small_rows, write_rows
):
    data, model = write_rows(small_rows), tiny_checkpoint("mistral")
    scores = []
    for device in ("cpu", "cuda"):
        run = ("--run", tmp_path / device)
        with StandIn() as gpu:
            encoder = ("--model", model, "--data", data, "--pooling", "mean", "--dtype", "float32")
            prompts = ("--prompt", "concat-sent-cond", "separate")
            run_json(capsys, "extract", *run, *encoder, *prompts, "--device", device)
            assert bool(gpu.n_launches) == (device == "cuda")
            fit = ("fit-head", *run, "--device", device, *SMALL)
            run_json(capsys, *fit, "--head", "mlp", "--dim", "16", "--prompt", "concat-sent-cond")
            run_json(capsys, *fit, "rank=4", "--head", "hypernet", "--prompt", "separate")
            if device == "cuda":
                assert not [line for line in gpu.unpinned if "heads/fitted" in line]
                waits = [line for line in gpu.waits if "heads/conditioned" in line]
                assert [line.partition(",")[0] for line in waits] == ["to(cpu)"]
        results = run_json(capsys, "evaluate", *run)["results"]
        scores.append([result["spearman"] for result in results])
    assert len(scores[0]) >= 3
    assert scores[1] == pytest.approx(scores[0], abs=0.05)


def test_queries_match_cpu(tiny_run, dialogue_run, tmp_path, capsys):
    folder, replies = tmp_path / "run", tmp_path / "replies.txt"
    shutil.copytree(tiny_run, folder)
    run_json(capsys, "fit-head", "--run", folder, "--head", "linear", "--device", "cpu", *SMALL)
    replies.write_text("two men play in the park\nsad\n")
    reply = ("reply", "two men ?", "in the park .", "--candidates", replies, "--head", "weighted")
    body = {"input": ["two men play", "children sit"], "condition": "the place"}
    results = []
    for device in ("cpu", "cuda"):
        with StandIn() as gpu:
            ranked = run_json(capsys, *reply, "--run", dialogue_run, "--device", device)["results"]
            embedder = load_embedder(folder, device=device)
            scores = [reply["score"] for reply in ranked]
            scores += embedder.similarity(["two men play"], ["two dogs sit"], "the place").tolist()
            model = ServedModel(embedder)
            with serve(model, max_client_batch_size=50, payload_limit=20_000) as (client, _):
                gpu.reset()
                data = client.post("/v1/embeddings", body).json["data"]
            assert bool(gpu.n_launches) == (device == "cuda")
        results.append([*scores, *(value for item in data for value in item["embedding"])])
    assert results[1] == pytest.approx(results[0], abs=1e-3)


# -- training ------------------------------------------------------------------------------------


def test_losses_match_cpu(tiny_checkpoint, write_rows, small_rows, tmp_path):
    model, data, losses = tiny_checkpoint("mistral"), write_rows(small_rows), []
    for device in ("cpu", "cuda"):
        options = EncoderOptions(dtype="float32", device=device, pooling="mean")
        step_losses = []
        with StandIn() as gpu:
            settings = {"dropout": 0.0, "encoder_dropout": False, "epochs": 1}
            trainer = build_trainer(model, data, tmp_path / device, options=options, **settings)
            trainer.run(lambda _, steps, entry, x=step_losses: x.append(entry["loss"]))
            assert bool(gpu.n_launches) == (device == "cuda")
            unpinned = [line for line in gpu.unpinned if line.split(", ")[1].startswith("heads/")]
            assert not unpinned
        losses.append(step_losses)
    assert len(losses[0]) > 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
