"""What recipes may say of heads that are trained by gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from llmcond.config import STRICT
from llmcond.heads.contrastive import ContrastSettings
from llmcond.heads.objectives import ObjectiveSettings

#: Beyond any use, and below what overflows.
Count = Annotated[int, Ge(1), Le(1_000_000)]
Size = Annotated[int, Ge(1), Le(65_536)]
SizeOrNone = Annotated[int, Ge(0), Le(65_536)]

Activation = Literal["none", "relu", "gelu", "tanh"]


@dataclass(frozen=True, kw_only=True)  # no slots: two bases of a class cannot both have them
class GradientSettings:
    """How any head is trained by gradient, whatever it minimises.

    Attributes:
        dropout: share of units dropped in training.
        learning_rate: of Adam.
        weight_decay: decoupled, as AdamW has it.
        batch_size: rows a step.
        epochs: at most.
        patience: epochs without a better dev score before fitting stops.
        precision: of products in training: ``float32``, ``bfloat16`` (summed in float32), or
            ``auto``: bfloat16 where it pays, as for rated pairs in heads of 2 M parameters and
            more, if the device has it.
        members: size of the ensemble: heads that are fitted, each by a seed of its own. Their
            embeddings, each of length 1, are concatenated, so that the cosine is the mean of
            theirs.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    dropout: Annotated[float, Ge(0), Lt(1)]
    learning_rate: Annotated[float, Gt(0)]
    batch_size: Count
    epochs: Count
    patience: Count
    weight_decay: Annotated[float, Ge(0)] = 0.0
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    members: Annotated[int, Ge(1), Le(100)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings(GradientSettings, ObjectiveSettings):
    """What the recipe of any head may say that is trained by gradient on rated pairs.

    Attributes:
        batches: ``rows`` in any order, or ``conditions``: rows of a condition next to each other,
            whose matrices are then made once. Contrastive objectives keep the two conditions of a
            sentence pair together instead.
    """

    batches: Literal["rows", "conditions"] = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySettings(GradientSettings, ContrastSettings):
    """What the recipe of any head may say that maps queries and candidates.

    The settings of the map of queries itself, such as its rank, come in addition.

    Attributes:
        candidate: what maps candidates: ``none``; ``linear``, a layer of their own; or ``same``,
            what maps queries too: a joint map itself, and before a conditioned one the same layer.
        score: ``cosine`` of both embeddings (Hyper-CL's paper), or ``dot``: their product as they
            are (its released code, which has candidates of length 1 and no layer for them).
        neighbours: whether an entity is read with the mean of its neighbours' features in the
            training graph, of which a triple's other end is taken out in training.
        relations: what is known of a relation: its ``features``, or ``one-hot`` which one it is; a
            hypernetwork is then one free matrix for each.
        start: ``identity``: embeddings are, as far as the form allows, the features at first; or
            ``random``.
        schedule: how the learning rate falls over all epochs: ``linear`` to 0, or ``constant``.
    """

    candidate: Literal["none", "linear", "same"] = "linear"
    score: Literal["cosine", "dot"] = "cosine"
    neighbours: bool = False
    relations: Literal["features", "one-hot"] = "features"
    start: Literal["identity", "random"] = "identity"
    schedule: Literal["linear", "constant"] = "linear"

    def __post_init__(self) -> None:
        """Refuse settings that do not go together."""
        if self.neighbours and self.candidate == "none":
            raise ValueError(
                "neighbours need a map of candidates, which brings twice as many features to "
                "their size: set candidate to linear or same"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedSettings(TrainingSettings):
    """The settings of a head whose embeddings have a size k, ``dim``: at most the features'."""

    dim: Size
