"""Descriptions of this machine, for measured figures and for reports of bugs."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from llmcond.errors import LlmcondError, first_line
from llmcond.files import format_bytes
from llmcond.system import choose_device, free_memory, versions


def describe_machine(device: str) -> dict[str, Any]:
    """Return the hardware, the driver and the versions of libraries, to record with figures."""
    import torch

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


def describe_installation() -> dict[str, str]:
    """Return what a report of a bug should say: versions, the device, and the extras.

    A broken installation is described too: each part that fails is replaced by its error.
    """
    facts = {**versions(), "python": f"{platform.python_version()} ({sys.executable})"}
    facts["package"] = str(Path(__file__).parents[1])
    try:
        machine = describe_machine(choose_device("auto"))
    except (LlmcondError, ImportError, OSError) as error:
        facts["device"] = first_line(error)
        facts |= {"cpu": _read_cpu_name(), "system": platform.platform()}
    else:
        facts |= {
            name: str(value)
            for name, value in machine.items()
            if name not in ("created", "versions")
        }
    with suppress(PackageNotFoundError):  # a folder on PYTHONPATH has no extras
        for extra, missing in _list_extras().items():
            facts[f"extra {extra}"] = f"lacks {', '.join(missing)}" if missing else "installed"
    return facts


def _list_extras() -> dict[str, list[str]]:
    """Return the names of the missing packages of each extra, except ``all``."""
    from packaging.requirements import Requirement

    package = distribution("llmcond")
    requirements = [Requirement(text) for text in package.requires or ()]
    extras: dict[str, list[str]] = {}
    for extra in sorted(package.metadata.get_all("Provides-Extra") or ()):
        extras[extra] = []
        for requirement in requirements:
            marker = requirement.marker
            if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
                try:
                    version(requirement.name)
                except PackageNotFoundError:
                    extras[extra].append(requirement.name)
    extras.pop("all", None)
    return extras


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
