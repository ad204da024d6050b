"""What heads share that take the features of a sentence and those of its condition, each by itself.

The tri-encoder baselines of C-STS and Hyper-CL are such, and the hypernetworks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from llmcond.heads.module import HeadModule
from llmcond.heads.settings import TrainingSettings


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
