"""Batches of rows for heads: shuffled for training, in order for scoring, read when needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from llmcond.arrays import DenseMatrix, Matrix, MatrixLike, Positions, SharedRows, as_matrix
from llmcond.heads.module import Batch
from llmcond.heads.objectives import adjacent_pairs, contrast_groups
from llmcond.heads.pairs import PairArrays
from llmcond.heads.settings import TrainingSettings
from llmcond.system import move_to_device

#: Features that are computed, gathered or scaled to length 1 are kept in memory as plain float32
#: arrays if these need at most this many bytes.
_DENSE_BYTES = 2**29
#: Number of adjacent rows that are read from disk at a time, and number of such blocks that are
#: shuffled together.
_BLOCK, _BLOCKS = 512, 16
#: Number of rows scored at a time.
_SCORED = 4_096


class GroupSampler:
    """Orders rows by a permutation of their groups, (n,), and cuts batches between groups.

    The rows of a group stay together: the two conditions of a sentence pair, for example.
    """

    def __init__(self, group: Positions) -> None:
        self.group: Positions = np.unique(group, return_inverse=True)[1].reshape(-1)

    def __len__(self) -> int:
        """Return the number of groups."""
        return int(self.group.max()) + 1

    def order(self, permutation: Positions) -> tuple[Positions, Positions]:
        """Return all rows, (n,), sorted by their permuted groups, and the groups' bounds, (g + 1,).

        Args:
            permutation: (g,) new position of each group.
        """
        rank = permutation[self.group]
        rows = np.argsort(rank, kind="stable")
        return rows, np.flatnonzero(np.diff(rank[rows], prepend=-1, append=len(rank)))

    def batches(self, permutation: Positions, size: int) -> Iterator[Positions]:
        """Yield batches of at most ``size`` rows, (b,), cut where the next group would not fit.

        A group larger than ``size`` becomes a batch by itself.
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
        """Return ``count`` batches with similar numbers of groups, each cut in ``shares`` parts."""
        rows, bounds = self.order(permutation)
        return [
            [rows[bounds[part[0]] : bounds[part[-1] + 1]] for part in np.array_split(step, shares)]
            for step in np.array_split(np.arange(len(self)), count)
        ]


class SharedConditions:
    """The conditions of rows; each distinct one is read once per batch."""

    def __init__(self, vectors: MatrixLike | None) -> None:
        """Store (n, dim_c) features of conditions; None for heads that read none."""
        self._vectors = None if vectors is None else as_matrix(vectors)
        self.which: Positions | None = None
        if self._vectors is not None:
            self._first, self.which = self._vectors.unique()

    def batch(self, sides: list[Matrix], rows: Any, dtype: torch.dtype) -> Batch:
        """Return rows of several matrices, concatenated, with their conditions."""
        parts = [_to_tensor(side, rows, dtype) for side in sides]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._vectors is None or self.which is None:
            return Batch(x)
        distinct, which = np.unique(self.which[rows], return_inverse=True)
        condition = _to_tensor(self._vectors, self._first[distinct], torch.float32)
        return Batch(x, condition, torch.from_numpy(which.reshape(-1)).repeat(len(parts)))


def _to_tensor(matrix: Matrix, rows: Any, dtype: torch.dtype) -> Tensor:
    # torch rejects arrays that are read-only or have negative strides.
    return torch.from_numpy(np.require(np.asarray(matrix[rows]), requirements=["C", "W"])).to(dtype)


#: A batch of the n first sentences followed by the n second ones; (n,) float32 ratings; and for
#: objectives the (n,) sentence pair of each row and the (p, 2) positions of contrastive pairs.
RatedRows = tuple[Batch, Tensor, Tensor | None, Tensor | None]


