"""Heads that take the features of a sentence and those of its condition, each by itself.

The tri-encoder baselines of C-STS and Hyper-CL: Hadamard product and concatenation, the
parameter-matched ablation without a hypernetwork, and what all of them share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from llmcond.config import STRICT
from llmcond.errors import UserError
from llmcond.heads.networks import ACTIVATIONS, Batch, Network, Ops, Parameter, Weights
from llmcond.heads.training import TrainingSettings, check_size, one_of, trained

FEATURES = ("separate", "joint", "both")
MASKS = ("shared", "own")


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

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    features: str = "separate"
    transform: bool = True
    bias: bool = True
    masks: str = "shared"

    def __post_init__(self) -> None:
        """Refuse values that no fit can have."""
        # Not super(): a dataclass with slots is a new class, which super() does not know.
        TrainingSettings.__post_init__(self)
        one_of("features", self.features, FEATURES)
        one_of("masks", self.masks, MASKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcatSettings(ConditionedSettings):
    """The settings of the concatenation.

    Attributes:
        dim: size k of the embeddings.
        activation: behind the layer; GELU in the released code.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    dim: int
    activation: str = "gelu"

    def __post_init__(self) -> None:
        """Refuse values that no fit can have."""
        ConditionedSettings.__post_init__(self)
        check_size("dim", self.dim)
        one_of("activation", self.activation, tuple(ACTIVATIONS))


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationSettings(ConditionedSettings):
    """The settings of the ablation.

    Attributes:
        rank: K of the low-rank hypernetwork whose parameters it matches.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    rank: int

    def __post_init__(self) -> None:
        """Refuse values that no fit can have."""
        ConditionedSettings.__post_init__(self)
        check_size("rank", self.rank)


def need_conditions(kind: str, dim_c: int) -> None:
    """Raise a UserError unless there are features of conditions."""
    if not dim_c:
        raise UserError(
            f"the {kind} head takes the features of each condition, and none were given: "
            "PairArrays(..., condition=...)."
        )


def layer(name: str, out: int, into: int, bias: bool) -> dict[str, Parameter]:
    """Return the parameters of a linear layer."""
    made = {name: Parameter((out, into), into)}
    return {**made, f"{name}_bias": Parameter((out,), into)} if bias else made


def apply(weights: Weights, name: str, values: Tensor, ops: Ops) -> Tensor:
    """Apply a linear layer, with its bias if it has one."""
    product = ops.product(values, weights[name])
    bias = weights.get(f"{name}_bias")
    return product if bias is None else product + bias


def transform_parameters(settings: Any, dim_c: int) -> dict[str, Parameter]:
    """Return the parameters of the layer before all that is made of the condition."""
    return layer("transform", dim_c, dim_c, bias=True) if settings.transform else {}


def conditions(weights: Weights, settings: Any, batch: Batch, ops: Ops) -> tuple[Tensor, Tensor]:
    """Return the conditions c' that a head goes on with, and which of them each row has.

    c' = W Dropout(h_c) + b where the settings say so, else c' = h_c. Rows are picked by
    ``index_select``: gradients of an index are added in any order on several threads.
    """
    c, which = batch.c, batch.which
    if ops.training and settings.masks == "own":
        c, which = c.index_select(0, which), torch.arange(len(which), device=c.device)
    if settings.transform:
        c = apply(weights, "transform", ops.dropout(c), ops)
    return c, which


# -- Hadamard ----------------------------------------------------------------------------------


def _hadamard_parameters(settings: Any, dim: int, dim_c: int) -> Mapping[str, Parameter]:
    need_conditions("hadamard", dim_c)
    if settings.transform:
        return layer("transform", dim, dim_c, bias=settings.bias)
    if dim != dim_c:
        raise UserError(
            f"the sentences' features have {dim} dimensions and the conditions' {dim_c}; without "
            "a transform the hadamard head needs as many. Set transform to true."
        )
    return {}


def _hadamard(weights: Weights, settings: Any, batch: Batch, ops: Ops) -> Tensor:
    """Z = h_s * c' (C-STS, released code)."""
    c, which = conditions(weights, settings, batch, ops)
    return batch.x * c.index_select(0, which)


# -- concatenation -----------------------------------------------------------------------------


def _concat_parameters(settings: Any, dim: int, dim_c: int) -> Mapping[str, Parameter]:
    need_conditions("concat", dim_c)
    into = dim + dim_c
    made = {
        "sentence": Parameter((settings.dim, dim), into),
        "condition": Parameter((settings.dim, dim_c), into),
    }
    bias = {"bias": Parameter((settings.dim,), into)} if settings.bias else {}
    return {**transform_parameters(settings, dim_c), **made, **bias}


def _concat(weights: Weights, settings: Any, batch: Batch, ops: Ops) -> Tensor:
    """Z = f(W Dropout([h_s; c']) + b) (C-STS, released code), the two halves of W by themselves.

    The condition's half is computed once for each condition of a batch.
    """
    c, which = conditions(weights, settings, batch, ops)
    sentence = ops.product(ops.dropout(batch.x), weights["sentence"])
    condition = ops.product(ops.dropout(c), weights["condition"])
    total = sentence + condition.index_select(0, which)
    if settings.bias:
        total = total + weights["bias"]
    return ACTIVATIONS[settings.activation](total)


# -- ablation ----------------------------------------------------------------------------------


def _ablation_parameters(settings: Any, dim: int, dim_c: int) -> Mapping[str, Parameter]:
    need_conditions("hypernet-ablation", dim_c)
    wide = dim * settings.rank
    return {
        **transform_parameters(settings, dim_c),
        **layer("up", wide, dim_c, settings.bias),
        **layer("down", dim, wide, settings.bias),
    }


def _ablation(weights: Weights, settings: Any, batch: Batch, ops: Ops) -> Tensor:
    """Z = h_s * (W2 Dropout(W1 Dropout(c'))): as many parameters as the low-rank hypernetwork.

    Hyper-CL, table 6 and arXiv v1, section 5.3; released code, ``hypernet_ablation``.
    """
    c, which = conditions(weights, settings, batch, ops)
    up = apply(weights, "up", ops.dropout(c), ops)
    down = apply(weights, "down", ops.dropout(up), ops)
    return batch.x * down.index_select(0, which)


def conditioned(kind: str, settings: type[Any], network: Network) -> Any:
    """Return the family of a network that takes conditions."""
    return trained(kind, settings, network, features="separate", conditioned=True)


HADAMARD = conditioned("hadamard", ConditionedSettings, Network(_hadamard_parameters, _hadamard))
CONCAT = conditioned("concat", ConcatSettings, Network(_concat_parameters, _concat))
ABLATION = conditioned(
    "hypernet-ablation", AblationSettings, Network(_ablation_parameters, _ablation)
)
