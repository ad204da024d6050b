"""Hyper-CL's hypernetwork: a matrix generated from the condition, applied to the sentence.

Hyper-CL, ACL 2024, section 3. In full, W_c = f(h_c) is H x H; in low rank it is the product of two
generated factors, H x K and K x H. Features of sentences are separate ones in the paper, and may be
joint ones here, which no paper has.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.arrays import Array, Lookup, Matrix, distinct, rows_of
from llmcond.config import STRICT
from llmcond.errors import UserError
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
from llmcond.heads.networks import (
    ACTIVATIONS,
    Batch,
    Network,
    Ops,
    Parameter,
    Weights,
    by_condition,
)
from llmcond.heads.training import check_size, one_of

#: Conditions whose matrices are made at a time outside of training.
_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HypernetSettings(ConditionedSettings):
    """The settings of a hypernetwork.

    Attributes:
        dim: size k of the embeddings; H in the paper.
        rank: K of the two factors; 0: W_c in full.
        activation: behind the product; ``none`` in the paper. With ``relu`` no embedding points
            away from another, as no rating is below 0.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    dim: int
    rank: int
    activation: str = "none"

    def __post_init__(self) -> None:
        """Refuse values that no fit can have."""
        # Not super(): a dataclass with slots is a new class, which super() does not know.
        ConditionedSettings.__post_init__(self)
        check_size("dim", self.dim)
        check_size("rank", self.rank, least=0)
        one_of("activation", self.activation, tuple(ACTIVATIONS))


def _parameters(settings: Any, dim: int, dim_c: int) -> Mapping[str, Parameter]:
    need_conditions("hypernet", dim_c)
    before = transform_parameters(settings, dim_c)
    if not settings.rank:
        return {**before, **layer("matrix", dim * settings.dim, dim_c, settings.bias)}
    if settings.rank > min(dim, settings.dim):
        raise UserError(
            f"rank is {settings.rank}, above the {min(dim, settings.dim)} dimensions that a "
            f"{dim} x {settings.dim} matrix has. Lower it, or set rank to 0 for the full form."
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
    first = made[0].view(len(c), len(weights[names[0]]) // inner, inner)
    return [first, *(one.view(len(c), inner, settings.dim) for one in made[1:])]


def _forward(weights: Weights, settings: Any, batch: Batch, ops: Ops) -> Tensor:
    """Z = f(h_s^T W_c); in low rank (h_s^T W_1) W_2, W_c never formed (Hyper-CL, section 3.4)."""
    values = _generated(weights, settings, batch, ops)
    if settings.activation == "none":
        return values
    return ops.dropout(ACTIVATIONS[settings.activation](values))


def _generated(weights: Weights, settings: Any, batch: Batch, ops: Ops) -> Tensor:
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


def generates(head: FittedHead) -> bool:
    """Tell whether a head is one hypernetwork, whose matrices can be had."""
    return head.family.kind == "hypernet" and head.settings.members == 1


class ConditionCache:
    """A fitted hypernetwork that keeps what it made of conditions (Hyper-CL, section 3.5).

    A condition that comes again, in any later call, costs two small products and no generated
    matrix. The least recently used ones are forgotten above a budget. One thread at a time.

    Attributes:
        head: of kind ``hypernet``.
        hits, misses: distinct conditions of all calls that were there, and that were not.
    """

    def __init__(self, head: FittedHead, budget: int = 2**28) -> None:
        """Keep up to ``budget`` bytes.

        Raises:
            UserError: the head is no hypernetwork, so there is nothing to keep.
        """
        if not generates(head):
            raise UserError(f"a {head.family.kind} head makes no matrices that could be kept.")
        self.head, self.hits, self.misses = head, 0, 0
        self._budget, self._size = budget, 0
        self._kept: OrderedDict[bytes, list[Array]] = OrderedDict()
        self._lock = threading.Lock()

    def transform(self, features: Matrix, condition: Matrix) -> Array:
        """Return embeddings, (n, k) float32; as :meth:`FittedHead.transform`.

        Args:
            features: (n, dim) of sentences.
            condition: (n, dim_c) of the conditions, or (1, dim_c) of one for all.

        Raises:
            UserError: as :meth:`FittedHead.transform`.
        """
        self.head.check(features, condition)
        n = len(features)
        if len(condition) == 1 != n:
            condition = Lookup(condition, np.zeros(n, dtype=np.int64))
        first, number = distinct(condition)
        order = np.argsort(number, kind="stable")
        ends = np.cumsum(np.bincount(number, minlength=len(first)))
        output = np.empty((n, self.head.settings.dim), dtype=np.float32)
        for start in range(0, len(first), _AT_ONCE):
            part = first[start : start + _AT_ONCE]
            for i, factors in enumerate(self._factors(rows_of(condition, part)), start):
                rows = order[ends[i - 1] if i else 0 : ends[i]]
                values = rows_of(features, rows)
                for factor in factors:
                    values = values @ factor
                output[rows] = values
        activation = ACTIVATIONS[self.head.settings.activation]
        embedded: Array = activation(torch.from_numpy(output)).numpy()
        return embedded

    def _factors(self, vectors: Array) -> list[list[Array]]:
        """Return the factors of conditions, made where they are not kept."""
        keys = [vector.tobytes() for vector in vectors]
        with self._lock:
            found = {key: self._kept[key] for key in keys if key in self._kept}
            absent = [i for i, key in enumerate(keys) if key not in found]
            self.hits += len(keys) - len(absent)
            self.misses += len(absent)
            if absent:
                made = factors_of(self.head, vectors[absent])
                for place, i in enumerate(absent):
                    # Copies: a view would keep what was made of all of them.
                    found[keys[i]] = [factor[place].copy() for factor in made]
            for key in keys:
                self._keep(key, found[key])
        return [found[key] for key in keys]

    def _keep(self, key: bytes, factors: list[Array]) -> None:
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        self._kept[key] = factors
        self._size += len(key) + sum(factor.nbytes for factor in factors)
        while self._size > self._budget:
            old, gone = self._kept.popitem(last=False)
            self._size -= len(old) + sum(factor.nbytes for factor in gone)


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
