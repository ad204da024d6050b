"""The linear head of CASE: one map, its weights shared by both sentences (section 3.2)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import init

from llmcond.heads.layers import linear_forms
from llmcond.heads.module import HeadModule
from llmcond.heads.settings import SizedSettings


class Linear(HeadModule):
    """Z = Dropout(W e) (CASE, equation 3)."""

    Settings = SizedSettings
    multiplies_in_bfloat16 = True

    def __init__(self, settings: SizedSettings, dim_in: int, dim_condition: int = 0) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.add_layers(linear_forms(settings, dim_in))

    def start_at_identity(self) -> None:
        """See :class:`HeadModule`."""
        init.eye_(self.get_parameter("weight"))

    def forward(self, x: Tensor, condition: Any = None, which: Any = None) -> Tensor:
        """Return embeddings, (m, dim)."""
        return self.dropout(self.affine("weight", x))
