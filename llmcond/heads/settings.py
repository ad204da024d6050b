"""The settings of recipes, the sizes of heads, and learning rates, without an import of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from llmcond.base import package as plugins


def learning_rate_factor(step: int, steps: int, warmup: float, schedule: str = "linear") -> float:
    """Return the factor of the learning rate at a step.

    Args:
        step: the step, from 0.
        steps: total number of steps.
        warmup: share of the steps in which the factor rises linearly from 0.
        schedule: course after the warm-up: ``linear`` decay to 0, or ``constant``.
    """
    warmup_steps = math.ceil(warmup * steps)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    return 1 - (step - warmup_steps) / max(1, steps - warmup_steps)


#: Upper limit of settings: larger than any useful value, and too small to overflow. Its inverse is
#: the lowest temperature.
LARGEST = 1_000_000

Count = Annotated[int, Ge(1), Le(LARGEST)]
Size = Annotated[int, Ge(1), Le(65_536)]
SizeOrNone = Annotated[int, Ge(0), Le(65_536)]

#: A size or a count in a record, with a limit above any useful value that cannot overflow.
RecordedSize = Annotated[int, Ge(0), Le(2**24)]

Weight = Annotated[float, Ge(0), Le(LARGEST)]
_Positive = Annotated[float, Ge(1 / LARGEST), Le(LARGEST)]

Activation = Literal["none", "relu", "gelu", "tanh"]

#: Names of the settings that are weights of objectives.
_OBJECTIVES = ("mse", "cosent", "ranking", "info_nce", "quadruplet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """The weighted sum of objectives that is minimised.

    Attributes:
        mse: weight of the mean of (cos(z1, z2) - r)^2 (CASE, equation 2, as a mean over the batch).
        info_nce: weight of the contrastive objective of Hyper-CL (section 3.3), with the cosines p
            of the positive and n of the negative, and the temperature t.
        info_nce_form: formula of ``info_nce``. ``acl``: -log(e^(p/t) / (e^(p/t) + e^(n/t))), as in
            ACL 2024 and the released code. ``v1``: as in arXiv version 1, where the denominator
            contains the cosines of each first sentence with the second one under the other
            condition instead of p, so the loss may be negative. ``self-negatives``: ``acl`` with
            half the cosine of each sentence with itself under the other condition added to the
            denominator (``cl_in_batch_neg`` in the released code).
        quadruplet: weight of max(0, margin + (1 - p) - (1 - n)), the quadruplet objective of C-STS.
        cosent: weight of CoSENT, log(1 + sum of e^(scale (cos_j - cos_i))) over the rows i and j of
            the batch with rating_i > rating_j.
        ranking: weight of RankNet on cosines, the mean over the same i and j of
            log(1 + e^(scale (cos_j - cos_i))).
        objective: name of a custom objective, ``FILE.py:NAME`` or ``package.module:NAME``.
        objective_weight: weight of the custom objective.
        temperature: temperature t of ``info_nce``.
        margin: margin of ``quadruplet``.
        scale: factor of the cosines in ``cosent`` and ``ranking``.
        ties: how ``info_nce`` and ``quadruplet`` treat contrastive pairs with equal ratings.
            ``drop``: they leave them out. ``keep``: the first row counts as the higher one, as in
            the code of C-STS and Hyper-CL. ``gap``: each contrastive pair is weighted by the
            difference of its ratings, and so are i and j of ``ranking``.
        matryoshka: sizes below that of the embeddings, such as 256 and 128. The objectives are then
            also computed on the first dimensions of the embeddings, as many as each size says, and
            averaged, so that embeddings can be truncated to these sizes (Matryoshka representation
            learning, arXiv 2205.13147, equation 1 with equal weights). Empty: the full size only.
    """

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
    matryoshka: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        """Raise an error if the settings leave nothing to minimise."""
        has_custom_objective = bool(self.objective) and self.objective_weight > 0
        if not has_custom_objective and not any(getattr(self, name) for name in _OBJECTIVES):
            raise ValueError(
                f"the weights {', '.join(_OBJECTIVES)} are all 0, so there is nothing to minimise: "
                "set at least one of them above 0"
            )

    @property
    def contrasts(self) -> bool:
        """Whether contrastive pairs are needed."""
        if self.info_nce > 0 or self.quadruplet > 0:
            return True
        return bool(self.objective) and bool(getattr(self.load_objective(), "contrasts", False))

    def load_objective(self) -> Any:
        """Return the custom objective that the settings name.

        Returns:
            A function or a class; see ``llmcond.heads.module``.

        Raises:
            UserError: the objective has not been loaded or registered.
        """
        return plugins.get_registered(self.objective, "the setting objective")


@dataclass(frozen=True, kw_only=True)  # no slots: two bases of a class cannot both have them
class GradientSettings:
    """Settings of training by gradient descent, for any objective.

    Attributes:
        dropout: share of units dropped in training.
        learning_rate: learning rate of AdamW.
        weight_decay: decoupled weight decay of AdamW.
        batch_size: rows per step.
        epochs: maximum number of epochs.
        patience: number of epochs without a better dev score after which fitting stops.
        precision: precision of products in training: ``float32``, ``bfloat16`` (summed in float32),
            or ``auto``: bfloat16 if it is faster, which for rated pairs means heads of at least 2 M
            parameters on a device that supports it.
        members: number of heads in the ensemble, each fitted with a different seed. Their
            embeddings, each of length 1, are concatenated, so that the cosine is the mean of their
            cosines.
    """

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
    """Recipe settings of heads that are trained by gradient descent on rated pairs.

    Custom heads subclass it to add settings.

    Attributes:
        batches: how batches are formed. ``rows``: from rows in any order. ``conditions``: rows with
            the same condition are adjacent, so that its matrices are generated once. Contrastive
            objectives always keep the two conditions of a sentence pair together instead.

    Examples:
        >>> from llmcond.heads import TrainingSettings
        >>> settings = TrainingSettings(
        ...     dropout=0.1, learning_rate=1e-3, batch_size=64, epochs=10, patience=3
        ... )
        >>> settings.mse, settings.batches, settings.members
        (1.0, 'rows', 1)
    """

    batches: Literal["rows", "conditions"] = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedSettings(TrainingSettings):
    """Recipe settings of heads whose embeddings have a size of their own.

    Attributes:
        dim: size k of the embeddings, at most that of the features.

    Examples:
        >>> from llmcond.heads import SizedSettings
        >>> settings = SizedSettings(
        ...     dim=128, dropout=0.1, learning_rate=1e-3, batch_size=64, epochs=10, patience=3
        ... )
        >>> settings.dim
        128
    """

    dim: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSettings(SizedSettings):
    """Recipe settings of the MLP.

    Attributes:
        hidden: width of the hidden layers; 0: the size of the embeddings. CASE does not state it.
        depth: number of layers, including the last one; 2 in CASE.
        activation: ``relu`` as in CASE, ``gelu``, ``tanh`` or ``none``.
        last: what follows the last layer. ``same``: activation and dropout like the other layers,
            as in CASE. ``none``: neither.
    """

    hidden: SizeOrNone = 0
    depth: Annotated[int, Ge(1), Le(16)] = 2
    activation: Activation = "relu"
    last: Literal["same", "none"] = "same"


@dataclass(frozen=True, slots=True)
class NoSettings:
    """Settings of heads that have nothing to set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionSettings:
    """Recipe settings of PCA, whitening and random projection.

    Attributes:
        dim: number of components.
    """

    dim: Annotated[int, Ge(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class IcaSettings(ProjectionSettings):
    """Recipe settings of FastICA.

    Attributes:
        max_iterations: maximum number of iterations.
        tolerance: change of the unmixing matrix below which FastICA has converged.
    """

    max_iterations: Annotated[int, Ge(1)]
    tolerance: Annotated[float, Gt(0)]


@dataclass(frozen=True)
class Sizes:
    """The sizes that a head's constructor takes, in this order, as head.json records them.

    Attributes:
        dim_in: size of the sentence features.
        dim_condition: size of the condition features; 0: none.
    """

    dim_in: Annotated[int, Ge(1), Le(2**24)]
    dim_condition: RecordedSize = 0
