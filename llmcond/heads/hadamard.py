"""The Hadamard product of a sentence's and its condition's features, a baseline of C-STS."""

from __future__ import annotations

from torch import Tensor
from torch.nn import init

from llmcond.errors import UserError
from llmcond.heads.conditioned import ConditionedHead, ConditionedSettings


class Hadamard(ConditionedHead):
    """Z = h_s * c' (C-STS, released code)."""

    def __init__(self, settings: ConditionedSettings, dim_in: int, dim_condition: int) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.add_transform(dim_in, settings.bias)
        if not settings.transform and dim_in != dim_condition:
            raise UserError(
                f"the sentences' features have {dim_in} dimensions and the conditions' "
                f"{dim_condition}; without a transform the hadamard head needs as many. Set "
                "transform to true."
            )

    def start_at_identity(self) -> None:
        """See :class:`HeadModule`."""
        if self.settings.transform and self.settings.bias:
            init.zeros_(self.get_parameter("transform"))
            init.ones_(self.get_parameter("transform_bias"))

    def forward(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        """Return embeddings, (m, dim_in)."""
        condition, which = self.transformed(condition, which)
        return x * condition.index_select(0, which)
