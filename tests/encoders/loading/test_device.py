"""Tensors on their way to a device and back, and which GPUs PyTorch was built for."""

import pytest
import torch

from llmcond import system
from llmcond.encoders.loading.device import copy_to_cpu
from llmcond.errors import UserError
from llmcond.system import check_capability, choose_device, move_to_device

BUILT_FOR = ["sm_75", "sm_80", "sm_90a", "sm_120", "compute_120"]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_go_to_a_device_and_come_back(device):
    values = torch.arange(6).view(2, 3)
    there = move_to_device(values, torch.device(device))
    assert there.device.type == device
    back, copied = copy_to_cpu(there * 2)
    assert (copied is None) == (device == "cpu")
    if copied is not None:
        copied.synchronize()
    assert back.is_cpu
    assert torch.equal(back, values * 2)


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (9, 0), (12, 1), (13, 0)])
def test_gpu_that_pytorch_was_built_for_is_taken(capability):
    check_capability("cuda:0", capability, BUILT_FOR)


def test_gpu_that_is_too_old_is_refused_in_one_line():
    with pytest.raises(UserError) as refusal:
        check_capability("cuda:0 (Tesla V100)", (7, 0), BUILT_FOR)
    assert str(refusal.value) == (
        "cuda:0 (Tesla V100) has compute capability 7.0, and this PyTorch was built for 7.5, 8.0, "
        "9.0, 12.0. Use --device cpu, or install a build of PyTorch for this GPU (https://pytorch.org)."
    )


def test_gpu_of_another_maker_is_left_to_pytorch():
    check_capability("cuda:0", (9, 4), ["gfx942"])


@pytest.mark.parametrize("built_for", [["sm_75", "sm_80", "sm_90"], ["sm_90a"]])
def test_gpu_that_is_newer_than_the_build_is_refused(built_for):
    with pytest.raises(UserError, match=r"capability 12\.0, and this PyTorch was built for .*9\.0"):
        check_capability("cuda:0 (RTX 5090)", (12, 0), built_for)


def test_a_build_that_does_not_say_what_it_is_for_takes_any_gpu():
    check_capability("cuda:0 (Radeon)", (9, 0), ["gfx942"])


def test_a_mac_is_told_once_that_its_gpu_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    system._log_unused_mps.cache_clear()
    with caplog.at_level("INFO", logger="llmcond"):
        assert [choose_device("auto"), choose_device("auto"), choose_device("cpu")] == ["cpu"] * 3
    assert [one.message for one in caplog.records] == [
        "the GPU of this Mac is not used: llmcond computes on CUDA GPUs and on CPUs."
    ]