class Loader:
    """Batches of rows; rows on disk are read when needed.

    Attributes:
        steps: number of batches in the last epoch.
        rating: (n,) ratings of all rows.
    """

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
        self._on_disk = any(side.on_disk for side in self._sides)
        if not self._on_disk:
            small = 4 * math.prod(self._sides[0].shape) <= _DENSE_BYTES
            self._sides = [
                DenseMatrix(side.read()) if side.parts and small else side for side in self._sides
            ]
        self._conditions = SharedConditions(pairs.condition)
        self.rating = pairs.rating
        self._pair = pairs.pair
        pair = pairs.pair if settings.contrasts else None
        self._group = None if pair is None else contrast_groups(pair)
        self.steps = -(-len(pairs) // settings.batch_size)

    def shuffled(self) -> Iterator[RatedRows]:
        """Yield batches of all rows in a new random order."""
        self.steps = 0
        device = self._device
        for sides, rows in self._read_parts():
            for positions in self._cut_batches(rows):
                batch_rows = rows[positions]
                self.steps += 1
                batch = self._conditions.batch(sides, batch_rows, self._dtype).to(device)
                rating = torch.from_numpy(self.rating[batch_rows].astype(np.float32))
                pair = contrastive = None
                if self._pair is not None:
                    pair = move_to_device(torch.from_numpy(self._pair[batch_rows]), device)
                if self._group is not None:
                    adjacent = torch.from_numpy(adjacent_pairs(self._group[batch_rows]))
                    contrastive = move_to_device(adjacent, device)
                yield batch, move_to_device(rating, device), pair, contrastive

    def in_order(self) -> Iterator[Batch]:
        """Yield batches of all rows in their order."""
        for start in range(0, len(self.rating), _SCORED):
            rows = np.arange(start, min(start + _SCORED, len(self.rating)))
            yield self._conditions.batch(self._sides, rows, self._dtype).to(self._device)
            self._release()

    def _read_parts(self) -> Iterator[tuple[list[Matrix], Positions]]:
        """Yield matrices with those of their rows that are shuffled together."""
        n = len(self.rating)
        if not self._on_disk:
            yield self._sides, np.arange(n)
            return
        starts = np.arange(0, n, _BLOCK)
        if self._group is not None:
            # Keep both rows of a contrastive pair in the same block.
            starts[1:] += self._group[starts[1:]] == self._group[starts[1:] - 1]
            # The last block may have contained only that row.
            starts = starts[starts < n]
        ends = np.append(starts[1:], n)
        order = self._permute(len(starts))
        for start in range(0, len(order), _BLOCKS):
            blocks = order[start : start + _BLOCKS]
            rows = np.concatenate([np.arange(starts[block], ends[block]) for block in blocks])
            # Sort, so that adjacent rows are read together, in their order on disk.
            stored = np.sort(rows)
            position = np.zeros(n, dtype=np.int64)
            position[stored] = np.arange(len(stored))
            sides: list[Matrix] = [SharedRows(side[stored], position) for side in self._sides]
            self._release()
            yield sides, rows

    def _release(self) -> None:
        for side in self._sides:
            side.release()  # has no effect on arrays in memory

    def _permute(self, n: int) -> Positions:
        permutation: Positions = torch.randperm(n, generator=self._generator).numpy()
        return permutation

    def _cut_batches(self, rows: Positions) -> Iterable[Positions]:
        """Return positions in ``rows``, batch by batch, in a new random order."""
        size = self._settings.batch_size
        if self._group is not None:
            sampler = GroupSampler(self._group[rows])
            return sampler.batches(self._permute(len(sampler)), size)
        if self._settings.batches == "conditions" and self._conditions.which is not None:
            sampler = GroupSampler(self._conditions.which[rows])
            order, _ = sampler.order(self._permute(len(sampler)))
        else:
            order = self._permute(len(rows))
        return np.split(order, range(size, len(order), size))


class UnitRows:
    """The rows of a matrix scaled to length 1.

    Attributes:
        table: all rows, if they fit in memory; otherwise None.
    """

    def __init__(self, vectors: MatrixLike) -> None:
        self._matrix = as_matrix(vectors)
        small = 4 * math.prod(self._matrix.shape) <= _DENSE_BYTES
        self.table = normalize(torch.from_numpy(self._matrix.read())) if small else None

    def read(self, rows: Positions) -> Tensor:
        """Return rows by position, (m, d) float32."""
        if self.table is not None:
            return self.table[torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))]
        # Read rows on disk in their order, each one once.
        distinct, which = np.unique(rows, return_inverse=True)
        vectors = torch.from_numpy(self._matrix.read(distinct))
        return normalize(vectors)[torch.from_numpy(which.reshape(-1))]
