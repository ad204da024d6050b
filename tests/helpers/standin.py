"""A stand-in for CUDA, so that tests run the code for GPUs on a machine without one.

CPU kernels compute real values. Only the devices are simulated: a tensor is "on cuda:N" if its
storage has this tag. Like CUDA, the stand-in raises an error if an operator gets tensors of
different devices, if NumPy reads a tensor of a GPU, if memory runs out, and if attention for
uneven lengths gets arguments that FlashAttention does not support. Unlike CUDA, it also raises an
error if the project copies asynchronously from or to pageable memory, or reads a copy before the
event recorded after it has happened. It counts kernel launches, copies, waits of the host, and the
memory of each device::

    with StandIn(gpus=1, gib=24, capability=(8, 9)) as gpu:
        ...
    assert not gpu.waits

Its limits: it has one stream, which always runs in order, and C++ code sees CPU tensors.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.kernels import reference_attention

_ATEN = torch.ops.aten
_CPU = torch.device("cpu")
_BASE = torch._C.TensorBase
_real_device = _BASE.device.__get__
_real_numpy, _real_tolist, _real_to, _real_copy = _BASE.numpy, _BASE.tolist, _BASE.to, _BASE.copy_
#: Number of bytes whose multiples the CUDA allocator returns.
_BLOCK = 512
#: Operators whose result the host needs before it continues.
_WAITING = {
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
    _ATEN._local_scalar_dense.default,
    _ATEN.equal.default,
    _ATEN.repeat_interleave.Tensor,
    _ATEN._unique2.default,
    _ATEN.unique_dim.default,
    _ATEN.unique_consecutive.default,
    _ATEN.bincount.default,
    _ATEN.is_nonzero.default,
}
#: Operators that accept indices on the CPU, which CUDA copies.
_INDEXING = {
    _ATEN.index.Tensor,
    _ATEN.index_put_.default,
    _ATEN.index_put.default,
    _ATEN._index_put_impl_.default,
}
_INDICES = (torch.long, torch.bool, torch.uint8)


class _State(threading.local):
    """Whether this thread runs code of the stand-in, which sees the real tensors."""

    depth = 0


_state = _State()


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # such as a tensor without memory
        return None


def device_of(tensor: Tensor) -> torch.device:
    """Return the simulated device of a tensor."""
    real = _real_device(tensor)
    return getattr(_storage(tensor), "_device", _CPU) if real.type == "cpu" else real


def _as_device(device: Any) -> torch.device | None:
    if device is None:
        return None
    device = torch.device("cuda", device) if type(device) is int else torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", 0)
    return device


def _where() -> str:
    """Return the line that called torch, in the project without the path to it."""
    frame = sys._getframe(1)
    while frame is not None:
        line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if "standin" not in line and "site-packages/torch/" not in line:
            return line.rpartition("/llmcond/")[2]
        frame = frame.f_back
    return "?"


class StandIn:
    """A context manager that simulates GPUs.

    Attributes:
        launches: number of kernel launches, by operator.
        copies: number of copies between the memory of the host and of a GPU, by direction.
        waits: number of waits of the host for a GPU, by operation and line, except for an event.
        events: number of waits of the host for an event.
        unpinned: number of copies to a GPU from pageable memory, by line, which wait, too.
        used, peak: bytes in use on each GPU, now and at most.
    """

    current: StandIn

    def __init__(
        self,
        gpus: int = 1,
        gib: float = 80.0,
        capability: tuple[int, int] = (9, 0),
        *,
        built_for: Sequence[str] = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    ) -> None:
        self.gpus, self.total, self.capability = gpus, int(gib * 2**30), capability
        self.built_for = list(built_for)
        self.fraction = 1.0
        self.used, self.peak = [0] * gpus, [0] * gpus
        self.launches: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.unpinned: Counter[str] = Counter()
        self.events = 0
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._lock = threading.RLock()
        self._stack = contextlib.ExitStack()

    @property
    def n_launches(self) -> int:
        """Number of launched kernels."""
        return self.launches.total()

    def reset(self) -> None:
        """Reset all counters."""
        for counter in (self.launches, self.copies, self.waits, self.unpinned):
            counter.clear()
        self.events = 0
        self.peak = list(self.used)

    # -- memory ------------------------------------------------------------------------------

    def tag(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Tag a CPU tensor as being on a device, and count its memory."""
        if device.type != "cuda" or _real_device(tensor).type != "cpu":
            return tensor
        storage = _storage(tensor)
        if storage is None or hasattr(storage, "_device"):
            return tensor
        gpu, size = device.index or 0, -(-storage.nbytes() // _BLOCK) * _BLOCK
        if gpu >= self.gpus:
            raise RuntimeError(f"CUDA error: invalid device ordinal {gpu}")
        with self._lock:
            if self.used[gpu] + size > self.total * self.fraction:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
            self.used[gpu] += size
            self.peak[gpu] = max(self.peak[gpu], self.used[gpu])
        storage._device = device
        weakref.finalize(storage, self._free, gpu, size)
        return tensor

    def _free(self, gpu: int, size: int) -> None:
        with self._lock:
            self.used[gpu] -= size

    # -- order of the device's work ----------------------------------------------------------

    def wait(self, what: str) -> None:
        """Count a wait of the host for all work of the GPU, and finish this work."""
        self.waits[f"{what}, {_where()}"] += 1
        self._finish(self._pending)

    def _finish(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        with self._lock, _inside(), torch.inference_mode():
            for target, source in copies:
                _real_copy(target, source)
            done = set(map(id, copies))
            self._pending = [copy for copy in self._pending if id(copy) not in done]

    def _copy_later(self, target: Tensor, source: Tensor) -> Tensor:
        """Copy as soon as an event recorded after this has happened."""
        with self._lock, _inside():
            self._pending.append((target.detach(), source.detach().clone()))
            return target.fill_(math.nan if target.is_floating_point() else -7)

    def check_arrived(self, tensors: Sequence[Tensor]) -> None:
        """Raise an error if one of the tensors is still being copied."""
        if not self._pending:
            return
        with _inside():
            awaited = {_storage(target)._cdata for target, _ in self._pending}
            early = any(_storage(t) is not None and _storage(t)._cdata in awaited for t in tensors)
        if early:
            raise RuntimeError(f"a copy from the GPU was read before its event, {_where()}")

    # -- patches -----------------------------------------------------------------------------

    def __enter__(self) -> StandIn:
        with contextlib.suppress(ImportError):
            # It looks for CUDA when it is imported, and must choose its CPU kernels.
            import bitsandbytes  # noqa: F401
        StandIn.current = self
        patches = (self._tensors(), self._cuda(), self._libraries())
        for group in patches:
            for patch in group:
                self._stack.enter_context(patch)
        self._stack.enter_context(_modes(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _tensors(self) -> Iterator[Any]:
        def numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not _state.depth:
                if device_of(tensor).type == "cuda":
                    raise TypeError("can't convert cuda:0 device type tensor to numpy.")
                self.check_arrived([tensor])
            return _real_numpy(tensor, *args, **kwargs)

        def as_array(tensor: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
            values = numpy(tensor.detach() if tensor.requires_grad else tensor)
            return values if dtype is None else values.astype(dtype)

        def tolist(tensor: Tensor) -> Any:
            if not _state.depth:
                if device_of(tensor).type == "cuda":
                    self.wait("tolist")
                self.check_arrived([tensor])
            with _inside():
                return _real_tolist(tensor)

        def pin_memory(tensor: Tensor, *args: Any) -> Tensor:
            if device_of(tensor).type != "cpu":
                raise RuntimeError("only dense CPU tensors can be pinned")
            with _inside():
                pinned = tensor.detach().clone()
            _storage(pinned)._pinned = True
            return pinned

        def is_pinned(tensor: Tensor, *args: Any) -> bool:
            return hasattr(_storage(tensor), "_pinned")

        def on(kind: str) -> property:
            return property(
                lambda t: (_real_device(t) if _state.depth else device_of(t)).type == kind
            )

        replaced = {
            "device": property(lambda t: _real_device(t) if _state.depth else device_of(t)),
            "is_cuda": on("cuda"),
            "is_cpu": on("cpu"),
            "get_device": lambda t: device_of(t).index if device_of(t).type == "cuda" else -1,
            "numpy": numpy,
            "__array__": as_array,
            "tolist": tolist,
            "pin_memory": pin_memory,
            "is_pinned": is_pinned,
            "cuda": lambda t, device="cuda", **_: t.to(_as_device(device)),
        }
        for name, value in replaced.items():
            yield mock.patch.object(Tensor, name, value, create=True)

    def _cuda(self) -> Iterator[Any]:
        stand = self

        class Event:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._behind: list[Any] = []

            def record(self, stream: Any = None) -> None:
                self._behind = list(stand._pending)

            def synchronize(self) -> None:
                stand.events += 1
                stand._finish(self._behind)

        def index(device: Any = "cuda") -> int:
            resolved = _as_device("cuda" if device is None else device)
            if resolved.type != "cuda" or (resolved.index or 0) >= self.gpus:
                raise RuntimeError(f"Invalid device {device}")
            return resolved.index or 0

        def properties(device: Any = None) -> Any:
            index(device)
            return SimpleNamespace(
                name="Stand-in",
                major=self.capability[0],
                minor=self.capability[1],
                total_memory=self.total,
                multi_processor_count=132,
                warp_size=32,
            )

        stream = SimpleNamespace(
            synchronize=lambda: self.wait("stream.synchronize"),
            wait_stream=lambda other: None,
            is_capturing=lambda: False,
            cuda_stream=0,
            device=torch.device("cuda", 0),
        )

        def used(device: Any = None) -> int:
            return self.used[index(device)]

        replaced: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "_lazy_init": lambda: None,
            "device_count": lambda: self.gpus,
            "get_device_properties": properties,
            "get_device_capability": lambda device=None: self.capability,
            "get_arch_list": lambda: self.built_for,
            "is_bf16_supported": lambda *args, **kwargs: self.capability[0] >= 8,
            "mem_get_info": lambda device=None: (self.total - used(device), self.total),
            "memory_allocated": used,
            "memory_reserved": used,
            "empty_cache": lambda: None,
            "synchronize": lambda device=None: self.wait("synchronize"),
            "set_per_process_memory_fraction": lambda share, device=None: setattr(
                self, "fraction", share
            ),
            "manual_seed_all": lambda seed: None,
            "Event": Event,
            "current_stream": lambda device=None: stream,
            "is_current_stream_capturing": lambda: False,
        }
        for name, value in replaced.items():
            yield mock.patch.object(torch.cuda, name, value, create=True)
        cuda = torch.device("cuda")
        for module, name, value in (
            (torch.accelerator, "current_accelerator", cuda),
            (torch.accelerator, "current_stream", stream),
            (torch._C, "_cuda_init", None),
            (torch._C, "_accelerator_getAccelerator", cuda),
        ):
            yield mock.patch.object(module, name, mock.Mock(return_value=value), create=True)

    def _libraries(self) -> Iterator[Any]:
        real_generator, real_autocast = torch.Generator, torch.autocast.__init__

        class Generator(real_generator):
            def __new__(cls, device: Any = "cpu") -> Any:
                return real_generator.__new__(cls, "cpu")

            def __init__(self, device: Any = "cpu") -> None:
                self._device = _as_device(device)

            @property
            def device(self) -> Any:
                return self._device

        def autocast(block: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            kind = "cpu" if str(device_type).startswith("cuda") else device_type
            real_autocast(block, kind, *args, **kwargs)

        begin = threading.Thread._bootstrap_inner

        def begin_in_modes(thread: threading.Thread) -> None:
            with _modes(self):
                begin(thread)

        yield mock.patch.object(torch, "Generator", Generator)
        yield mock.patch.object(torch.autocast, "__init__", autocast)
        yield mock.patch.object(threading.Thread, "_bootstrap_inner", begin_in_modes)
        if self.total < 2**31:  # transformers reserves 1.2 GiB of the memory of a GPU
            import transformers.modeling_utils as loading

            yield mock.patch.object(loading, "caching_allocator_warmup")
        yield mock.patch("torch.nn.attention.varlen.varlen_attn", varlen_attn)


@contextlib.contextmanager
def _modes(stand: StandIn) -> Iterator[None]:
    with _Dispatch(stand), _Functions(stand):
        yield


class _Dispatch(TorchDispatchMode):
    """Intercepts every operator below autograd: devices, launches, waits and memory."""

    def __init__(self, stand: StandIn) -> None:
        super().__init__()
        self._stand = stand

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _state.depth:
            return func(*args, **kwargs)
        stand = self._stand
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = [device_of(tensor) for tensor in tensors]
        gpus = {device for device in devices if device.type == "cuda"}
        on_cpu = [t for t, device in zip(tensors, devices, strict=True) if device.type == "cpu"]
        if on_cpu:
            written = args[0] if func is _ATEN.copy_.default else None
            stand.check_arrived([tensor for tensor in on_cpu if tensor is not written])
        if not gpus:
            return func(*args, **kwargs)
        if func is _ATEN.copy_.default:
            return self._copy(*args, **kwargs)
        self._check_devices(func, tensors, devices, gpus)
        (gpu,) = gpus
        masks = (torch.bool, torch.uint8)
        masked = func in _INDEXING and any(
            isinstance(index, Tensor) and index.dtype in masks for index in args[1]
        )
        if func in _WAITING or masked:
            stand.wait(str(func))
        stand.launches[str(func)] += 1
        # The kernels of bitsandbytes create tensors on the device of their inputs.
        with _inside() if func.namespace == "bitsandbytes" else contextlib.nullcontext():
            output = func(*args, **kwargs)
        # A view shares its storage with an input.
        cpu_storages = [_storage(tensor) for tensor in on_cpu]
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and not any(_storage(leaf) is s for s in cpu_storages):
                stand.tag(leaf, gpu)
        return output

    def _check_devices(
        self, func: Any, tensors: Sequence[Tensor], devices: Sequence[Any], gpus: set[Any]
    ) -> None:
        message = "Expected all tensors to be on the same device"
        if len(gpus) > 1:
            raise RuntimeError(f"{message}, but found {gpus} in {func}")
        for tensor, device in zip(tensors, devices, strict=True):
            if device.type != "cpu" or not tensor.ndim:
                continue
            if func not in _INDEXING or tensor.dtype not in _INDICES:
                raise RuntimeError(f"{message}, but found {gpus} and cpu in {func}")
            self._stand.unpinned[f"{func}, {_where()}"] += 1

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        stand, to, origin = self._stand, device_of(target), device_of(source)
        if to == origin or (not source.ndim and origin.type == "cpu"):
            stand.launches["copy"] += 1
            return _real_copy(target, source)
        stand.copies[f"{origin.type} to {to.type}"] += 1
        if to.type == "cuda":
            if origin.type == "cpu" and not source.is_pinned():
                _check_pinned(non_blocking)
                stand.unpinned[f"copy, {_where()}"] += 1
            return _real_copy(target, source)
        if non_blocking and target.is_pinned():
            return stand._copy_later(target, source)
        _check_pinned(non_blocking)
        stand.wait("copy to the CPU")
        return _real_copy(target, source)


def _check_pinned(non_blocking: bool) -> None:
    """Raise an error if the project, not a library, copies asynchronously with pageable memory."""
    if non_blocking and "site-packages" not in _where():
        raise RuntimeError(f"an asynchronous copy of memory that is not pinned, {_where()}")


class _Functions(TorchFunctionMode):
    """Intercepts calls above autograd, and the device that they request."""

    def __init__(self, stand: StandIn) -> None:
        super().__init__()
        self._stand = stand

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if _state.depth:
            return func(*args, **kwargs)
        if func is torch.device and args and type(args[0]) is int:
            return torch.device("cuda", args[0])
        if name == "is_pinned":
            return Tensor.is_pinned(args[0])
        if func is Tensor.backward:  # the mode would be off within it
            with self:
                gradients = args[1:2] or [kwargs.pop("gradient", None)]
                return torch.autograd.backward(args[0], *gradients, **kwargs)
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        moves = {"to": None, "cpu": _CPU, "cuda": "cuda"}
        if name in moves and args and isinstance(args[0], Tensor):
            to_args = args if name == "to" else (args[0], *(args[1:] or (moves[name],)))
            return self._to(*to_args, **kwargs)
        pin = kwargs.pop("pin_memory", False)
        device = _as_device(kwargs.get("device"))
        if device is not None and device.type == "cuda":
            return self._create(func, name, args, {**kwargs, "device": _CPU}, device)
        output = func(*args, **kwargs)
        if pin and isinstance(output, Tensor):
            _storage(output)._pinned = True
        return output

    def _create(self, func: Any, name: str, args: Any, kwargs: Any, device: torch.device) -> Any:
        """Create a tensor on a GPU."""
        like = "like" in name and any(isinstance(value, Tensor) for value in args)
        with _inside() if like else contextlib.nullcontext():
            output = func(*args, **kwargs)
        if not isinstance(output, Tensor):
            return output
        if name in ("tensor", "as_tensor", "asarray") and output.ndim:
            self._stand.unpinned[f"torch.{name}(device=), {_where()}"] += 1
        storages = [_storage(value) for value in args if isinstance(value, Tensor)]
        with _inside(), torch.no_grad():
            if any(s is not None and s._cdata == _storage(output)._cdata for s in storages):
                output = output.clone()
            if "empty" in name and output.is_floating_point():
                output.fill_(math.nan)
        return self._stand.tag(output, device)

    def _to(self, tensor: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        device, dtype, non_blocking, copy = _to_arguments(rest, kwargs)
        origin = device_of(tensor)
        if "meta" in (origin.type, device.type if device else ""):
            return _real_to(tensor, device or origin, dtype or tensor.dtype)
        if device is None or device == origin:
            if dtype is None and not copy:
                return tensor
            return _real_to(tensor, dtype=dtype or tensor.dtype, copy=copy)
        if device.type == "cuda":
            if origin.type == "cpu" and tensor.ndim and not tensor.is_pinned():
                _check_pinned(non_blocking)
                self._stand.unpinned[f"to(cuda), {_where()}"] += 1
        else:
            _check_pinned(non_blocking)
            self._stand.wait("to(cpu)")
        self._stand.check_arrived([tensor])
        return _moved(tensor, device, dtype or tensor.dtype)


def _to_arguments(rest: Sequence[Any], kwargs: Any) -> tuple[Any, Any, bool, bool]:
    """Return the device, dtype, ``non_blocking`` and ``copy`` of a call of ``Tensor.to``."""
    others = [value for value in (*rest, kwargs.get("other")) if isinstance(value, Tensor)]
    if others:
        return device_of(others[0]), others[0].dtype, False, False
    rest = [torch.device("cuda", value) if type(value) is int else value for value in rest]
    parsed = {name: value for name, value in kwargs.items() if name != "copy"}
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*rest, **parsed)
    return _as_device(device), dtype, non_blocking, kwargs.get("copy", False)


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    stand = StandIn.current
    stand.copies[f"{device_of(tensor).type} to {device.type}"] += 1
    with _inside():
        copy = _real_to(tensor.detach(), dtype, copy=True, memory_format=torch.preserve_format)
    return stand.tag(copy, device)


# -- attention for uneven lengths ----------------------------------------------------------------


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor:
    """Compute PyTorch's function of this name, and check the requirements of FlashAttention."""
    device = device_of(query)
    states, lengths = (query, key, value), (cu_seq_q, cu_seq_k)
    if device.type != "cuda" or any(device_of(tensor) != device for tensor in (*states, *lengths)):
        raise RuntimeError("varlen_attn: all tensors must be on one GPU")
    with _inside():
        sizes = [ends.diff().max().item() for ends in lengths]
        totals = [ends[-1].item() for ends in lengths]
    for problem, found in (
        ("the type is not fp16 or bf16", query.dtype not in (torch.float16, torch.bfloat16)),
        ("several types", any(x.dtype != query.dtype for x in states)),
        ("a last dimension is not contiguous", any(x.stride(-1) != 1 for x in states)),
        ("head dimension", query.shape[2] > 256 or query.shape[2] % 8 > 0),
        ("cu_seqlens are not int32", any(x.dtype != torch.int32 for x in lengths)),
        ("cu_seqlens are not contiguous", not all(x.is_contiguous() for x in lengths)),
        ("numbers of heads differ", query.shape[1] != key.shape[1] and not enable_gqa),
        ("the stand-in has no windows", window_size not in ((-1, -1), (-1, 0))),
        ("cu_seqlens do not cover the row", totals != [len(query), len(key)]),
        ("max_q and max_k", [max_q, max_k] != sizes),
    ):
        if found:
            raise RuntimeError(f"varlen_attn: {problem}")
    StandIn.current.launches["varlen_attn"] += 1
    options |= {"window_size": window_size, "enable_gqa": enable_gqa}
    with _inside():
        output = reference_attention(*states, *lengths, max_q, max_k, **options)
    return StandIn.current.tag(output, device)
