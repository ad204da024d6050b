"""A stand-in for CUDA, so that tests run the code for GPUs on a machine without one.

CPU kernels compute real values. Only devices are made up: a tensor is "on cuda:N" if its storage
is tagged so. Like CUDA, the stand-in raises an error where tensors of different devices meet,
where NumPy reads a tensor of the GPU, where memory runs out, and where its attention for uneven
lengths gets what FlashAttention does not take. Unlike CUDA, it also raises an error where the
project copies asynchronously from or to pageable memory, and where it reads a copy before the
event behind it has happened. It counts kernel launches, copies, waits of the host, and the memory
of each device::

    with StandIn(gpus=1, gib=24, capability=(8, 9)) as gpu:
        ...
    assert not gpu.waits

Its limits: there is one stream, it is always in order, and C++ code sees CPU tensors.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ATEN = torch.ops.aten
_CPU = torch.device("cpu")
_BASE = torch._C.TensorBase
_real_device = _BASE.device.__get__
_real_numpy, _real_tolist, _real_to, _real_copy = _BASE.numpy, _BASE.tolist, _BASE.to, _BASE.copy_
#: The allocator of CUDA hands out multiples of this.
_BLOCK = 512
#: Operators whose result the host must know before it goes on.
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
#: Operators that take indices from the CPU, which CUDA copies.
_INDEXING = {
    _ATEN.index.Tensor,
    _ATEN.index_put_.default,
    _ATEN.index_put.default,
    _ATEN._index_put_impl_.default,
}
_INDICES = (torch.long, torch.bool, torch.uint8)


class _State(threading.local):
    """Whether this thread is inside the stand-in, which sees tensors as they are."""

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


def place(tensor: Tensor) -> torch.device:
    """Return the device that a tensor is said to be on."""
    real = _real_device(tensor)
    return getattr(_storage(tensor), "_place", _CPU) if real.type == "cpu" else real


def _as_device(device: Any) -> torch.device | None:
    if device is None:
        return None
    device = torch.device("cuda", device) if type(device) is int else torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", StandIn.current.index)
    return device


def _frames() -> Iterator[str]:
    frame = sys._getframe(2)
    while frame is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back


def _where() -> str:
    """Return the line of the project that is running, or the one that called torch."""
    other = "?"
    for line in _frames():
        if "/llmcond/" in line and "site-packages" not in line:
            return line.rpartition("/llmcond/")[2]
        if other == "?" and not any(part in line for part in ("standin", "/torch/")):
            other = line.rpartition("site-packages/")[2]
    return other


def _is_ours() -> bool:
    """Return whether the project itself, and no library that it uses, called torch."""
    lines = (line for line in _frames() if "standin" not in line and "/torch/" not in line)
    first = next(lines, "")
    return "site-packages" not in first and ("/llmcond/" in first or "/tests/" in first)


class StandIn:
    """Some GPUs that there are not, for a block.

    Attributes:
        launches: kernels, by the name of the operator.
        copies: between the host's memory and a GPU's, by their direction.
        waits: where the host waited for a GPU, by what it did and the line; waits for an event are
            in ``events``.
        unpinned: copies to a GPU from pageable memory, by the line: the host waits for these too.
        used, peak: bytes of each GPU.
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
        self.index, self.fraction = 0, 1.0
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
        """Return how many kernels were launched."""
        return self.launches.total()

    def reset(self) -> None:
        """Begin to count anew."""
        for counter in (self.launches, self.copies, self.waits, self.unpinned):
            counter.clear()
        self.events = 0
        self.peak = list(self.used)

    def report(self) -> str:
        """Return what was counted, for people."""
        lines = [f"{self.n_launches:,} launches, {self.copies.total():,} copies"]
        lines += [f"{n:,} x waited: {what}" for what, n in self.waits.most_common()]
        lines += [f"{n:,} x unpinned: {what}" for what, n in self.unpinned.most_common()]
        return "\n".join(lines)

    # -- memory ------------------------------------------------------------------------------

    def tag(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Say that a tensor of the CPU is on a device, and count its memory."""
        if device.type != "cuda" or _real_device(tensor).type != "cpu":
            return tensor
        storage = _storage(tensor)
        if storage is None or hasattr(storage, "_place"):
            return tensor
        gpu, size = device.index or 0, -(-storage.nbytes() // _BLOCK) * _BLOCK
        if gpu >= self.gpus:
            raise RuntimeError(f"CUDA error: invalid device ordinal {gpu}")
        with self._lock:
            if self.used[gpu] + size > self.total * self.fraction:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
            self.used[gpu] += size
            self.peak[gpu] = max(self.peak[gpu], self.used[gpu])
        storage._place = device
        weakref.finalize(storage, self._free, gpu, size)
        return tensor

    def _free(self, gpu: int, size: int) -> None:
        with self._lock:
            self.used[gpu] -= size

    # -- order of the device's work ----------------------------------------------------------

    def wait(self, what: str) -> None:
        """Count that the host waits for all work of the GPU."""
        self.waits[f"{what}, {_where()}"] += 1
        self._finish(self._pending)

    def _finish(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        with self._lock, _inside(), torch.inference_mode():
            for target, source in copies:
                _real_copy(target, source)
            done = set(map(id, copies))
            self._pending = [one for one in self._pending if id(one) not in done]

    def _later(self, target: Tensor, source: Tensor) -> Tensor:
        """Copy once an event behind it has happened."""
        with self._lock, _inside():
            self._pending.append((target.detach(), source.detach().clone()))
            return target.fill_(math.nan if target.is_floating_point() else -7)

    def check_arrived(self, tensors: Sequence[Tensor]) -> None:
        """Refuse to read what is still being copied."""
        if not self._pending:
            return
        with _inside():
            coming = {_storage(target)._cdata for target, _ in self._pending}
            early = any(_storage(t) is not None and _storage(t)._cdata in coming for t in tensors)
        if early:
            raise RuntimeError(f"a copy from the GPU was read before its event, {_where()}")

    # -- what is replaced --------------------------------------------------------------------

    def __enter__(self) -> StandIn:
        with contextlib.suppress(ImportError):
            # It looks for CUDA when it is imported, and is to take its CPU kernels.
            import bitsandbytes  # noqa: F401
        StandIn.current = self
        patches = (self._tensors(), self._cuda(), self._libraries())
        for patch in (one for group in patches for one in group):
            self._stack.enter_context(patch)
        self._stack.enter_context(_modes(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _tensors(self) -> Iterator[Any]:
        def numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not _state.depth:
                if place(tensor).type == "cuda":
                    raise TypeError("can't convert cuda:0 device type tensor to numpy.")
                self.check_arrived([tensor])
            return _real_numpy(tensor, *args, **kwargs)

        def as_array(tensor: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
            values = numpy(tensor.detach() if tensor.requires_grad else tensor)
            return values if dtype is None else values.astype(dtype)

        def tolist(tensor: Tensor) -> Any:
            if not _state.depth:
                if place(tensor).type == "cuda":
                    self.wait("tolist")
                self.check_arrived([tensor])
            with _inside():
                return _real_tolist(tensor)

        def pin_memory(tensor: Tensor, *args: Any) -> Tensor:
            if place(tensor).type != "cpu":
                raise RuntimeError("only dense CPU tensors can be pinned")
            with _inside():
                pinned = tensor.detach().clone()
            _storage(pinned)._pinned = True
            return pinned

        def is_pinned(tensor: Tensor, *args: Any) -> bool:
            return hasattr(_storage(tensor), "_pinned")

        def on(kind: str) -> property:
            return property(lambda t: (_real_device(t) if _state.depth else place(t)).type == kind)

        replaced = {
            "device": property(lambda t: _real_device(t) if _state.depth else place(t)),
            "is_cuda": on("cuda"),
            "is_cpu": on("cpu"),
            "get_device": lambda t: place(t).index if place(t).type == "cuda" else -1,
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

            def query(self) -> bool:
                return True

            def wait(self, stream: Any = None) -> None:
                pass

        def index(device: Any = "cuda") -> int:
            found = _as_device("cuda" if device is None else device)
            if found.type != "cuda" or (found.index or 0) >= self.gpus:
                raise RuntimeError(f"Invalid device {device}")
            return found.index or 0

        def properties(device: Any = None) -> Any:
            index(device)
            return SimpleNamespace(
                name="Stand-in",
                major=self.capability[0],
                minor=self.capability[1],
                total_memory=self.total,
                multi_processor_count=132,
                warp_size=32,
                gcnArchName="",
                is_integrated=False,
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

        def peak(device: Any = None) -> int:
            return self.peak[index(device)]

        replaced: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "device_count": lambda: self.gpus,
            "current_device": lambda: self.index,
            "set_device": lambda device: setattr(self, "index", index(device)),
            "device": lambda device: contextlib.nullcontext(),
            "get_device_properties": properties,
            "get_device_capability": lambda device=None: self.capability,
            "get_device_name": lambda device=None: "Stand-in",
            "get_arch_list": lambda: self.built_for,
            "is_bf16_supported": lambda *args, **kwargs: self.capability[0] >= 8,
            "mem_get_info": lambda device=None: (self.total - used(device), self.total),
            "memory_allocated": used,
            "memory_reserved": used,
            "max_memory_allocated": peak,
            "max_memory_reserved": peak,
            "memory_stats": lambda device=None: {},
            "reset_peak_memory_stats": lambda device=None: self.peak.__setitem__(
                index(device), used(device)
            ),
            "empty_cache": lambda: None,
            "ipc_collect": lambda: None,
            "synchronize": lambda device=None: self.wait("synchronize"),
            "set_per_process_memory_fraction": lambda share, device=None: setattr(
                self, "fraction", share
            ),
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: None,
            "get_rng_state_all": lambda: [torch.get_rng_state()],
            "set_rng_state_all": lambda states: None,
            "Event": Event,
            "current_stream": lambda device=None: stream,
            "default_stream": lambda device=None: stream,
            "is_current_stream_capturing": lambda: False,
        }
        for name, value in replaced.items():
            yield mock.patch.object(torch.cuda, name, value, create=True)
        accelerator: dict[str, Callable[..., Any]] = {
            "is_available": lambda *args: True,
            "current_accelerator": lambda *args, **kwargs: torch.device("cuda"),
            "device_count": lambda: self.gpus,
            "current_device_index": lambda: self.index,
            "current_stream": lambda *args: stream,
            "synchronize": lambda *args: self.wait("synchronize"),
        }
        for name, value in accelerator.items():
            yield mock.patch.object(torch.accelerator, name, value)
        for name, value in (
            ("_cuda_init", None),
            ("_accelerator_getAccelerator", torch.device("cuda")),
        ):
            yield mock.patch.object(torch._C, name, mock.Mock(return_value=value), create=True)

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
        if self.total < 2**31:  # transformers takes 1.2 GiB off the memory of a GPU
            import transformers.modeling_utils as loading

            yield mock.patch.object(loading, "caching_allocator_warmup")
        yield mock.patch("torch.nn.attention.varlen.varlen_attn", varlen_attn)


@contextlib.contextmanager
def _modes(stand: StandIn) -> Iterator[None]:
    with _Dispatch(stand), _Functions(stand):
        yield


class _Dispatch(TorchDispatchMode):
    """Sees every operator, behind autograd: devices, launches, waits and memory."""

    def __init__(self, stand: StandIn) -> None:
        super().__init__()
        self._stand = stand

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _state.depth:
            return func(*args, **kwargs)
        stand = self._stand
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = [place(tensor) for tensor in tensors]
        asked = _as_device(kwargs.get("device"))
        if asked is not None and asked.type == "cuda":
            return self._made(func, args, kwargs, tensors, asked)
        gpus = {one for one in places if one.type == "cuda"}
        if len(gpus) < len(places):
            own = [t for t, one in zip(tensors, places, strict=True) if one.type == "cpu"]
            written = args[0] if func is _ATEN.copy_.default else None
            stand.check_arrived([one for one in own if one is not written])
        if not gpus:
            return func(*args, **kwargs)
        if func is _ATEN.copy_.default:
            return self._copy(*args, **kwargs)
        self._check_places(func, tensors, places, gpus)
        (gpu,) = gpus
        masks = (torch.bool, torch.uint8)
        masked = func in _INDEXING and any(
            isinstance(index, Tensor) and index.dtype in masks for index in args[1]
        )
        if func in _WAITING or masked:
            stand.wait(str(func))
        stand.launches[str(func)] += 1
        # The kernels of bitsandbytes make tensors on the device of what they get.
        with _inside() if func.namespace == "bitsandbytes" else contextlib.nullcontext():
            found = func(*args, **kwargs)
        # A view shares its storage with an input.
        kept = [_storage(t) for t, one in zip(tensors, places, strict=True) if one.type == "cpu"]
        for made in tree_leaves(found):
            if isinstance(made, Tensor) and not any(_storage(made) is one for one in kept):
                stand.tag(made, gpu)
        return found

    def _made(
        self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], device: torch.device
    ) -> Tensor:
        """Make a tensor on a GPU, or copy one there, where C++ asked for it."""
        with _inside():
            pin = {"pin_memory": None} if "pin_memory" in kwargs else {}
            found: Tensor = func(*args, **{**kwargs, **pin, "device": _CPU})
            if tensors and _storage(found) is _storage(tensors[0]) and place(found) != device:
                found = found.clone()
        return self._stand.tag(found, device)

    def _check_places(
        self, func: Any, tensors: Sequence[Tensor], places: Sequence[Any], gpus: set[Any]
    ) -> None:
        same = "Expected all tensors to be on the same device"
        if len(gpus) > 1:
            raise RuntimeError(f"{same}, but found {gpus} in {func}")
        for tensor, one in zip(tensors, places, strict=True):
            if one.type != "cpu" or not tensor.ndim:
                continue
            if func not in _INDEXING or tensor.dtype not in _INDICES:
                raise RuntimeError(f"{same}, but found {gpus} and cpu in {func}")
            self._stand.unpinned[f"{func}, {_where()}"] += 1

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        stand, to, of = self._stand, place(target), place(source)
        if to == of or (not source.ndim and of.type == "cpu"):
            stand.launches["copy"] += 1
            return _real_copy(target, source)
        stand.copies[f"{of.type} to {to.type}"] += 1
        if to.type == "cuda":
            if of.type == "cpu" and not source.is_pinned():
                _check_pinned(non_blocking)
                stand.unpinned[f"copy, {_where()}"] += 1
            return _real_copy(target, source)
        if non_blocking and target.is_pinned():
            return stand._later(target, source)
        _check_pinned(non_blocking)
        stand.wait("copy to the CPU")
        return _real_copy(target, source)


def _check_pinned(non_blocking: bool) -> None:
    """Refuse an asynchronous copy between a GPU and pageable memory; libraries may make one."""
    if non_blocking and _is_ours():
        raise RuntimeError(f"an asynchronous copy of memory that is not pinned, {_where()}")


class _Functions(TorchFunctionMode):
    """Sees calls in front of autograd: which device is asked for."""

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
                return _backward(*args, **kwargs)
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        moves = {"to": None, "cpu": _CPU, "cuda": "cuda"}
        if name in moves and args and isinstance(args[0], Tensor):
            given = args if name == "to" else (args[0], *(args[1:] or (moves[name],)))
            return self._to(*given, **kwargs)
        pin = kwargs.pop("pin_memory", False)
        device = _as_device(kwargs.get("device"))
        if device is not None and device.type == "cuda":
            return self._made(func, name, args, {**kwargs, "device": _CPU}, device)
        found = func(*args, **kwargs)
        if pin and isinstance(found, Tensor):
            _storage(found)._pinned = True
        return found

    def _made(self, func: Any, name: str, args: Any, kwargs: Any, device: torch.device) -> Any:
        """Make a tensor on a GPU."""
        like = "like" in name and any(isinstance(one, Tensor) for one in args)
        with _inside() if like else contextlib.nullcontext():
            found = func(*args, **kwargs)
        if not isinstance(found, Tensor):
            return found
        if name in ("tensor", "as_tensor", "asarray") and found.ndim:
            self._stand.unpinned[f"torch.{name}(device=), {_where()}"] += 1
        given = [_storage(one) for one in args if isinstance(one, Tensor)]
        with _inside(), torch.no_grad():
            if any(one is not None and one._cdata == _storage(found)._cdata for one in given):
                found = found.clone()
            if "empty" in name and found.is_floating_point():
                found.fill_(math.nan)
        return self._stand.tag(found, device)

    def _to(self, tensor: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        device, dtype, non_blocking, copy = _to_arguments(rest, kwargs)
        here = place(tensor)
        if "meta" in (here.type, device.type if device else ""):
            if here.type == "meta" and device is not None and device.type == "cuda":
                raise NotImplementedError("Cannot copy out of meta tensor; no data!")
            return _real_to(tensor, device or here, dtype or tensor.dtype)
        if device is None or device == here:
            if dtype is None and not copy:
                return tensor
            return _real_to(tensor, dtype=dtype or tensor.dtype, copy=copy)
        if device.type == "cuda":
            if here.type == "cpu" and tensor.ndim and not tensor.is_pinned():
                _check_pinned(non_blocking)
                self._stand.unpinned[f"to(cuda), {_where()}"] += 1
        else:
            _check_pinned(non_blocking)
            self._stand.wait("to(cpu)")
        self._stand.check_arrived([tensor])
        return _Move.apply(tensor, device, dtype)


def _to_arguments(rest: Sequence[Any], kwargs: Any) -> tuple[Any, Any, bool, bool]:
    """Return the device, dtype, ``non_blocking`` and ``copy`` of a call of ``Tensor.to``."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    other = kwargs.get("other")
    flags = [kwargs.get("non_blocking", False), kwargs.get("copy", False)]
    n_flags = 0
    for one in rest:
        if isinstance(one, Tensor):
            other = one
        elif isinstance(one, bool):
            flags[n_flags] = one
            n_flags += 1
        elif isinstance(one, torch.dtype):
            dtype = one
        elif one is not None:
            device = one
    if other is not None:
        device, dtype = place(other), other.dtype
    return _as_device(device), dtype, *flags


def _backward(
    tensor: Tensor,
    gradient: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    gradients = None if gradient is None else [gradient]
    torch.autograd.backward([tensor], gradients, retain_graph, create_graph, inputs=inputs)


class _Move(torch.autograd.Function):
    """A copy to another device, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: Any, dtype: Any) -> Tensor:
        ctx.back = place(tensor), tensor.dtype
        return _moved(tensor, device, dtype or tensor.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        device, dtype = ctx.back
        if device.type == "cpu":
            StandIn.current.wait("gradient to the CPU")
        return _moved(gradient, device, dtype), None, None


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    stand = StandIn.current
    stand.copies[f"{place(tensor).type} to {device.type}"] += 1
    with _inside():
        made = _real_to(tensor.detach(), dtype, copy=True, memory_format=torch.preserve_format)
    return stand.tag(made, device)


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
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as PyTorch's function of this name, and check what FlashAttention demands."""
    device = place(query)
    texts, lengths = (query, key, value), (cu_seq_q, cu_seq_k)
    if device.type != "cuda" or any(place(one) != device for one in (*texts, *lengths)):
        raise RuntimeError("varlen_attn: all tensors must be on one GPU")
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if any(one.dtype != query.dtype or one.stride(-1) != 1 for one in texts):
        raise RuntimeError("varlen_attn: one data type, and a contiguous last dimension")
    if query.shape[2] > 256 or query.shape[2] % 8:
        raise RuntimeError("FlashAttention: a head dimension of at most 256, a multiple of 8")
    if any(one.dtype != torch.int32 or not one.is_contiguous() for one in lengths):
        raise RuntimeError("cu_seqlens must have dtype int32 and be contiguous")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError("Expect query and key/value to have the same number of heads")
    if window_size not in ((-1, -1), (-1, 0)):
        raise RuntimeError("the stand-in has no windows")
    with _inside():
        ends, key_ends = (_real_tolist(one) for one in lengths)
    if ends[-1] != len(query) or key_ends[-1] != len(key):
        raise RuntimeError("cu_seqlens do not cover the row")
    longest = [max(stop - start for start, stop in pairwise(one)) for one in (ends, key_ends)]
    if [max_q, max_k] != longest:
        raise RuntimeError(f"max_q and max_k are {max_q}, {max_k}; expected {longest}")
    StandIn.current.launches["varlen_attn"] += 1
    return _Varlen.apply(*texts, ends, key_ends, scale, window_size == (-1, 0), enable_gqa)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Sequence[int],
    key_ends: Sequence[int],
    scale: float | None,
    causal: bool,
    grouped: bool,
) -> Tensor:
    parts = []
    for (start, stop), (first, last) in zip(pairwise(ends), pairwise(key_ends), strict=True):
        own = query[start:stop], key[first:last], value[first:last]
        q, k, v = (one.transpose(0, 1).float()[None] for one in own)
        mask = None
        if causal:  # the last query is aligned with the last key
            n, m = stop - start, last - first
            mask = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        output = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
        parts.append(output[0].transpose(0, 1).to(query.dtype))
    return torch.cat(parts)


class _Varlen(torch.autograd.Function):
    """The reference attention and its gradients."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.rest = rest
        with _inside():
            output = _attend(query, key, value, *rest)
        return StandIn.current.tag(output, place(query))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        device, saved = place(gradient), ctx.saved_tensors
        with _inside(), torch.enable_grad():
            own = [one.detach().clone().requires_grad_(True) for one in saved]
            output = _attend(*own, *ctx.rest)
            found = torch.autograd.grad(output, own, gradient.detach().clone())
        return *(StandIn.current.tag(one, device) for one in found), *[None] * 5
