"""Rows of features as heads read them that compare by cosines: vectors of length 1."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from llmcond.arrays import MatrixLike, Positions, as_matrix

#: Features are kept in memory in float32 if these take no more bytes; else rows are read.
_DENSE_BYTES = 2**29


class UnitRows:
    """Vectors of length 1 of a matrix; ``table`` has all of them where they fit in memory."""

    def __init__(self, vectors: MatrixLike) -> None:
        self._matrix = as_matrix(vectors)
        small = 4 * math.prod(self._matrix.shape) <= _DENSE_BYTES
        self.table = normalize(torch.from_numpy(self._matrix.read())) if small else None

    def read(self, rows: Positions) -> Tensor:
        """Return some rows, (m, d) float32, by positions."""
        if self.table is not None:
            return self.table[torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))]
        # What lies on disk is read in its order, each row once.
        distinct, which = np.unique(rows, return_inverse=True)
        vectors = torch.from_numpy(self._matrix.read(distinct))
        return normalize(vectors)[torch.from_numpy(which.reshape(-1))]
