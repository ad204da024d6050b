"""Vectors wherever they lie: in memory, on disk, shared by many rows, or a difference of two.

Heads ask for some rows at a time, so what is stored in 16 bit, or on disk, stays there.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Positions = NDArray[np.int64]


class Matrix(Protocol):
    """Vectors, (n, dim), of which some rows can be had: NumPy arrays and memory maps are such."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (n, dim)."""
        ...

    def __getitem__(self, rows: Any, /) -> Any:
        """Return some rows, by a slice, a mask or positions, as an array of any float type."""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Lookup:
    """Rows that share vectors: the distinct ones, and which of them each row has.

    Attributes:
        table: (m, dim) distinct vectors.
        index: (n,) the place of each row's vector.
        told_apart: whether no two vectors of the table are equal.
    """

    table: Matrix
    index: Positions
    told_apart: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """See :class:`Matrix`."""
        return len(self.index), int(self.table.shape[1])

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Any) -> Any:
        return self.table[self.index[rows]]


@dataclass(frozen=True, eq=False)
class Difference:
    """``first`` - ``second``, computed in float32 for the rows that are asked for."""

    first: Matrix
    second: Matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """See :class:`Matrix`."""
        return self.first.shape

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, rows: Any) -> Any:
        return rows_of(self.first, rows) - rows_of(self.second, rows)


@dataclass(frozen=True, eq=False)
class Joined:
    """Several matrices side by side, as wide as all of them."""

    parts: Sequence[Matrix]

    @property
    def shape(self) -> tuple[int, ...]:
        """See :class:`Matrix`."""
        return len(self.parts[0]), sum(int(part.shape[1]) for part in self.parts)

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, rows: Any) -> Any:
        return np.concatenate([rows_of(part, rows) for part in self.parts], axis=1)


def chosen(matrix: Matrix, rows: NDArray[Any]) -> Matrix:
    """Return some rows of a matrix without reading its vectors.

    Args:
        matrix: (n, dim).
        rows: positions, or a mask (n,).
    """
    if isinstance(matrix, Lookup):
        return Lookup(matrix.table, matrix.index[rows], matrix.told_apart)
    if isinstance(matrix, Difference):
        return Difference(chosen(matrix.first, rows), chosen(matrix.second, rows))
    if isinstance(matrix, Joined):
        return Joined([chosen(part, rows) for part in matrix.parts])
    return Lookup(matrix, np.arange(len(matrix))[rows], told_apart=False)


def rows_of(matrix: Matrix, rows: Any) -> Array:
    """Return some rows of a matrix in float32."""
    found: Array = np.asarray(matrix[rows], dtype=np.float32)
    return found


def distinct(matrix: Matrix) -> tuple[Positions, Positions]:
    """Return what tells equal rows: (m,) the first of each distinct one, (n,) its number.

    Numbers go by first appearance, whatever type the vectors have and however they are stored.
    Rows that share an entry of a :class:`Lookup` are equal without a look at their vectors.
    """
    if isinstance(matrix, Lookup):
        _, first, number = np.unique(matrix.index, return_index=True, return_inverse=True)
        if not matrix.told_apart:
            firsts, numbers = distinct(np.asarray(matrix[first]))
            first, number = first[firsts], numbers[number.reshape(-1)]
            # The first of equal vectors need not be the first by its place in the table.
            first = np.full(len(first), len(number)).astype(np.int64)
            np.minimum.at(first, number, np.arange(len(number)))
        return _by_appearance(first, number)
    flat = np.ascontiguousarray(matrix[:])
    if not flat.shape[1]:
        return np.zeros(min(len(flat), 1), dtype=np.int64), np.zeros(len(flat), dtype=np.int64)
    rows = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1]))).reshape(-1)
    _, first, number = np.unique(rows, return_index=True, return_inverse=True)
    return _by_appearance(first, number)


def _by_appearance(first: Positions, number: Positions) -> tuple[Positions, Positions]:
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[number.reshape(-1)]


def release(matrix: Matrix) -> None:
    """Let go of what was read of a memory map, which else counts as this process's memory."""
    if isinstance(matrix, Lookup):
        release(matrix.table)
    elif isinstance(matrix, Difference):
        release(matrix.first)
        release(matrix.second)
    elif isinstance(matrix, Joined):
        for part in matrix.parts:
            release(part)
    # Of a private map, what was written would be lost.
    elif on_disk(matrix) and getattr(matrix, "mode", "c") != "c":
        mapped: Any = matrix
        mapped._mmap.madvise(mmap.MADV_DONTNEED)


def on_disk(matrix: Matrix) -> bool:
    """Tell whether a matrix is read from a memory map."""
    if isinstance(matrix, Lookup):
        return on_disk(matrix.table)
    if isinstance(matrix, Difference):
        return on_disk(matrix.first) or on_disk(matrix.second)
    if isinstance(matrix, Joined):
        return any(on_disk(part) for part in matrix.parts)
    # NumPy's copies of a memory map are of its class, and lie in memory.
    return isinstance(getattr(matrix, "_mmap", None), mmap.mmap)
