"""What every head family gives, and a head once it is fitted.

Heads know arrays only: they neither load encoders nor read rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Array, Lookup, Matrix, chosen, distinct, rows_of
from llmcond.errors import UserError

Tensors = Mapping[str, Array]

#: Vectors transformed at a time, so that memory does not grow with their number.
_BLOCK = 65_536


@dataclass(frozen=True, slots=True)
class PairArrays:
    """The rated pairs of a split, as heads take them.

    Attributes:
        first, second: (n, dim) the features of both sentences, in any float type: NumPy arrays,
            memory maps, or what :mod:`llmcond.arrays` has.
        rating: (n,) float64 on 0 to 1, no NaN.
        condition: (n, dim_c) the features e(c) of each row's condition, for heads that take them.
        pair: (n,) the sentence pair of each row, for objectives that contrast its two conditions.
        number: (n,) what messages call a row; its position from 1 where it is None.
    """

    first: Matrix
    second: Matrix
    rating: NDArray[np.float64]
    condition: Matrix | None = None
    pair: NDArray[np.int64] | None = None
    number: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.rating)

    @property
    def dim(self) -> int:
        """Return the features' size."""
        return int(self.first.shape[1])

    @property
    def dim_condition(self) -> int:
        """Return the size of the conditions' features, 0 where there are none."""
        return 0 if self.condition is None else int(self.condition.shape[1])

    def take(self, rows: NDArray[Any]) -> PairArrays:
        """Return some rows, by positions or a mask, without reading their vectors."""
        return replace(
            self,
            first=chosen(self.first, rows),
            second=chosen(self.second, rows),
            rating=self.rating[rows],
            condition=None if self.condition is None else chosen(self.condition, rows),
            pair=None if self.pair is None else self.pair[rows],
            number=None if self.number is None else self.number[rows],
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """What fitting gives.

    Attributes:
        tensors: the head's parameters.
        record: how it went: the epoch kept, what chose it, the learning curve.
        notes: what the user should know, in sentences.
    """

    tensors: Tensors
    record: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


#: Told of each epoch: its number, the number of epochs, and the score on dev.
OnEpoch = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of head: its settings, how it is fitted and how it is applied.

    Attributes:
        kind: the name that recipes use.
        settings: a frozen dataclass; its fields are the recipe's keys.
        fit: (training pairs, dev pairs or None, settings, seed, on_epoch) -> parameters.
        transform: (parameters, settings, (n, dim) features, (n, dim_c) conditions or None) ->
            (n, k) embeddings.
        features: which features of a sentence it takes: ``joint`` e(s|c), or ``separate`` e(s).
            A setting of that name says otherwise.
        conditioned: whether it takes the condition's own features e(c).
        supervised: whether it learns from ratings.
        network: what is trained, for families that are.
    """

    kind: str
    settings: type[Any]
    fit: Callable[[PairArrays, PairArrays | None, Any, int, OnEpoch], Fit]
    transform: Callable[[Tensors, Any, Array, Matrix | None], Array]
    features: str = "joint"
    conditioned: bool = False
    supervised: bool = False
    network: Any = None


@dataclass(frozen=True)
class FittedHead:
    """A fitted head: an immutable value that turns features into embeddings.

    Attributes:
        family: its kind.
        settings: what it was fitted with.
        seed: of initialisation, dropout and the order of rows.
        dim_in: size of the features.
        fit: its parameters, and how fitting went.
        dim_condition: size of the condition's features; 0 where it takes none.
    """

    family: Family
    settings: Any
    seed: int
    dim_in: int
    fit: Fit
    dim_condition: int = 0

    @property
    def dim_out(self) -> int:
        """Return the size of the embeddings."""
        one = np.zeros((1, self.dim_in), dtype=np.float32)
        condition = np.zeros((1, self.dim_condition), dtype=np.float32)
        return int(self.transform(one, condition if self.dim_condition else None).shape[1])

    def transform(self, features: Matrix, condition: Matrix | None = None) -> Array:
        """Return embeddings, (n, k) float32.

        Args:
            features: (n, dim) of sentences.
            condition: (n, dim_c) of the conditions, or (1, dim_c) of one for all, for heads that
                take them.

        Raises:
            UserError: features of another size, or conditions that are missing or not wanted.
        """
        self.check(features, condition)
        n = len(features)
        if condition is not None and len(condition) == 1 != n:
            condition = Lookup(condition, np.zeros(n, dtype=np.int64))
        elif condition is not None:
            # What is made of a condition is made once, also where its rows stand in several blocks.
            first, number = distinct(condition)
            condition = Lookup(chosen(condition, first), number)
        blocks = []
        for start in range(0, max(n, 1), _BLOCK):
            part = slice(start, start + _BLOCK)
            given = None if condition is None else chosen(condition, np.arange(n)[part])
            block = rows_of(features, part)
            blocks.append(self.family.transform(self.fit.tensors, self.settings, block, given))
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    def similarity(self, first: Matrix, second: Matrix, condition: Matrix | None = None) -> Array:
        """Return the cosine of the embeddings of two sets of features, (n,) float32.

        Raises:
            UserError: as :meth:`transform`.
        """
        return cosine(self.transform(first, condition), self.transform(second, condition))

    def check(self, features: Matrix, condition: Matrix | None) -> None:
        """Refuse what the head cannot be applied to.

        Raises:
            UserError: features of another size, or conditions that are missing or not wanted.
        """
        kind = self.family.kind
        if features.shape[1] != self.dim_in:
            raise UserError(
                f"the features have {features.shape[1]} dimensions; this {kind} head was fitted on "
                f"{self.dim_in}."
            )
        got = 0 if condition is None else int(condition.shape[1])
        if condition is not None and len(condition) not in (1, len(features)):
            raise UserError(
                f"there are {len(features)} sentences and {len(condition)} conditions; they must "
                "be as many, or one condition for all."
            )
        if got == self.dim_condition:
            return
        if not got:
            raise UserError(
                f"this {kind} head takes the features of each condition as well, "
                f"(n, {self.dim_condition}); none were given."
            )
        wanted = f"{self.dim_condition} dimensions" if self.dim_condition else "none"
        raise UserError(
            f"the conditions have {got} dimensions; this {kind} head was fitted on {wanted}."
        )


def cosine(first: Array, second: Array) -> Array:
    """Return the cosine of each row of ``first`` with that of ``second``, (n,) float32.

    A zero vector has cosine 0 with everything: it says nothing of its text.
    """
    product = _inner(first, second)
    norms = np.sqrt(_inner(first, first)) * np.sqrt(_inner(second, second))
    zeros = np.zeros(len(norms), dtype=np.float64)
    cosines: Array = np.divide(product, norms, out=zeros, where=norms > 0).astype(np.float32)
    return cosines


def _inner(first: Array, second: Array) -> NDArray[np.float64]:
    inner: NDArray[np.float64] = np.einsum("nd,nd->n", first, second, dtype=np.float64)
    return inner
