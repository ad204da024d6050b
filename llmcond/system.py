"""This machine and process: free memory, native number types, local rank."""

from __future__ import annotations

import logging
import multiprocessing
import os
import platform
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcond.errors import UserError
from llmcond.version import __version__

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_log = logging.getLogger(__name__)

_LIBRARIES = (
    "numpy",
    "pylance",
    "safetensors",
    "scikit-learn",
    "scipy",
    "tokenizers",
    "openvino",
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


def provenance() -> dict[str, Any]:
    """Return what made an artefact: the time now, and :func:`versions`."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created": created, "versions": dict(versions())}


def local_rank() -> int:
    """Return this process's local rank under torchrun or accelerate; 0 without a launcher."""
    value = os.environ.get("LOCAL_RANK", "")
    return int(value) if value.isdecimal() else 0


def choose_device(device: str) -> str:
    """Return ``cpu`` or ``cuda:N`` for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UserError: another name, or a device that this machine lacks.
    """
    if device == "cpu" or (device == "auto" and not _may_have_gpu()):
        return "cpu"
    import torch

    if device == "auto" and not torch.cuda.is_available():
        if torch.backends.mps.is_available():
            _tell_of_mps()
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


def _may_have_gpu() -> bool:
    """Return whether there may be a GPU; False, which spares the import of PyTorch, is certain."""
    if "torch" in sys.modules or platform.system() != "Linux":
        return True
    # Of the drivers of NVIDIA, in WSL and else, and of AMD.
    return any(Path("/dev", name).exists() for name in ("nvidiactl", "nvidia0", "dxg", "kfd"))


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; to a GPU it is copied from pinned memory, and nobody waits.

    A plain copy would wait for all work that is queued on the GPU, the batch before included.
    """
    if values.is_cpu and device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def check_capability(gpu: str, capability: tuple[int, int], built_for: Sequence[str]) -> None:
    """Refuse a GPU that PyTorch was not built for; ``built_for`` has entries such as ``sm_80``.

    Its first kernel would fail without saying why. Kernels of a capability run on GPUs of the same
    major version and as high a minor one; ``compute_90`` is compiled for any that is as high.

    Raises:
        UserError: naming what the GPU has and what PyTorch was built for.
    """
    found = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", one) for one in built_for]
    kinds = [(match[1], (int(match[2]), int(match[3]))) for match in found if match]
    fits = (
        least <= capability and (kind == "compute" or least[0] == capability[0])
        for kind, least in kinds
    )
    if kinds and not any(fits):
        own, *known = (
            ".".join(map(str, pair))
            for pair in (capability, *sorted({least for _, least in kinds}))
        )
        raise UserError(
            f"{gpu} has compute capability {own}, and this PyTorch was built for "
            f"{', '.join(known)}. Use --device cpu, or install a build of PyTorch for it "
            "(https://pytorch.org)."
        )


@cache
def _tell_of_mps() -> None:
    _log.info("the GPU of this Mac is not used: llmcond computes on CUDA GPUs and on CPUs.")


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


@cache
def native_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware."""
    native = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
    try:
        # One line for each core, all alike; PyTorch, which asks the CPU itself, takes a second.
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        import torch

        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name) for name in (*native, "sve_bf16"))
    flags = (line for line in lines if line.startswith(("flags", "Features")))
    return not native.isdisjoint(next(flags, "").split())


def cpu_threads() -> int:
    """Return how many threads compute on a CPU: PyTorch's number, whether it is imported or not.

    That is ``OMP_NUM_THREADS``, or the number of physical cores that this process may use.
    """
    if "torch" in sys.modules:
        import torch

        return torch.get_num_threads()
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    import psutil

    cores = psutil.cpu_count(logical=False) or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, min(cores, allowed))


def compute_on_one_thread() -> None:
    """Let this process compute on one thread of a CPU, without importing PyTorch for it."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by :func:`cpu_threads`, and by PyTorch's import
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


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
