"""Vectors of a collection under conditions, on disk: unit length, float16, memory-mapped.

A view is a folder of segments, each the vectors of some rows, by their row numbers. What was
computed of a row stays right, so that a view only grows: rows that were deleted are left out when
segments are merged. ``view.json`` names the segments, and is replaced as a whole. What a guide
makes of the vectors under a condition is another view, under the guide's digest.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from llmcond.errors import LlmcondError, UserError
from llmcond.files import digest_text, read_json, replacing, write_json
from llmcond.search.halves import products
from llmcond.search.table import Positions, Table

#: Bytes of views that can be made again at any time, above which the least recently used ones go.
BUDGET = 2**31
#: More segments than this are merged.
_SEGMENTS = 8


class Segment(NamedTuple):
    """The vectors of some rows: row numbers (m,), and (m, k) float16."""

    numbers: Positions
    vectors: NDArray[np.float16]


@dataclass(frozen=True)
class View:
    """The vectors of a table's rows under one condition.

    Attributes:
        segments: with vectors, (m, k) each.
        positions: of each segment's rows in the table, -1 for those that are not in it; None: it
            has all rows in the table's order.
        n: rows of the table.
    """

    segments: Sequence[Segment]
    positions: Sequence[Positions | None]
    n: int

    def scores(self, queries: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return cosines with unit queries, (q, k), of all the table's rows: (q, n)."""
        found = np.full((len(queries), self.n), -np.inf, dtype=np.float32)
        for segment, positions in zip(self.segments, self.positions, strict=True):
            own = products(segment.vectors, queries)
            if positions is None:
                found = own
            else:
                there = positions >= 0
                found[:, positions[there]] = own[:, there]
        return found

    def rows(self, rows: Positions) -> NDArray[np.float32]:
        """Return the (m, k) vectors of m rows of the table."""
        found = np.empty((len(rows), self.segments[0].vectors.shape[1]), dtype=np.float32)
        place = np.empty(self.n, dtype=np.int64)
        for segment, positions in zip(self.segments, self.positions, strict=True):
            place[:] = -1
            own = np.arange(self.n) if positions is None else positions
            place[own[own >= 0]] = np.flatnonzero(own >= 0)
            there = place[rows] >= 0
            found[there] = segment.vectors[place[rows][there]]
        return found


def view_of(segments: Sequence[Segment], table: Table) -> tuple[View, Positions]:
    """Return a view of a table's rows, and the positions of rows that no segment has."""
    positions: list[Positions | None] = []
    absent = np.ones(len(table), dtype=np.bool_)
    for segment in segments:
        if np.array_equal(segment.numbers, table.numbers):
            positions.append(None)
            absent[:] = False
            continue
        own = table.positions(segment.numbers)
        absent[own[own >= 0]] = False
        positions.append(own)
    return View(segments, positions, len(table)), np.flatnonzero(absent)


class Views:
    """The views in a folder. Several threads and processes may use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _place(self, condition: str | None, guide: str) -> Path:
        if condition is None:
            return self.folder / "alone"
        return self.folder / digest_text(condition, *filter(None, [guide]), size=12)

    def conditions(self) -> list[str]:
        """Return the conditions that there are views of, sorted."""
        records = (self._record(path.parent) for path in self.folder.glob("*/view.json"))
        return sorted({record["condition"] for record in records if record.get("condition")})

    def _record(self, place: Path) -> dict[str, Any]:
        try:
            return {"segments": [], **read_json(place / "view.json")}
        except UserError:  # there is none, or it was removed just now
            return {"segments": []}

    def read(self, condition: str | None, guide: str = "") -> list[Segment]:
        """Return the segments of a view; none where there is no view."""
        place, problem = self._place(condition, guide), "lacks files"
        for _ in range(3):  # others may merge segments while they are opened
            try:
                found = [_open(place, name) for name in self._record(place)["segments"]]
            except FileNotFoundError:
                continue
            except (EOFError, ValueError):
                problem = "is damaged"
                break
            with suppress(OSError):  # a disk that is only read
                os.utime(place / "view.json")
            return found
        raise LlmcondError(f"{place} {problem}. Delete it: it is made anew when it is needed.")

    def add(
        self,
        condition: str | None,
        segment: Segment,
        table: Table,
        *,
        lasting: bool,
        guide: str = "",
    ) -> list[Segment]:
        """Add a segment to a view, and return all; ``lasting`` ones are never dropped for room.

        Raises:
            DiskFullError, UserError: it cannot be written.
        """
        place = self._place(condition, guide)
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock"):
            names = list(self._record(place)["segments"])
            _sweep(place, names)
            segment = _without(segment, [_open(place, name) for name in names])
            if not len(segment.numbers):
                return self.read(condition, guide)
            if len(names) >= _SEGMENTS:
                old = [_open(place, name) for name in names]
                segment, dropped, names = _merged([*old, segment], table), names, []
            else:
                dropped = []
            names.append(_write(place, segment))
            record = {"condition": condition, "lasting": lasting, "segments": names}
            write_json(place / "view.json", record)
            for name in dropped:
                for end in (".npy", ".rows.npy"):
                    (place / f"{name}{end}").unlink(missing_ok=True)
            self._drop_oldest(place)
        return self.read(condition, guide)

    def _drop_oldest(self, kept: Path) -> None:
        """Remove the least recently used views above the budget, but for one."""
        places = [path.parent for path in self.folder.glob("*/view.json")]
        places = [place for place in places if not self._record(place).get("lasting")]
        sizes = {place: sum(file.stat().st_size for file in place.iterdir()) for place in places}
        total = sum(sizes.values())
        for place in sorted(sizes, key=lambda one: (one / "view.json").stat().st_mtime_ns):
            if total > BUDGET and place != kept:
                (place / "view.json").unlink()
                shutil.rmtree(place)
                total -= sizes[place]


def _open(place: Path, name: str) -> Segment:
    numbers = np.load(place / f"{name}.rows.npy")
    vectors = np.load(place / f"{name}.npy", mmap_mode="c")  # torch takes no read-only arrays
    return Segment(numbers, vectors)


def _write(place: Path, segment: Segment) -> str:
    name = secrets.token_hex(6)
    for path, array in ((f"{name}.npy", segment.vectors), (f"{name}.rows.npy", segment.numbers)):
        with replacing(place / path) as temporary, temporary.open("wb") as stream:
            np.save(stream, array)
    return name


def _sweep(place: Path, names: Sequence[str]) -> None:
    """Remove what writers left that were killed; the lock is held."""
    for path in place.iterdir():
        if path.name != "view.json" and path.name.partition(".")[0] not in names:
            path.unlink(missing_ok=True)


def _without(segment: Segment, others: Sequence[Segment]) -> Segment:
    """Return a segment without rows that others have, as another process made them meanwhile."""
    for other in others:
        new = np.isin(segment.numbers, other.numbers, invert=True)
        if not new.all():
            segment = Segment(segment.numbers[new], segment.vectors[new])
    return segment


def _merged(segments: Sequence[Segment], table: Table) -> Segment:
    """Return segments as one, without rows that are not in the table any more."""
    kept: Iterator[Any] = (table.positions(segment.numbers) >= 0 for segment in segments)
    parts = [(s.numbers[own], s.vectors[own]) for s, own in zip(segments, kept, strict=True)]
    numbers, first = np.unique(np.concatenate([own for own, _ in parts]), return_index=True)
    return Segment(numbers, np.concatenate([own for _, own in parts])[first])
