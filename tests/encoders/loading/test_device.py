"""Copies of tensors to and from a device, and the GPUs that PyTorch was built for."""

import pytest
import torch

from llmcond import system
from llmcond.encoders.loading.memory import copy_to_cpu
from llmcond.errors import UserError
from llmcond.system import check_capability, choose_device, move_to_device

BUILT_FOR = ["sm_75", "sm_80", "sm_90a", "sm_120", "compute_120"]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_survive_round_trip_to_device(device):
    values = torch.arange(6).view(2, 3)
    moved = move_to_device(values, torch.device(device))
    assert moved.device.type == device
    result, copy_event = copy_to_cpu(moved * 2)
    assert (copy_event is None) == (device == "cpu")
    if copy_event is not None:
        copy_event.synchronize()
    assert result.is_cpu
    assert torch.equal(result, values * 2)


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (9, 0), (12, 1), (13, 0)])
def test_gpu_supported_by_pytorch_build_is_accepted(capability):
    check_capability("cuda:0", capability, BUILT_FOR)


def test_too_old_gpu_is_rejected_in_one_line():
    with pytest.raises(UserError) as error:
        check_capability("cuda:0 (Tesla V100)", (7, 0), BUILT_FOR)
    assert str(error.value) == (
        "cuda:0 (Tesla V100) has compute capability 7.0, and this PyTorch was built for 7.5, 8.0, "
        "9.0, 12.0. Use --device cpu, or install a build of PyTorch for this GPU (https://pytorch.org)."
    )


@pytest.mark.parametrize("built_for", [["gfx942"], []])
def test_build_without_cuda_architectures_accepts_any_gpu(built_for):
    check_capability("cuda:0 (Radeon)", (9, 4), built_for)


@pytest.mark.parametrize("built_for", [["sm_75", "sm_80", "sm_90"], ["sm_90a"]])
def test_gpu_newer_than_pytorch_build_is_rejected(built_for):
    with pytest.raises(UserError, match=r"capability 12\.0, and this PyTorch was built for .*9\.0"):
        check_capability("cuda:0 (RTX 5090)", (12, 0), built_for)


def test_unused_mac_gpu_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    system._log_unused_mps.cache_clear()
    with caplog.at_level("INFO", logger="llmcond"):
        assert [choose_device("auto"), choose_device("auto"), choose_device("cpu")] == ["cpu"] * 3
    assert [record.message for record in caplog.records] == [
        "the GPU of this Mac is not used: llmcond computes on CUDA GPUs and on CPUs."
    ]
