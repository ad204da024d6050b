"""Packed rows for kernels that take segments of any length, on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmcond.encoders.engine.attention_plan import positions_of
from llmcond.encoders.engine.batching import Batch, Segment

#: Keys and values that a kernel is given at a time, against tokens of the row.
_GATHERED = 8


@dataclass(frozen=True, slots=True)
class _Run:
    """Some segments, in one call of a kernel.

    Attributes:
        start, stop: their tokens.
        keys: positions of their keys; None: the same tokens.
        ends, key_ends: (segments + 1,) where queries and keys of each begin and end.
        longest, longest_keys: most queries, and most keys, of a segment.
    """

    start: int
    stop: int
    keys: Tensor | None
    ends: Tensor
    key_ends: Tensor
    longest: int
    longest_keys: int


@dataclass(frozen=True, slots=True)
class Varlen:
    """A row for a kernel that takes segments of any length, such as FlashAttention's.

    Attributes:
        runs: one behind the other.
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
        parts = []
        for run in self.runs:
            part = slice(run.start, run.stop) if run.keys is None else run.keys
            parts.append(
                self.kernel(
                    query[run.start : run.stop],
                    key[part],
                    value[part],
                    run.ends,
                    run.key_ends,
                    run.longest,
                    run.longest_keys,
                    scale=scale,
                    window_size=(-1, 0) if self.causal else (-1, -1),
                    **options,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def plan_varlen(
    batch: Batch, causal: bool, device: torch.device, kernel: Callable[..., Any]
) -> Varlen:
    """Return the attention plan of a packed row for a kernel that takes uneven lengths.

    The keys of a segment with a path are gathered; so that memory stays bounded whatever the tree,
    those of few segments at a time where they are many.
    """
    limit = _GATHERED * batch.n_tokens
    positions = [positions_of([*batch.path(i), s]) for i, s in enumerate(batch.segments)]
    if not batch.shared:
        return Varlen([_run(batch.segments, positions, device, gather=False)], causal, kernel)
    runs, first, size = [], 0, 0
    for index, keys in enumerate(positions):
        if size and size + len(keys) > limit:
            runs.append(
                _run(batch.segments[first:index], positions[first:index], device, gather=True)
            )
            first, size = index, 0
        size += len(keys)
    runs.append(_run(batch.segments[first:], positions[first:], device, gather=True))
    return Varlen(runs, causal, kernel)


def _run(
    segments: Sequence[Segment], positions: Sequence[Tensor], device: torch.device, gather: bool
) -> _Run:
    def ends(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)

    lengths, key_lengths = [s.length for s in segments], [len(keys) for keys in positions]
    return _Run(
        segments[0].start,
        segments[-1].stop,
        torch.cat(list(positions)).to(device) if gather else None,
        ends(lengths),
        ends(key_lengths),
        max(lengths),
        max(key_lengths),
    )


def varlen_kernel(device: torch.device, dtype: torch.dtype) -> Callable[..., Any] | None:
    """Return PyTorch's attention for uneven lengths, None where it has none for device and type."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before PyTorch 2.10
        return None
    kernel: Callable[..., Any] = varlen_attn
    return kernel
