"""Which rows a step takes: a function of the seed, the epoch and the step, and of nothing else."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Positions
from llmcond.errors import UserError
from llmcond.finetune.settings import TuneSettings
from llmcond.heads.sampler import GroupSampler


class Order:
    """The ``steps`` of every epoch, each cut into parts for processes and accumulation."""

    def __init__(
        self, group: NDArray[np.int64], settings: TuneSettings, seed: int, processes: int
    ) -> None:
        """Plan steps of about ``settings.batch_size`` rows, shared by so many processes.

        Rows of a ``group``, (n,), stay together in one part: a row by itself, or the two of a
        contrastive pair.

        Raises:
            UserError: a step has fewer groups than parts.
        """
        self._sampler, self._seed = GroupSampler(group), seed
        self.steps = -(-len(group) // settings.batch_size)
        self._parts = settings.gradient_accumulation_steps * processes
        least = len(self._sampler) // self.steps
        if least < self._parts:
            kind = "rows" if len(self._sampler) == len(group) else "sentence pairs"
            raise UserError(
                f"a step of batch_size {settings.batch_size} has {least} {kind}, too few for "
                f"{processes} processes with gradient_accumulation_steps "
                f"{settings.gradient_accumulation_steps}. Raise --batch-size or lower "
                "--gradient-accumulation-steps."
            )

    def epoch(self, number: int) -> list[list[Positions]]:
        """Return the rows of an epoch's steps, part by part; steps are of like size."""
        drawn = np.random.Generator(np.random.SFC64([self._seed, number]))
        order = drawn.permutation(len(self._sampler))
        return self._sampler.even_batches(order, self.steps, self._parts)
