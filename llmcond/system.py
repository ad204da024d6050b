"""This machine and process: free memory, native number types, local rank."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

from llmcond.errors import UserError
from llmcond.version import __version__

_LIBRARIES = (
    "numpy",
    "pylance",
    "safetensors",
    "scikit-learn",
    "scipy",
    "tokenizers",
    "torch",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "peft",
)


@cache
def versions() -> dict[str, str]:
    """Return the versions of this package, Python, and the libraries that are installed."""
    found = {"llmcond": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def local_rank() -> int:
    """Return this process's local rank under torchrun or accelerate; 0 without a launcher."""
    value = os.environ.get("LOCAL_RANK", "")
    return int(value) if value.isdecimal() else 0


def choose_device(device: str) -> str:
    """Return ``cpu`` or ``cuda:N`` for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UserError: another name, or a device that this machine lacks.
    """
    if device == "cpu":
        return "cpu"
    import torch

    if device == "auto" and not torch.cuda.is_available():
        return "cpu"
    match = re.fullmatch(r"cuda(?::(\d+))?", "cuda" if device == "auto" else device)
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
    gpu = torch.cuda.get_device_properties(index)
    check_capability(
        f"cuda:{index} ({gpu.name})", (gpu.major, gpu.minor), torch.cuda.get_arch_list()
    )
    return f"cuda:{index}"


def check_capability(gpu: str, capability: tuple[int, int], built_for: Sequence[str]) -> None:
    """Refuse a GPU that is older than what PyTorch was built for, such as ``sm_80``.

    Its first kernel would fail without saying why.

    Raises:
        UserError: naming both.
    """
    matches = (re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[af]?", one) for one in built_for)
    least = min(((int(match[1]), int(match[2])) for match in matches if match), default=(0, 0))
    if capability < least:
        own, needed = (".".join(map(str, pair)) for pair in (capability, least))
        raise UserError(
            f"{gpu} has compute capability {own}, and this PyTorch was built for {needed} and "
            "above. Use --device cpu, or install a build of PyTorch for it (https://pytorch.org)."
        )


def processes(*modules: str) -> ForkServerContext | SpawnContext:
    """Return a context whose processes are forked by a server that has imported modules.

    So they are imported once, however many processes there are. They may not start threads, as
    Lance does. Where there is no such server, as on Windows, each process starts on its own.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules])
    return context


def native_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    native = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
    return any(capabilities.get(name) for name in native)


def free_memory() -> int:
    """Return the bytes of main memory that are free now, within a container's limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = _cgroup_room()
    return free if limit is None else min(free, limit)


def _cgroup_room() -> int | None:
    """Return what a container's own limit leaves, which the machine's figures do not show."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        cached = next(
            int(line.split()[1])
            for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            if line.startswith("inactive_file ")
        )
    except (OSError, ValueError, StopIteration):
        return None
    return None if limit == "max" else max(int(limit) - used + cached, 0)
