"""The head of a cross-encoder: one number of the vector of both texts together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from llmcond.config import STRICT
from llmcond.heads.module import HeadModule


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionSettings:
    """How the head of a cross-encoder is trained.

    Attributes:
        dropout: share of the vector's units dropped in training.
        learning_rate, weight_decay: of the head, by AdamW.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    dropout: Annotated[float, Ge(0), Lt(1)] = 0.1
    learning_rate: Annotated[float, Gt(0), Le(100)] = 1e-3
    weight_decay: Annotated[float, Ge(0), Le(1_000_000)] = 0.01


class Regression(HeadModule):
    """y = w^T Dropout(e) + b, of the vector e of two texts and their condition."""

    Settings = RegressionSettings
    no_recipe = (
        "is the head of a cross-encoder, which has no embeddings; llmcond train-cross trains it"
    )

    def __init__(self, settings: RegressionSettings, dim_in: int, dim_condition: int = 0) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.add_layer("weight", 1, dim_in, bias=True)

    def forward(self, x: Tensor, condition: Any = None, which: Any = None) -> Tensor:
        """Return the predicted similarity, (m, 1)."""
        return self.affine("weight", self.dropout(x))
