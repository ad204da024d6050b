"""Attention plans of packed rows for CUDA kernels that take segments of any length."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from llmcond.encoders.engine.attention_plan import token_positions
from llmcond.encoders.engine.batching import PackedRow, RowSegment
from llmcond.system import move_to_device

#: Most keys and values that are gathered for one call of a kernel, as a multiple of the row's
#: tokens.
_MAX_GATHERED = 8


@dataclass(frozen=True, slots=True)
class _KernelCall:
    """The arguments of one call of a kernel, for some segments of a row.

    Attributes:
        queries: Positions of the queries in the row.
        keys: Positions of the keys in the row, often those of the queries.
        lengths: The cumulative numbers of queries and of keys of the segments, both
            (segments + 1,), and the most queries and the most keys of a segment.
    """

    queries: slice
    keys: slice | Tensor
    lengths: tuple[Tensor, Tensor, int, int]


@dataclass(frozen=True, slots=True)
class Varlen:
    """The plan of a row for a kernel that takes segments of any length, such as FlashAttention's.

    Attributes:
        calls: The calls of the kernel, in the order of the row.
        causal: Whether a token sees only itself and the tokens before it. If there are more keys
            than queries, the last query is aligned with the last key.
        kernel: A function with the signature of ``torch.nn.attention.varlen.varlen_attn``.
    """

    calls: Sequence[_KernelCall]
    causal: bool
    kernel: Callable[..., Any]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute the attention of the row, as ``AttentionPlan`` describes."""
        options: dict[str, Any] = {"enable_gqa": True} if len(query) != len(key) else {}
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        options |= {"scale": scale, "window_size": (-1, 0) if self.causal else (-1, -1)}
        parts = [
            self.kernel(
                query[call.queries], key[call.keys], value[call.keys], *call.lengths, **options
            )
            for call in self.calls
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def plan_varlen(
    batch: PackedRow, causal: bool, device: torch.device, kernel: Callable[..., Any]
) -> Varlen:
    """Plan the attention of a packed row for a kernel that takes segments of any length.

    If inputs share prefixes, the keys of each segment and its ancestors are gathered. The number of
    segments per call is limited, so that memory stays bounded whatever the prefix tree.
    """
    if not batch.shared:
        return Varlen([_make_call(batch.segments, None, device)], causal, kernel)
    limit = _MAX_GATHERED * batch.n_tokens
    positions = [token_positions([*batch.ancestors(i), s]) for i, s in enumerate(batch.segments)]
    cuts, size = [0], 0
    for index, keys in enumerate(positions):
        if size and size + len(keys) > limit:
            cuts.append(index)
            size = 0
        size += len(keys)
    parts = [slice(*ends) for ends in pairwise([*cuts, len(positions)])]
    calls = [_make_call(batch.segments[part], positions[part], device) for part in parts]
    return Varlen(calls, causal, kernel)


def _make_call(
    segments: Sequence[RowSegment], positions: list[Tensor] | None, device: torch.device
) -> _KernelCall:
    """Create the kernel call for some segments.

    ``positions`` has the key positions of each segment; None means that each sees itself only.
    """

    def accumulate_lengths(lengths: list[int]) -> tuple[Tensor, int]:
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return move_to_device(offsets, device), max(lengths)

    queries = slice(segments[0].start, segments[-1].stop)
    offsets, longest = accumulate_lengths([segment.length for segment in segments])
    if positions is None:
        return _KernelCall(queries, queries, (offsets, offsets, longest, longest))
    key_offsets, most_keys = accumulate_lengths([len(keys) for keys in positions])
    return _KernelCall(
        queries,
        move_to_device(torch.cat(positions), device),
        (offsets, key_offsets, longest, most_keys),
    )


def varlen_kernels(device: torch.device, dtype: torch.dtype) -> list[Callable[..., Any]]:
    """Return the installed kernels for segments of any length, the preferred one first.

    They have the signature of ``torch.nn.attention.varlen.varlen_attn``. The list is empty on a
    CPU, for float32 and on GPUs older than Ampere.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return []
    if torch.cuda.get_device_capability(device) < (8, 0):
        return []
    from torch.nn.attention.varlen import varlen_attn

    kernels = [_adapt_torch_kernel(varlen_attn)]
    with suppress(ImportError):
        from flash_attn import flash_attn_varlen_func

        kernels.append(_adapt_flash_attn(flash_attn_varlen_func))
    return kernels


def _adapt_torch_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give PyTorch's kernel the signature that it has from version 2.12 on.

    Earlier versions need as many key heads as query heads, and version 2.10 has neither a scale nor
    a window.
    """
    parameters = inspect.signature(function).parameters
    if "enable_gqa" in parameters:
        return function

    def varlen_attn(
        query: Tensor, key: Tensor, value: Tensor, *lengths: Any, **options: Any
    ) -> Any:
        if options.pop("enable_gqa", False):
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        if "window_size" not in parameters:
            scale = options.pop("scale")
            if scale is not None:
                query = query * (scale * query.shape[2] ** 0.5)
            options["is_causal"] = options.pop("window_size") == (-1, 0)
        return function(query, key, value, *lengths, **options)

    return varlen_attn


def _adapt_flash_attn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``flash_attn_varlen_func`` of the library flash-attn PyTorch's signature."""

    def flash_attn(*inputs: Any, scale: float | None, window_size: Any, **options: Any) -> Any:
        # The options may have enable_gqa, which flash-attn does not need: it always supports fewer
        # key heads.
        return function(*inputs, softmax_scale=scale, causal=window_size == (-1, 0))

    return flash_attn
