"""Heads that take the features of a sentence and those of its condition, each by itself.

The tri-encoder baselines of C-STS and Hyper-CL are here; hypernetworks are such heads, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import init

from llmcond.errors import UserError
from llmcond.heads.module import ACTIVATIONS, HeadModule
from llmcond.heads.settings import Activation, Size, TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionedSettings(TrainingSettings):
    """What the recipe of any head that takes conditions may say.

    Attributes:
        features: of a sentence: ``separate`` e(s), ``joint`` e(s|c) - e(c), or ``both``.
        transform: whether a linear layer with bias stands before all that is made of the
            condition, as in the released code of C-STS and Hyper-CL; the paper of Hyper-CL has
            none.
        bias: whether linear layers have biases, as in the released code; the paper shows none.
        masks: ``shared``: one dropout mask for a condition; ``own``: one for each sentence, as in
            the released code, where the two of a row see the condition through different masks.
    """

    features: Literal["separate", "joint", "both"] = "separate"
    transform: bool = True
    bias: bool = True
    masks: Literal["shared", "own"] = "shared"


class ConditionedHead(HeadModule):
    """A head that takes e(c) too, behind a linear layer if its settings say so."""

    Settings: ClassVar[type[Any]] = ConditionedSettings
    features = "separate"
    conditioned = True
    multiplies_in_bfloat16 = True

    def add_transform(self, dim: int, bias: bool = True) -> None:
        """Register the layer to ``dim`` before all that is made of the condition, if it is set."""
        if self.settings.transform:
            self.add_layer("transform", dim, self.dim_condition, bias)

    def transformed(self, condition: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Return the conditions c' that a head goes on with, and which of them each row has.

        c' = W Dropout(h_c) + b where the settings say so, else c' = h_c. Rows are picked by
        ``index_select``: gradients of an index are added in any order on several threads.
        """
        if self.training and self.settings.masks == "own":
            condition = condition.index_select(0, which)
            which = torch.arange(len(which), device=condition.device)
        if self.settings.transform:
            condition = self.affine("transform", self.dropout(condition))
        return condition, which


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
