"""The supervised heads of CASE: one map, its weights shared by both sentences (section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from llmcond.config import STRICT
from llmcond.heads.base import Array, Family, Fit, OnEpoch, PairArrays, Tensors
from llmcond.heads.training import Dropout, TrainingSettings, Weights, train

_WIDEST = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSettings(TrainingSettings):
    """The MLP's settings.

    Attributes:
        hidden: width of the hidden layer; 0: as wide as the embeddings. CASE does not state it.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    hidden: int = 0

    def __post_init__(self) -> None:
        """Refuse values that no fit can have."""
        # Not super(): a dataclass with slots is a new class, which super() does not know.
        TrainingSettings.__post_init__(self)
        if not 0 <= self.hidden <= _WIDEST:
            raise ValueError(f"hidden must be at least 0 and at most {_WIDEST:,}")


def _linear_forward(weights: Weights, features: Tensor, dropout: Dropout) -> Tensor:
    """Z = Dropout(W e) (CASE, equation 3)."""
    return dropout(features @ weights["weight"].T)


def _linear_transform(tensors: Tensors, features: Array) -> Array:
    return features @ tensors["weight"].T


def _fit_linear(
    pairs: PairArrays, dev: PairArrays | None, settings: Any, seed: int, on_epoch: OnEpoch
) -> Fit:
    shapes = {"weight": (settings.dim, pairs.dim)}
    return train(shapes, _linear_forward, pairs, dev, settings, seed, on_epoch)


def _mlp_forward(weights: Weights, features: Tensor, dropout: Dropout) -> Tensor:
    """H = Dropout(ReLU(W1 e)), z = Dropout(ReLU(W2 h)) (CASE, equations 4 and 5)."""
    hidden = dropout((features @ weights["weight1"].T).relu())
    return dropout((hidden @ weights["weight2"].T).relu())


def _mlp_transform(tensors: Tensors, features: Array) -> Array:
    hidden = np.maximum(features @ tensors["weight1"].T, 0)
    embedded: Array = np.maximum(hidden @ tensors["weight2"].T, 0)
    return embedded


def _fit_mlp(
    pairs: PairArrays, dev: PairArrays | None, settings: Any, seed: int, on_epoch: OnEpoch
) -> Fit:
    hidden = settings.hidden or settings.dim
    shapes = {"weight1": (hidden, pairs.dim), "weight2": (settings.dim, hidden)}
    return train(shapes, _mlp_forward, pairs, dev, settings, seed, on_epoch)


LINEAR = Family("linear", TrainingSettings, _fit_linear, _linear_transform)
MLP = Family("mlp", MlpSettings, _fit_mlp, _mlp_transform)
