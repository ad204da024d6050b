"""What recipes may say of heads that are trained by gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from llmcond.heads.objectives import ObjectiveSettings

#: Beyond any use, and below what overflows.
Count = Annotated[int, Ge(1), Le(1_000_000)]
Size = Annotated[int, Ge(1), Le(65_536)]
SizeOrNone = Annotated[int, Ge(0), Le(65_536)]

Activation = Literal["none", "relu", "gelu", "tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings(ObjectiveSettings):
    """What the recipe of any head trained by gradient may say.

    Attributes:
        dropout: share of units dropped in training.
        learning_rate: of Adam.
        weight_decay: decoupled, as AdamW has it.
        batch_size: rows a step.
        epochs: at most.
        patience: epochs without a better dev score before fitting stops.
        batches: ``rows`` in any order, or ``conditions``: rows of a condition next to each other,
            whose matrices are then made once. Contrastive objectives keep the two conditions of a
            sentence pair together instead.
        precision: of products in training: ``float32``, ``bfloat16`` (summed in float32), or
            ``auto``: bfloat16 for heads of 2 M parameters and more, where the device has it.
        members: size of the ensemble: heads that are fitted, each by a seed of its own. Their
            embeddings, each of length 1, are concatenated, so that the cosine is the mean of
            theirs.
    """

    dropout: Annotated[float, Ge(0), Lt(1)]
    learning_rate: Annotated[float, Gt(0)]
    batch_size: Count
    epochs: Count
    patience: Count
    weight_decay: Annotated[float, Ge(0)] = 0.0
    batches: Literal["rows", "conditions"] = "rows"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    members: Annotated[int, Ge(1), Le(100)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedSettings(TrainingSettings):
    """The settings of a head whose embeddings have a size k, ``dim``: at most the features'."""

    dim: Size
