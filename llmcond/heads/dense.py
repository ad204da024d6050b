"""Heads of dense layers, whose weights both sentences share (CASE, section 3.2), and no head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor
from torch.nn import init

from llmcond.config import STRICT
from llmcond.heads.layers import PLAIN_KINDS, DenseLayer
from llmcond.heads.module import ACTIVATIONS, HeadModule
from llmcond.heads.pairs import Fit, PairArrays
from llmcond.heads.settings import MlpSettings, NoSettings, SizedSettings


class Identity(HeadModule):
    """Z = e: the features as they are, which is the zero-shot setting."""

    Settings = NoSettings
    supervised = False
    is_identity = True

    def solve(self, pairs: PairArrays, seed: int) -> Fit:
        """Fit nothing."""
        return Fit({"selected_on": None})

    def forward(self, x: Tensor, condition: Tensor | None = None, which: Any = None) -> Tensor:
        """Return the features."""
        return x


class _Dense(HeadModule):
    kind: ClassVar[str]
    multiplies_in_bfloat16 = True

    def __init__(self, settings: Any, dim_in: int, dim_condition: int = 0) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.forms = PLAIN_KINDS[self.kind][1](settings, dim_in)
        for form in self.forms:
            self.add_layer(form.name, form.size_out, form.size_in, bias=False)

    def dense_layers(self, condition: Tensor | None) -> list[DenseLayer[Tensor]]:
        return [form.layer(self.state_dict()) for form in self.forms]

    def forward(self, x: Tensor, condition: Any = None, which: Any = None) -> Tensor:
        for form in self.forms:
            x = ACTIVATIONS[form.activation](self.affine(form.name, x))
            x = self.dropout(x) if form.dropout else x
        return x


class Linear(_Dense):
    """Z = Dropout(W e) (CASE, equation 3)."""

    kind, Settings = "linear", SizedSettings

    def start_at_identity(self) -> None:
        """See :class:`HeadModule`."""
        init.eye_(self.get_parameter("weight"))


class Mlp(_Dense):
    """H = Dropout(ReLU(W1 e)), z = Dropout(ReLU(W2 h)) (CASE, equations 4 and 5)."""

    kind, Settings = "mlp", MlpSettings

    def start_at_identity(self) -> None:
        """See :class:`HeadModule`: f(x) - f(-x) = x for ReLU and GELU, if two layers have room."""
        settings = self.settings
        room = (settings.hidden or settings.dim) >= 2 * self.dim_in
        plain = settings.last == "none" and settings.activation in {"relu", "gelu"}
        if settings.depth != 2 or not room or not plain:
            return
        first, second = self.get_parameter("weight1"), self.get_parameter("weight2")
        n = self.dim_in
        with torch.no_grad():
            # The other units are as they were drawn, and have no say yet.
            second.zero_()
            for begin, sign in ((0, 1.0), (n, -1.0)):
                first[begin : begin + n] = sign * torch.eye(n)
                second[:, begin : begin + n] = sign * torch.eye(settings.dim, n)


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
