"""This machine and process: devices, memory, number types, threads and installed libraries."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from llmcond.base.errors import LlmcondError, UserError, first_line, install_command, shortened_repr
from llmcond.base.files import format_bytes
from llmcond.base.package import __version__

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, SpawnContext

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
    """Return the versions of this package, Python, and the installed libraries."""
    installed = {"llmcond": __version__, "python": platform.python_version()}
    return installed | _find_versions(_LIBRARIES)


def _find_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    from importlib import metadata  # slow to import

    installed = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def provenance() -> dict[str, Any]:
    """Return the provenance of a new file: the current time and ``versions``."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created": created, "versions": dict(versions())}


def local_rank() -> int:
    """Return the local rank of this process under torchrun or accelerate; 0 without a launcher."""
    value = os.environ.get("LOCAL_RANK", "")
    return int(value) if value.isdecimal() else 0


def follow_parent(pipe: Connection) -> None:
    """Leave Ctrl-C to the parent process, and end this one when the parent closes the pipe or dies.

    Args:
        pipe: end of a pipe whose other end only the parent has.
    """

    def wait() -> None:
        pipe.poll(None)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait, daemon=True).start()


def choose_device(device: str) -> str:
    """Return the device, ``cpu`` or ``cuda:N``, for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UserError: the name is invalid, or this machine has no such device.
    """
    check_device(device)
    if device == "cpu" or (device == "auto" and not may_have_gpu()):
        return "cpu"
    import torch

    if device == "auto" and not torch.cuda.is_available():
        if torch.backends.mps.is_available():
            _log_unused_mps()
        return "cpu"
    count = torch.cuda.device_count()
    number = device.partition(":")[2]
    # Processes that are launched together use different GPUs.
    index = int(number) if number else local_rank() % max(1, count)
    if index >= count:
        raise _no_such_gpu(device, count)
    gpu = torch.cuda.get_device_properties(index)
    check_capability(
        f"cuda:{index} ({gpu.name})", (gpu.major, gpu.minor), torch.cuda.get_arch_list()
    )
    return f"cuda:{index}"


def check_device_name(device: object) -> None:
    """Raise a UserError unless a device is ``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UserError(f"device is {shortened_repr(device)}. Legal: auto, cpu, cuda, cuda:N.")


def check_device(device: str) -> None:
    """Check a device as far as that is possible without importing PyTorch.

    Raises:
        UserError: the name is invalid, or this machine certainly has no GPU.
    """
    check_device_name(device)
    if device.startswith("cuda") and not may_have_gpu():
        raise _no_such_gpu(device, 0)


def _no_such_gpu(device: str, count: int) -> UserError:
    return UserError(
        f"device is {device!r}, but PyTorch sees {count} CUDA devices. Use --device cpu, or "
        "install a CUDA build of PyTorch."
    )


def may_have_gpu() -> bool:
    """Return False only if there is certainly no GPU, without importing PyTorch."""
    if "torch" in sys.modules or platform.system() != "Linux":
        return True
    # Device files of the drivers of NVIDIA, of WSL (dxg) and of AMD (kfd).
    return any(Path("/dev", name).exists() for name in ("nvidiactl", "nvidia0", "dxg", "kfd"))


def move_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; copies to a GPU are asynchronous, from pinned memory.

    A plain copy would wait for all queued work of the GPU, including the previous batch.
    """
    if values.is_cpu and device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def check_capability(gpu: str, capability: tuple[int, int], built_for: Sequence[str]) -> None:
    """Check that PyTorch was built for a GPU, whose first kernel would fail without a reason.

    Kernels built for ``sm_80`` run on GPUs of the same major version and the same or a higher minor
    version. ``compute_90`` is compiled at load for the same or any higher version.

    Args:
        gpu: name of the GPU, for the message.
        capability: compute capability of the GPU.
        built_for: architectures that PyTorch was built for, such as ``sm_80``.

    Raises:
        UserError: PyTorch was not built for the GPU.
    """
    matches = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name) for name in built_for]
    kinds = [(match[1], (int(match[2]), int(match[3]))) for match in matches if match]
    fits = (
        least <= capability and (kind == "compute" or least[0] == capability[0])
        for kind, least in kinds
    )
    if kinds and not any(fits):
        gpu_version, *supported = (
            ".".join(map(str, pair))
            for pair in (capability, *sorted({least for _, least in kinds}))
        )
        raise UserError(
            f"{gpu} has compute capability {gpu_version}, and this PyTorch was built for "
            f"{', '.join(supported)}. Use --device cpu, or install a build of PyTorch for this GPU "
            "(https://pytorch.org)."
        )


