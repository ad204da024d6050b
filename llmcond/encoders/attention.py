"""Attention over a packed row: each text sees itself, and what stands before it on its path.

transformers isolates packed texts by position ids in the causal direction only; a bidirectional
encoder would let them see each other, silently. So the attention is ours: registered with
transformers under :data:`NAME`, and given, with each forward pass, a layout that says which tokens
attend to which. No token of another text is ever among the keys, so none can leak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from llmcond.encoders.batching import Batch, Segment

NAME = "llmcond_packed"
#: Up to so many keys a head, plain matrix products beat PyTorch's attention on a CPU.
SHORT = 64
#: Bytes that a CPU computes with at a time, and how much wider a softmax is made to fill them.
_VECTOR_BYTES, _WIDEN = 64, 1.35
#: Texts are multiplied in multiples of so many in 16 bit.
_ROWS = 8
#: Tokens of neighbouring branches that attend in one product, under a mask.
BRANCH_TOKENS = 192
#: Padding, in tokens, that costs as much as a call of its own.
_CALL = 64
#: Keys and values that a kernel for uneven lengths is given at a time, against tokens of the row.
_GATHERED = 8


class Layout(Protocol):
    """Which tokens of a packed row attend to which."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attend.

        Args:
            query: (heads, tokens, head_dim).
            key: (heads or fewer, tokens, head_dim).
            value: the same.
            scale: of the scores; None: head_dim ** -0.5.

        Returns:
            (tokens, heads, head_dim).
        """
        ...


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers does by itself, or within a packed row where there is a layout."""
    if packed is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output, None
    unknown = [name for name in ("softcap", "position_bias", "s_aux") if kwargs.get(name)]
    if unknown:
        raise NotImplementedError(f"packed attention has no {unknown[0]}")
    return packed.attend(query[0], key[0], value[0], scaling)[None], None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


# -- products of PyTorch, on any device --------------------------------------------------------


class _Block(Protocol):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Blocks:
    """A row as blocks of queries, one behind the other, each with keys of its own.

    What stands in the row behind its texts attends to nothing.

    Attributes:
        blocks: all that attend.
        n_tokens: tokens of the texts.
    """

    blocks: Sequence[_Block]
    n_tokens: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See :class:`Layout`."""
        heads, length, width = query.shape
        scale = width**-0.5 if scale is None else scale
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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        stop = self.start + self.rows * self.length
        shape = (self.rows, self.length)
        query, key, value = (
            x[:, self.start : stop].view(len(x), *shape, -1).transpose(0, 1)
            for x in (query, key, value)
        )
        output = _product(query, key, value, scale, self.mask, self.causal)
        return output.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class _Uneven:
    """Texts of about one length, filled up to the longest.

    Attributes:
        rows: how many.
        places: (rows * longest,); where a text is shorter, any place.
        real: of them, those that are tokens.
        causal: then no token sees what its row is filled up with, and keys need no mask.
        mask: added to scores.
    """

    rows: int
    places: Tensor
    real: Tensor
    causal: bool
    mask: Tensor | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # Tokens first, as they lie in memory: whole tokens are copied then.
        query, key, value = (
            x.transpose(0, 1).index_select(0, self.places).view(self.rows, -1, len(x), x.shape[2])
            for x in (query, key, value)
        )
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        output = _product(query, key, value, scale, self.mask, self.causal)
        return output.transpose(1, 2).flatten(0, 1).index_select(0, self.real)


@dataclass(frozen=True, slots=True)
class _Branches:
    """Neighbours in a prefix tree: they see themselves, and the path before them.

    Attributes:
        start, stop: the queries.
        keys: places of the path and of the queries.
        mask: (1, 1, queries, keys), added to scores.
    """

    start: int
    stop: int
    keys: Tensor
    mask: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query, key, value = (
            query[None, :, self.start : self.stop],
            key[None].index_select(2, self.keys),
            value[None].index_select(2, self.keys),
        )
        return _product(query, key, value, scale, self.mask, False)[0].transpose(0, 1)


def _product(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> Tensor:
    """Attend in (rows, heads, tokens, head_dim)."""
    grouped = query.shape[1] != key.shape[1]
    if query.is_cpu and not grouped and max(key.shape[2], query.shape[3]) <= SHORT:
        return _few_shapes(query, key, value, scale, mask)
    dtype = query.dtype
    if query.is_cpu:
        # Without AMX, PyTorch's attention in 16 bit takes longer on a CPU than casting does.
        query, key, value = query.float(), key.float(), value.float()
        mask = None if mask is None else mask.float()
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        # A kernel's own causal direction is cheaper than a mask that says the same.
        attn_mask=None if causal else mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=grouped,
    )
    return output.to(dtype)


def _few_shapes(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    """Attend among few keys, in products of few different shapes.

    In 16 bit oneDNN prepares a product for every shape, and keeps 0.6 MiB of each: texts go in
    multiples of eight, and the rest in float32, whose library keeps nothing.
    """
    if query.dtype == torch.float32:
        return _short(query, key, value, scale, mask)
    whole = len(query) // _ROWS * _ROWS
    parts = []
    for part, kind in ((slice(0, whole), query.dtype), (slice(whole, None), torch.float32)):
        if len(query[part]):
            own = mask if mask is None or len(mask) == 1 else mask[part]
            own = None if own is None else own.to(kind)
            texts = [x[part].to(kind) for x in (query, key, value)]
            parts.append(_short(texts[0], texts[1], texts[2], scale, own).to(query.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _short(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Attend among few keys, by batched products of small matrices.

    In 16 bit throughout where the rest is: PyTorch's own attention rounds no less there. Scores are
    laid out keys first: PyTorch's softmax over a short last dimension takes longer than both
    products.
    """
    rows, heads, n_queries, width = query.shape
    flat = rows * heads
    wide = _widened(n_queries, query.dtype)
    if wide > n_queries:
        query = torch.nn.functional.pad(query, (0, 0, 0, wide - n_queries))
    query, key, value = (x.reshape(flat, -1, width) for x in (query, key, value))
    added = query.new_empty(1, 1, 1) if mask is None else _keys_first(mask, heads, wide)
    scores = torch.baddbmm(
        added, key, query.transpose(1, 2), beta=0 if mask is None else 1, alpha=scale
    )
    weights = scores.softmax(dim=1)[:, :, :n_queries]
    return torch.bmm(weights.transpose(1, 2), value).view(rows, heads, n_queries, width)


