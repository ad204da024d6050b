"""Views: vectors of a collection under a condition, stored with unit length in mapped files.

The numbers are float16, or are quantised with ranges that are measured on the first texts of a
view and recorded in ``view.json``.

A view is a folder of segments, each of which holds the vectors of some rows by their row numbers.
Anything computed for a row number stays valid, so a view only grows; vectors of deleted rows are
dropped when segments are merged. ``view.json`` names the segments, and is replaced atomically. The
vectors under a condition that a guide has mapped form another view, whose name depends on the
guide's digest.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from llmcond.base.arrays import Quantizer, StoredCodes
from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.files import digest_text, read_json, replace_atomically, write_json
from llmcond.base.options import IndexPrecision
from llmcond.search.table import BLOCK, Positions, TextTable

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


#: Total size in bytes of the views that can be computed again without encoding: of those on disk,
#: above which the oldest are deleted, and of those in the memory of one process.
BUDGET = 2**31
#: Segments are merged if there are more than this.
_MAX_SEGMENTS = 8


class VectorSegment(NamedTuple):
    """The vectors of some rows.

    Attributes:
        numbers: (m,) row numbers.
        vectors: (m, k) float16 vectors, or (m, width) codes.
        codes: what the codes stand for; None: ``vectors`` are float16.
    """

    numbers: Positions
    vectors: NDArray[Any]
    codes: StoredCodes | None = None

    @property
    def dim(self) -> int:
        """The size k of the vectors."""
        return int(self.vectors.shape[1]) if self.codes is None else self.codes.dim

    def read(self, rows: NDArray[Any], n_values: int) -> NDArray[np.float32]:
        """Return vectors, (n, k); ``n_values`` is as for ``convert_dtype``."""
        if self.codes is not None:
            return self.codes.decode(self.vectors[rows])
        return convert_dtype(self.vectors[rows], "float32", n_values)

    def scores(self, queries: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the inner products, (q, m), of queries, (q, k), with the vectors."""
        codes = self.codes
        if codes is None:
            return inner_products(self.vectors, queries)
        products = inner_products(self.vectors, queries * codes.scale, codes.unpack)
        return products + (queries @ codes.offset)[:, None]


