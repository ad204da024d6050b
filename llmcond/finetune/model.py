"""An encoder and a head as one module that is trained, and what it gives in between."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmcond.arrays import Positions
from llmcond.encoders.engine.engine import Engine
from llmcond.errors import UserError
from llmcond.finetune.inputs import RatedInputs
from llmcond.heads import FittedHead, Recipe
from llmcond.heads.module import HeadModule, seeded
from llmcond.heads.objectives import (
    Objective,
    ObjectiveSettings,
    RatedBatch,
    adjacent_pairs,
    contrast_groups,
)
from llmcond.heads.pairs import Fit
from llmcond.prompts import Prompt

#: Inputs with routers that are encoded at a time where there are no gradients.
_ROUTED = 1_024


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """The head that is trained, and on which features.

    Attributes:
        recipe: its kind and settings; of kind ``none`` nothing stands behind the encoder.
        objective: what is minimised.
        seed: of its first weights, of order and of dropout.
        prompts: of the features; none yet where those are taken that suit encoder and head.
        subtract: whether unconditional features are subtracted.
        start: a head fitted before, whose weights are the first ones; None: they are drawn.
    """

    recipe: Recipe
    objective: ObjectiveSettings
    seed: int
    prompts: tuple[Prompt, ...] = ()
    subtract: bool = False
    start: FittedHead | None = None


class TunedModel(nn.Module):
    """From rows to the loss: the encoder's network, with its adapters, the head, the objective."""

    def __init__(self, engine: Engine, plan: HeadPlan, dims: tuple[int, int]) -> None:
        """Put a head behind an engine.

        Raises:
            UserError: the head goes with no features of these ``dims``, those of sentences and of
                conditions.
        """
        super().__init__()
        self.encoder: nn.Module = engine.model.network
        recipe = plan.recipe
        (head, objective), _ = seeded(
            lambda: (recipe.family(recipe.settings, *dims), Objective(plan.objective)), plan.seed
        )
        if plan.start is not None:
            start = plan.start.module.state_dict()
            drawn = {name: value.shape for name, value in head.state_dict().items()}
            if drawn != {name: value.shape for name, value in start.items()}:
                raise UserError(
                    "the head to start from was fitted on features of other sizes: this encoder "
                    f"and prompt give {dims[0]} dimensions. Start from a head of the same encoder "
                    "and prompt."
                )
            head.load_state_dict(start)
        self.head: HeadModule = head.to(engine.out)
        self.objective = objective.to(engine.out)
        self.engine, self.plan = engine, plan

    def forward(self, inputs: RatedInputs, rows: Positions, seed: list[int]) -> Tensor:
        """Return the mean loss of some rows, a scalar; ``seed`` is that of dropout."""
        drawn = np.random.SeedSequence(seed).generate_state(2, np.uint64)
        torch.manual_seed(int(drawn[0] >> 1))
        used = inputs.used(rows)
        vectors = inputs.embed(self.engine, used)
        with torch.autocast(vectors.device.type, enabled=False):
            batch = inputs.batch(rows, used, vectors.float())
            self.head.seed_dropout(int(drawn[1]))
            first, second = self.head(*batch).chunk(2)
            pair, contrastive = torch.from_numpy(inputs.pair[rows]).to(first.device), None
            if self.plan.objective.contrasts:
                found = adjacent_pairs(contrast_groups(inputs.pair)[rows])
                contrastive = torch.from_numpy(found).to(first.device)
            info = RatedBatch(self.head.similarity, pair, contrastive)
            rating = torch.from_numpy(inputs.rating[rows]).to(first)
            loss: Tensor = self.objective(first, second, rating, info)
            return loss

    def trained(self) -> dict[str, Tensor]:
        """Return what is trained, by name: parameters of the encoder and of the head."""
        return {name: value for name, value in self.named_parameters() if value.requires_grad}

    def fitted(self, record: Mapping[str, Any] | None = None) -> FittedHead:
        """Return the head as it is now, as one that was fitted."""
        # It is seeded again before each use, and not all generators can be copied.
        self.head.seed_dropout(None)
        recipe, module = self.plan.recipe, copy.deepcopy(self.head).finished()
        return FittedHead(recipe.kind, recipe.family, module, self.plan.seed, Fit(record or {}))

    def encode(self, inputs: RatedInputs, which: Positions) -> NDArray[np.float32]:
        """Return the vectors of some distinct inputs, without dropout and gradients."""
        was = self.training
        self.eval()
        vectors = np.empty((len(which), self.engine.dim), dtype=np.float32)
        if inputs.queries:
            with torch.inference_mode():
                for start in range(0, len(which), _ROUTED):
                    part = inputs.embed(self.engine, which[start : start + _ROUTED])
                    vectors[start : start + _ROUTED] = part.cpu().numpy()
        else:
            for done in self.engine.run([inputs.tokens[i] for i in which]):
                vectors[done.inputs] = done.vectors
        self.train(was)
        return vectors
