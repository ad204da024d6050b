"""Attention plans of packed rows: blocks of queries, each with keys of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from llmcond.encoders.engine import attention_kernels
from llmcond.encoders.engine.attention import AttentionPlan
from llmcond.encoders.engine.batching import Batch, Segment
from llmcond.system import to_device

#: Tokens of adjacent branches that attend in one call, under a mask, on a CPU and on a GPU.
BRANCH_TOKENS, _BRANCH_TOKENS_ON_GPU = 192, 1_024
#: Padding, in tokens, that costs as much as a call of its own: on a CPU, and on a GPU.
_CALL, _CALL_ON_GPU = 64, 4_096


@dataclass(frozen=True, slots=True)
class Blocks:
    """A row as blocks of queries, one behind the other, each with keys of its own.

    What stands in the row behind the ``n_tokens`` of its texts attends to nothing.
    """

    blocks: Sequence[AttentionPlan]
    n_tokens: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See :class:`AttentionPlan`."""
        heads, length, width = query.shape
        parts = [block.attend(query, key, value, scale) for block in self.blocks]
        if length > self.n_tokens:
            parts.append(query.new_zeros(length - self.n_tokens, heads, width))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class _Even:
    """Texts of one length."""

    start: int
    rows: int
    length: int
    causal: bool
    mask: Tensor | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        stop = self.start + self.rows * self.length
        query, key, value = (
            x[:, self.start : stop].view(len(x), self.rows, self.length, -1).transpose(0, 1)
            for x in (query, key, value)
        )
        output = attention_kernels.attend(query, key, value, scale, self.mask, self.causal)
        return output.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class _Uneven:
    """Texts of about one length, filled up to the longest.

    Attributes:
        positions: (rows * longest,); where a text is shorter, any position.
        real: of them, those that are tokens.
        causal: then no token sees what its row is filled up with, and keys need no mask.
        mask: added to scores.
    """

    rows: int
    positions: Tensor
    real: Tensor
    causal: bool
    mask: Tensor | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        # Tokens first, as they lie in memory: whole tokens are copied then.
        query, key, value = (
            x.transpose(0, 1)
            .index_select(0, self.positions)
            .view(self.rows, -1, len(x), x.shape[2])
            .transpose(1, 2)
            for x in (query, key, value)
        )
        output = attention_kernels.attend(query, key, value, scale, self.mask, self.causal)
        return output.transpose(1, 2).flatten(0, 1).index_select(0, self.real)


@dataclass(frozen=True, slots=True)
class _Branches:
    """Adjacent branches of a prefix tree: they see themselves, and the path before them.

    Attributes:
        start, stop: the queries.
        keys: positions of the path and of the queries.
        mask: (1, 1, queries, keys), added to scores.
    """

    start: int
    stop: int
    keys: Tensor
    mask: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        query = query[None, :, self.start : self.stop]
        key, value = (x[None].index_select(2, self.keys) for x in (key, value))
        output = attention_kernels.attend(query, key, value, scale, self.mask, False)
        return output[0].transpose(0, 1)


def plan_attention(
    batch: Batch, causal: bool, device: torch.device, dtype: torch.dtype
) -> AttentionPlan:
    """Return the layout of a packed row for products of PyTorch."""
    if batch.shared:
        return Blocks(_branches(batch, device, dtype), batch.n_tokens)
    call = _CALL if device.type == "cpu" else _CALL_ON_GPU
    blocks = [_group(runs, causal, device, dtype) for runs in _groups(batch.segments, call)]
    return Blocks(blocks, batch.n_tokens)


def _groups(segments: Sequence[Segment], call: int) -> list[list[tuple[int, int, int]]]:
    """Return runs of texts of one length, (start, rows, length), grouped where padding pays.

    A ``call`` of its own costs as much as so many tokens of padding.
    """
    groups: list[list[tuple[int, int, int]]] = []
    for length, texts in groupby(segments, key=lambda segment: segment.length):
        starts = [text.start for text in texts]
        rows = len(starts)
        longest = max(n for _, _, n in groups[-1]) if groups else 0
        if not groups or not 0 <= rows * (longest - length) <= call:
            groups.append([])
        groups[-1].append((starts[0], rows, length))
    return groups