@dataclass(frozen=True)
class ConditionView:
    """The vectors of a table's rows under one condition.

    Attributes:
        segments: the segments with the vectors.
        positions: for each segment, the positions of its rows in the table, -1 for rows that the
            table does not have; None if the segment has all rows in the table's order.
        n: number of rows of the table.
    """

    segments: Sequence[VectorSegment]
    positions: Sequence[Positions | None]
    n: int

    @property
    def n_bytes(self) -> int:
        """Number of bytes in memory, without mapped files."""
        vectors = (segment.vectors for segment in self.segments)
        return sum(array.nbytes for array in vectors if not isinstance(array, np.memmap))

    def scores(self, queries: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the cosines of unit-length queries, (q, k), with all rows of the table: (q, n)."""
        scores = np.full((len(queries), self.n), -np.inf, dtype=np.float32)
        for segment, positions in zip(self.segments, self.positions, strict=True):
            segment_scores = segment.scores(queries)
            if positions is None:
                scores = segment_scores
            else:
                exists = positions >= 0
                scores[:, positions[exists]] = segment_scores[:, exists]
        return scores

    @cached_property
    def _locations(self) -> Positions:
        """(2, n) the number of the segment that has each row, and the row's index in it."""
        locations = np.zeros((2, self.n), dtype=np.int64)
        for number, positions in enumerate(self.positions):
            table_positions = np.arange(self.n) if positions is None else positions
            indices = np.flatnonzero(table_positions >= 0)
            locations[0, table_positions[indices]] = number
            locations[1, table_positions[indices]] = indices
        return locations

    def rows(self, rows: Positions) -> NDArray[np.float32]:
        """Return the vectors, (m, k), of m rows of the table."""
        vectors = np.empty((len(rows), self.segments[0].dim), dtype=np.float32)
        segment_of, index_of = self._locations[:, rows]
        for number, segment in enumerate(self.segments):
            selected = segment_of == number
            vectors[selected] = segment.read(index_of[selected], vectors.size)
        return vectors


def make_view(
    segments: Sequence[VectorSegment], table: TextTable
) -> tuple[ConditionView, Positions]:
    """Return a view of a table's rows, and the positions of rows that no segment has."""
    positions: list[Positions | None] = []
    is_missing = np.ones(len(table), dtype=np.bool_)
    for segment in segments:
        if np.array_equal(segment.numbers, table.numbers):
            positions.append(None)
            is_missing[:] = False
            continue
        table_positions = table.positions(segment.numbers)
        is_missing[table_positions[table_positions >= 0]] = False
        positions.append(table_positions)
    return ConditionView(segments, positions, len(table)), np.flatnonzero(is_missing)


class ConditionViews:
    """The views in a folder. Several threads and processes may use it.

    Attributes:
        folder: the folder.
        precision: the number type of new views.
    """

    def __init__(self, folder: Path, precision: IndexPrecision = "float16") -> None:
        self.folder, self.precision = folder, precision

    @property
    def is_binary(self) -> bool:
        """Whether only the sign of each number is stored."""
        return self.precision.endswith("binary")

    def _view_folder(self, condition: str | None, guide: str) -> Path:
        if condition is None:
            return self.folder / "alone"
        return self.folder / digest_text(condition, *filter(None, [guide]), size=12)

    def conditions(self) -> list[str]:
        """Return the conditions that have a view, sorted."""
        records = (self._read_record(path.parent) for path in self.folder.glob("*/view.json"))
        return sorted({record["condition"] for record in records if record.get("condition")})

    def _read_record(self, folder: Path) -> dict[str, Any]:
        try:
            return {"segments": [], **read_json(folder / "view.json")}
        except UserError as error:
            if isinstance(error.__cause__, OSError) and (folder / "view.json").exists():
                raise  # otherwise its segments would count as leftovers, and be deleted
            return {"segments": []}  # there is no view, or another process has just removed it

    def read(self, condition: str | None, guide: str = "") -> list[VectorSegment]:
        """Return the segments of a view; an empty list if there is no view."""
        folder, problem = self._view_folder(condition, guide), "lacks files"
        for _ in range(3):  # another process may merge segments while they are opened
            try:
                return self._open_segments(folder, self._read_record(folder))
            except FileNotFoundError:
                continue
            except (EOFError, ValueError):
                problem = "is damaged"
                break
        raise LlmcondError(
            f"{folder} {problem}. Delete it; it is computed again when it is needed."
        )

    def add(
        self,
        condition: str | None,
        segment: VectorSegment,
        table: TextTable,
        *,
        lasting: bool,
        guide: str = "",
    ) -> list[VectorSegment]:
        """Add a segment to a view, and return all its segments.

        Args:
            condition: the condition of the view.
            segment: the vectors to add; rows that the view already has are skipped.
            table: the current table, for merging.
            lasting: whether the view must not be deleted to save space.
            guide: the digest of the guide that mapped the vectors.

        Raises:
            DiskFullError, UserError: if the segment cannot be written.
        """
        folder = self._view_folder(condition, guide)
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock"):
            record = self._read_record(folder)
            names = list(record["segments"])
            _remove_leftovers(folder, names)
            segments = self._open_segments(folder, record)
            for other in segments:  # another process may have added rows in the meantime
                new = np.isin(segment.numbers, other.numbers, invert=True)
                if not new.all():  # the copy of a large segment takes memory
                    segment = VectorSegment(segment.numbers[new], segment.vectors[new])
            if not len(segment.numbers):
                return self.read(condition, guide)
            form: dict[str, Any] = {}
            if self.precision != "float16":
                segment, form = self._quantize(segment, record)
            dropped: list[str] = []
            if len(names) >= _MAX_SEGMENTS:
                segment, dropped, names = _merge_segments([*segments, segment], table), names, []
            names.append(_write_segment(folder, segment))
            record = {"condition": condition, "lasting": lasting, "segments": names, **form}
            write_json(folder / "view.json", record)
            for name in dropped:
                for suffix in (".npy", ".rows.npy"):
                    (folder / f"{name}{suffix}").unlink(missing_ok=True)
            self._drop_oldest(folder)
            return self._open_segments(folder, record)

    def convert(
        self, condition: str | None, segment: VectorSegment, guide: str = ""
    ) -> VectorSegment:
        """Return a segment in the precision of its view, without saving it."""
        if self.precision == "float16":
            return segment
        record = self._read_record(self._view_folder(condition, guide))
        return self._quantize(segment, record)[0]

    def _open_segments(self, folder: Path, record: Mapping[str, Any]) -> list[VectorSegment]:
        codes = self._stored_codes(record) if "dim" in record else None
        return [
            VectorSegment(
                np.load(folder / f"{name}.rows.npy"),
                np.load(folder / f"{name}.npy", mmap_mode="c"),  # torch requires writable arrays
                codes,
            )
            for name in record["segments"]
        ]

    def _stored_codes(self, form: Mapping[str, Any]) -> StoredCodes:
        """Return what the codes of a quantised view stand for, by the entries of its record."""
        ranges = np.array(form["ranges"], dtype=np.float32) if "ranges" in form else None
        quantizer = Quantizer(self.precision, ranges)  # type: ignore[arg-type]  # not float16
        return StoredCodes(quantizer, form["dim"])

    def _quantize(
        self, segment: VectorSegment, record: Mapping[str, Any]
    ) -> tuple[VectorSegment, dict[str, Any]]:
        """Quantise a segment with the ranges of its view, which are measured on the first one.

        Returns:
            The segment, and the entries of the view's record that its codes depend on.
        """
        form = {key: record[key] for key in ("dim", "ranges") if key in record}
        if not form:
            form["dim"] = segment.vectors.shape[1]
            if not self.is_binary:
                vectors = segment.vectors
                extremes = np.stack([vectors.min(axis=0), vectors.max(axis=0)])
                form["ranges"] = extremes.astype(np.float32).tolist()
        stored_codes = self._stored_codes(form)
        blocks = range(0, len(segment.numbers), BLOCK)
        codes = [stored_codes.quantizer(segment.vectors[start : start + BLOCK]) for start in blocks]
        return VectorSegment(segment.numbers, np.concatenate(codes), stored_codes), form

    def _drop_oldest(self, current: Path) -> None:
        """Delete the oldest views above the budget, except ``current``."""
        folders = [path.parent for path in self.folder.glob("*/view.json")]
        folders = [folder for folder in folders if not self._read_record(folder).get("lasting")]
        sizes = {
            folder: sum(file.stat().st_size for file in folder.iterdir()) for folder in folders
        }
        total = sum(sizes.values())
        for folder in sorted(sizes, key=lambda view: (view / "view.json").stat().st_mtime_ns):
            if total > BUDGET and folder != current:
                (folder / "view.json").unlink()
                shutil.rmtree(folder)
                total -= sizes[folder]


def _write_segment(folder: Path, segment: VectorSegment) -> str:
    name = secrets.token_hex(6)
    for path, array in ((f"{name}.npy", segment.vectors), (f"{name}.rows.npy", segment.numbers)):
        with replace_atomically(folder / path) as temporary, temporary.open("wb") as stream:
            np.save(stream, array)
    return name


def _remove_leftovers(folder: Path, names: Sequence[str]) -> None:
    """Remove files of writers that were killed; the caller holds the lock."""
    for path in folder.iterdir():
        if path.name != "view.json" and path.name.partition(".")[0] not in names:
            path.unlink(missing_ok=True)


def _merge_segments(segments: Sequence[VectorSegment], table: TextTable) -> VectorSegment:
    """Merge segments into one, without rows that the table no longer has."""
    masks: Iterator[Any] = (table.positions(segment.numbers) >= 0 for segment in segments)
    parts = [(s.numbers[mask], s.vectors[mask]) for s, mask in zip(segments, masks, strict=True)]
    numbers, first = np.unique(np.concatenate([part for part, _ in parts]), return_index=True)
    return VectorSegment(numbers, np.concatenate([part for _, part in parts])[first])
