"""Feature matrices: in memory, on disk, with vectors shared by rows, or computed from others.

Heads read a few rows at a time, so that vectors in 16 bit or on disk are never converted or loaded
as a whole.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.display import are_equal
from llmcond.errors import UserError, shortened_repr

Array = NDArray[np.float32]
Positions = NDArray[np.int64]
T = TypeVar("T")


def as_list(values: Iterable[T], name: str = "the values") -> list[T]:
    """Return the items of a sequence, an iterator, a column or an Arrow array as a list.

    Args:
        values: the items.
        name: name of the items in messages.

    Raises:
        UserError: ``values`` is a table, whose items would be the names of its columns, a single
            text, or has no items, such as a number.
    """
    if hasattr(values, "columns") or isinstance(values, Mapping):
        raise UserError(
            f"a whole {type(values).__name__} was given as a list of values; give one of its "
            "columns."
        )
    if hasattr(values, "to_pylist"):  # Arrow arrays yield Arrow scalars, not Python objects.
        items: list[T] = values.to_pylist()
        return items
    try:
        if not isinstance(values, str | bytes):
            return list(values)
    except TypeError:
        pass
    raise UserError(
        f"expected a list for {name}, not the {type(values).__name__} {shortened_repr(values)}."
    )


class Matrix(ABC):
    """A matrix of vectors, (n, dim), whose rows are read when they are needed.

    Attributes:
        shape: (n, dim).
        parts: the matrices that this one is computed from.

    Examples:
        >>> import numpy as np
        >>> from llmcond.heads import ConcatenatedMatrix
        >>> matrix = ConcatenatedMatrix([np.ones((3, 2), dtype=np.float16), np.zeros((3, 1))])
        >>> matrix.shape, matrix.read([0, 2]).dtype
        ((3, 3), dtype('float32'))
    """

    shape: tuple[int, ...]
    parts: Sequence[Matrix] = ()

    @abstractmethod
    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        """Return rows, selected by a slice, a mask or positions, in their stored dtype."""

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, rows: Any = slice(None)) -> Array:
        """Return some or all rows in float32."""
        return np.asarray(self[rows], dtype=np.float32)

    def take(self, rows: NDArray[Any]) -> Matrix:
        """Return a matrix of some rows, by positions or a mask (n,), without reading it."""
        return SharedRows(self, np.arange(len(self))[rows], unique_table=False)

    def unique(self) -> tuple[Positions, Positions]:
        """Find the distinct vectors, whatever their dtype and however they are stored.

        Returns:
            The first row of each distinct vector, (m,), in the order of first appearance, and for
            each row the number of its distinct vector, (n,).
        """
        flat = np.ascontiguousarray(self[:])
        if not flat.shape[1]:
            return np.zeros(min(len(flat), 1), dtype=np.int64), np.zeros(len(flat), dtype=np.int64)
        rows = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1]))).reshape(-1)
        return _number_by_appearance(rows)

    @property
    def on_disk(self) -> bool:
        """Whether any part of the matrix is read from a memory map."""
        return any(part.on_disk for part in self.parts)

    def release(self) -> None:
        """Release the pages read from memory maps, which count as memory in use until then."""
        for part in self.parts:
            part.release()


#: A matrix, NumPy array or memory map, (n, dim).
MatrixLike = Matrix | NDArray[Any]


def as_matrix(vectors: MatrixLike) -> Matrix:
    """Return a NumPy array or a memory map as a matrix, and a matrix unchanged."""
    return vectors if isinstance(vectors, Matrix) else DenseMatrix(vectors)


class DenseMatrix(Matrix):
    """A NumPy array or a memory map."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array, self.shape = array, array.shape

    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        selected: NDArray[Any] = self.array[rows]
        return selected

    @property
    @override
    def on_disk(self) -> bool:
        # NumPy's copies of a memory map have the same class, but are in memory.
        return isinstance(getattr(self.array, "_mmap", None), mmap.mmap)

    @override
    def release(self) -> None:
        # A private map (mode c) would lose its changes.
        if self.on_disk and getattr(self.array, "mode", "c") != "c":
            mapped: Any = self.array
            mapped._mmap.madvise(mmap.MADV_DONTNEED)


class SharedRows(Matrix):
    """A matrix whose rows share the vectors of a table.

    Attributes:
        table: (m, dim) vectors.
        index: (n,) position of each row's vector in the table.
        unique_table: whether the vectors of the table are distinct, so that rows can be compared
            by their positions alone.

    Examples:
        >>> import numpy as np
        >>> from llmcond.heads import SharedRows
        >>> table = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float16)
        >>> SharedRows(table, np.array([1, 1, 0])).read().tolist()
        [[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    """

    def __init__(self, table: MatrixLike, index: Positions, unique_table: bool = True) -> None:
        self.table, self.index, self.unique_table = as_matrix(table), index, unique_table
        self.shape, self.parts = (len(index), int(table.shape[1])), (self.table,)

    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        return self.table[self.index[rows]]

    @override
    def take(self, rows: NDArray[Any]) -> SharedRows:
        return SharedRows(self.table, self.index[rows], self.unique_table)

    @override
    def unique(self) -> tuple[Positions, Positions]:
        first, numbers = _number_by_appearance(self.index)
        if self.unique_table:
            return first, numbers
        _, equal = DenseMatrix(self[first]).unique()
        return _number_by_appearance(equal[numbers])


