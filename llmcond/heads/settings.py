"""The settings that recipes have, and the sizes that heads have; without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from llmcond import plugins
from llmcond.config import STRICT
from llmcond.records import RECORD

#: Beyond any use, and below what overflows; its inverse is the least temperature.
LARGEST = 1_000_000

Count = Annotated[int, Ge(1), Le(LARGEST)]
Size = Annotated[int, Ge(1), Le(65_536)]
SizeOrNone = Annotated[int, Ge(0), Le(65_536)]

#: Of features and whatever else is counted: beyond any use, and below what overflows.
RecordedSize = Annotated[int, Ge(0), Le(2**24)]

Weight = Annotated[float, Ge(0), Le(LARGEST)]
_Positive = Annotated[float, Ge(1 / LARGEST), Le(LARGEST)]

Activation = Literal["none", "relu", "gelu", "tanh"]

#: The settings that are weights of objectives.
_OBJECTIVES = ("mse", "cosent", "ranking", "info_nce", "quadruplet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """What is minimised: a weighted sum of objectives.

    Attributes:
        mse: weight of the mean of (cos(z1, z2) - r)^2 (CASE, equation 2, as a mean over the batch).
        info_nce: weight of the contrastive objective of Hyper-CL (section 3.3), with the cosines
            p of the positive and n of the negative, and the temperature t.
        info_nce_form: ``acl``: -log(e^(p/t) / (e^(p/t) + e^(n/t))), as in ACL 2024 and the
            released code; ``v1``: as in arXiv version 1, where the denominator has the cosines of
            each first sentence with the second one under the other condition, and not p, so that
            it may be below 0;
            ``self-negatives``: ``acl`` with half the cosine of each sentence with itself under the
            other condition added to the denominator (the released code's ``cl_in_batch_neg``).
        quadruplet: weight of max(0, margin + (1 - p) - (1 - n)), the quadruplet objective of C-STS.
        cosent: weight of CoSENT, log(1 + sum of e^(scale (cos_j - cos_i))) over the rows i and j
            of the batch with rating_i > rating_j.
        ranking: weight of RankNet on cosines, the mean over the same i and j of
            log(1 + e^(scale (cos_j - cos_i))).
        objective: an objective of the user's own, ``FILE.py:NAME`` or ``package.module:NAME``.
        objective_weight: its weight.
        temperature: t of ``info_nce``.
        margin: of ``quadruplet``.
        scale: of ``cosent`` and ``ranking``.
        ties: ``drop``: ``info_nce`` and ``quadruplet`` leave out contrastive pairs of equal rating;
            ``keep``: the first row of such pairs counts as the higher, as in the code of C-STS and
            Hyper-CL; ``gap``: each contrastive pair weighs as much as its ratings differ, and so
            does each i and j of ``ranking``.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    mse: Weight = 1.0
    info_nce: Weight = 0.0
    info_nce_form: Literal["acl", "v1", "self-negatives"] = "acl"
    quadruplet: Weight = 0.0
    cosent: Weight = 0.0
    ranking: Weight = 0.0
    objective: str = ""
    objective_weight: Weight = 1.0
    temperature: _Positive = 1.5
    margin: Weight = 1.0
    scale: _Positive = 20.0
    ties: Literal["drop", "keep", "gap"] = "drop"

    def __post_init__(self) -> None:
        """Refuse settings that leave nothing to minimise."""
        own = bool(self.objective) and self.objective_weight > 0
        if not own and not any(getattr(self, name) for name in _OBJECTIVES):
            raise ValueError(
                f"the weights {', '.join(_OBJECTIVES)} are all 0, so there is nothing to minimise: "
                "set one of them at least above 0"
            )

    @property
    def contrasts(self) -> bool:
        """Return whether contrastive pairs are needed."""
        if self.info_nce > 0 or self.quadruplet > 0:
            return True
        return bool(self.objective) and bool(getattr(self.load_objective(), "contrasts", False))

    def load_objective(self) -> Any:
        """Return the objective of the user's own that the settings name.

        Raises:
            UserError: the user has not loaded or registered it.
        """
        return plugins.recorded(self.objective, "the setting objective")


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
class SizedSettings(TrainingSettings):
    """The settings of a head whose embeddings have a size k, ``dim``: at most the features'."""

    dim: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSettings(SizedSettings):
    """The MLP's settings.

    Attributes:
        hidden: width of the hidden layers; 0: as wide as the embeddings. CASE does not state it.
        depth: layers, the last one included; 2 in CASE.
        activation: ``relu`` as in CASE, ``gelu``, ``tanh`` or ``none``.
        last: what stands behind the last layer: ``same`` as behind the others, as in CASE, or
            ``none``: neither activation nor dropout.
    """

    hidden: SizeOrNone = 0
    depth: Annotated[int, Ge(1), Le(16)] = 2
    activation: Activation = "relu"
    last: Literal["same", "none"] = "same"


@dataclass(frozen=True, slots=True)
class NoSettings:
    """Nothing to set."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionSettings:
    """The settings of PCA, whitening and random projection: the number of components."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    dim: Annotated[int, Ge(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class IcaSettings(ProjectionSettings):
    """The settings of FastICA, which has converged once the unmixing matrix changes by less."""

    max_iterations: Annotated[int, Ge(1)]
    tolerance: Annotated[float, Gt(0)]


@dataclass(frozen=True)
class Sizes:
    """The sizes that a head's module is made with, in this order, as head.json records them.

    Attributes:
        dim_in: of the features of sentences.
        dim_condition: of the features of conditions; 0: none.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    dim_in: Annotated[int, Ge(1), Le(2**24)]
    dim_condition: RecordedSize = 0
