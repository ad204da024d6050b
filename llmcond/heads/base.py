"""What every head family gives, and a head once it is fitted.

Heads know arrays only: they neither load encoders nor read rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Tensors = Mapping[str, Array]

#: Vectors transformed at a time, so that memory does not grow with their number.
_BLOCK = 65_536


@dataclass(frozen=True, slots=True)
class PairArrays:
    """The rated pairs of a split, as heads take them.

    Attributes:
        first, second: (n, dim) float32, the joint features of both sentences.
        rating: (n,) float64 on 0 to 1, no NaN.
    """

    first: Array
    second: Array
    rating: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.rating)

    @property
    def dim(self) -> int:
        """Return the features' size."""
        return int(self.first.shape[1])


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
        transform: (parameters, (n, dim) features) -> (n, k) embeddings.
    """

    kind: str
    settings: type[Any]
    fit: Callable[[PairArrays, PairArrays | None, Any, int, OnEpoch], Fit]
    transform: Callable[[Tensors, Array], Array]


@dataclass(frozen=True)
class FittedHead:
    """A fitted head: an immutable value that turns features into embeddings.

    Attributes:
        family: its kind.
        settings: what it was fitted with.
        seed: of initialisation, dropout and the order of rows.
        dim_in: size of the features.
        fit: its parameters, and how fitting went.
    """

    family: Family
    settings: Any
    seed: int
    dim_in: int
    fit: Fit

    @property
    def dim_out(self) -> int:
        """Return the size of the embeddings."""
        return int(self.transform(np.zeros((1, self.dim_in), dtype=np.float32)).shape[1])

    def transform(self, features: Array) -> Array:
        """Return embeddings, (n, k) float32, of features, (n, dim) float32."""
        blocks = [
            self.family.transform(self.fit.tensors, features[start : start + _BLOCK])
            for start in range(0, max(len(features), 1), _BLOCK)
        ]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    def similarity(self, first: Array, second: Array) -> Array:
        """Return the cosine of the embeddings of two sets of features, (n,) float32."""
        return cosine(self.transform(first), self.transform(second))


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
