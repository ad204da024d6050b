"""Which rows a step takes: a function of the seed, the epoch and the step, and of nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError
from llmcond.finetune.settings import TuneSettings

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Order:
    """The steps of every epoch, each cut into parts for processes and accumulation.

    Attributes:
        unit: (n,) what each row may not be parted from, counted from 0: its own number, or that of
            its two.
        steps: of an epoch.
        parts: of a step.
        seed: of the order.
    """

    unit: NDArray[np.int64]
    steps: int
    parts: int
    seed: int

    @classmethod
    def of(
        cls, unit: NDArray[np.int64] | None, n: int, settings: TuneSettings, seed: int, shares: int
    ) -> Order:
        """Plan steps of about ``settings.batch_size`` of ``n`` rows.

        Args:
            unit: (n,) what keeps rows together; None where nothing does.
            n: rows.
            settings: how many a step takes, and in how many parts.
            seed: of the order.
            shares: processes.

        Raises:
            UserError: a step has fewer units than parts.
        """
        own = np.arange(n) if unit is None else np.unique(unit, return_inverse=True)[1].reshape(-1)
        steps = -(-n // settings.batch_size)
        parts = settings.accumulate * shares
        least = (int(own.max()) + 1) // steps
        if least < parts:
            kind = "rows" if unit is None else "sentence pairs"
            raise UserError(
                f"a step of batch_size {settings.batch_size} has {least} {kind}, too few for "
                f"{shares} processes with accumulate {settings.accumulate}. Raise --batch-size or "
                "lower --accumulate."
            )
        return cls(own, steps, parts, seed)

    def epoch(self, number: int) -> list[list[Places]]:
        """Return the rows of an epoch's steps, part by part; steps are of like size."""
        drawn = np.random.Generator(np.random.SFC64([self.seed, number]))
        rank = drawn.permutation(int(self.unit.max()) + 1)
        rows = np.argsort(rank[self.unit], kind="stable")
        ranks = rank[self.unit][rows]
        starts = np.flatnonzero(np.diff(ranks, prepend=-1))
        return [
            [self._rows(rows, starts, part) for part in np.array_split(step, self.parts)]
            for step in np.array_split(np.arange(len(starts)), self.steps)
        ]

    @staticmethod
    def _rows(rows: Places, starts: Places, units: Places) -> Places:
        last = units[-1] + 1
        return rows[starts[units[0]] : starts[last] if last < len(starts) else len(rows)]
