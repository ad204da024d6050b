"""Choosing a device, and the fastest number type that it computes natively."""

from __future__ import annotations

import re
from typing import Literal

import torch

from llmcond.encoders.spec import Dtype
from llmcond.errors import UserError
from llmcond.system import local_rank, native_bfloat16

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def choose_device(device: str) -> str:
    """Return ``cpu`` or ``cuda:N`` for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UserError: another name, or a device that this machine lacks.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return "cpu"
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise UserError(f"device is {device!r}. Legal: auto, cpu, cuda, cuda:N.")
    count = torch.cuda.device_count()
    # Of several processes that were launched together, each takes a GPU of its own.
    index = int(match[1]) if match[1] else local_rank() % max(1, count)
    if index >= count:
        raise UserError(
            f"device is {device!r}, but PyTorch sees {count} CUDA devices here. Use --device cpu, "
            "or install a CUDA build of PyTorch."
        )
    return f"cuda:{index}"


def choose_dtype(dtype: Literal["auto"] | Dtype, device: str) -> Dtype:
    """Return ``dtype``, or for ``auto`` the fastest one that ``device`` computes natively."""
    if dtype != "auto":
        return dtype
    if device.startswith("cuda"):
        # Before compute capability 8.0 bfloat16 is emulated, and float16 is the fast type.
        major, _ = torch.cuda.get_device_capability(device)
        return "bfloat16" if major >= 8 else "float16"
    return "bfloat16" if native_bfloat16() else "float32"


def default_token_budget(device: str) -> int:
    """Return how many tokens one forward pass takes, padding included.

    On a CPU small batches keep activations in the cache: 1,536 tokens measured fastest for
    MiniLM. A GPU needs more work at a time to be busy.
    """
    return 16_384 if device.startswith("cuda") else 1_536