@cache
def _log_unused_mps() -> None:
    _log.info("the GPU of this Mac is not used: llmcond computes on CUDA GPUs and on CPUs.")


def require_libraries(what: str, *names: str, extra: str = "quantize") -> None:
    """Raise a UserError unless the libraries ``names`` are installed.

    ``what`` says what needs them, as the beginning of the message. ``extra`` is the extra of
    llmcond that installs them.
    """
    absent = [name for name in names if not is_installed(name)]
    if absent:
        raise UserError(
            f"{what}, which needs {' and '.join(absent)}. Install it: {install_command(extra)}."
        )


def require_quantization(quantize: str) -> None:
    """Raise a UserError unless the libraries for quantised weights are installed."""
    require_libraries(f"quantize is {quantize!r}", "bitsandbytes", "accelerate")


def is_installed(name: str) -> bool:
    """Return whether a library is installed, without importing it."""
    try:
        spec = find_spec(name)
    except ValueError:  # the module was disabled in sys.modules
        return False
    # W&B writes to a folder `wandb`, which Python takes for a package without code.
    return spec is not None and spec.origin is not None


def process_context(*modules: str) -> ForkServerContext | SpawnContext:
    """Return a multiprocessing context whose processes are forked from a server.

    The server imports modules once for all processes. These modules must not start threads when
    they are imported, as Lance does. Without a fork server, as on Windows, each process is started
    from scratch.

    Args:
        modules: names of the modules that the server imports.
    """
    import multiprocessing

    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules])
    return context


#: Comma-separated features that replace those of the CPU, to test what llmcond does on another CPU.
CPU_FEATURES = "LLMCOND_CPU_FEATURES"
#: The features of CPUs that multiply 16-bit types, by their names in Linux and PyTorch.
_NATIVE_FEATURES: Mapping[str, frozenset[str]] = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16", "sve_bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp", "fp16"}),
}


def cpu_features() -> frozenset[str]:
    """Return the features of this CPU, such as ``avx2``; all decisions about it use this function.

    The environment variable ``LLMCOND_CPU_FEATURES`` replaces them.
    """
    simulated = os.environ.get(CPU_FEATURES)
    if simulated is not None:
        return frozenset(simulated.replace(",", " ").split())
    return _read_cpu_features()


@cache
def _read_cpu_features() -> frozenset[str]:
    try:
        # Reading this file avoids importing PyTorch, which takes a second. All cores are alike.
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # Only Linux has the file.
        import torch

        capabilities = torch.cpu.get_capabilities()
        return frozenset(name for name, value in capabilities.items() if value is True)
    flags = (line for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(flags, "").split())


def computes_natively(dtype: str, device: str = "cpu") -> bool:
    """Return whether a device multiplies a number type in hardware.

    Other types are emulated: several times slower than float32, and with a rounding that depends
    on the size of the batch.

    Args:
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        device: ``cpu`` or ``cuda:N``.
    """
    if device == "cpu":
        return dtype == "float32" or not _NATIVE_FEATURES[dtype].isdisjoint(cpu_features())
    if dtype != "bfloat16":
        return True
    import torch

    # GPUs before compute capability 8.0 emulate bfloat16. A GPU of another machine is not known.
    is_here = torch.cuda.is_available()
    return not is_here or torch.cuda.get_device_capability(device)[0] >= 8


