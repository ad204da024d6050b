"""Fitting of heads that map utterances to roles, on cached features of dialogues."""

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
from llmcond.heads.fit import HeadTrainer, fit_members
from llmcond.heads.pairs import DevScore, OnEpoch
from llmcond.heads.recipes import Recipe
from llmcond.kinds.dialogue.roles import FittedRoleHead, RoleHead
from llmcond.schedules import learning_rate_factor
from llmcond.system import choose_device


@dataclass(frozen=True, slots=True)
class TurnArrays:
    """The dialogues of a split, in the form on which heads are fitted.

    Attributes:
        utterances: features of distinct utterances, (n, d), in any float type.
        turns: position of the utterance of each turn, dialogue by dialogue, (t,) int64.
        starts: first turn of each dialogue, followed by t, (m + 1,) int64.
    """

    utterances: MatrixLike
    turns: Positions
    starts: Positions


def fit_turns(
    recipe: Recipe,
    arrays: TurnArrays,
    dev: DevScore[FittedRoleHead] | None,
    seed: int,
    on_epoch: OnEpoch,
    device: str = "auto",
    start: FittedRoleHead | None = None,
) -> FittedRoleHead:
    """Fit a head on the windows of dialogues.

    The score on ``dev`` chooses the epoch; without ``dev`` the last epoch is kept. The parameters
    of ``start``, if it is given, are the initial ones. The same seed gives the same head on the
    same machine, bit for bit on one thread.

    Raises:
        UserError: The recipe is for another task, no dialogue has enough turns, the parameters do
            not fit into memory, those of ``start`` have other shapes, or the loss diverges.
    """
    family = check_turns(recipe)
    dims, torch_device = (int(arrays.utterances.shape[1]),), torch.device(choose_device(device))
    fitting = partial(_TurnFitting, recipe, dims, arrays, dev, torch_device)
    module, fit = fit_members(fitting, recipe.settings.members, seed, on_epoch, start)
    return FittedRoleHead(recipe.kind, family, module, seed, fit)


def check_turns(recipe: Recipe) -> type[RoleHead]:
    """Return the family of a recipe's head.

    Raises:
        UserError: The family does not map utterances to roles.
    """
    if not issubclass(recipe.family, RoleHead):
        raise UserError(
            f"the head {recipe.name} does not map utterances to roles. `llmcond heads` lists the "
            "heads for dialogues."
        )
    return recipe.family


class _TurnFitting(HeadTrainer[RoleHead, FittedRoleHead]):
    """Fits one head on the windows of dialogues."""

    data: TurnArrays

    def create_module(self) -> RoleHead:
        module = super().create_module()
        module.start_at_identity()
        return module

    def prepare(self) -> None:
        self._rng = np.random.Generator(np.random.SFC64(self.seed))
        least = self.settings.min_context
        window_turns = windows(self.data.starts, self.settings.window, least)
        if not len(window_turns):
            raise UserError(
                f"no dialogue of the training split has more than {least} "
                f"utterance{'s' * (least > 1)}, so a head cannot be fitted."
            )
        turns = np.append(self.data.turns, -1)  # position -1: no utterance
        self._windows: Positions = turns[window_turns]
        self._features = UnitRows(self.data.utterances)
        self.n_rows = len(self._windows)

    def learning_rate_factor(self, step: int, steps: int) -> float:
        return learning_rate_factor(step, steps, self.settings.warmup, self.settings.schedule)

    def loss(self, batch: Positions) -> Tensor:
        utterances, rows = distinct_utterances(self._windows[batch])
        features = self._features.read(utterances).to(self.device)
        return self.module.loss(features, torch.from_numpy(rows).to(self.device), self._rng)

    def record(self) -> dict[str, Any]:
        return {"n_windows": self.n_rows}

    def current_head(self) -> FittedRoleHead:
        module = self.frozen_copy()
        return FittedRoleHead(self.recipe.kind, type(module), module, self.seed)


def windows(starts: Positions, size: int, min_context: int) -> Positions:
    """Return the windows of dialogues as positions of turns, (m, size), with the target last.

    Every turn with at least ``min_context`` turns before it is a target, including the last turn of
    a dialogue. Windows with fewer than ``size`` - 1 turns before the target are padded with -1 on
    the left.

    Args:
        starts: first turn of each dialogue, followed by the number of turns, (dialogues + 1,).
        size: turns of a window, including the target.
        min_context: minimum number of turns before a target.
    """
    n_before = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
    targets = np.flatnonzero(n_before >= min_context)
    offsets = np.arange(size - 1, -1, -1)
    return np.where(n_before[targets, None] >= offsets, targets[:, None] - offsets, -1)


def distinct_utterances(utterances: Positions) -> tuple[Positions, Positions]:
    """Return the distinct utterances of windows, (u,), and the windows' indices of them, (m, w).

    Padding is -1 in both the given windows and the result.
    """
    distinct_utterances, indices = np.unique(utterances, return_inverse=True)
    n_missing = int(len(distinct_utterances) > 0 and distinct_utterances[0] < 0)
    return distinct_utterances[n_missing:], indices.reshape(utterances.shape) - n_missing
