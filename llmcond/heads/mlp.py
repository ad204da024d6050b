"""The MLP of CASE, its weights shared by both sentences (section 3.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmcond.heads.layers import DenseLayer, mlp_forms
from llmcond.heads.module import ACTIVATIONS, HeadModule
from llmcond.heads.settings import MlpSettings


class Mlp(HeadModule):
    """H = Dropout(ReLU(W1 e)), z = Dropout(ReLU(W2 h)) (CASE, equations 4 and 5)."""

    Settings = MlpSettings
    multiplies_in_bfloat16 = True

    def __init__(self, settings: MlpSettings, dim_in: int, dim_condition: int = 0) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.forms = mlp_forms(settings, dim_in)
        self.add_layers(self.forms)

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

    def dense_layers(self, condition: Tensor | None) -> list[DenseLayer[Tensor]]:
        """See :class:`HeadModule`."""
        return [form.layer(self.state_dict()) for form in self.forms]

    def forward(self, x: Tensor, condition: Any = None, which: Any = None) -> Tensor:
        """Return embeddings, (m, dim)."""
        settings = self.settings
        for number, form in enumerate(self.forms, start=1):
            x = self.affine(form.name, x)
            if number < settings.depth or settings.last == "same":
                x = self.dropout(ACTIVATIONS[form.activation](x))
        return x
