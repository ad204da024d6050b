"""Fitting a head that maps utterances to roles on cached features of dialogues."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcond.arrays import MatrixLike, Positions
from llmcond.errors import UserError
from llmcond.heads.batches import UnitRows
from llmcond.heads.fit import Fitting, fit_members
from llmcond.heads.pairs import DevScore, OnEpoch
from llmcond.heads.recipes import Recipe
from llmcond.kinds.dialogue.roles import FittedRoles, Roles
from llmcond.schedules import scheduled
from llmcond.system import choose_device


@dataclass(frozen=True, slots=True)
class TurnArrays:
    """The dialogues of a split, as heads take them.

    Attributes:
        utterances: (n, d) the features of distinct utterances, in any float type.
        turns: (t,) int64 which of them each turn has, dialogue by dialogue.
        starts: (m + 1,) int64 the first turn of each dialogue, and t.
    """

    utterances: MatrixLike
    turns: Positions
    starts: Positions


def fit_turns(
    recipe: Recipe,
    arrays: TurnArrays,
    dev: DevScore[FittedRoles] | None,
    seed: int,
    on_epoch: OnEpoch,
    device: str = "auto",
) -> FittedRoles:
    """Fit a head on the windows of dialogues; ``dev`` chooses the epoch.

    Without it the last epoch is kept. The same seed gives the same head on the same machine, to
    the last bit on one thread.

    Raises:
        UserError: a recipe of another task, no dialogue with turns enough, parameters that do not
            fit into memory, or a loss that diverges.
    """
    family = check_turns(recipe)
    dims, where = (int(arrays.utterances.shape[1]),), torch.device(choose_device(device))
    fitting = partial(_TurnFitting, recipe, dims, arrays, dev, where)
    module, fit = fit_members(fitting, recipe.settings.members, seed, on_epoch)
    return FittedRoles(recipe.kind, family, module, seed, fit)


def check_turns(recipe: Recipe) -> type[Roles]:
    """Return the family of a recipe's head; a UserError unless it maps utterances to roles."""
    if not issubclass(recipe.family, Roles):
        raise UserError(
            f"the head {recipe.name} maps no utterances to roles. `llmcond heads` lists those of "
            "dialogues."
        )
    return recipe.family


class _TurnFitting(Fitting[Roles, FittedRoles]):
    """A head that is fitted on the windows of dialogues."""

    data: TurnArrays

    def make(self) -> Roles:
        module = super().make()
        module.start_at_identity()
        return module

    def prepare(self) -> None:
        self._draws = np.random.Generator(np.random.SFC64(self.seed))
        least = self.settings.least
        places = windows(self.data.starts, self.settings.window, least)
        if not len(places):
            raise UserError(
                f"no dialogue of the training split has more than {least} "
                f"utterance{'s' * (least > 1)}, so there is nothing to fit."
            )
        turns = np.append(self.data.turns, -1)  # of position -1
        self._windows: Positions = turns[places]
        self._features = UnitRows(self.data.utterances)
        self.n_rows = len(self._windows)

    def rate(self, step: int, steps: int) -> float:
        return scheduled(step, steps, self.settings.warmup, self.settings.schedule)

    def loss(self, batch: Positions) -> Tensor:
        used, rows = distinct(self._windows[batch])
        features = self._features.read(used).to(self.device)
        return self.module.loss(features, torch.from_numpy(rows).to(self.device), self._draws)

    def record(self) -> dict[str, Any]:
        return {"n_windows": self.n_rows}

    def current(self) -> FittedRoles:
        module = self.finished_copy()
        return FittedRoles(self.recipe.kind, type(module), module, self.seed)


def windows(starts: Positions, size: int, least: int) -> Positions:
    """Return each window of dialogues, (m, size) positions among all turns; its target is last.

    Every turn is a target that has ``least`` others before it, the last one of a dialogue too.
    Where fewer than ``size`` - 1 stand before it, those that are missing are -1, on the left.

    Args:
        starts: (dialogues + 1,) the first turn of each dialogue, and the number of all turns.
        size: turns of a window, the target included.
        least: turns before a target.
    """
    before = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
    targets = np.flatnonzero(before >= least)
    back = np.arange(size - 1, -1, -1)
    return np.where(before[targets, None] >= back, targets[:, None] - back, -1)


def distinct(utterances: Positions) -> tuple[Positions, Positions]:
    """Return the distinct utterances of windows, (u,), and windows (m, w) among those; -1: none."""
    used, places = np.unique(utterances, return_inverse=True)
    absent = int(len(used) > 0 and used[0] < 0)
    return used[absent:], places.reshape(utterances.shape) - absent
