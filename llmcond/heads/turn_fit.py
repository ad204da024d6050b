"""Fitting a head that maps utterances to roles on cached features of dialogues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.arrays import Array, MatrixLike, Positions, as_matrix
from llmcond.errors import UserError
from llmcond.heads.base import Fitted
from llmcond.heads.fit import best_epoch, check_memory, in_bfloat16
from llmcond.heads.module import finished_copy, seeded
from llmcond.heads.pairs import DevScore, Fit, OnEpoch, OnStep
from llmcond.heads.query_fit import SCORE
from llmcond.heads.recipes import Recipe
from llmcond.heads.roles import Roles
from llmcond.heads.rows import UnitRows
from llmcond.heads.turns import DistanceWeights, Score, State
from llmcond.heads.windows import windows
from llmcond.system import choose_device

#: Utterances mapped at a time.
_BLOCK = 8_192


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


@dataclass(frozen=True, eq=False)
class FittedRoles(Fitted):
    """A fitted head that maps utterances to roles: an immutable value, like other heads.

    Attributes:
        scored_by: what candidates are scored by instead of what its recipe says.
    """

    scored_by: Score | None = None

    module: Roles

    @property
    def dim_out(self) -> int:
        """Return the size of roles, which is that of the features."""
        return self.dim_in

    @property
    def score(self) -> Score:
        """Return what candidates are scored by."""
        return self.scored_by or Score.parse(self.settings.score)

    @property
    def weights(self) -> DistanceWeights | None:
        """Return the weights of distances that it learned, as arrays; None where it has none."""
        found = self.module.distance_weights
        return found and DistanceWeights(*(own.detach().numpy() for own in found))

    def scoring(self, score: str) -> FittedRoles:
        """Return the same head with another score.

        Raises:
            UserError: no such score, or one by weights that this head did not learn.
        """
        chosen = Score.parse(score)
        if chosen.kind == "weighted":
            chosen.coefficients(1, self.weights)
        return replace(self, scored_by=chosen)

    def before(self, vectors: MatrixLike) -> tuple[Array, Array]:
        """Return the roles before-1 and before-2 of utterances, (n, k) float32, of features (n, d).

        Raises:
            UserError: features of another size than those it was fitted on.
        """
        first, second = self._mapped(vectors, self.module.before)
        return first, second

    def after(self, vectors: MatrixLike) -> Array:
        """Return the role after of utterances, (n, k) float32, of length 1; see :meth:`before`."""
        (found,) = self._mapped(vectors, lambda x: (self.module.after(x),))
        return found

    def start(self, vectors: NDArray[Any]) -> State:
        """Return a dialogue of some utterances, in order, of features (n, d)."""
        state = State(self.before, self.score, self.weights)
        for vector in vectors:
            state = state.add(vector)
        return state

    def _mapped(
        self, vectors: MatrixLike, role: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> list[Array]:
        if vectors.shape[1] != self.dim_in:
            raise UserError(
                f"the features have {vectors.shape[1]} dimensions; this {self.kind} head was "
                f"fitted on {self.dim_in}."
            )
        matrix, blocks = as_matrix(vectors), []
        with torch.inference_mode():
            for start in range(0, max(len(matrix), 1), _BLOCK):
                part = torch.from_numpy(matrix.read(slice(start, start + _BLOCK)))
                blocks.append([own.numpy() for own in role(torch.nn.functional.normalize(part))])
        return [np.concatenate(parts) for parts in zip(*blocks, strict=True)]


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
    check_turns(recipe)
    fitting = _Fitting(recipe, arrays, seed, torch.device(choose_device(device)))
    fit = fitting.run(dev, on_epoch)
    return FittedRoles(recipe.kind, recipe.family, fitting.module.finished(), seed, fit)


def check_turns(recipe: Recipe) -> None:
    """Raise a UserError unless a recipe's head maps utterances to roles."""
    if not recipe.family.maps_turns:
        raise UserError(
            f"the head {recipe.name} maps no utterances to roles. `llmcond heads` lists those of "
            "dialogues."
        )