def _widened(n_queries: int, dtype: torch.dtype) -> int:
    """Return how many queries a softmax takes: columns that fill no vector are slow."""
    vector = _VECTOR_BYTES // dtype.itemsize
    wide = -(-n_queries // vector) * vector
    # In 16 bit it always pays; in float32 not for a few beyond a whole vector.
    worth = dtype.itemsize == 2 or n_queries < vector or wide <= _WIDEN * n_queries
    return wide if worth else n_queries


def _keys_first(mask: Tensor, heads: int, n_queries: int) -> Tensor:
    """Return a mask of (rows or 1, 1, queries or 1, keys) as it is added to scores."""
    mask = mask.transpose(2, 3)
    if 1 < mask.shape[3] < n_queries:
        mask = torch.nn.functional.pad(mask, (0, n_queries - mask.shape[3]))
    return mask[0] if len(mask) == 1 else mask.expand(-1, heads, -1, -1).flatten(0, 1)


def lay_out(batch: Batch, causal: bool, device: torch.device, dtype: torch.dtype) -> Layout:
    """Return the layout of a packed row for products of PyTorch.

    Args:
        batch: the row.
        causal: whether a token sees what stands before it only.
        device: where it is computed.
        dtype: what it is computed in.
    """
    if batch.shared:
        blocks = [piece.to(device, dtype) for piece in _branches(batch)]
    else:
        groups = _groups(batch.segments)
        blocks = [_group(runs, causal, device, dtype) for runs in groups]
    return Blocks(blocks, batch.n_tokens)


def _groups(segments: Sequence[Segment]) -> list[list[tuple[int, int, int]]]:
    """Return runs of neighbours of one length, (start, rows, length), those together that pay."""
    groups: list[list[tuple[int, int, int]]] = []
    at = 0
    while at < len(segments):
        first, rows = segments[at], 1
        while at + rows < len(segments) and segments[at + rows].length == first.length:
            rows += 1
        at += rows
        run = (first.start, rows, first.length)
        longest = max((length for _, _, length in groups[-1]), default=0) if groups else 0
        padding = rows * (longest - first.length)
        if groups and 0 <= padding <= _CALL:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _group(
    runs: list[tuple[int, int, int]], causal: bool, device: torch.device, dtype: torch.dtype
) -> _Block:
    longest = max(length for _, _, length in runs)
    mask = None
    if causal and longest <= SHORT:
        before = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        mask = _added(before, dtype)[None, None]
    if len(runs) == 1:
        start, rows, length = runs[0]
        return _Even(start, rows, length, causal, mask)
    starts = [start + row * length for start, rows, length in runs for row in range(rows)]
    lengths = [length for _, rows, length in runs for _ in range(rows)]
    at = torch.arange(longest)
    real = at < torch.tensor(lengths)[:, None]
    places = torch.where(real, torch.tensor(starts)[:, None] + at, starts[0]).to(device)
    if not causal:
        mask = _added(real.to(device), dtype)[:, None, None]
    kept = real.flatten().nonzero()[:, 0].to(device)
    return _Uneven(len(lengths), places.flatten(), kept, causal, mask)


def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores so that only the visible count."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, float("-inf"))


# -- prefix trees ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries ``start`` to ``stop`` of a row, and the places of their keys."""

    start: int
    stop: int
    keys: Tensor
    visible: Tensor | None

    def to(self, device: torch.device, dtype: torch.dtype) -> _Block:
        if self.visible is None:
            return _group([(self.start, 1, self.stop - self.start)], True, device, dtype)
        mask = _added(self.visible, dtype)[None, None]
        return _Branches(self.start, self.stop, self.keys.to(device), mask.to(device))


def _branches(batch: Batch) -> list[_Piece]:
    """Cut a tree into pieces that attend at once, in the order of the row.

    Neighbouring branches go together up to ``BRANCH_TOKENS``. What is longer is taken apart: its
    own tokens first, in slices, then its branches. So no piece has more queries than that, and the
    keys and values that are gathered for it are one path and its own.
    """
    segments = batch.segments
    children: dict[int, list[int]] = {}
    for index, segment in enumerate(segments):
        children.setdefault(segment.parent, []).append(index)
    until = torch.repeat_interleave(
        torch.tensor([segment.until for segment in segments]),
        torch.tensor([segment.length for segment in segments]),
    )
    pieces: list[_Piece] = []
    # Families that are still to be cut, the next one last.
    waiting = [children[-1]]
    while waiting:
        family = waiting.pop()
        size, taken = 0, 0
        for index in family:
            size += segments[index].until - segments[index].start
            if size > BRANCH_TOKENS:
                break
            taken += 1
        if taken < len(family):
            waiting.append(family[max(taken, 1) :])
        if taken == 0:
            pieces += _slices(batch, family[0], until)
            if family[0] in children:
                waiting.append(children[family[0]])
        else:
            first, last = segments[family[0]], segments[family[taken - 1]]
            path = _places(batch.path(family[0]))
            pieces.append(_piece(path, first.start, first.start, last.until, until))
        waiting = [family for family in waiting if family]
    return pieces


def _slices(batch: Batch, index: int, until: Tensor) -> list[_Piece]:
    """Cut one segment's own tokens."""
    segment, path = batch.segments[index], _places(batch.path(index))
    if not len(path):
        return [_Piece(segment.start, segment.stop, path, None)]
    return [
        _piece(path, segment.start, start, min(start + BRANCH_TOKENS, segment.stop), until)
        for start in range(segment.start, segment.stop, BRANCH_TOKENS)
    ]


def _piece(path: Tensor, begin: int, start: int, stop: int, until: Tensor) -> _Piece:
    """Return queries ``start`` to ``stop``, which see the path and what stands from ``begin``."""
    keys = torch.cat([path, torch.arange(begin, stop)])
    queries = torch.arange(start, stop)[:, None]
    # A token is seen by what comes behind it in its own branch.
    return _Piece(start, stop, keys, (keys <= queries) & (queries < until[keys]))


def _places(path: list[Segment]) -> Tensor:
    return torch.cat(
        [torch.arange(segment.start, segment.stop) for segment in path]
        or [torch.empty(0, dtype=torch.long)]
    )


# -- kernels for uneven lengths, on CUDA -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """Some segments, in one call of a kernel.

    Attributes:
        start, stop: their tokens.
        keys: places of their keys; None: the same tokens.
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
        """See :class:`Layout`."""
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


def lay_out_varlen(
    batch: Batch, causal: bool, device: torch.device, kernel: Callable[..., Any]
) -> Varlen:
    """Return the layout of a packed row for a kernel that takes uneven lengths.

    The keys of a segment with a path are gathered; so that memory stays bounded whatever the tree,
    those of few segments at a time where they are many.
    """
    limit = _GATHERED * batch.n_tokens
    places = [_places([*batch.path(i), s]) for i, s in enumerate(batch.segments)]
    if not batch.shared:
        return Varlen([_run(batch.segments, places, device, gather=False)], causal, kernel)
    runs, first, size = [], 0, 0
    for index, keys in enumerate(places):
        if size and size + len(keys) > limit:
            runs.append(_run(batch.segments[first:index], places[first:index], device, gather=True))
            first, size = index, 0
        size += len(keys)
    runs.append(_run(batch.segments[first:], places[first:], device, gather=True))
    return Varlen(runs, causal, kernel)


def _run(
    segments: Sequence[Segment], places: Sequence[Tensor], device: torch.device, gather: bool
) -> _Run:
    def ends(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)

    lengths, key_lengths = [s.length for s in segments], [len(keys) for keys in places]
    return _Run(
        segments[0].start,
        segments[-1].stop,
        torch.cat(list(places)).to(device) if gather else None,
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
