"""The ablation of Hyper-CL: as many parameters as the low-rank hypernetwork, and no matrix."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from llmcond.heads.conditioned import ConditionedHead, ConditionedSettings
from llmcond.heads.settings import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationSettings(ConditionedSettings):
    """The settings of the ablation: ``rank``, K of the hypernetwork whose parameters it matches."""

    rank: Size


class HypernetAblation(ConditionedHead):
    """Z = h_s * (W2 Dropout(W1 Dropout(c'))).

    Hyper-CL, table 6 and arXiv v1, section 5.3; released code, ``hypernet_ablation``.
    """

    Settings = AblationSettings

    def __init__(self, settings: AblationSettings, dim_in: int, dim_condition: int) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.add_transform(dim_condition)
        wide = dim_in * settings.rank
        self.add_layer("up", wide, dim_condition, settings.bias)
        self.add_layer("down", dim_in, wide, settings.bias)

    def forward(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        """Return embeddings, (m, dim_in)."""
        condition, which = self.transformed(condition, which)
        up = self.affine("up", self.dropout(condition))
        down = self.affine("down", self.dropout(up))
        return x * down.index_select(0, which)
