"""Batches of rows of which some stay together: the two conditions of a sentence pair, say."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmcond.arrays import Positions


class GroupSampler:
    """Orders rows by a permutation of their groups, (n,), and cuts batches between groups."""

    def __init__(self, group: Positions) -> None:
        self.group: Positions = np.unique(group, return_inverse=True)[1].reshape(-1)

    def __len__(self) -> int:
        """Return the number of groups."""
        return int(self.group.max()) + 1

    def order(self, permutation: Positions) -> tuple[Positions, Positions]:
        """Return all rows, (n,), by new positions of groups, (g,), and their bounds, (g + 1,)."""
        rank = permutation[self.group]
        rows = np.argsort(rank, kind="stable")
        return rows, np.flatnonzero(np.diff(rank[rows], prepend=-1, append=len(rank)))

    def batches(self, permutation: Positions, size: int) -> Iterator[Positions]:
        """Yield batches of at most ``size`` rows, (b,), cut where the next group would not fit.

        A group larger than ``size`` is a batch of its own.
        """
        rows, bounds = self.order(permutation)
        group = 0
        while group < len(self):
            last = int(np.searchsorted(bounds, bounds[group] + size, side="right")) - 1
            last = max(last, group + 1)
            yield rows[bounds[group] : bounds[last]]
            group = last

    def even_batches(
        self, permutation: Positions, count: int, shares: int
    ) -> list[list[Positions]]:
        """Return ``count`` batches with like many groups each, every one cut into ``shares``."""
        rows, bounds = self.order(permutation)
        return [
            [rows[bounds[part[0]] : bounds[part[-1] + 1]] for part in np.array_split(step, shares)]
            for step in np.array_split(np.arange(len(self)), count)
        ]
