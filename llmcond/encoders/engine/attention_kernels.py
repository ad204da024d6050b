"""The fastest attention of PyTorch for a device and the lengths of a batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

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
