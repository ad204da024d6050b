"""Hyper-CL's hypernetwork: a matrix generated from the condition, applied to the sentence.

Hyper-CL, ACL 2024, section 3. In full, W_c = f(h_c) is H x H; in low rank it is the product of two
generated factors, H x K and K x H. Features of sentences are separate ones in the paper, and may be
joint ones here, which no paper has.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.arrays import Array, Gathered, MatrixLike, as_matrix
from llmcond.errors import UserError
from llmcond.heads.base import FittedHead
from llmcond.heads.conditioned import ConditionedHead, ConditionedSettings
from llmcond.heads.module import ACTIVATIONS
from llmcond.heads.settings import Activation, Size, SizeOrNone

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

    dim: Size
    rank: SizeOrNone
    activation: Activation = "none"


class Hypernet(ConditionedHead):
    """Z = f(h_s^T W_c); in low rank (h_s^T W_1) W_2, W_c never formed (Hyper-CL, section 3.4)."""

    Settings: ClassVar[type[Any]] = HypernetSettings
    generates_matrices = True

    def __init__(self, settings: HypernetSettings, dim_in: int, dim_condition: int) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.add_transform(dim_condition)
        self._add_generator(dim_in, settings.dim)

    def _add_generator(self, dim_in: int, dim: int) -> None:
        """Register what generates (dim_in, dim) matrices."""
        rank, bias, into = self.settings.rank, self.settings.bias, self.dim_condition
        if not rank:
            self.add_layer("matrix", dim_in * dim, into, bias)
            return
        if rank > min(dim_in, dim):
            raise UserError(
                f"rank is {rank}, above the {min(dim_in, dim)} dimensions that a {dim_in} x {dim} "
                "matrix has. Lower it, or set rank to 0 for the full form."
            )
        self.add_layer("factor1", dim_in * rank, into, bias)
        self.add_layer("factor2", rank * dim, into, bias)

    def forward(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        """Return embeddings, (m, dim)."""
        values = self._times_matrices(x, condition, which)
        if self.settings.activation == "none":
            return values
        return self.dropout(ACTIVATIONS[self.settings.activation](values))

    def _times_matrices(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        c, which = self.transformed(condition, which)
        if torch.is_grad_enabled() or len(c) <= _AT_ONCE:
            return by_condition(x, which, self.factors(c), self.batched_product)
        # Outside of training nothing is kept, so memory need not grow with the conditions.
        order = torch.argsort(which, stable=True)
        ends = torch.bincount(which, minlength=len(c)).cumsum(0).tolist()
        blocks = []
        for start in range(0, len(c), _AT_ONCE):
            stop = min(start + _AT_ONCE, len(c))
            rows = order[ends[start - 1] if start else 0 : ends[stop - 1]]
            factors = self.factors(c[start:stop])
            blocks.append(by_condition(x[rows], which[rows] - start, factors, self.batched_product))
        return torch.cat(blocks)[torch.argsort(order)]

    def factors(self, transformed: Tensor) -> list[Tensor]:
        """Return W_c, or the factors whose product it is, (u, a, b) each; one dropout mask each.

        Args:
            transformed: (u, dim_c), as :meth:`transformed` gives them.
        """
        names = ("factor1", "factor2") if self.settings.rank else ("matrix",)
        made = [self.affine(name, self.dropout(transformed)) for name in names]
        dim = self._dim_generated
        inner = self.settings.rank or dim
        first = made[0].view(len(transformed), len(self.get_parameter(names[0])) // inner, inner)
        return [first, *(one.view(len(transformed), inner, dim) for one in made[1:])]

    @property
    def _dim_generated(self) -> int:
        dim: int = self.settings.dim
        return dim

    # -- fitted --------------------------------------------------------------------------------

    def generated_matrices(self, condition: MatrixLike) -> list[Array]:
        """Return what a fitted hypernetwork makes of conditions, (u, dim_c).

        Returns:
            W_c, (u, dim, k), or in low rank its factors, (u, dim, K) and (u, K, k), in float32.
        """
        with torch.inference_mode():
            given = torch.from_numpy(as_matrix(condition).read())
            c, _ = self.transformed(given, torch.arange(len(given)))
            return [factor.numpy() for factor in self.factors(c)]

    def matrix_norms(self, condition: MatrixLike) -> NDArray[np.float64]:
        """Return the Frobenius norm of W_c for each condition, (u,) (Hyper-CL, section 5.4.1).

        In low rank from the factors' own small products, W_c never formed:
        ||W_1 W_2||^2 = trace((W_1^T W_1)(W_2 W_2^T)).
        """
        norms = []
        for start in range(0, len(condition), _AT_ONCE):
            part = as_matrix(condition).read(slice(start, start + _AT_ONCE))
            factors = [factor.astype(np.float64) for factor in self.generated_matrices(part)]
            if len(factors) == 1:
                norms.append(np.sqrt(np.square(factors[0]).sum(axis=(1, 2))))
                continue
            left = np.einsum("uak,ual->ukl", factors[0], factors[0])
            right = np.einsum("ukb,ulb->ukl", factors[1], factors[1])
            norms.append(np.sqrt(np.maximum(np.einsum("ukl,ukl->u", left, right), 0)))
        return np.concatenate(norms) if norms else np.zeros(0)


def by_condition(
    x: Tensor,
    which: Tensor,
    factors: list[Tensor],
    batched_product: Callable[[Tensor, Tensor], Tensor] = torch.bmm,
) -> Tensor:
    """Multiply each row by the matrices of its condition, left to right: ((x F1) F2) ...

    No matrix is copied for each row, and no product of two factors is formed. Rows of a condition
    are multiplied at once, padded to a common number; where a condition has far more rows than
    others, it is cut into several.

    Args:
        x: (m, dim).
        which: (m,) the condition of each row, below u.
        factors: each (u, a, b), the first with a = dim.
        batched_product: (n, m, a) and (n, a, b) -> (n, m, b).

    Returns:
        (m, b) of the last factor.
    """
    count = len(factors[0])
    if not len(x):
        return x.new_empty(0, factors[-1].shape[2], dtype=factors[-1].dtype)
    rows = torch.bincount(which, minlength=count)
    most = max(4, -(-2 * len(x) // max(count, 1)))
    width = int(min(int(rows.max()), most))
    pieces = (rows + width - 1) // width
    order = torch.argsort(which, stable=True)
    ordered = which[order]
    begins = torch.cumsum(rows, 0) - rows
    rank = torch.arange(len(x), device=x.device) - begins[ordered]
    position = (torch.cumsum(pieces, 0) - pieces)[ordered] * width + rank
    total = int(pieces.sum())
    grouped = x.new_zeros(total * width, x.shape[1]).index_copy(0, position, x[order])
    grouped = grouped.view(total, width, -1)
    # As a rule every condition is one piece, and no matrix is copied at all.
    single = bool((pieces == 1).all())
    owner = torch.repeat_interleave(torch.arange(count, device=x.device), pieces)
    for factor in factors:
        # Not factor[owner]: gradients of an index are added in any order on several threads.
        matrices = factor if single else factor.index_select(0, owner)
        grouped = batched_product(grouped, matrices)
    back = torch.empty_like(position)
    back[order] = position
    return grouped.reshape(total * width, -1)[back]


class ConditionCache:
    """A fitted hypernetwork that keeps the matrices of conditions (Hyper-CL, section 3.5).

    A condition that comes again, in any later call, costs two small products and no generated
    matrix. The least recently used ones are dropped above a budget. Calls from several threads are
    safe.

    Attributes:
        head: of kind ``hypernet``.
        hits, misses: distinct conditions of all calls that were there, and that were not.
    """

    def __init__(self, head: FittedHead, budget: int = 2**28) -> None:
        """Keep up to ``budget`` bytes.

        Raises:
            UserError: the head is no hypernetwork, so there is nothing to keep.
        """
        if not isinstance(head.module, Hypernet) or not head.generates_matrices:
            raise UserError(f"a {head.kind} head makes no matrices that could be kept.")
        self.head, self.hits, self.misses = head, 0, 0
        self._module = head.module
        self._budget, self._size = budget, 0
        self._kept: OrderedDict[bytes, list[Array]] = OrderedDict()
        self._lock = threading.Lock()

    def transform(self, features: MatrixLike, condition: MatrixLike | None) -> Array:
        """Return embeddings, (n, k) float32; as :meth:`FittedHead.transform`.

        Args:
            features: (n, dim) of sentences.
            condition: (n, dim_c) of the conditions, or (1, dim_c) of one for all.

        Raises:
            UserError: as :meth:`FittedHead.transform`.
        """
        self.head.check(features, condition)
        n, features = len(features), as_matrix(features)
        shared = as_matrix(np.empty((0, 0)) if condition is None else condition)
        if len(shared) == 1 != n:
            shared = Gathered(shared, np.zeros(n, dtype=np.int64))
        first, which = shared.unique()
        order = np.argsort(which, kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(first)))
        output = np.empty((n, self.head.settings.dim), dtype=np.float32)
        for start in range(0, len(first), _AT_ONCE):
            part = first[start : start + _AT_ONCE]
            for i, factors in enumerate(self._factors(shared.read(part)), start):
                rows = order[ends[i - 1] if i else 0 : ends[i]]
                values = features.read(rows)
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
                made = self._module.generated_matrices(vectors[absent])
                for position, i in enumerate(absent):
                    # Copies: a view would keep what was made of all of them.
                    found[keys[i]] = [factor[position].copy() for factor in made]
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
