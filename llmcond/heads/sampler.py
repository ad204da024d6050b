"""Batches of rows of which some stay together: the two conditions of a sentence pair, say."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


class GroupSampler:
    """Orders rows by a permutation of their groups, and cuts batches between groups.

    Attributes:
        group: (n,) group of each row, numbered from 0; rows of a group stay next to each other.
    """

    def __init__(self, group: NDArray[np.int64]) -> None:
        self.group: Positions = np.unique(group, return_inverse=True)[1].reshape(-1)

    def __len__(self) -> int:
        """Return the number of groups."""
        return int(self.group.max()) + 1

    def order(self, permutation: NDArray[np.int64]) -> tuple[Positions, Positions]:
        """Return all rows, (n,), group by group, and where each group begins, (g,).

        Args:
            permutation: (g,) the new position of each group.
        """
        rank = permutation[self.group]
        rows = np.argsort(rank, kind="stable")
        return rows, np.flatnonzero(np.diff(rank[rows], prepend=-1))

    def batches(self, permutation: NDArray[np.int64], size: int) -> Iterator[Positions]:
        """Yield batches of at most ``size`` rows, cut where the next group would not fit.

        A group larger than ``size`` is a batch of its own.
        """
        rows, starts = self.order(permutation)
        ends = np.append(starts[1:], len(rows))
        begin = 0
        while begin < len(rows):
            last = int(np.searchsorted(ends, begin + size, side="right")) - 1
            if last < 0 or ends[last] <= begin:
                last += 1
            stop = int(ends[last])
            yield rows[begin:stop]
            begin = stop

    def even_batches(
        self, permutation: NDArray[np.int64], count: int, shares: int
    ) -> list[list[Positions]]:
        """Return ``count`` batches with like many groups each, every one cut into ``shares``."""
        rows, starts = self.order(permutation)
        bounds = np.append(starts, len(rows))
        return [
            [rows[bounds[part[0]] : bounds[part[-1] + 1]] for part in np.array_split(step, shares)]
            for step in np.array_split(np.arange(len(starts)), count)
        ]
