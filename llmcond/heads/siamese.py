"""The supervised heads of CASE: one map, its weights shared by both sentences (section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from llmcond.config import STRICT
from llmcond.heads.networks import ACTIVATIONS, Batch, Network, Ops, Parameter, Weights
from llmcond.heads.training import SizedSettings, check_size, one_of, trained

_DEEPEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSettings(SizedSettings):
    """The MLP's settings.

    Attributes:
        hidden: width of the hidden layers; 0: as wide as the embeddings. CASE does not state it.
        depth: layers, the last one included; 2 in CASE.
        activation: ``relu`` as in CASE, ``gelu``, ``tanh`` or ``none``.
        last: what stands behind the last layer: ``same`` as behind the others, as in CASE, or
            ``none``: neither activation nor dropout.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    hidden: int = 0
    depth: int = 2
    activation: str = "relu"
    last: str = "same"

    def __post_init__(self) -> None:
        """Refuse values that no fit can have."""
        # Not super(): a dataclass with slots is a new class, which super() does not know.
        SizedSettings.__post_init__(self)
        check_size("hidden", self.hidden, least=0)
        if not 1 <= self.depth <= _DEEPEST:
            raise ValueError(f"depth must be at least 1 and at most {_DEEPEST}")
        one_of("activation", self.activation, tuple(ACTIVATIONS))
        one_of("last", self.last, ("same", "none"))


def _linear_parameters(settings: Any, dim: int, dim_c: int) -> Mapping[str, Parameter]:
    return {"weight": Parameter((settings.dim, dim), dim)}


def _linear(weights: Weights, settings: Any, batch: Batch, ops: Ops) -> Tensor:
    """Z = Dropout(W e) (CASE, equation 3)."""
    return ops.dropout(ops.product(batch.x, weights["weight"]))


def _mlp_parameters(settings: Any, dim: int, dim_c: int) -> Mapping[str, Parameter]:
    hidden = settings.hidden or settings.dim
    sizes = [dim, *[hidden] * (settings.depth - 1), settings.dim]
    return {
        f"weight{layer}": Parameter((sizes[layer], sizes[layer - 1]), sizes[layer - 1])
        for layer in range(1, settings.depth + 1)
    }


def _mlp(weights: Weights, settings: Any, batch: Batch, ops: Ops) -> Tensor:
    """H = Dropout(ReLU(W1 e)), z = Dropout(ReLU(W2 h)) (CASE, equations 4 and 5)."""
    activation = ACTIVATIONS[settings.activation]
    values = batch.x
    for layer in range(1, settings.depth + 1):
        values = ops.product(values, weights[f"weight{layer}"])
        if layer < settings.depth or settings.last == "same":
            values = ops.dropout(activation(values))
    return values


LINEAR = trained("linear", SizedSettings, Network(_linear_parameters, _linear))
MLP = trained("mlp", MlpSettings, Network(_mlp_parameters, _mlp))
