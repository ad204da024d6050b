"""The stand-in for a GPU detects mistakes that would fail or slow down a real GPU."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.standin import StandIn

from llmcond.benchmark.checks import CheckEnvironment
from llmcond.benchmark.shapes import csts_inputs
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.engine import engine, forward
from llmcond.errors import LlmcondError

INPUTS = csts_inputs(8, instruct=False)


def load(folder: Path) -> Encoder:
    return Encoder(CheckEnvironment("cuda:0", folder).resolve("minilm", "bfloat16"))


def test_tensor_left_on_cpu_is_detected(
    gpu: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "move_to_device", lambda values, device: values)
    with pytest.raises(LlmcondError, match="Expected all tensors to be on the same device"):
        load(tmp_path)


def test_copy_read_before_its_event_is_detected(
    gpu: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load(tmp_path)
    copy_to_cpu = engine.copy_to_cpu
    monkeypatch.setattr(engine, "copy_to_cpu", lambda values: (copy_to_cpu(values)[0], None))
    with pytest.raises(RuntimeError, match=r"read before its event, encoders/engine/engine\.py"):
        encoder.encode_with_counts(INPUTS)


def test_copy_from_unpinned_memory_is_detected(
    gpu: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_unpinned(values: torch.Tensor, device: torch.device) -> torch.Tensor:
        return values.to(device, non_blocking=True)

    encoder = load(tmp_path)
    monkeypatch.setattr(forward, "move_to_device", copy_unpinned)
    with pytest.raises(RuntimeError, match="memory that is not pinned"):
        encoder.encode_with_counts(INPUTS)


def test_wait_of_host_is_counted(
    gpu: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load(tmp_path)
    finish = engine.Engine.finish

    def finish_with_wait(instance: Any, pooled: torch.Tensor) -> torch.Tensor:
        assert pooled.isfinite().all()
        return finish(instance, pooled)

    gpu.reset()
    encoder.encode_with_counts(INPUTS)
    assert not gpu.waits
    monkeypatch.setattr(engine.Engine, "finish", finish_with_wait)
    encoder.encode_with_counts(INPUTS)
    assert gpu.waits.total() == 1


def test_memory_of_retained_tensors_is_counted(
    gpu: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, retained = load(tmp_path), []
    finish = engine.Engine.finish

    def finish_and_retain(instance: Any, pooled: torch.Tensor) -> torch.Tensor:
        retained.append(pooled)
        return finish(instance, pooled)

    gc.collect()
    before = gpu.used[0]
    monkeypatch.setattr(engine.Engine, "finish", finish_and_retain)
    encoder.encode_with_counts(INPUTS)
    gc.collect()
    assert gpu.used[0] == before + 8 * encoder.dim * 4


def test_tensors_of_two_gpus_cannot_be_combined() -> None:
    with StandIn(gpus=2):
        first, second = (torch.ones(2, device=f"cuda:{number}") for number in range(2))
        with pytest.raises(RuntimeError, match="same device"):
            first + second
        with pytest.raises(TypeError, match="can't convert"):
            first.numpy()
        assert (first + second.to(0)).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seq_q": torch.tensor([0, 3])}, "dtype int32"),
        ({"cu_seq_q": torch.tensor([0, 2], dtype=torch.int32)}, "do not cover"),
        ({"max_q": 4}, "max_q and max_k"),
        ({"query": torch.zeros(3, 2, 8)}, "fp16 and bf16"),
        ({"query": torch.zeros(3, 4, 8, dtype=torch.bfloat16)}, "same number of heads"),
        ({"query": torch.zeros(3, 2, 12, dtype=torch.bfloat16)}, "multiple of 8"),
    ],
)
def test_invalid_flash_attention_arguments_are_rejected(
    gpu: StandIn, changes: Any, message: str
) -> None:
    from torch.nn.attention.varlen import varlen_attn

    tensor = torch.zeros(3, 2, 8, dtype=torch.bfloat16)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    arguments = {
        "query": tensor,
        "key": tensor,
        "value": tensor,
        "cu_seq_q": ends,
        "cu_seq_k": ends,
    }
    arguments = {**arguments, "max_q": 3, "max_k": 3}
    on_gpu = {
        name: value.to("cuda") if isinstance(value, torch.Tensor) else value
        for name, value in {**arguments, **changes}.items()
    }
    with pytest.raises((RuntimeError, ValueError), match=message):
        varlen_attn(**on_gpu)