class Difference(Matrix):
    """The difference ``first`` - ``second``, computed in float32 for the rows that are read.

    Attributes:
        first: (n, dim) vectors.
        second: (n, dim) vectors to subtract.

    Examples:
        >>> import numpy as np
        >>> from llmcond.heads import Difference
        >>> Difference(np.array([[3.0, 2.0]]), np.array([[1.0, 2.0]])).read().tolist()
        [[2.0, 0.0]]
    """

    def __init__(self, first: MatrixLike, second: MatrixLike) -> None:
        self.first, self.second = as_matrix(first), as_matrix(second)
        self.shape, self.parts = first.shape, (self.first, self.second)

    def __getitem__(self, rows: Any, /) -> Array:
        return self.first.read(rows) - self.second.read(rows)

    @override
    def take(self, rows: NDArray[Any]) -> Difference:
        return Difference(self.first.take(rows), self.second.take(rows))


class ConcatenatedMatrix(Matrix):
    """Several matrices concatenated along the columns, in float32.

    Attributes:
        parts: the matrices, (n, dim_i) each.

    Examples:
        >>> import numpy as np
        >>> from llmcond.heads import ConcatenatedMatrix
        >>> ConcatenatedMatrix([np.array([[1.0]]), np.array([[2.0, 3.0]])]).read().tolist()
        [[1.0, 2.0, 3.0]]
    """

    def __init__(self, parts: Sequence[MatrixLike]) -> None:
        self.parts = tuple(as_matrix(part) for part in parts)
        self.shape = len(parts[0]), sum(int(part.shape[1]) for part in parts)

    def __getitem__(self, rows: Any, /) -> Array:
        return np.concatenate([part.read(rows) for part in self.parts], axis=1)

    @override
    def take(self, rows: NDArray[Any]) -> ConcatenatedMatrix:
        return ConcatenatedMatrix([part.take(rows) for part in self.parts])


def _number_by_appearance(values: NDArray[Any]) -> tuple[Positions, Positions]:
    """Find distinct values, (n,), with the results of ``Matrix.unique``."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[inverse.reshape(-1)]


class EqualByValue:
    """A base of dataclasses with arrays, which are equal if all their fields are.

    Such a dataclass is declared with ``eq=False``: the comparison that ``dataclass`` generates
    fails for arrays. NaN is equal to itself, so that a copy is always equal.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    @override
    def __eq__(self, other: object) -> bool:
        return are_equal(self, other)


def cosine(first: Array, second: Array) -> Array:
    """Return the cosine of each row of ``first`` with the same row of ``second``, (n,) float32.

    A zero vector carries no information about its text, so its cosine with any vector is 0.

    Args:
        first: (n, dim) vectors.
        second: (n, dim) vectors.

    Returns:
        (n,) cosines in float32.

    Examples:
        >>> import numpy as np
        >>> from llmcond.heads import cosine
        >>> cosine(np.array([[1.0, 0.0], [0.0, 0.0]]), np.array([[2.0, 0.0], [1.0, 0.0]])).tolist()
        [1.0, 0.0]
    """
    product = _inner(first, second)
    norms = np.sqrt(_inner(first, first)) * np.sqrt(_inner(second, second))
    zeros = np.zeros(len(norms), dtype=np.float64)
    cosines = np.divide(product, norms, out=zeros, where=norms > 0)
    return clip_cosines(cosines).astype(np.float32)


def scale_to_unit_norm(vectors: NDArray[Any]) -> NDArray[Any]:
    """Return vectors, (n, k), with unit L2 norm. Zero vectors stay zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[Any] = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return unit


def clip_cosines(cosines: NDArray[Any]) -> NDArray[Any]:
    """Return cosines within -1 and 1, which rounding of unit vectors can exceed.

    Every cosine that is shown or returned passes this function or ``cosine``.
    """
    clipped: NDArray[Any] = np.clip(cosines, -1, 1)
    return clipped


def _inner(first: Array, second: Array) -> NDArray[np.float64]:
    inner: NDArray[np.float64] = np.einsum("nd,nd->n", first, second, dtype=np.float64)
    return inner


def gelu(values: Array) -> Array:
    """Return x Φ(x) for each value x, where Φ is the standard normal distribution function."""
    from scipy.special import erf

    activated: Array = values * (0.5 * (1 + erf(values * np.float32(0.5**0.5))))
    return activated