class _Fitting:
    """One head while it is fitted."""

    def __init__(self, recipe: Recipe, arrays: TurnArrays, seed: int, device: torch.device) -> None:
        settings: Any = recipe.settings
        self.recipe, self.settings, self.seed, self.device = recipe, settings, seed, device
        made: Any = recipe.family
        dim = int(arrays.utterances.shape[1])
        self.n_parameters = check_memory(made, settings, (dim,), device)
        self.module: Roles
        self.module, self._generator = seeded(partial(_begun, made, settings, dim), seed)
        self._draws = np.random.Generator(np.random.SFC64(seed))
        if self.n_parameters:
            places = windows(arrays.starts, settings.window, settings.least)
            if not len(places):
                raise UserError(
                    f"no dialogue of the training split has more than {settings.least} "
                    f"utterance{'s' * (settings.least > 1)}, so there is nothing to fit."
                )
            turns = np.append(arrays.turns, -1)  # of position -1
            self._windows: Positions = turns[places]
            self._features = UnitRows(arrays.utterances)

    def run(self, dev: DevScore[FittedRoles] | None, on_epoch: OnEpoch) -> Fit:
        """Fit the module in place."""
        settings, module = self.settings, self.module
        if not self.n_parameters:
            note = "the head has no parameters, so nothing is fitted"
            return Fit({"selected_on": None}, (note,))
        module.seed_dropout(self.seed)
        module.to(self.device)
        optimiser = torch.optim.AdamW(
            module.parameters(),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        steps = -(-len(self._windows) // settings.batch_size)
        module.in_bfloat16 = in_bfloat16(settings.precision, self.device)

        def train(epoch: int, on_step: OnStep) -> float:
            return self._run_epoch(optimiser, steps, epoch - 1, on_step)

        chosen, curve = best_epoch(module, train, self._as_it_is, dev, on_epoch, SCORE)
        return Fit(
            {
                **chosen,
                "n_parameters": self.n_parameters,
                "n_windows": len(self._windows),
                "steps_per_epoch": steps,
                "precision": "bfloat16" if module.in_bfloat16 else "float32",
                "curve": curve,
            }
        )

    def _run_epoch(
        self, optimiser: torch.optim.Optimizer, steps: int, done: int, on_step: OnStep
    ) -> float:
        """Train on all windows after so many epochs; return the mean loss of one."""
        settings, module = self.settings, self.module
        module.train()
        total = torch.zeros((), device=self.device)
        order = torch.randperm(len(self._windows), generator=self._generator).numpy()
        for number, chosen in enumerate(np.array_split(order, steps)):
            rate = settings.rate(done * steps + number, settings.epochs * steps)
            for group in optimiser.param_groups:
                group["lr"] = settings.learning_rate * rate
            used, rows = distinct(self._windows[chosen])
            features = self._features.read(used).to(self.device)
            loss = module.loss(features, torch.from_numpy(rows).to(self.device), self._draws)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            total += loss.detach() * len(chosen)
            on_step(number + 1, steps)
        return float(total) / len(self._windows)

    def _as_it_is(self) -> FittedRoles:
        """Return the head as it is now."""
        module = finished_copy(self.module, self.module.dim_in)
        return FittedRoles(self.recipe.kind, type(module), module, self.seed)


def distinct(utterances: Positions) -> tuple[Positions, Positions]:
    """Return the distinct utterances of windows, (u,), and windows (m, w) among those; -1: none."""
    used, places = np.unique(utterances, return_inverse=True)
    absent = int(len(used) > 0 and used[0] < 0)
    return used[absent:], places.reshape(utterances.shape) - absent


def _begun(family: type[Roles], settings: Any, dim: int) -> Roles:
    made = family(settings, dim)
    made.start_at_identity()
    return made
