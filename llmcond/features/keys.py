"""An index from keys to row positions. It grows cheaply and takes 24 bytes per key.

This module imports no storage library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

#: The number type that a store keeps features in.
StoreDtype = Literal["float16", "float32"]

KEY_BYTES = 16


class KeyIndex:
    """The positions of 16-byte keys: the n-th key that was added has the position n, from 0.

    Keys are digests, so their first halves hardly ever agree. If they do, a lookup is slower but
    correct. The keys lie in sorted arrays, each at least twice as long as the next, so a key is
    moved, and looked up, O(log n) times. Not safe for use by several threads at once.
    """

    def __init__(self) -> None:
        self._runs: list[_SortedKeys] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, joined: bytes) -> None:
        """Append keys, given as concatenated bytes."""
        first, second = _split_keys(joined)
        if not len(first):
            return
        positions = np.arange(self._size, self._size + len(first), dtype=np.int64)
        run = _sort_keys(first, second, positions)
        while self._runs and len(self._runs[-1].first) < 2 * len(run.first):
            older = self._runs.pop()
            run = _sort_keys(
                np.concatenate([older.first, run.first]),
                np.concatenate([older.second, run.second]),
                np.concatenate([older.positions, run.positions]),
            )
        self._runs.append(run)
        self._size += len(first)

    def find(self, joined: bytes) -> NDArray[np.int64]:
        """Return the first position of each of the concatenated keys; -1 for a missing key."""
        first, second = _split_keys(joined)
        # With ascending keys, searchsorted walks through memory in order, which is several times
        # faster.
        order = np.argsort(first)
        first, second = first[order], second[order]
        positions = np.full(len(first), -1, dtype=np.int64)
        for run in self._runs:
            absent = np.flatnonzero(positions < 0)
            positions[absent] = run.find(first[absent], second[absent])
        result = np.empty_like(positions)
        result[order] = positions
        return result


@dataclass(frozen=True, slots=True, eq=False)
class _SortedKeys:
    """Keys in ascending order of their first halves; equal ones in ascending order of position."""

    first: NDArray[np.uint64]
    second: NDArray[np.uint64]
    positions: NDArray[np.int64]

    def find(self, first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.int64]:
        positions = np.full(len(first), -1, dtype=np.int64)
        candidate = np.searchsorted(self.first, first)
        remaining = np.flatnonzero(candidate < len(self.first))
        while len(remaining):
            remaining = remaining[self.first[candidate[remaining]] == first[remaining]]
            hit = self.second[candidate[remaining]] == second[remaining]
            positions[remaining[hit]] = self.positions[candidate[remaining[hit]]]
            # A key with the same first half may follow.
            remaining = remaining[~hit]
            candidate[remaining] += 1
            remaining = remaining[candidate[remaining] < len(self.first)]
        return positions


def _split_keys(joined: bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    halves = np.frombuffer(joined, dtype=np.uint64).reshape(-1, 2)
    return halves[:, 0], halves[:, 1]


def _sort_keys(
    first: NDArray[np.uint64], second: NDArray[np.uint64], positions: NDArray[np.int64]
) -> _SortedKeys:
    # A stable sort keeps the order of positions, and takes linear time for two sorted arrays.
    order = np.argsort(first, kind="stable")
    return _SortedKeys(first[order], second[order], positions[order])
