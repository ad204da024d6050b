"""Which rows a step takes: a function of the seed, the epoch and the step, and of nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError
from llmcond.finetune.settings import TuneSettings
from llmcond.heads.sampler import GroupSampler, Positions


@dataclass(frozen=True, slots=True)
class Order:
    """The steps of every epoch, each cut into parts for processes and accumulation.

    Attributes:
        sampler: keeps rows of a group in one part: a row by itself, or the two of a contrastive
            pair.
        steps: of an epoch.
        parts: of a step.
        seed: of the order.
    """

    sampler: GroupSampler
    steps: int
    parts: int
    seed: int

    @classmethod
    def of(
        cls,
        group: NDArray[np.int64] | None,
        n: int,
        settings: TuneSettings,
        seed: int,
        processes: int,
    ) -> Order:
        """Plan steps of about ``settings.batch_size`` of ``n`` rows.

        Args:
            group: (n,) what keeps rows together; None where nothing does.
            n: rows.
            settings: ``batch_size`` and ``gradient_accumulation_steps``.
            seed: of the order.
            processes: that share each step.

        Raises:
            UserError: a step has fewer groups than parts.
        """
        sampler = GroupSampler(np.arange(n) if group is None else group)
        steps = -(-n // settings.batch_size)
        parts = settings.gradient_accumulation_steps * processes
        least = len(sampler) // steps
        if least < parts:
            kind = "rows" if group is None else "sentence pairs"
            raise UserError(
                f"a step of batch_size {settings.batch_size} has {least} {kind}, too few for "
                f"{processes} processes with gradient_accumulation_steps "
                f"{settings.gradient_accumulation_steps}. Raise --batch-size or lower "
                "--gradient-accumulation-steps."
            )
        return cls(sampler, steps, parts, seed)

    def epoch(self, number: int) -> list[list[Positions]]:
        """Return the rows of an epoch's steps, part by part; steps are of like size."""
        drawn = np.random.Generator(np.random.SFC64([self.seed, number]))
        return self.sampler.even_batches(
            drawn.permutation(len(self.sampler)), self.steps, self.parts
        )
