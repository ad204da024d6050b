"""A head on both kinds of features: an MLP on joint ones beside a hypernetwork on separate ones.

No paper has it. What joint features tell of a sentence under a condition went through all layers of
the encoder; what e(s) tells was not disturbed by the condition. Each tower's embedding has length 1
before both stand side by side, so that the cosine is the mean of the two cosines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from llmcond.config import STRICT
from llmcond.errors import UserError
from llmcond.heads.conditioned import need_conditions
from llmcond.heads.hypernet import HYPERNET, HypernetSettings
from llmcond.heads.networks import ACTIVATIONS, Batch, Network, Ops, Parameter, Weights
from llmcond.heads.training import check_size, trained


@dataclass(frozen=True, slots=True, kw_only=True)
class TowersSettings(HypernetSettings):
    """The settings of the two towers; those of the hypernetwork are its tower's.

    Attributes:
        dim: size of the embeddings, half for each tower.
        hidden: width of the MLP's hidden layer.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    features: str = "both"
    hidden: int

    def __post_init__(self) -> None:
        """Refuse values that no fit can have."""
        # Not super(): a dataclass with slots is a new class, which super() does not know.
        HypernetSettings.__post_init__(self)
        check_size("hidden", self.hidden)
        if self.features != "both":
            raise ValueError("features is not 'both', which the two towers need")
        if self.dim % 2:
            raise ValueError(f"dim is {self.dim}; it must be even, half for each tower")


def _tower(settings: Any) -> HypernetSettings:
    """Return the settings of the hypernetwork by itself."""
    own = {item.name: getattr(settings, item.name) for item in fields(HypernetSettings)}
    return HypernetSettings(**{**own, "dim": settings.dim // 2})


def _parameters(settings: Any, dim: int, dim_c: int) -> Mapping[str, Parameter]:
    need_conditions("towers", dim_c)
    if dim <= dim_c:
        raise UserError(
            f"the towers head needs joint features beside separate ones of {dim_c} dimensions, "
            f"and the features have {dim} in all."
        )
    joint, half = dim - dim_c, settings.dim // 2
    generated = HYPERNET.network.parameters(_tower(settings), dim_c, dim_c)
    return {
        "weight1": Parameter((settings.hidden, joint), joint),
        "weight2": Parameter((half, settings.hidden), settings.hidden),
        **generated,
    }


def _forward(weights: Weights, settings: Any, batch: Batch, ops: Ops) -> Tensor:
    """Return both towers' embeddings, each of length 1, side by side."""
    # The sentence's own features stand last, as many as the condition's: one encoder made both.
    own = batch.c.shape[1]
    joint, sentence = batch.x[:, :-own], batch.x[:, -own:]
    activation = ACTIVATIONS[settings.activation]
    hidden = ops.dropout(activation(ops.product(joint, weights["weight1"])))
    first = ops.dropout(activation(ops.product(hidden, weights["weight2"])))
    second = HYPERNET.network.forward(weights, _tower(settings), replace(batch, x=sentence), ops)
    return torch.cat([normalize(first), normalize(second)], dim=1)


TOWERS = trained(
    "towers", TowersSettings, Network(_parameters, _forward), features="both", conditioned=True
)
