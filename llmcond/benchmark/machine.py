"""A description of the machine that figures were measured on."""

from __future__ import annotations

import platform
import shutil
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from llmcond.files import format_bytes
from llmcond.system import free_memory, versions


def describe_machine(device: str) -> dict[str, Any]:
    """Return the hardware, the driver and the versions of libraries, to record with figures."""
    description: dict[str, Any] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "cpu": _read_cpu_name(),
        "threads": torch.get_num_threads(),
        "free_memory": format_bytes(free_memory()),
        "system": platform.platform(),
    }
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        description |= {
            "gpu": properties.name,
            "gpu_memory": format_bytes(properties.total_memory),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "driver": _read_driver_version(),
            "cuda": torch.version.cuda,
        }
    peers = {}
    for name in ("sentence-transformers", "flash-attn"):
        with suppress(PackageNotFoundError):
            peers[name] = version(name)
    return {**description, "versions": {**versions(), **peers}}


def _read_cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _read_driver_version() -> str | None:
    """Return the version of NVIDIA's driver, as ``nvidia-smi`` reports it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None
