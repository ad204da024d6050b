"""Packed rows for kernels that take segments of any length, on CUDA."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from llmcond.encoders.engine.attention_plan import positions_of
from llmcond.encoders.engine.batching import Batch, Segment
from llmcond.system import to_device

#: Keys and values that a kernel is given at a time, against tokens of the row.
_GATHERED = 8


@dataclass(frozen=True, slots=True)
class _Run:
    """Some segments, in one call of a kernel.

    Attributes:
        keys: their positions, often those of the queries.
        lengths: what a kernel is told of them: where the queries and the keys of each begin and
            end, both (segments + 1,), and the most queries and the most keys of a segment.
    """

    queries: slice
    keys: slice | Tensor
    lengths: tuple[Tensor, Tensor, int, int]


@dataclass(frozen=True, slots=True)
class Varlen:
    """A row for a kernel that takes segments of any length, such as FlashAttention's.

    Attributes:
        causal: whether a token sees what stands before it only. With more keys than queries the
            last query is aligned with the last key.
        kernel: with the signature of ``torch.nn.attention.varlen.varlen_attn``.
    """

    runs: Sequence[_Run]
    causal: bool
    kernel: Callable[..., Any]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See :class:`AttentionPlan`."""
        options: dict[str, Any] = {"enable_gqa": True} if len(query) != len(key) else {}
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        options |= {"scale": scale, "window_size": (-1, 0) if self.causal else (-1, -1)}
        parts = [
            self.kernel(query[run.queries], key[run.keys], value[run.keys], *run.lengths, **options)
            for run in self.runs
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def plan_varlen(
    batch: Batch, causal: bool, device: torch.device, kernel: Callable[..., Any]
) -> Varlen:
    """Return the attention plan of a packed row for a kernel that takes uneven lengths.

    The keys of a segment with a path are gathered; so that memory stays bounded whatever the tree,
    those of few segments at a time where they are many.
    """
    if not batch.shared:
        return Varlen([_run(batch.segments, None, device)], causal, kernel)
    limit = _GATHERED * batch.n_tokens
    positions = [positions_of([*batch.path(i), s]) for i, s in enumerate(batch.segments)]
    cuts, size = [0], 0
    for index, keys in enumerate(positions):
        if size and size + len(keys) > limit:
            cuts.append(index)
            size = 0
        size += len(keys)
    parts = [slice(*ends) for ends in pairwise([*cuts, len(positions)])]
    runs = [_run(batch.segments[part], positions[part], device) for part in parts]
    return Varlen(runs, causal, kernel)


def _run(segments: Sequence[Segment], positions: list[Tensor] | None, device: torch.device) -> _Run:
    """Return the call for some segments, which see these positions, or themselves only."""

    def ends(lengths: list[int]) -> tuple[Tensor, int]:
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return to_device(starts, device), max(lengths)

    queries = slice(segments[0].start, segments[-1].stop)
    own, longest = ends([segment.length for segment in segments])
    if positions is None:
        return _Run(queries, queries, (own, own, longest, longest))
    keys, most = ends([len(one) for one in positions])
    return _Run(queries, to_device(torch.cat(positions), device), (own, keys, longest, most))


def varlen_kernels(device: torch.device, dtype: torch.dtype) -> list[Callable[..., Any]]:
    """Return the attention for uneven lengths that there is for device and type, the first best."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return []
    if torch.cuda.get_device_capability(device) < (8, 0):
        return []
    from torch.nn.attention.varlen import varlen_attn

    found = [_of_torch(varlen_attn)]
    with suppress(ImportError):
        from flash_attn import flash_attn_varlen_func

        found.append(_as_varlen(flash_attn_varlen_func))
    return found


def _of_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return PyTorch's kernel with the signature it has from version 2.12 on.

    Before, it has as many key heads as query heads; in 2.10 neither scale nor window.
    """
    takes = inspect.signature(function).parameters
    if "enable_gqa" in takes:
        return function

    def varlen_attn(
        query: Tensor, key: Tensor, value: Tensor, *lengths: Any, **options: Any
    ) -> Any:
        if options.pop("enable_gqa", False):
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        if "window_size" not in takes:
            scale = options.pop("scale")
            if scale is not None:
                query = query * (scale * query.shape[2] ** 0.5)
            options["is_causal"] = options.pop("window_size") == (-1, 0)
        return function(query, key, value, *lengths, **options)

    return varlen_attn


def _as_varlen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``flash_attn_varlen_func`` of the library flash-attn with PyTorch's signature."""

    def flash_attn(*inputs: Any, scale: float | None, window_size: Any, **options: Any) -> Any:
        # Among the options is enable_gqa, which it takes without being told.
        return function(*inputs, softmax_scale=scale, causal=window_size == (-1, 0))

    return flash_attn