def cpu_threads() -> int:
    """Return the number of threads that PyTorch uses on a CPU, even if it is not imported yet.

    It is ``OMP_NUM_THREADS``, or the number of physical cores that this process may use.
    """
    if "torch" in sys.modules:
        import torch

        return torch.get_num_threads()
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    import psutil

    cores = psutil.cpu_count(logical=False) or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, min(cores, allowed))


def limit_cpu_threads(count: int) -> None:
    """Limit the CPU threads of this process, without importing PyTorch."""
    # ``cpu_threads`` and a later import of PyTorch read it.
    os.environ["OMP_NUM_THREADS"] = str(count)
    _limit_torch(count)


def _limit_torch(count: int = 1) -> None:
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(count)


if hasattr(os, "register_at_fork"):  # not on Windows
    # A forked process does not have PyTorch's threads, and would wait for them for ever.
    os.register_at_fork(after_in_child=_limit_torch)


def free_memory() -> int:
    """Return the number of free bytes of main memory, within the limit of a container."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = _free_cgroup_memory()
    return free if limit is None else min(free, limit)


def _free_cgroup_memory() -> int | None:
    """Return the free bytes within a container's limit, which psutil ignores; None: no limit."""
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
    peers = _find_versions(("sentence-transformers", "flash-attn"))
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
    if _find_versions(["llmcond"]):  # a folder on PYTHONPATH has no extras
        for extra, missing in _list_extras().items():
            facts[f"extra {extra}"] = f"lacks {', '.join(missing)}" if missing else "installed"
    return facts


def _list_extras() -> dict[str, list[str]]:
    """Return the names of the missing packages of each extra, except ``all``."""
    from importlib.metadata import distribution

    from packaging.requirements import Requirement

    package = distribution("llmcond")
    requirements = [Requirement(text) for text in package.requires or ()]
    extras: dict[str, list[str]] = {}
    for extra in sorted(package.metadata.get_all("Provides-Extra") or ()):
        names = [
            requirement.name
            for requirement in requirements
            if (marker := requirement.marker)
            and marker.evaluate({"extra": extra})
            and not marker.evaluate({"extra": ""})
        ]
        extras[extra] = sorted(set(names) - _find_versions(names).keys(), key=names.index)
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
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None


#: The variable with the key for servers that others run, as OpenAI's client reads it.
API_KEY_VARIABLE = "OPENAI_API_KEY"
_LOCAL = ("localhost", "127.0.0.1", "::1")


def read_api_key() -> str:
    """Return the key in the environment; empty if there is none."""
    return os.environ.get(API_KEY_VARIABLE, "").strip()


def check_server_address(address: str, flag: str) -> None:
    """Check the address of a server, and the key in the environment, before any request.

    Args:
        address: an address such as ``http://localhost:8000/v1``.
        flag: the flag that names it, for messages.

    Raises:
        UserError: the address or the key is invalid.
    """
    try:
        parts = urlsplit(address if _is_printable(address) else "")
        secret = parts.username is not None or parts.password is not None or bool(parts.query)
        _ = parts.port  # a number that is no port raises an error
    except ValueError:
        parts, secret = urlsplit(""), False
    if secret:
        raise UserError(
            f"{flag} contains a user name, a password or a query, which messages would show. Leave "
            f"them out; the key is read from {API_KEY_VARIABLE}."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"{flag} is {shortened_repr(address)}; expected an address such as "
            "http://localhost:8000/v1."
        )
    key = read_api_key()
    if not (key.isascii() and _is_printable(key)):
        raise UserError(
            f"{API_KEY_VARIABLE} is no key, because an HTTP header cannot contain it: it has a "
            "space, a line break or a character outside of ASCII. Copy the key again."
        )
    if parts.scheme == "http" and parts.hostname not in _LOCAL and key:
        _warn_unencrypted(parts.hostname)


@cache
def _warn_unencrypted(host: str) -> None:
    message = f"{API_KEY_VARIABLE} is sent to {host} unencrypted; use https to protect it."
    logging.getLogger("llmcond").warning(message)


def _is_printable(text: str) -> bool:
    return text.isprintable() and " " not in text
