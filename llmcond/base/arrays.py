"""Feature matrices in memory, on disk or computed, and vectors quantised to 8 bits and 1 bit.

Heads read a few rows at a time, so that vectors in 16 bit or on disk are never converted or loaded
as a whole.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.errors import UserError, list_legal_values, shortened_repr
from llmcond.base.options import Precision, check_argument
from llmcond.base.output import are_equal, log

if TYPE_CHECKING:
    from torch import Tensor

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
    cosines = np.divide(product, norms, out=zeros, where=norms != 0)
    return clip_cosines(cosines).astype(np.float32)


def scale_to_unit_norm(vectors: NDArray[Any]) -> NDArray[Any]:
    """Return vectors, (n, k), with unit L2 norm. Zero vectors stay zero, and NaN stays NaN."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[Any] = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms != 0)
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


PRECISIONS: tuple[Precision, ...] = get_args(Precision)
#: Precisions whose codes depend on the lowest and highest value of each dimension.
CALIBRATED = ("int8", "uint8")
#: Fewer embeddings than this give a poor estimate of the range of each dimension.
MIN_CALIBRATION = 100

#: Options of ``encode`` with their names in sentence-transformers, which decide unless None.
_OTHER_NAMES = {"normalize": "normalize_embeddings", "show_progress": "show_progress_bar"}

#: Quantised embeddings, or float32 ones.
Quantized = NDArray[Any]


class EncodeOptions(TypedDict, total=False):
    """The options of ``encode`` besides the texts; the methods document them."""

    normalize: bool
    show_progress: bool
    truncate_dim: int | None
    precision: Precision
    batch_size: int | None
    convert_to_numpy: bool
    convert_to_tensor: bool
    show_progress_bar: bool | None
    normalize_embeddings: bool | None


def check_encode_options(
    *,
    precision: Precision = "float32",
    batch_size: int | None = None,
    **flags: bool | None,
) -> tuple[bool, bool]:
    """Check the options of ``encode``, before anything is encoded.

    Returns:
        Whether to normalise, and whether to show progress, by either name of the option.

    Raises:
        UserError: an option has another type, the precision is unknown, or ``batch_size`` is below
            1.
    """
    check_precision(precision)
    check_argument("batch_size", batch_size, (Integral, None), "a whole number of at least 1")
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; it must be at least 1.")
    for name, value in flags.items():
        types = (bool, np.bool_, None) if name in _OTHER_NAMES.values() else (bool, np.bool_)
        check_argument(name, value, types, "True or False")
    normalize, show_progress = (
        flags[name] if flags[other] is None else flags[other]
        for name, other in _OTHER_NAMES.items()
    )
    return bool(normalize), bool(show_progress)


def check_truncate_dim(truncate_dim: int | None, dim: int) -> int:
    """Return the number of dimensions that remain of ``dim``.

    Raises:
        UserError: ``truncate_dim`` is no whole number, or is below 1 or above ``dim``.
    """
    if truncate_dim is None:
        return dim
    check_argument("truncate_dim", truncate_dim, (Integral,), "a whole number")
    if not 1 <= truncate_dim <= dim:
        raise UserError(
            f"truncate_dim is {shortened_repr(truncate_dim)}, but the embeddings have {dim} "
            f"dimensions. Give a whole number from 1 to {dim}."
        )
    return int(truncate_dim)


def check_precision(precision: Precision) -> None:
    """Check that embeddings can have a number type.

    Raises:
        UserError: the precision is unknown.
    """
    if precision not in PRECISIONS:
        legal = list_legal_values(str(precision), PRECISIONS)
        raise UserError(f"precision is {shortened_repr(precision)}. {legal}")


def measure_ranges(embeddings: NDArray[Any], n: int | None = None) -> Array:
    """Return the lowest and the highest value of each dimension of embeddings, (2, k) float32.

    Args:
        embeddings: the embeddings, or the extremes of parts of them.
        n: number of embeddings that the extremes are from; None: all are given.

    Raises:
        UserError: there are fewer than two embeddings.
    """
    if n is None:
        n = 1 if embeddings.ndim == 1 else len(embeddings)
    if n < 2:
        raise UserError(
            "int8 and uint8 need the range of each dimension, and a single embedding has none. "
            f"Give ranges that were measured on at least {MIN_CALIBRATION} embeddings."
        )
    if n < MIN_CALIBRATION:
        log.warning(
            f"the ranges of int8 and uint8 come from {n} embeddings only; they are more stable "
            f"with at least {MIN_CALIBRATION}"
        )
    return np.stack([embeddings.min(axis=0), embeddings.max(axis=0)]).astype(np.float32)


