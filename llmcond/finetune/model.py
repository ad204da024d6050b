"""An encoder of each text and a head that compares them, as one module that is trained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.arrays import Positions
from llmcond.encoders.engine.engine import Engine
from llmcond.errors import UserError
from llmcond.finetune.base import RatedModel, Shared
from llmcond.finetune.inputs import RatedInputs
from llmcond.heads import FittedHead, Recipe
from llmcond.heads.module import seeded
from llmcond.heads.objectives import (
    Objective,
    RatedBatch,
    adjacent_pairs,
    contrast_groups,
)
from llmcond.heads.settings import ObjectiveSettings
from llmcond.metrics import METRICS, Metric
from llmcond.prompts import Prompt
from llmcond.system import to_device

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
        metric: what dev is scored by.
    """

    recipe: Recipe
    objective: ObjectiveSettings
    seed: int
    prompts: tuple[Prompt, ...] = ()
    subtract: bool = False
    start: FittedHead | None = None
    metric: Metric = METRICS["spearman"]


class TunedModel(RatedModel[RatedInputs]):
    """From rows to the loss: the encoder's vectors, the head's embeddings, the objective."""

    def __init__(self, engine: Engine, plan: HeadPlan, dims: tuple[int, int]) -> None:
        """Put a head behind an engine.

        Raises:
            UserError: the head goes with no features of these ``dims``, those of sentences and of
                conditions.
        """
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
        super().__init__(engine, head, recipe.kind, plan.seed, plan.metric)
        self.objective = objective.to(engine.out)
        self.plan = plan

    def forward(self, inputs: RatedInputs, rows: Positions, seed: list[int]) -> Tensor:
        """Return the mean loss of some rows, a scalar; ``seed`` is that of dropout."""
        self.seed_dropout(seed)
        used = inputs.used(rows)
        vectors = inputs.embed(self.engine, used)
        with torch.autocast(vectors.device.type, enabled=False):
            batch = inputs.batch(rows, used, vectors.float())
            first, second = self.head(*batch).chunk(2)
            device, contrastive = first.device, None
            pair = to_device(torch.from_numpy(inputs.pair[rows]), device)
            if self.plan.objective.contrasts:
                found = adjacent_pairs(contrast_groups(inputs.pair)[rows])
                contrastive = to_device(torch.from_numpy(found), device)
            info = RatedBatch(self.head.similarity, pair, contrastive)
            rating = to_device(torch.from_numpy(inputs.rating[rows]), device).to(first)
            loss: Tensor = self.objective(first, second, rating, info)
            return loss

    def groups(self, inputs: RatedInputs) -> NDArray[np.int64]:
        """Return (n,) a number for each row, the same for the two of a contrastive pair."""
        contrasts = self.plan.objective.contrasts
        return contrast_groups(inputs.pair) if contrasts else super().groups(inputs)

    def predict(self, inputs: RatedInputs, shared: Shared) -> NDArray[np.float32]:
        """Return the predicted similarity of all rows, (n,), each distinct input encoded once."""
        vectors = shared(len(inputs.items), lambda which: self.encode(inputs, which))
        pairs = inputs.arrays(vectors)
        return self.fitted().similarity(pairs.first, pairs.second, pairs.condition)

    def encode(self, inputs: RatedInputs, which: Positions) -> NDArray[np.float32]:
        """Return (u, dim) the vectors of distinct inputs (u,), without dropout and gradients."""
        if not inputs.queries:
            return self.vectors([inputs.tokens[i] for i in which])
        was = self.training
        self.eval()
        vectors = np.empty((len(which), self.engine.dim), dtype=np.float32)
        with torch.inference_mode():
            for start in range(0, len(which), _ROUTED):
                part = inputs.embed(self.engine, which[start : start + _ROUTED])
                vectors[start : start + _ROUTED] = part.float().cpu().numpy()
        self.train(was)
        return vectors
