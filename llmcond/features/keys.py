"""An index from keys to places that grows cheaply and takes 24 bytes a key.

Importing this module imports no storage library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

#: The number type that a store has for features.
StoreDtype = Literal["float16", "float32"]

KEY_BYTES = 16


class KeyIndex:
    """The places of keys of 16 bytes: the n-th key that was added has place n.

    Keys are digests, so their first halves hardly ever agree; where they do, finding is slower but
    right. They lie in sorted runs, each at least twice as long as the next: a key moves, and is
    looked for, O(log n) times. Not safe to use from several threads at once.
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, joined: bytes) -> None:
        """Add keys, joined one after the other, behind those that are there."""
        first, second = _halves(joined)
        if not len(first):
            return
        places = np.arange(self._size, self._size + len(first), dtype=np.int64)
        run = _sorted(first, second, places)
        while self._runs and len(self._runs[-1].first) < 2 * len(run.first):
            older = self._runs.pop()
            run = _sorted(
                np.concatenate([older.first, run.first]),
                np.concatenate([older.second, run.second]),
                np.concatenate([older.places, run.places]),
            )
        self._runs.append(run)
        self._size += len(first)

    def find(self, joined: bytes) -> NDArray[np.int64]:
        """Return the first place of each of the joined keys, -1 for one that is not there."""
        first, second = _halves(joined)
        # Ascending needles walk through a run front to back, which is several times faster.
        order = np.argsort(first)
        first, second = first[order], second[order]
        places = np.full(len(first), -1, dtype=np.int64)
        for run in self._runs:
            absent = np.flatnonzero(places < 0)
            places[absent] = run.find(first[absent], second[absent])
        found = np.empty_like(places)
        found[order] = places
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Keys in ascending order of their first halves; equal ones in ascending order of place."""

    first: NDArray[np.uint64]
    second: NDArray[np.uint64]
    places: NDArray[np.int64]

    def find(self, first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.int64]:
        found = np.full(len(first), -1, dtype=np.int64)
        at = np.searchsorted(self.first, first)
        wanted = np.flatnonzero(at < len(self.first))
        while len(wanted):
            wanted = wanted[self.first[at[wanted]] == first[wanted]]
            hit = self.second[at[wanted]] == second[wanted]
            found[wanted[hit]] = self.places[at[wanted[hit]]]
            # Another key with the same first half may stand behind.
            wanted = wanted[~hit]
            at[wanted] += 1
            wanted = wanted[at[wanted] < len(self.first)]
        return found


def _halves(joined: bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    halves = np.frombuffer(joined, dtype=np.uint64).reshape(-1, 2)
    return halves[:, 0], halves[:, 1]


def _sorted(
    first: NDArray[np.uint64], second: NDArray[np.uint64], places: NDArray[np.int64]
) -> _Run:
    # Stable: keeps the order of places, and takes linear time where two sorted runs meet.
    order = np.argsort(first, kind="stable")
    return _Run(first[order], second[order], places[order])