def check_ranges(ranges: Any, dim: int | None, source: str = "ranges") -> Array:
    """Return ranges as (2, dim) float32; ``dim`` may be None, for any size.

    Raises:
        UserError: they have another shape, are not finite, or a lowest value is above the highest.
    """
    values: Array = _as_array(ranges, source).astype(np.float32)
    if values.ndim != 2 or len(values) != 2 or dim not in (None, values.shape[1]):
        raise UserError(
            f"{source} has the shape {_shape_text(values)}, not 2x{dim or 'dimensions'}: the "
            "lowest and the highest value of each dimension of the embeddings."
        )
    if not (np.isfinite(values).all() and (values[0] <= values[1]).all()):
        raise UserError(
            f"{source} is not a range for each dimension: a value is not finite, or the lowest is "
            "above the highest."
        )
    return values


def _as_array(values: Any, name: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} cannot be read as an array of numbers: {error}.") from error
    if array.dtype.kind not in "fiu":
        raise UserError(f"{name} cannot be read as an array of numbers: its type is {array.dtype}.")
    return array


def _shape_text(array: NDArray[Any]) -> str:
    return "x".join(map(str, array.shape)) or "of a single number"


def quantize_embeddings(
    embeddings: NDArray[Any],
    precision: Precision,
    ranges: NDArray[Any] | None = None,
    calibration_embeddings: NDArray[Any] | None = None,
) -> Quantized:
    """Convert embeddings to fewer bits, as sentence-transformers' function of this name does.

    ``int8`` and ``uint8`` divide the range of each dimension into 256 equal steps. ``binary`` and
    ``ubinary`` store only whether a number is above 0, 8 dimensions in a byte; bits are added if
    the number of dimensions is no multiple of 8.

    Args:
        embeddings: (n, k) embeddings, or a single one, (k,).
        precision: ``float32``, ``int8``, ``uint8``, ``binary`` (signed bytes) or ``ubinary``
            (unsigned bytes).
        ranges: (2, k), the lowest and the highest value of each dimension, for ``int8`` and
            ``uint8``. Values outside are clipped. None: those of ``calibration_embeddings``.
        calibration_embeddings: (m, k) embeddings that the ranges are measured on. None:
            ``embeddings``; then embeddings of two calls cannot be compared.

    Returns:
        (n, k) float32, int8 or uint8; for ``binary`` and ``ubinary`` (n, ceil(k / 8)) int8 or
        uint8.

    Raises:
        UserError: the precision is unknown, embeddings are no finite floating-point numbers, the
            ranges or the calibration embeddings have another shape, or the ranges would be those of
            a single embedding.

    Examples:
        >>> import llmcond
        >>> embedder = llmcond.load_embedder()
        >>> texts = ["A man rides a horse.", "A girl reads.", "Two dogs play."]
        >>> vectors = embedder.encode(texts, "the activity")
        >>> codes = llmcond.quantize_embeddings(vectors, "ubinary")
        >>> codes.shape, codes.dtype
        ((3, 48), dtype('uint8'))
    """
    check_precision(precision)
    embeddings = _check_embeddings(embeddings, "the embeddings")
    if precision == "float32":
        return embeddings.astype(np.float32, copy=False)
    if precision in CALIBRATED:
        if ranges is not None:
            ranges = check_ranges(ranges, embeddings.shape[-1])
        else:
            calibration = embeddings
            if calibration_embeddings is not None:
                dim = embeddings.shape[-1]
                calibration = _check_embeddings(
                    calibration_embeddings, "calibration_embeddings", dim
                )
            if embeddings.ndim == 2 and not len(embeddings):
                return np.zeros(embeddings.shape, dtype=precision)
            ranges = measure_ranges(calibration)
        lowest = ranges[0]
        steps = (ranges[1] - lowest) / 255
        # A dimension whose values are all equal has the code 0.
        steps = np.where(steps == 0, 1, steps)
        codes: Array = np.clip(np.floor((embeddings - lowest) / steps), 0, 255)
        return codes.astype(np.uint8) if precision == "uint8" else (codes - 128).astype(np.int8)
    bits: NDArray[np.uint8] = np.packbits(embeddings > 0, axis=-1)
    return bits if precision == "ubinary" else (bits - np.uint8(128)).view(np.int8)


