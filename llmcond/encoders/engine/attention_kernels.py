"""Attention kernels: the fastest of PyTorch for a device and some lengths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

#: Up to so many keys a head, plain matrix products beat PyTorch's attention on a CPU.
SHORT = 64
#: Bytes that a CPU computes with at a time, and how much wider a softmax is made to fill them.
_VECTOR_BYTES, _WIDEN = 64, 1.35
#: Texts are multiplied in multiples of so many in 16 bit.
_ROWS = 8


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """Attend in (rows, heads, tokens, head_dim)."""
    scale = query.shape[3] ** -0.5 if scale is None else scale
    grouped = query.shape[1] != key.shape[1]
    if query.is_cpu and not grouped and max(key.shape[2], query.shape[3]) <= SHORT:
        return _few_shapes(query, key, value, scale, mask)
    dtype = query.dtype
    if query.is_cpu:
        # Without AMX, PyTorch's attention in 16 bit takes longer on a CPU than casting does.
        query, key, value = query.float(), key.float(), value.float()
        mask = None if mask is None else mask.float()
    elif grouped:
        # With a mask, or in float32, CUDA's fast kernels may not take fewer key heads, and PyTorch
        # would keep the scores of all pairs in memory.
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        grouped = False
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
    full = len(query) // _ROWS * _ROWS
    parts = []
    for part, kind in ((slice(0, full), query.dtype), (slice(full, None), torch.float32)):
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
        query = pad(query, (0, 0, 0, wide - n_queries))
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
        mask = pad(mask, (0, n_queries - mask.shape[3]))
    return mask[0] if len(mask) == 1 else mask.expand(-1, heads, -1, -1).flatten(0, 1)
