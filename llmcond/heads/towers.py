"""A head on both kinds of features: an MLP on joint ones and a hypernetwork on separate ones.

No paper has it. What joint features tell of a sentence under a condition went through all layers of
the encoder; what e(s) tells was not disturbed by the condition. Each tower's embedding has length 1
before both are concatenated, so that the cosine is the mean of the two cosines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import MultipleOf
from torch import Tensor
from torch.nn.functional import normalize

from llmcond.errors import UserError
from llmcond.heads.hypernet import Hypernet, HypernetSettings
from llmcond.heads.module import ACTIVATIONS, HeadModule
from llmcond.heads.settings import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class TowersSettings(HypernetSettings):
    """The settings of the two towers; those of the hypernetwork are its tower's.

    Attributes:
        dim: size of the embeddings, half for each tower.
        hidden: width of the MLP's hidden layer.
    """

    features: Literal["both"] = "both"
    dim: Annotated[Size, MultipleOf(2)]
    hidden: Size


class Towers(Hypernet):
    """Both towers' embeddings, each of length 1, side by side."""

    Settings = TowersSettings
    features = "both"
    generates_matrices = False

    def __init__(self, settings: TowersSettings, dim_in: int, dim_condition: int) -> None:
        if dim_in <= dim_condition:
            raise UserError(
                f"the towers head needs joint features beside separate ones of {dim_condition} "
                f"dimensions, and the features have {dim_in} in all."
            )
        joint = dim_in - dim_condition
        HeadModule.__init__(self, settings, dim_in, dim_condition)
        self.add_layer("weight1", settings.hidden, joint, bias=False)
        self.add_layer("weight2", settings.dim // 2, settings.hidden, bias=False)
        self.add_transform(dim_condition)
        self._add_generator(dim_condition, settings.dim // 2)

    def forward(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        """Return embeddings, (m, dim)."""
        # The sentence's own features stand last, as many as the condition's: one encoder made both.
        joint, sentence = x[:, : -self.dim_condition], x[:, -self.dim_condition :]
        activation = ACTIVATIONS[self.settings.activation]
        hidden = self.dropout(activation(self.affine("weight1", joint)))
        first = self.dropout(activation(self.affine("weight2", hidden)))
        second = super().forward(sentence, condition, which)
        return torch.cat([normalize(first), normalize(second)], dim=1)