def _group(
    runs: list[tuple[int, int, int]], causal: bool, device: torch.device, dtype: torch.dtype
) -> AttentionPlan:
    longest = max(length for _, _, length in runs)
    mask = None
    if causal and longest <= attention_kernels.SHORT:
        before = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        mask = _added(before, dtype)[None, None]
    if len(runs) == 1:
        start, rows, length = runs[0]
        return _Even(start, rows, length, causal, mask)
    starts = [start + row * length for start, rows, length in runs for row in range(rows)]
    lengths = [length for _, rows, length in runs for _ in range(rows)]
    at = torch.arange(longest)
    real = at < torch.tensor(lengths)[:, None]
    positions = torch.where(real, torch.tensor(starts)[:, None] + at, starts[0])
    if not causal:
        mask = _added(to_device(real, device), dtype)[:, None, None]
    positions, kept = (
        to_device(value, device) for value in (positions, real.flatten().nonzero()[:, 0])
    )
    return _Uneven(len(lengths), positions.flatten(), kept, causal, mask)


def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores so that only the visible count."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, float("-inf"))


# -- prefix trees ------------------------------------------------------------------------------


def _branches(batch: Batch, device: torch.device, dtype: torch.dtype) -> list[AttentionPlan]:
    """Cut a tree into pieces, each of which attends in one call, in the order of the row.

    Adjacent branches go together up to ``BRANCH_TOKENS``. What is longer is taken apart: its
    own tokens first, in slices, then its branches. So no piece has more queries than that, and the
    keys and values that are gathered for it are one path and its own.
    """
    segments = batch.segments
    most = BRANCH_TOKENS if device.type == "cpu" else _BRANCH_TOKENS_ON_GPU
    children: dict[int, list[int]] = {}
    for index, segment in enumerate(segments):
        children.setdefault(segment.parent, []).append(index)
    lengths = torch.tensor([segment.length for segment in segments])
    until = torch.tensor([segment.until for segment in segments]).repeat_interleave(lengths)

    def piece(path: Tensor, begin: int, start: int, stop: int) -> AttentionPlan:
        """Return queries ``start`` to ``stop``, which see the path and what is from ``begin``."""
        keys = torch.cat([path, torch.arange(begin, stop)])
        queries = torch.arange(start, stop)[:, None]
        # A token is seen by what comes behind it in its own branch.
        mask = _added((keys <= queries) & (queries < until[keys]), dtype)[None, None]
        return _Branches(start, stop, to_device(keys, device), to_device(mask, device))

    pieces: list[AttentionPlan] = []
    # Families that are still to be cut, the next one last.
    waiting = [children[-1]]
    while waiting:
        family = waiting.pop()
        first, path = segments[family[0]], positions_of(batch.path(family[0]))
        sizes = accumulate(segments[index].until - segments[index].start for index in family)
        taken = sum(size <= most for size in sizes)
        waiting.append(family[max(taken, 1) :])
        if taken:
            pieces.append(piece(path, first.start, first.start, segments[family[taken - 1]].until))
        elif not len(path):
            pieces.append(_group([(first.start, 1, first.length)], True, device, dtype))
        else:
            starts = range(first.start, first.stop, most)
            stops = (*starts[1:], first.stop)
            pieces += [piece(path, first.start, *ends) for ends in zip(starts, stops, strict=True)]
        if not taken:
            waiting.append(children.get(family[0], []))
        waiting = [family for family in waiting if family]
    return pieces


def positions_of(path: list[Segment]) -> Tensor:
    """Return the positions of the tokens of some segments, in their order."""
    return torch.cat(
        [torch.arange(segment.start, segment.stop) for segment in path]
        or [torch.empty(0, dtype=torch.long)]
    )
