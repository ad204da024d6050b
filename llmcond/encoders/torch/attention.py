"""Attention of packed rows, registered with transformers under ``NAME``.

transformers isolates packed texts by their position ids in the causal direction only. In a
bidirectional encoder, packed texts would silently attend to each other. llmcond therefore registers
an attention function of its own, and passes it a plan with each forward pass that says which tokens
attend to which. The keys of a text never include a token of another text, so nothing can leak.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from llmcond.base.system import move_to_device
from llmcond.encoders.torch.batching import PackedRow, RowSegment

NAME = "llmcond_packed"


#: A plan, which says which tokens of a packed row attend to which, and computes their attention. It
#: takes the row's queries, (heads, tokens, head_dim), its keys and values, of as many heads or
#: fewer, and the factor of the scores; None means head_dim ** -0.5. It returns
#: (tokens, heads, head_dim).
AttentionPlan = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


class AttentionCall(NamedTuple):
    """A call of a layer's attention, as a router inside the network sees it.

    Attributes:
        module: The layer's attention module.
        query: (batch, heads, tokens, head_dim).
        key: Like ``query``, with the same number of heads or fewer.
        value: Like ``key``.
        scale: Factor of the scores; None means head_dim ** -0.5.
        attend: Computes the attention without the router, (batch, tokens, heads, head_dim).
    """

    module: torch.nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None
    attend: Callable[[], Tensor]


def _compute_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed: AttentionPlan | None = None,
    router: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer, within a packed row if there is a plan (``packed``).

    Without a plan, this is the scaled dot product attention of transformers. A ``router`` modifies
    the result by another text; its method ``attend`` gets an ``AttentionCall``.
    """

    def attend_without_router() -> Tensor:
        if packed is None:
            output: Tensor = sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **kwargs
            )[0]
            return output
        for option in ("softcap", "position_bias", "s_aux"):
            if kwargs.get(option) is not None:
                raise NotImplementedError(f"packed attention does not support {option}")
        return packed(query[0], key[0], value[0], scaling)[None]

    if router is None:
        return attend_without_router(), None
    call = AttentionCall(module, query, key, value, scaling, attend_without_router)
    return router.attend(call), None


