"""The MLP of CASE, its weights shared by both sentences (section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from llmcond.heads.module import ACTIVATIONS, DenseLayer, HeadModule
from llmcond.heads.settings import Activation, SizedSettings, SizeOrNone


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

    hidden: SizeOrNone = 0
    depth: Annotated[int, Ge(1), Le(16)] = 2
    activation: Activation = "relu"
    last: Literal["same", "none"] = "same"


class Mlp(HeadModule):
    """H = Dropout(ReLU(W1 e)), z = Dropout(ReLU(W2 h)) (CASE, equations 4 and 5)."""

    Settings = MlpSettings
    multiplies_in_bfloat16 = True

    def __init__(self, settings: MlpSettings, dim_in: int, dim_condition: int = 0) -> None:
        super().__init__(settings, dim_in, dim_condition)
        hidden = settings.hidden or settings.dim
        sizes = [dim_in, *[hidden] * (settings.depth - 1), settings.dim]
        for number, (into, out) in enumerate(pairwise(sizes), start=1):
            self.add_layer(f"weight{number}", out, into, bias=False)

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

    def dense_layers(self, condition: Tensor | None) -> list[DenseLayer]:
        """See :class:`HeadModule`."""
        settings = self.settings
        names = [f"weight{number}" for number in range(1, settings.depth + 1)]
        last = settings.activation if settings.last == "same" else "none"
        behind = [settings.activation] * (settings.depth - 1) + [last]
        layers = zip(names, behind, strict=True)
        return [DenseLayer(self.get_parameter(name), None, f) for name, f in layers]

    def forward(self, x: Tensor, condition: Any = None, which: Any = None) -> Tensor:
        """Return embeddings, (m, dim)."""
        settings = self.settings
        for number in range(1, settings.depth + 1):
            x = self.affine(f"weight{number}", x)
            if number < settings.depth or settings.last == "same":
                x = self.dropout(ACTIVATIONS[settings.activation](x))
        return x
