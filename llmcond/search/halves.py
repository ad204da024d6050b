"""Vectors in half precision: widened, narrowed and multiplied, (n, k) at a time.

PyTorch converts half precision several times as fast as NumPy, but takes more than a second to
import. So it is used where there are many values. Which one it is depends on their number alone, so
that equal searches have equal scores.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

#: Values that NumPy converts in about 10 ms.
_FEW = 2**22
#: Rows that are multiplied at a time: half precision is widened in the processor's cache.
_ROWS = 4_096


def converted(
    vectors: NDArray[Any], dtype: Literal["float16", "float32"], n_values: int
) -> NDArray[Any]:
    """Return vectors in another type; ``n_values`` are converted in all, block by block."""
    if n_values <= _FEW:
        return vectors.astype(dtype)
    import torch

    return torch.from_numpy(vectors).to(getattr(torch, dtype)).numpy()


def products(vectors: NDArray[np.float16], queries: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the inner products of queries, (q, k), with vectors, (n, k): (q, n)."""
    if vectors.size <= _FEW:
        return queries @ vectors.astype(np.float32).T
    import torch

    given, held = torch.from_numpy(np.ascontiguousarray(queries.T)), torch.from_numpy(vectors)
    # One buffer for all: to allocate and fault in memory takes longer than the products.
    wide = torch.empty(min(_ROWS, len(held)), held.shape[1])
    found = torch.empty(len(held), len(queries))
    for start in range(0, len(held), _ROWS):
        part = held[start : start + _ROWS]
        rows = wide[: len(part)].copy_(part)
        torch.mm(rows, given, out=found[start : start + len(part)])
    return np.asarray(found.numpy().T)


def largest(values: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Return the positions of the k largest of n values, in any order."""
    if values.size <= _FEW:
        return np.argpartition(values, -k)[-k:] if k < len(values) else np.arange(len(values))
    import torch

    return np.asarray(torch.topk(torch.from_numpy(values), k).indices.numpy())
