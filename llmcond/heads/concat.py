"""Concatenation of a sentence's and its condition's features, a baseline of C-STS."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import init

from llmcond.heads.conditioned import ConditionedHead, ConditionedSettings
from llmcond.heads.module import ACTIVATIONS
from llmcond.heads.settings import Activation, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcatSettings(ConditionedSettings):
    """The settings of the concatenation.

    Attributes:
        dim: size k of the embeddings.
        activation: behind the layer; GELU in the released code.
    """

    dim: Size
    activation: Activation = "gelu"


class Concat(ConditionedHead):
    """Z = f(W Dropout([h_s; c']) + b) (C-STS, released code), the two halves of W by themselves.

    The condition's half is computed once for each condition of a batch.
    """

    Settings = ConcatSettings

    def __init__(self, settings: ConcatSettings, dim_in: int, dim_condition: int) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.add_transform(dim_condition)
        into = dim_in + dim_condition
        self.add_weight("sentence", (settings.dim, dim_in), into)
        self.add_weight("condition", (settings.dim, dim_condition), into)
        if settings.bias:
            self.add_weight("bias", (settings.dim,), into)

    def start_at_identity(self) -> None:
        """See :class:`HeadModule`: as the sentence's, but for what the activation does."""
        init.eye_(self.get_parameter("sentence"))

    def forward(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        """Return embeddings, (m, dim)."""
        condition, which = self.transformed(condition, which)
        sentences = self.affine("sentence", self.dropout(x))
        total = sentences + self.affine("condition", self.dropout(condition)).index_select(0, which)
        if self.settings.bias:
            total = total + self.get_parameter("bias")
        return ACTIVATIONS[self.settings.activation](total)
