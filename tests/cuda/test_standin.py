"""The stand-in for a GPU detects mistakes that would fail or slow down a real GPU."""

import gc

import pytest
import torch
from helpers.standin import StandIn

from llmcond.base.errors import LlmcondError
from llmcond.benchmark.checks import CheckEnvironment
from llmcond.benchmark.shapes import csts_inputs
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.torch import engine, forward

INPUTS = csts_inputs(8, instruct=False)


@pytest.fixture
def encoder(gpu, tmp_path):
    return Encoder(CheckEnvironment("cuda:0", tmp_path).resolve("minilm", "bfloat16"))


def test_tensor_left_on_cpu_is_detected(gpu, tmp_path, monkeypatch):
    resolved = CheckEnvironment("cuda:0", tmp_path).resolve("minilm", "bfloat16")
    monkeypatch.setattr(forward, "move_to_device", lambda values, device: values)
    with pytest.raises(LlmcondError, match="Expected all tensors to be on the same device"):
        Encoder(resolved)


def test_wrong_copies_are_detected(encoder, monkeypatch):
    copy_to_cpu = engine.copy_to_cpu
    with monkeypatch.context() as patch:
        patch.setattr(engine, "copy_to_cpu", lambda values: (copy_to_cpu(values)[0], None))
        with pytest.raises(RuntimeError, match=r"read before its event, encoders/torch/engine"):
            encoder.encode_with_counts(INPUTS)

    def copy_unpinned(values, device):
        return values.to(device, non_blocking=True)

    monkeypatch.setattr(forward, "move_to_device", copy_unpinned)
    with pytest.raises(RuntimeError, match="memory that is not pinned"):
        encoder.encode_with_counts(INPUTS)


def test_waits_and_memory_of_retained_tensors_are_counted(gpu, encoder, monkeypatch):
    finish, retained = engine.Engine.finish, []

    def finish_with_wait(instance, pooled):
        assert pooled.isfinite().all()
        retained.append(pooled)
        return finish(instance, pooled)

    gpu.reset()
    encoder.encode_with_counts(INPUTS)
    assert not gpu.waits
    gc.collect()
    before = gpu.used[0]
    monkeypatch.setattr(engine.Engine, "finish", finish_with_wait)
    encoder.encode_with_counts(INPUTS)
    gc.collect()
    assert gpu.waits.total() == 1
    assert gpu.used[0] == before + 8 * encoder.dim * 4


def test_tensors_of_two_gpus_cannot_be_combined():
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
    ],
)
def test_invalid_flash_attention_arguments_are_rejected(gpu, changes, message):
    from torch.nn.attention.varlen import varlen_attn

    arguments = dict.fromkeys(("query", "key", "value"), torch.zeros(3, 2, 8, dtype=torch.bfloat16))
    ends = torch.tensor([0, 3], dtype=torch.int32)
    arguments |= {"cu_seq_q": ends, "cu_seq_k": ends, "max_q": 3, "max_k": 3, **changes}
    on_gpu = {
        name: value.to("cuda") if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    with pytest.raises((RuntimeError, ValueError), match=message):
        varlen_attn(**on_gpu)