AttentionInterface.register(NAME, _compute_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


#: Plain matrix products are faster on a CPU than PyTorch's attention up to this number of keys and
#: up to this size of a head.
SHORT = 64
#: Width of a CPU's vector registers in bytes.
_VECTOR_BYTES = 64
#: Largest factor by which the columns of a float32 softmax are padded to fill vector registers.
_MAX_WIDENING = 1.35
#: In 16 bit, texts are multiplied in multiples of this number.
_ROW_MULTIPLE = 8


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """Compute scaled dot product attention in (rows, heads, tokens, head_dim).

    Args:
        query: (rows, heads, queries, head_dim).
        key: (rows, heads or fewer, keys, head_dim).
        value: Like ``key``.
        scale: Factor of the scores; None means head_dim ** -0.5.
        mask: Added to the scores, (rows or 1, 1, queries or 1, keys).
        causal: Whether a token sees only itself and the tokens before it. ``mask`` must say the
            same if there is one: short texts on a CPU follow the mask, and all others this flag.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    grouped = query.shape[1] != key.shape[1]
    if query.is_cpu and not grouped and max(key.shape[2], query.shape[3]) <= SHORT:
        return _attend_in_few_shapes(query, key, value, scale, mask)
    dtype = query.dtype
    if query.is_cpu:
        # Without AMX, PyTorch's attention in 16 bit takes longer on a CPU than casting to float32.
        query, key, value = query.float(), key.float(), value.float()
        mask = None if mask is None else mask.float()
    elif grouped:
        # With a mask, or in float32, CUDA's fast kernels may not support fewer key heads than query
        # heads. PyTorch would then keep the scores of all pairs in memory.
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        grouped = False
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        # A kernel's causal flag is cheaper than an equivalent mask.
        attn_mask=None if causal else mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=grouped,
    )
    return output.to(dtype)


def _attend_in_few_shapes(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    """Compute the attention of short texts with matrix products of few different shapes.

    In 16 bit, oneDNN prepares a product for every shape and caches 0.6 MiB for each. So texts are
    multiplied in multiples of eight, and the remainder in float32, whose library caches nothing.
    """
    if query.dtype == torch.float32:
        return _attend_short(query, key, value, scale, mask)
    full = len(query) // _ROW_MULTIPLE * _ROW_MULTIPLE
    parts = []
    for part, part_dtype in ((slice(0, full), query.dtype), (slice(full, None), torch.float32)):
        if len(query[part]):
            part_mask = mask if mask is None or len(mask) == 1 else mask[part]
            part_mask = None if part_mask is None else part_mask.to(part_dtype)
            texts = [x[part].to(part_dtype) for x in (query, key, value)]
            parts.append(
                _attend_short(texts[0], texts[1], texts[2], scale, part_mask).to(query.dtype)
            )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_short(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    """Compute the attention of short texts with batched products of small matrices.

    If the inputs are in 16 bit, so are all intermediate values; PyTorch's own attention does not
    round less. The scores have the keys before the queries, because PyTorch's softmax over a short
    last dimension takes longer than both products.
    """
    rows, heads, n_queries, width = query.shape
    flat = rows * heads
    wide = _widen_queries(n_queries, query.dtype)
    if wide > n_queries:
        query = pad(query, (0, 0, 0, wide - n_queries))
    query, key, value = (x.reshape(flat, -1, width) for x in (query, key, value))
    added = query.new_empty(1, 1, 1) if mask is None else _transpose_mask(mask, heads, wide)
    scores = torch.baddbmm(
        added, key, query.transpose(1, 2), beta=0 if mask is None else 1, alpha=scale
    )
    weights = scores.softmax(dim=1)[:, :, :n_queries]
    return torch.bmm(weights.transpose(1, 2), value).view(rows, heads, n_queries, width)


def _widen_queries(n_queries: int, dtype: torch.dtype) -> int:
    """Return the number of queries to pad to; a softmax is slow if they do not fill registers."""
    vector = _VECTOR_BYTES // dtype.itemsize
    wide = -(-n_queries // vector) * vector
    # In 16 bit it always pays; in float32 it does not for a few queries more than a whole vector.
    worth = dtype.itemsize == 2 or n_queries < vector or wide <= _MAX_WIDENING * n_queries
    return wide if worth else n_queries


def _transpose_mask(mask: Tensor, heads: int, n_queries: int) -> Tensor:
    """Turn a mask of (rows or 1, 1, queries or 1, keys) into what is added to the scores."""
    mask = mask.transpose(2, 3)
    if 1 < mask.shape[3] < n_queries:
        mask = pad(mask, (0, n_queries - mask.shape[3]))
    return mask[0] if len(mask) == 1 else mask.expand(-1, heads, -1, -1).flatten(0, 1)


#: Most tokens of adjacent branches that attend in one masked call: on a CPU, and on a GPU.
BRANCH_TOKENS, _BRANCH_TOKENS_ON_GPU = 192, 1_024
#: Number of padding tokens that costs as much as one more call: on a CPU, and on a GPU.
_CALL_COST, _CALL_COST_ON_GPU = 64, 4_096


def plan_attention(
    batch: PackedRow, causal: bool, device: torch.device, dtype: torch.dtype
) -> AttentionPlan:
    """Plan the attention of a packed row for PyTorch's scaled dot product attention.

    The row is a sequence of blocks of queries, each with its own keys. The padding after its texts
    attends to nothing.
    """
    if batch.shared:
        blocks = _plan_branches(batch, device, dtype)
    else:
        call_cost = _CALL_COST if device.type == "cpu" else _CALL_COST_ON_GPU
        groups = _group_runs(batch.segments, call_cost)
        blocks = [_plan_group(runs, causal, device, dtype) for runs in groups]

    def attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        heads, length, width = query.shape
        parts = [block(query, key, value, scale) for block in blocks]
        if length > batch.n_tokens:
            parts.append(query.new_zeros(length - batch.n_tokens, heads, width))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return attend_in_blocks


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
    if causal and longest <= SHORT:
        visible = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        mask = _make_mask(visible, dtype)[None, None]
    if len(runs) == 1:
        start, rows, length = runs[0]

        def attend_even(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
            stop = start + rows * length
            query, key, value = (
                x[:, start:stop].view(len(x), rows, length, -1).transpose(0, 1)
                for x in (query, key, value)
            )
            output = attend(query, key, value, scale, mask, causal)
            return output.transpose(1, 2).flatten(0, 1)

        return attend_even
    starts = [start + row * length for start, rows, length in runs for row in range(rows)]
    lengths = [length for _, rows, length in runs for _ in range(rows)]
    offsets = torch.arange(longest)
    real = offsets < torch.tensor(lengths)[:, None]
    positions = torch.where(real, torch.tensor(starts)[:, None] + offsets, starts[0])
    if not causal:  # otherwise no token sees the padding behind it, and keys need no mask
        mask = _make_mask(move_to_device(real, device), dtype)[:, None, None]
    positions, token_indices = (
        move_to_device(value, device)
        for value in (positions.flatten(), real.flatten().nonzero()[:, 0])
    )

    def attend_uneven(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        # Tokens come first, as they do in memory, so that whole tokens are copied.
        query, key, value = (
            x.transpose(0, 1)
            .index_select(0, positions)
            .view(len(lengths), longest, len(x), x.shape[2])
            .transpose(1, 2)
            for x in (query, key, value)
        )
        output = attend(query, key, value, scale, mask, causal)
        return output.transpose(1, 2).flatten(0, 1).index_select(0, token_indices)

    return attend_uneven


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
        positions = torch.cat([path, torch.arange(begin, stop)])
        queries = torch.arange(start, stop)[:, None]
        # A token is visible to its own query and to those of later tokens in its branch.
        visible = (positions <= queries) & (queries < until[positions])
        mask = move_to_device(_make_mask(visible, dtype)[None, None], device)
        keys = move_to_device(positions, device)

        def attend_branches(
            query: Tensor, key: Tensor, value: Tensor, scale: float | None
        ) -> Tensor:
            key, value = (x[None].index_select(2, keys) for x in (key, value))
            output = attend(query[None, :, start:stop], key, value, scale, mask, False)
            return output[0].transpose(0, 1)

        return attend_branches

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


#: Most keys and values that are gathered for one call of a kernel, as a multiple of the row's
#: tokens.
_MAX_GATHERED = 8


def plan_varlen(
    batch: PackedRow, causal: bool, device: torch.device, kernel: Callable[..., Any]
) -> AttentionPlan:
    """Plan the attention of a packed row for a kernel that takes segments of any length.

    If inputs share prefixes, the keys of each segment and its ancestors are gathered. The number of
    segments per call is limited, so that memory stays bounded whatever the prefix tree. If there
    are more keys than queries, the last query is aligned with the last key.

    Args:
        batch: The row.
        causal: Whether a token sees only itself and the tokens before it.
        device: Where the row is.
        kernel: A function with the signature of ``torch.nn.attention.varlen.varlen_attn``.
    """
    segments = batch.segments
    if not batch.shared:
        calls = [_make_call(segments, None, device)]
    else:
        limit = _MAX_GATHERED * batch.n_tokens
        positions = [token_positions([*batch.ancestors(i), s]) for i, s in enumerate(segments)]
        cuts, size = [0], 0
        for index, keys in enumerate(positions):
            if size and size + len(keys) > limit:
                cuts.append(index)
                size = 0
            size += len(keys)
        parts = [slice(*ends) for ends in pairwise([*cuts, len(positions)])]
        calls = [_make_call(segments[part], positions[part], device) for part in parts]

    def attend_in_calls(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        options: dict[str, Any] = {"enable_gqa": True} if len(query) != len(key) else {}
        # In training, autocast rotates queries and keys in float32, and the kernels need one type.
        query, key, value = (x.to(value.dtype).transpose(0, 1) for x in (query, key, value))
        options |= {"scale": scale, "window_size": (-1, 0) if causal else (-1, -1)}
        outputs = [
            kernel(query[queries], key[keys], value[keys], *lengths, **options)
            for queries, keys, lengths in calls
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    return attend_in_calls


def _make_call(
    segments: Sequence[RowSegment], positions: list[Tensor] | None, device: torch.device
) -> tuple[slice, slice | Tensor, tuple[Tensor, Tensor, int, int]]:
    """Return the arguments of a kernel's call for some segments.

    ``positions`` has the key positions of each segment; None means that each sees itself only.

    Returns:
        The positions of the queries in the row, those of the keys, and the lengths: the cumulative
        numbers of queries and of keys, both (segments + 1,), and the most queries and the most keys
        of a segment.
    """

    def accumulate_lengths(lengths: list[int]) -> tuple[Tensor, int]:
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return move_to_device(offsets, device), max(lengths)

    queries = slice(segments[0].start, segments[-1].stop)
    offsets, longest = accumulate_lengths([segment.length for segment in segments])
    if positions is None:
        return queries, queries, (offsets, offsets, longest, longest)
    key_offsets, most_keys = accumulate_lengths([len(keys) for keys in positions])
    keys = move_to_device(torch.cat(positions), device)
    return queries, keys, (offsets, key_offsets, longest, most_keys)


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
