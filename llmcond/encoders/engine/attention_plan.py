"""Attention plans that cut a packed row into blocks of queries, each with its own keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from llmcond.encoders.engine import attention_kernels
from llmcond.encoders.engine.attention import AttentionPlan
from llmcond.encoders.engine.batching import PackedRow, RowSegment
from llmcond.system import move_to_device

#: Most tokens of adjacent branches that attend in one masked call: on a CPU, and on a GPU.
BRANCH_TOKENS, _BRANCH_TOKENS_ON_GPU = 192, 1_024
#: Number of padding tokens that costs as much as one more call: on a CPU, and on a GPU.
_CALL_COST, _CALL_COST_ON_GPU = 64, 4_096


@dataclass(frozen=True, slots=True)
class Blocks:
    """A row as a sequence of blocks of queries, each with its own keys.

    Attributes:
        blocks: The plans of the blocks, in the order of the row.
        n_tokens: Number of tokens of the row's texts. The padding after them attends to nothing.
    """

    blocks: Sequence[AttentionPlan]
    n_tokens: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute the attention of the row block by block, as ``AttentionPlan`` describes."""
        heads, length, width = query.shape
        parts = [block.attend(query, key, value, scale) for block in self.blocks]
        if length > self.n_tokens:
            parts.append(query.new_zeros(length - self.n_tokens, heads, width))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class _EvenBlock:
    """Adjacent texts of one length."""

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
class _UnevenBlock:
    """Texts of about one length, padded to the longest.

    Attributes:
        rows: Number of texts.
        positions: Position in the row of each token, (rows * longest,); padding has any position.
        real: Indices into ``positions`` of the entries that are tokens.
        causal: Whether a token sees only the tokens before it. If so, no token sees the padding
            behind it, and keys need no mask.
        mask: Added to the scores.
    """

    rows: int
    positions: Tensor
    real: Tensor
    causal: bool
    mask: Tensor | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        # Tokens come first, as they do in memory, so that whole tokens are copied.
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
class _BranchBlock:
    """Adjacent branches of a prefix tree, which see themselves and the path before them.

    Attributes:
        start: Position of the first query.
        stop: Position behind the last query.
        keys: Positions of the path and of the queries.
        mask: Added to the scores, (1, 1, queries, keys).
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
    batch: PackedRow, causal: bool, device: torch.device, dtype: torch.dtype
) -> AttentionPlan:
    """Plan the attention of a packed row for PyTorch's scaled dot product attention."""
    if batch.shared:
        return Blocks(_plan_branches(batch, device, dtype), batch.n_tokens)
    call_cost = _CALL_COST if device.type == "cpu" else _CALL_COST_ON_GPU
    blocks = [
        _plan_group(runs, causal, device, dtype) for runs in _group_runs(batch.segments, call_cost)
    ]
    return Blocks(blocks, batch.n_tokens)


def _group_runs(segments: Sequence[RowSegment], call_cost: int) -> list[list[tuple[int, int, int]]]:
    """Group runs of texts of one length, (start, rows, length), where padding them pays.

    One more call costs as much as ``call_cost`` tokens of padding.
    """
    groups: list[list[tuple[int, int, int]]] = []
    for length, texts in groupby(segments, key=lambda segment: segment.length):
        starts = [text.start for text in texts]
        rows = len(starts)
        longest = max(n for _, _, n in groups[-1]) if groups else 0
        if not groups or not 0 <= rows * (longest - length) <= call_cost:
            groups.append([])
        groups[-1].append((starts[0], rows, length))
    return groups


