"""Rows as batches for a head: shuffled for training, in order for scoring, read as needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from llmcond.arrays import Dense, Gathered, Matrix, MatrixLike, Positions, as_matrix
from llmcond.heads.module import Batch
from llmcond.heads.objectives import adjacent_pairs, contrast_groups
from llmcond.heads.pairs import PairArrays
from llmcond.heads.settings import TrainingSettings
from llmcond.system import to_device

#: Features that are computed or gathered, or scaled to length 1, are kept in memory as plain
#: float32 arrays if these take no more bytes.
_DENSE_BYTES = 2**29
#: From disk, so many adjacent rows are read at a time, and so many of those blocks are shuffled.
_BLOCK, _BLOCKS = 512, 16
#: Rows scored at a time.
_SCORED = 4_096


class GroupSampler:
    """Orders rows by a permutation of their groups, (n,), and cuts batches between groups.

    A group is of rows that stay together: the two conditions of a sentence pair, say.
    """

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


class SharedConditions:
    """The conditions of rows, each distinct one read once a batch."""

    def __init__(self, vectors: MatrixLike | None) -> None:
        """Take (n, dim_c); None where the head takes none."""
        self._vectors = None if vectors is None else as_matrix(vectors)
        self.which: Positions | None = None
        if self._vectors is not None:
            self._first, self.which = self._vectors.unique()

    def batch(self, sides: list[Matrix], rows: Any, dtype: torch.dtype) -> Batch:
        """Return rows of several matrices, one below the other, with their conditions."""
        parts = [_tensor(side, rows, dtype) for side in sides]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._vectors is None or self.which is None:
            return Batch(x)
        distinct, which = np.unique(self.which[rows], return_inverse=True)
        condition = _tensor(self._vectors, self._first[distinct], torch.float32)
        return Batch(x, condition, torch.from_numpy(which.reshape(-1)).repeat(len(parts)))


def _tensor(matrix: Matrix, rows: Any, dtype: torch.dtype) -> Tensor:
    # torch takes no array that cannot be written, or stands backwards in memory.
    return torch.from_numpy(np.require(np.asarray(matrix[rows]), requirements=["C", "W"])).to(dtype)


#: First sentences, then second ones, 2 n; (n,) ratings, float32; and as objectives take them
#: (n,) the sentence pair of each row and (p, 2) positions of contrastive pairs.
RatedRows = tuple[Batch, Tensor, Tensor | None, Tensor | None]


class Loader:
    """Rows in batches, ``steps`` in the last epoch; what lies on disk is read as it is needed."""

    def __init__(
        self,
        pairs: PairArrays,
        settings: TrainingSettings,
        generator: torch.Generator,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._settings, self._generator = settings, generator
        self._dtype, self._device = dtype, device
        self._sides = [as_matrix(pairs.first), as_matrix(pairs.second)]
        self._streams = any(side.on_disk for side in self._sides)
        if not self._streams:
            small = 4 * math.prod(self._sides[0].shape) <= _DENSE_BYTES
            self._sides = [
                Dense(side.read()) if side.parts and small else side for side in self._sides
            ]
        self._conditions = SharedConditions(pairs.condition)
        self.rating = pairs.rating
        self._pair = pairs.pair
        pair = pairs.pair if settings.contrasts else None
        self._group = None if pair is None else contrast_groups(pair)
        self.steps = -(-len(pairs) // settings.batch_size)

    def shuffled(self) -> Iterator[RatedRows]:
        """Yield batches of all rows in a new order."""
        self.steps = 0
        device = self._device
        for sides, rows in self._parts():
            for positions in self._cut(rows):
                chosen = rows[positions]
                self.steps += 1
                batch = self._conditions.batch(sides, chosen, self._dtype).to(device)
                rating = torch.from_numpy(self.rating[chosen].astype(np.float32))
                pair = contrastive = None
                if self._pair is not None:
                    pair = to_device(torch.from_numpy(self._pair[chosen]), device)
                if self._group is not None:
                    adjacent = torch.from_numpy(adjacent_pairs(self._group[chosen]))
                    contrastive = to_device(adjacent, device)
                yield batch, to_device(rating, device), pair, contrastive

    def in_order(self) -> Iterator[Batch]:
        """Yield batches of all rows as they stand."""
        for start in range(0, len(self.rating), _SCORED):
            rows = np.arange(start, min(start + _SCORED, len(self.rating)))
            yield self._conditions.batch(self._sides, rows, self._dtype).to(self._device)
            self._release()

    def _parts(self) -> Iterator[tuple[list[Matrix], Positions]]:
        """Yield matrices, and rows of them, that are shuffled among each other."""
        n = len(self.rating)
        if not self._streams:
            yield self._sides, np.arange(n)
            return
        begins = np.arange(0, n, _BLOCK)
        if self._group is not None:
            # The second row of a contrastive pair goes with the first.
            begins[1:] += self._group[begins[1:]] == self._group[begins[1:] - 1]
            # The last block may have had that row only.
            begins = begins[begins < n]
        ends = np.append(begins[1:], n)
        order = self._permutation(len(begins))
        for start in range(0, len(order), _BLOCKS):
            blocks = order[start : start + _BLOCKS]
            rows = np.concatenate([np.arange(begins[block], ends[block]) for block in blocks])
            # Adjacent rows are read at once, in their order on disk.
            stored = np.sort(rows)
            place = np.zeros(n, dtype=np.int64)
            place[stored] = np.arange(len(stored))
            sides: list[Matrix] = [Gathered(side[stored], place) for side in self._sides]
            self._release()
            yield sides, rows

    def _release(self) -> None:
        for side in self._sides:
            side.release()  # nothing where none lies on disk

    def _permutation(self, n: int) -> Positions:
        drawn: Positions = torch.randperm(n, generator=self._generator).numpy()
        return drawn

    def _cut(self, rows: Positions) -> Iterable[Positions]:
        """Return positions in ``rows``, batch by batch, in a new order."""
        size = self._settings.batch_size
        if self._group is not None:
            sampler = GroupSampler(self._group[rows])
            return sampler.batches(self._permutation(len(sampler)), size)
        if self._settings.batches == "conditions" and self._conditions.which is not None:
            sampler = GroupSampler(self._conditions.which[rows])
            order, _ = sampler.order(self._permutation(len(sampler)))
        else:
            order = self._permutation(len(rows))
        return np.split(order, range(size, len(order), size))


class UnitRows:
    """Vectors of length 1 of a matrix; ``table`` has all of them where they fit in memory."""

    def __init__(self, vectors: MatrixLike) -> None:
        self._matrix = as_matrix(vectors)
        small = 4 * math.prod(self._matrix.shape) <= _DENSE_BYTES
        self.table = normalize(torch.from_numpy(self._matrix.read())) if small else None

    def read(self, rows: Positions) -> Tensor:
        """Return some rows, (m, d) float32, by positions."""
        if self.table is not None:
            return self.table[torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))]
        # What lies on disk is read in its order, each row once.
        distinct, which = np.unique(rows, return_inverse=True)
        vectors = torch.from_numpy(self._matrix.read(distinct))
        return normalize(vectors)[torch.from_numpy(which.reshape(-1))]
