"""Feature matrices wherever they lie: in memory, on disk, shared by many rows, or computed.

Heads read some rows at a time, so what is stored in 16 bit, or on disk, stays there.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError

Array = NDArray[np.float32]
Positions = NDArray[np.int64]
T = TypeVar("T")


def as_list(values: Iterable[T]) -> list[T]:
    """Return the items of a sequence, an iterator, a column or an Arrow array as a list.

    Raises:
        UserError: a whole table, whose items would be the names of its columns.
    """
    if hasattr(values, "columns") or isinstance(values, Mapping):
        raise UserError(f"a whole {type(values).__name__} was given; give one of its columns.")
    if hasattr(values, "to_pylist"):  # the items of Arrow arrays are objects of its own
        items: list[T] = values.to_pylist()
        return items
    return list(values)


class Matrix(ABC):
    """Vectors, (n, dim), whose rows are read when they are needed, computed from its ``parts``."""

    shape: tuple[int, ...]
    parts: Sequence[Matrix] = ()

    @abstractmethod
    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        """Return some rows, by a slice, a mask or positions, in the type they are stored in."""

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, rows: Any = slice(None)) -> Array:
        """Return some rows, or all, in float32."""
        return np.asarray(self[rows], dtype=np.float32)

    def take(self, rows: NDArray[Any]) -> Matrix:
        """Return some rows, by positions or a mask (n,), without reading them."""
        return Gathered(self, np.arange(len(self))[rows], unique_table=False)

    def unique(self) -> tuple[Positions, Positions]:
        """Return the first row of each distinct vector, (m,), and which of them each row has, (n,).

        Distinct vectors are numbered by first appearance, whatever type they have and however they
        are stored.
        """
        flat = np.ascontiguousarray(self[:])
        if not flat.shape[1]:
            return np.zeros(min(len(flat), 1), dtype=np.int64), np.zeros(len(flat), dtype=np.int64)
        rows = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1]))).reshape(-1)
        return _by_appearance(rows)

    @property
    def on_disk(self) -> bool:
        """Return whether any of it is read from a memory map."""
        return any(part.on_disk for part in self.parts)

    def release(self) -> None:
        """Drop the pages that were read of memory maps, which else count as memory in use."""
        for part in self.parts:
            part.release()


#: A matrix, a NumPy array or a memory map, (n, dim).
MatrixLike = Matrix | NDArray[Any]


def as_matrix(vectors: MatrixLike) -> Matrix:
    """Return a matrix of what may be a NumPy array or a memory map."""
    return vectors if isinstance(vectors, Matrix) else Dense(vectors)


class Dense(Matrix):
    """A NumPy array or a memory map."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array, self.shape = array, array.shape

    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        found: NDArray[Any] = self.array[rows]
        return found

    @property
    def on_disk(self) -> bool:
        """See :class:`Matrix`."""
        # NumPy's copies of a memory map are of its class, and lie in memory.
        return isinstance(getattr(self.array, "_mmap", None), mmap.mmap)

    def release(self) -> None:
        """See :class:`Matrix`."""
        # Of a private map (mode c), what was written would be lost.
        if self.on_disk and getattr(self.array, "mode", "c") != "c":
            mapped: Any = self.array
            mapped._mmap.madvise(mmap.MADV_DONTNEED)


class Gathered(Matrix):
    """Rows that share vectors.

    Attributes:
        table: (m, dim) vectors.
        index: (n,) the position of each row's vector in the table.
        unique_table: whether no two vectors of the table are equal, so that rows can be compared
            by their positions alone.
    """

    def __init__(self, table: MatrixLike, index: Positions, unique_table: bool = True) -> None:
        self.table, self.index, self.unique_table = as_matrix(table), index, unique_table
        self.shape, self.parts = (len(index), int(table.shape[1])), (self.table,)

    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        return self.table[self.index[rows]]

    def take(self, rows: NDArray[Any]) -> Gathered:
        """See :class:`Matrix`."""
        return Gathered(self.table, self.index[rows], self.unique_table)

    def unique(self) -> tuple[Positions, Positions]:
        """See :class:`Matrix`."""
        first, which = _by_appearance(self.index)
        if self.unique_table:
            return first, which
        _, equal = Dense(self[first]).unique()
        return _by_appearance(equal[which])


class Difference(Matrix):
    """``first`` - ``second``, computed in float32 for the rows that are read."""

    def __init__(self, first: MatrixLike, second: MatrixLike) -> None:
        self.first, self.second = as_matrix(first), as_matrix(second)
        self.shape, self.parts = first.shape, (self.first, self.second)

    def __getitem__(self, rows: Any, /) -> Array:
        return self.first.read(rows) - self.second.read(rows)

    def take(self, rows: NDArray[Any]) -> Difference:
        """See :class:`Matrix`."""
        return Difference(self.first.take(rows), self.second.take(rows))


class Concatenated(Matrix):
    """Several matrices side by side, as wide as all of them."""

    def __init__(self, parts: Sequence[MatrixLike]) -> None:
        self.parts = tuple(as_matrix(part) for part in parts)
        self.shape = len(parts[0]), sum(int(part.shape[1]) for part in parts)

    def __getitem__(self, rows: Any, /) -> Array:
        return np.concatenate([part.read(rows) for part in self.parts], axis=1)

    def take(self, rows: NDArray[Any]) -> Concatenated:
        """See :class:`Matrix`."""
        return Concatenated([part.take(rows) for part in self.parts])


def _by_appearance(values: NDArray[Any]) -> tuple[Positions, Positions]:
    """Return what :meth:`Matrix.unique` does, of single values, (n,)."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[inverse.reshape(-1)]


def cosine(first: Array, second: Array) -> Array:
    """Return the cosine of each row of ``first`` with that of ``second``, (n,) float32.

    A zero vector has cosine 0 with everything: it says nothing of its text.
    """
    product = _inner(first, second)
    norms = np.sqrt(_inner(first, first)) * np.sqrt(_inner(second, second))
    zeros = np.zeros(len(norms), dtype=np.float64)
    cosines: Array = np.divide(product, norms, out=zeros, where=norms > 0).astype(np.float32)
    return cosines


def _inner(first: Array, second: Array) -> NDArray[np.float64]:
    inner: NDArray[np.float64] = np.einsum("nd,nd->n", first, second, dtype=np.float64)
    return inner


def gelu(values: Array) -> Array:
    """Return x Φ(x) of each value x, with Φ the distribution function of the normal one."""
    from scipy.special import erf

    activated: Array = values * (0.5 * (1 + erf(values * np.float32(0.5**0.5))))
    return activated