def _plan_group(
    runs: list[tuple[int, int, int]], causal: bool, device: torch.device, dtype: torch.dtype
) -> AttentionPlan:
    """Plan one block for runs of texts, padded to the longest where their lengths differ."""
    longest = max(length for _, _, length in runs)
    mask = None
    if causal and longest <= attention_kernels.SHORT:
        visible = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        mask = _make_mask(visible, dtype)[None, None]
    if len(runs) == 1:
        start, rows, length = runs[0]
        return _EvenBlock(start, rows, length, causal, mask)
    starts = [start + row * length for start, rows, length in runs for row in range(rows)]
    lengths = [length for _, rows, length in runs for _ in range(rows)]
    offsets = torch.arange(longest)
    real = offsets < torch.tensor(lengths)[:, None]
    positions = torch.where(real, torch.tensor(starts)[:, None] + offsets, starts[0])
    if not causal:
        mask = _make_mask(move_to_device(real, device), dtype)[:, None, None]
    positions, token_indices = (
        move_to_device(value, device) for value in (positions, real.flatten().nonzero()[:, 0])
    )
    return _UnevenBlock(len(lengths), positions.flatten(), token_indices, causal, mask)


def _make_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask: 0 where a key is visible, and minus infinity elsewhere."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, float("-inf"))


# -- prefix trees ------------------------------------------------------------------------------


def _plan_branches(
    batch: PackedRow, device: torch.device, dtype: torch.dtype
) -> list[AttentionPlan]:
    """Cut a prefix tree into blocks, in the order of the row; each attends in one call.

    Adjacent branches are joined up to ``BRANCH_TOKENS`` tokens. A longer branch is split: the
    tokens of its first segment are cut into slices, and its child branches follow. So no block has
    more queries than that, and the keys and values gathered for it are those of one path and of the
    block itself.
    """
    segments = batch.segments
    max_tokens = BRANCH_TOKENS if device.type == "cpu" else _BRANCH_TOKENS_ON_GPU
    children: dict[int, list[int]] = {}
    for index, segment in enumerate(segments):
        children.setdefault(segment.parent, []).append(index)
    lengths = torch.tensor([segment.length for segment in segments])
    until = torch.tensor([segment.subtree_stop for segment in segments]).repeat_interleave(lengths)

    def make_block(path: Tensor, begin: int, start: int, stop: int) -> AttentionPlan:
        """Plan queries ``start`` to ``stop``; keys are the path and ``begin`` to ``stop``."""
        keys = torch.cat([path, torch.arange(begin, stop)])
        queries = torch.arange(start, stop)[:, None]
        # A token is visible to its own query and to those of later tokens in its branch.
        mask = _make_mask((keys <= queries) & (queries < until[keys]), dtype)[None, None]
        return _BranchBlock(start, stop, move_to_device(keys, device), move_to_device(mask, device))

    blocks: list[AttentionPlan] = []
    # Families (siblings) that still have to be cut, as a stack.
    waiting = [children[-1]]
    while waiting:
        family = waiting.pop()
        first, path = segments[family[0]], token_positions(batch.ancestors(family[0]))
        sizes = accumulate(segments[index].subtree_stop - segments[index].start for index in family)
        n_joined = sum(size <= max_tokens for size in sizes)
        waiting.append(family[max(n_joined, 1) :])
        if n_joined:
            blocks.append(
                make_block(
                    path, first.start, first.start, segments[family[n_joined - 1]].subtree_stop
                )
            )
        elif not len(path):
            blocks.append(_plan_group([(first.start, 1, first.length)], True, device, dtype))
        else:
            starts = range(first.start, first.stop, max_tokens)
            stops = (*starts[1:], first.stop)
            blocks += [
                make_block(path, first.start, *ends) for ends in zip(starts, stops, strict=True)
            ]
        if not n_joined:
            waiting.append(children.get(family[0], []))
        waiting = [family for family in waiting if family]
    return blocks


def token_positions(path: list[RowSegment]) -> Tensor:
    """Return the positions of the tokens of some segments, in the order of the segments."""
    return torch.cat(
        [torch.arange(segment.start, segment.stop) for segment in path]
        or [torch.empty(0, dtype=torch.long)]
    )