def _check_embeddings(embeddings: Any, name: str, dim: int | None = None) -> NDArray[Any]:
    """Return embeddings as an array; with ``dim``, these are (n, dim).

    Raises:
        UserError: they are no finite floating-point numbers, or have another shape.
    """
    array = _as_array(embeddings, name)
    are, dtype = ("is" if name.isidentifier() else "are"), array.dtype
    if not np.issubdtype(dtype, np.floating):
        raise UserError(
            f"{name} {are} of the type {dtype}; expected floating-point numbers, which have not "
            "been quantised yet."
        )
    if array.ndim not in (1, 2) or (dim is not None and array.shape[1:] != (dim,)):
        expected = "texts x dimensions" if dim is None else f"embeddings x {dim}"
        raise UserError(f"{name} {are} {_shape_text(array)}; expected {expected}.")
    if not np.isfinite(array).all():
        row = int(np.flatnonzero(~np.isfinite(np.atleast_2d(array)).all(axis=1))[0]) + 1
        raise UserError(f"{name} {are} not finite: row {row} has NaN or infinity. Leave it out.")
    return array


@dataclass(frozen=True, eq=False)
class Quantizer:
    """A precision with its ranges, for all embeddings of a file or a server.

    Attributes:
        precision: the precision.
        ranges: (2, k) lowest and highest value of each dimension; None: not needed, or not
            measured yet.
    """

    precision: Precision = "float32"
    ranges: Array | None = None

    @property
    def needs_ranges(self) -> bool:
        """Whether ranges must be measured first."""
        return self.precision in CALIBRATED and self.ranges is None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The number type of quantised embeddings."""
        names = {"binary": "int8", "ubinary": "uint8"}
        return np.dtype(names.get(self.precision, self.precision))

    def width(self, dim: int) -> int:
        """Return how many numbers an embedding of ``dim`` dimensions has when it is quantised."""
        return -(-dim // 8) if self.precision.endswith("binary") else dim

    def __call__(self, embeddings: Array) -> Quantized:
        """Quantise embeddings, (n, k)."""
        return quantize_embeddings(embeddings, self.precision, self.ranges)


@dataclass(frozen=True, eq=False)
class StoredCodes:
    """How the codes of quantised vectors, (n, width), stand for vectors, (n, k).

    Number j of a vector is ``offset[j] + scale[j] * u``. u is the code from 0 to 255 plus a half,
    the middle of its step, or the bit. A bit stands for 1 / sqrt(k) or -1 / sqrt(k), so that
    vectors have unit length.

    Attributes:
        quantizer: the precision and its ranges.
        dim: the number of dimensions k.
    """

    quantizer: Quantizer
    dim: int

    @cached_property
    def scale(self) -> Array:
        """The size of a step of each dimension, (k,)."""
        ranges = self.quantizer.ranges
        if ranges is None:
            return np.full(self.dim, 2 / np.sqrt(self.dim), dtype=np.float32)
        step: Array = (ranges[1] - ranges[0]) / 255
        return step

    @cached_property
    def offset(self) -> Array:
        """What the code 0 of each dimension stands for, (k,)."""
        ranges = self.quantizer.ranges
        half = self.scale / np.float32(2)
        return -half if ranges is None else ranges[0] + half

    def unpack(self, codes: Quantized) -> NDArray[np.uint8]:
        """Return the codes from 0 to 255, or the bits, of quantised vectors: (n, k)."""
        if codes.dtype == np.int8:
            codes = codes.view(np.uint8) ^ np.uint8(128)
        if self.quantizer.ranges is None:
            return np.unpackbits(codes, axis=1, count=self.dim)
        return codes

    def decode(self, codes: Quantized) -> Array:
        """Return the vectors that codes stand for, (n, k) float32."""
        vectors: Array = self.offset + self.scale * self.unpack(codes).astype(np.float32)
        return vectors


def read_ranges(path: str | Path, dim: int | None = None) -> Array:
    """Read a .npy file of ranges, (2, dim); ``dim`` may be None, for any size.

    Raises:
        UserError: the file cannot be read, or as ``check_ranges``.
    """
    if not Path(path).is_file():
        raise UserError(f"--ranges {path} does not exist. Name a file that embed has written.")
    try:
        ranges = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"--ranges {path} cannot be read as a .npy file: {error}.") from error
    return check_ranges(ranges, dim, f"--ranges {path}")


def convert_embeddings(
    embeddings: Array,
    precision: Precision = "float32",
    *,
    convert_to_numpy: bool = True,
    convert_to_tensor: bool = False,
) -> Quantized | Tensor | list[Tensor]:
    """Return embeddings in a precision, as an array, a tensor, or a list of tensors.

    Tensors are on the CPU. As in sentence-transformers, ``convert_to_tensor`` takes precedence over
    ``convert_to_numpy``, and a list is returned if both are False.

    Raises:
        UserError: as ``quantize_embeddings``.
    """
    quantized = quantize_embeddings(embeddings, precision)
    if convert_to_numpy and not convert_to_tensor:
        return quantized
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(quantized))
    return tensor if convert_to_tensor or tensor.ndim == 1 else list(tensor)
