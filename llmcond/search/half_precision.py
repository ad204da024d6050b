"""Conversion and multiplication of vectors in half precision (float16).

PyTorch converts half precision several times as fast as NumPy, but takes more than a second to
import, so it is only used for large arrays. The choice depends on the number of values alone, so
that equal searches give equal scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

#: Largest number of values that NumPy is used for; NumPy converts that many in about 10 ms.
_MAX_NUMPY_VALUES = 2**22
#: Rows that are multiplied at a time, so that the float32 copy of them fits the CPU cache.
_BLOCK_ROWS = 4_096


def convert_dtype(
    vectors: NDArray[Any], dtype: Literal["float16", "float32"], n_values: int
) -> NDArray[Any]:
    """Convert vectors to another float type.

    Args:
        vectors: (n, k) vectors.
        dtype: the type to convert to.
        n_values: number of values that are converted in total, where the caller converts a large
            array block by block.
    """
    if n_values <= _MAX_NUMPY_VALUES:
        return vectors.astype(dtype)
    import torch

    return torch.from_numpy(vectors).to(getattr(torch, dtype)).numpy()


def inner_products(
    vectors: NDArray[Any],
    queries: NDArray[np.float32],
    unpack: Callable[[NDArray[Any]], NDArray[Any]] | None = None,
) -> NDArray[np.float32]:
    """Return the (q, n) inner products of queries, (q, k), with vectors, (n, k).

    Args:
        vectors: the vectors, of any number type.
        queries: the queries.
        unpack: function from some rows of ``vectors`` to their (m, k) numbers; None: they are
            numbers already.
    """
    unpack = unpack or (lambda rows: rows)
    if len(vectors) * queries.shape[1] <= _MAX_NUMPY_VALUES:
        return queries @ unpack(vectors).astype(np.float32).T
    import torch

    queries_t = torch.from_numpy(np.ascontiguousarray(queries.T))
    # All blocks share one buffer: allocating and page-faulting memory takes longer than the
    # multiplication.
    buffer = torch.empty(min(_BLOCK_ROWS, len(vectors)), queries.shape[1])
    scores = torch.empty(len(vectors), len(queries))
    for start in range(0, len(vectors), _BLOCK_ROWS):
        block = torch.from_numpy(unpack(vectors[start : start + _BLOCK_ROWS]))
        floats = buffer[: len(block)].copy_(block)
        torch.mm(floats, queries_t, out=scores[start : start + len(block)])
    return np.asarray(scores.numpy().T)


def top_k(values: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Return the indices of the k largest of n values, in any order."""
    if values.size <= _MAX_NUMPY_VALUES:
        return np.argpartition(values, -k)[-k:] if k < len(values) else np.arange(len(values))
    import torch

    return np.asarray(torch.topk(torch.from_numpy(values), k).indices.numpy())
