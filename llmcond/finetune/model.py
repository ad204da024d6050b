"""An encoder and a head as one module that is trained, and what it gives in between."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmcond.encoders.engine.engine import Engine
from llmcond.errors import UserError
from llmcond.finetune.inputs import Places, RatedInputs
from llmcond.heads import FittedHead, Recipe
from llmcond.heads.base import Fit
from llmcond.heads.networks import Ops
from llmcond.heads.objectives import ObjectiveSettings, neighbours, objective, stretches

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """The head that is trained.

    Attributes:
        recipe: its kind and settings; of kind ``none`` nothing stands behind the encoder.
        objective: what is minimised.
        seed: of its first weights.
        start: of a head fitted before, its weights; None: they are drawn.
    """

    recipe: Recipe
    objective: ObjectiveSettings
    seed: int
    start: Mapping[str, NDArray[np.float32]] | None = None

    def draw(self, dim: int, dim_condition: int) -> Tensors:
        """Return the first weights.

        Raises:
            UserError: the head goes with no features of these sizes.
        """
        network = self.recipe.family.network
        if network is None:
            return {}
        generator = torch.Generator().manual_seed(self.seed)
        made = network.parameters(self.recipe.settings, dim, dim_condition)
        drawn = {name: parameter.draw(generator) for name, parameter in made.items()}
        if self.start is None:
            return drawn
        shapes = {name: tuple(value.shape) for name, value in self.start.items()}
        if shapes != {name: tuple(value.shape) for name, value in drawn.items()}:
            raise UserError(
                f"the head to start from was fitted on features of other sizes: this encoder and "
                f"prompt give {dim} dimensions. Start from a head of the same encoder and prompt."
            )
        return {name: torch.from_numpy(np.array(value)) for name, value in self.start.items()}


class TunedModel(nn.Module):
    """From rows to the loss: the encoder's network, and the head's weights.

    Attributes:
        encoder: the network, with adapters or without.
        head: the head's weights.
    """

    def __init__(self, engine: Engine, plan: HeadPlan, dims: tuple[int, int]) -> None:
        """Put a head behind an engine.

        Args:
            engine: around the network.
            plan: the head.
            dims: sizes of the features of sentences and of conditions.
        """
        super().__init__()
        self.encoder: nn.Module = engine.model.network
        drawn = plan.draw(*dims)
        self.head = nn.ParameterDict(
            {name: nn.Parameter(value.to(engine.out)) for name, value in drawn.items()}
        )
        self.engine, self._plan = engine, plan
        self.dims = dims

    # -- training ------------------------------------------------------------------------------

    def forward(self, inputs: RatedInputs, rows: Places, seed: list[int]) -> Tensor:
        """Return the mean loss of some rows, a scalar.

        Args:
            inputs: of the training split.
            rows: which of them.
            seed: of everything random in this call, dropout that is.
        """
        drawn = np.random.SeedSequence(seed).generate_state(2, np.uint64)
        torch.manual_seed(int(drawn[0] >> 1))
        used = inputs.used(rows)
        vectors = self.engine.embed([inputs.tokens[i] for i in used])
        with torch.autocast(vectors.device.type, enabled=False):
            batch = inputs.batch(rows, used, vectors.float())
            network, recipe = self._plan.recipe.family.network, self._plan.recipe
            embedded = batch.x
            if network is not None:
                masks = np.random.Generator(np.random.SFC64(int(drawn[1])))
                ops = Ops(recipe.settings.dropout, masks if self.training else None)
                embedded = network.forward(self.head, recipe.settings, batch, ops)
            return objective(
                embedded[: len(rows)],
                embedded[len(rows) :],
                torch.from_numpy(inputs.rating[rows]).to(embedded),
                self._plan.objective,
                self._twos(inputs, rows, embedded.device),
            )

    def _twos(self, inputs: RatedInputs, rows: Places, device: torch.device) -> Tensor | None:
        if not self._plan.objective.contrasts:
            return None
        return torch.from_numpy(neighbours(stretches(inputs.pair)[rows])).to(device)

    def trained(self) -> Tensors:
        """Return what is trained, by name: parameters of the encoder and of the head."""
        return {name: value for name, value in self.named_parameters() if value.requires_grad}

    @property
    def n_head(self) -> int:
        """Return the number of the head's weights."""
        return sum(value.numel() for value in self.head.values())

    @property
    def recipe(self) -> Recipe:
        """Return the head's recipe."""
        return self._plan.recipe

    # -- in between ----------------------------------------------------------------------------

    def fitted(self, record: Mapping[str, Any] | None = None) -> FittedHead:
        """Return the head as it is now, as one that was fitted."""
        tensors = {
            name: value.detach().float().cpu().numpy().copy() for name, value in self.head.items()
        }
        recipe = self._plan.recipe
        return FittedHead(
            recipe.family,
            recipe.settings,
            self._plan.seed,
            self.dims[0],
            Fit(tensors, record or {}),
            self.dims[1],
        )

    def encode(
        self,
        inputs: RatedInputs,
        which: Places,
        context: AbstractContextManager[Any] | None = None,
    ) -> NDArray[np.float32]:
        """Return the vectors of some distinct inputs, without dropout and gradients."""
        was = self.training
        self.eval()
        vectors = np.empty((len(which), self.engine.dim), dtype=np.float32)
        with context or nullcontext():
            for done in self.engine.run([inputs.tokens[i] for i in which]):
                vectors[done.inputs] = done.vectors
        self.train(was)
        return vectors
