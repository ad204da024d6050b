"""Hyper-CL's hypernetwork: a matrix generated from the condition, applied to the sentence.

Hyper-CL, ACL 2024, section 3. In full, W_c = f(h_c) is H x H; in low rank it is the product of two
generated factors, H x K and K x H. Features of sentences are separate ones in the paper, and may be
joint ones here, which no paper has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.config import STRICT
from llmcond.errors import UserError
from llmcond.heads.arrays import Array, Matrix, rows_of
from llmcond.heads.base import FittedHead
from llmcond.heads.conditioned import (
    ConditionedSettings,
    apply,
    conditioned,
    conditions,
    layer,
    need_conditions,
    transform_parameters,
)
from llmcond.heads.networks import Batch, Network, Ops, Parameter, Weights, by_condition
from llmcond.heads.training import check_size

#: Conditions whose matrices are made at a time outside of training.
_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HypernetSettings(ConditionedSettings):
    """The settings of a hypernetwork.

    Attributes:
        dim: size k of the embeddings; H in the paper.
        rank: K of the two factors; 0: W_c in full.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    dim: int
    rank: int

    def __post_init__(self) -> None:
        """Refuse values that no fit can have."""
        # Not super(): a dataclass with slots is a new class, which super() does not know.
        ConditionedSettings.__post_init__(self)
        check_size("dim", self.dim)
        check_size("rank", self.rank, least=0)


def _parameters(settings: Any, dim: int, dim_c: int) -> Mapping[str, Parameter]:
    need_conditions("hypernet", dim_c)
    before = transform_parameters(settings, dim_c)
    if not settings.rank:
        return {**before, **layer("matrix", dim * settings.dim, dim_c, settings.bias)}
    if settings.rank > min(dim, settings.dim):
        raise UserError(
            f"rank is {settings.rank}, above the {min(dim, settings.dim)} dimensions that a "
            f"{dim} x {settings.dim} matrix has. Lower it, or give --set rank=0 for the full form."
        )
    return {
        **before,
        **layer("factor1", dim * settings.rank, dim_c, settings.bias),
        **layer("factor2", settings.rank * settings.dim, dim_c, settings.bias),
    }


def _factors(weights: Weights, settings: Any, c: Tensor, ops: Ops) -> list[Tensor]:
    """Return W_c, or the factors whose product it is, (u, a, b) each; one dropout mask each."""
    names = ("factor1", "factor2") if settings.rank else ("matrix",)
    inner = settings.rank or settings.dim
    made = [apply(weights, name, ops.dropout(c), ops) for name in names]
    first = made[0].view(len(c), -1, inner)
    return [first, *(one.view(len(c), inner, settings.dim) for one in made[1:])]


def _forward(weights: Weights, settings: Any, batch: Batch, ops: Ops) -> Tensor:
    """Z = h_s^T W_c; in low rank (h_s^T W_1) W_2, W_c never formed (Hyper-CL, section 3.4)."""
    c, which = conditions(weights, settings, batch, ops)
    if torch.is_grad_enabled() or len(c) <= _AT_ONCE:
        return by_condition(batch.x, which, _factors(weights, settings, c, ops), ops)
    # Outside of training nothing is kept, so memory need not grow with the conditions.
    output = batch.x.new_empty(len(batch.x), settings.dim, dtype=c.dtype)
    order = torch.argsort(which, stable=True)
    ends = torch.bincount(which, minlength=len(c)).cumsum(0)
    for start in range(0, len(c), _AT_ONCE):
        stop = min(start + _AT_ONCE, len(c))
        rows = order[int(ends[start - 1]) if start else 0 : int(ends[stop - 1])]
        factors = _factors(weights, settings, c[start:stop], ops)
        output[rows] = by_condition(batch.x[rows], which[rows] - start, factors, ops)
    return output


HYPERNET = conditioned("hypernet", HypernetSettings, Network(_parameters, _forward))


def factors_of(head: FittedHead, condition: Matrix) -> list[Array]:
    """Return what a fitted hypernetwork makes of conditions.

    Args:
        head: of kind ``hypernet``.
        condition: (u, dim_c).

    Returns:
        W_c, (u, dim, k), or in low rank its factors, (u, dim, K) and (u, K, k), in float32.
    """
    weights = {
        name: torch.from_numpy(np.asarray(value)) for name, value in head.fit.tensors.items()
    }
    with torch.inference_mode():
        c = torch.from_numpy(rows_of(condition, slice(None)))
        c, _ = conditions(weights, head.settings, Batch(c, c, torch.arange(len(c))), Ops())
        return [factor.numpy() for factor in _factors(weights, head.settings, c, Ops())]


def frobenius_norms(head: FittedHead, condition: Matrix) -> NDArray[np.float64]:
    """Return the Frobenius norm of W_c for each condition, (u,) (Hyper-CL, section 5.4.1).

    In low rank from the factors' own small products, W_c never formed:
    ||W_1 W_2||^2 = trace((W_1^T W_1)(W_2 W_2^T)).
    """
    norms = []
    for start in range(0, len(condition), _AT_ONCE):
        part = rows_of(condition, slice(start, start + _AT_ONCE))
        factors = [factor.astype(np.float64) for factor in factors_of(head, part)]
        if len(factors) == 1:
            norms.append(np.sqrt(np.square(factors[0]).sum(axis=(1, 2))))
            continue
        left = np.einsum("uak,ual->ukl", factors[0], factors[0])
        right = np.einsum("ukb,ulb->ukl", factors[1], factors[1])
        norms.append(np.sqrt(np.maximum(np.einsum("ukl,ukl->u", left, right), 0)))
    return np.concatenate(norms) if norms else np.zeros(0)
