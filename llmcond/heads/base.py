"""Fitted heads, and a cache of the matrices that a hypernetwork generates."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from llmcond.arrays import Array, Gathered, MatrixLike, as_matrix, cosine
from llmcond.errors import UserError
from llmcond.heads.batches import SharedConditions
from llmcond.heads.module import AT_ONCE, HeadModule
from llmcond.heads.pairs import Fit
from llmcond.heads.plain import ACTIVATIONS, DenseLayer, check_features, transform_blocks
from llmcond.heads.settings import Sizes
from llmcond.system import choose_device


@dataclass(frozen=True, eq=False)
class Fitted:
    """What fitting gives, and what is saved: a module, and how it was made.

    Attributes:
        kind: the name that recipes and head.json have for its family.
        family: its class, or that of each head of an ensemble.
        module: with its parameters, as :meth:`HeadModule.finished` leaves it.
        seed: of initialisation, dropout and the order of rows.
        fit: how fitting went.
        Sizes: the sizes that modules are made with besides their settings, and that head.json
            records.
        refusal: what an error says of a head of another class where one of this class is needed.
    """

    Sizes: ClassVar[type[Sizes]] = Sizes
    refusal: ClassVar[str]

    kind: str
    family: type[HeadModule]
    module: HeadModule
    seed: int
    fit: Fit = field(default_factory=Fit)

    @property
    def settings(self) -> Any:
        """Return what it was fitted with."""
        return self.module.settings

    @property
    def dim_in(self) -> int:
        """Return the size of the features."""
        return self.module.dim_in

    @property
    def dim_condition(self) -> int:
        """Return the size of the condition's features; 0 where it takes none."""
        return self.module.dim_condition

    @property
    def features(self) -> str:
        """Return which features of a sentence it takes: ``joint``, ``separate`` or ``both``."""
        return str(getattr(self.settings, "features", self.family.features))

    @property
    def conditioned(self) -> bool:
        """Return whether it takes the condition's own features."""
        return self.family.conditioned

    @property
    def is_identity(self) -> bool:
        """Return whether embeddings are the features as they are."""
        return self.family.is_identity

    @property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """Return its parameters, by the names that head.safetensors has."""
        return {name: value.cpu().numpy() for name, value in self.module.state_dict().items()}

    @property
    def dim_out(self) -> int:
        """Return the size of the embeddings."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class FittedHead(Fitted):
    """A fitted head: an immutable value that turns features into embeddings."""

    refusal = "ranks candidates and compares no pairs"

    @property
    def generates_matrices(self) -> bool:
        """Return whether it makes a matrix of each condition."""
        return self.module.generates_matrices

    @property
    def compares_by_cosine(self) -> bool:
        """Return whether the similarity of embeddings is their cosine."""
        return self.family.similarity is HeadModule.similarity

    @property
    def dim_out(self) -> int:
        """Return the size of the embeddings."""
        one = np.zeros((1, self.dim_in), dtype=np.float32)
        condition = np.zeros((1, self.dim_condition), dtype=np.float32)
        return int(self.transform(one, condition if self.dim_condition else None).shape[1])

    def to(self, device: str) -> FittedHead:
        """Return the head on a device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
        return replace(self, module=copy.deepcopy(self.module).to(choose_device(device)))

    def transform(self, features: MatrixLike, condition: MatrixLike | None = None) -> Array:
        """Return embeddings, (n, k) float32, of features, (n, dim).

        Heads that take conditions take (n, dim_c) of them, or (1, dim_c) of one for all.

        Raises:
            UserError: features of another size, or conditions that are missing or not wanted.
        """
        check_features(self, features, condition)
        n = len(features)
        if condition is not None and len(condition) == 1:
            condition = Gathered(condition, np.zeros(n, dtype=np.int64))
        shared, sides = SharedConditions(condition), [as_matrix(features)]
        device = next(iter(self.module.state_dict().values()), torch.empty(0)).device

        def embed(rows: slice) -> Array:
            batch = shared.batch(sides, rows, torch.float32)
            with torch.inference_mode():
                embedded: Array = self.module(*batch.to(device)).cpu().numpy()
            return embedded

        return transform_blocks(embed, n)

    def similarity(
        self, first: MatrixLike, second: MatrixLike, condition: MatrixLike | None = None
    ) -> Array:
        """Return how similar two sets of features are, (n,) float32; see :meth:`compare`."""
        return self.compare(self.transform(first, condition), self.transform(second, condition))

    def compare(self, first: Array, second: Array) -> Array:
        """Return how similar embeddings are, (n, k) twice -> (n,): as a rule their cosine."""
        if self.compares_by_cosine:
            return cosine(first, second)
        with torch.inference_mode():
            sides = [torch.from_numpy(np.ascontiguousarray(side)) for side in (first, second)]
            return np.asarray(self.module.similarity(*sides).float().numpy())

    def dense_layers(self, condition: Array | None = None) -> Sequence[DenseLayer[Any]] | None:
        """Return the layers that it is under one condition, (1, dim_c).

        None: it is no such layers; see :meth:`HeadModule.dense_layers`.
        """
        return self.module.dense_layers(None if condition is None else torch.from_numpy(condition))

    def matrix_norms(self, condition: MatrixLike) -> NDArray[np.float64]:
        """Return the Frobenius norm of the matrix W_c of each condition, (u,).

        See Hyper-CL, section 5.4.1. In low rank from the factors' own small products, W_c never
        formed: ||W_1 W_2||^2 = trace((W_1^T W_1)(W_2 W_2^T)).

        Raises:
            UserError: the head makes no matrices.
        """
        if not self.generates_matrices:
            raise UserError(f"a {self.kind} head makes no matrices.")
        norms = [np.zeros(0)]
        for start in range(0, len(condition), AT_ONCE):
            part = as_matrix(condition).read(slice(start, start + AT_ONCE))
            factors = [f.astype(np.float64) for f in self.module.generated_matrices(part)]
            if len(factors) == 1:
                norms.append(np.sqrt(np.square(factors[0]).sum(axis=(1, 2))))
                continue
            left = np.einsum("uak,ual->ukl", factors[0], factors[0])
            right = np.einsum("ukb,ulb->ukl", factors[1], factors[1])
            norms.append(np.sqrt(np.maximum(np.einsum("ukl,ukl->u", left, right), 0)))
        return np.concatenate(norms)


class ConditionCache:
    """A fitted hypernetwork that keeps the matrices of conditions (Hyper-CL, section 3.5).

    A condition that comes again, in any later call, costs two small products and no generated
    matrix. The least recently used ones are dropped above a budget in bytes. Calls from several
    threads are safe.

    Attributes:
        hits, misses: distinct conditions of all calls that were there, and that were not.
    """

    def __init__(self, head: FittedHead, budget: int = 2**28) -> None:
        if not head.generates_matrices:
            raise UserError(f"a {head.kind} head makes no matrices that could be kept.")
        self.head, self.hits, self.misses = head, 0, 0
        self._budget, self._size = budget, 0
        self._kept: OrderedDict[bytes, list[Array]] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[ConditionCache], tuple[FittedHead, int]]:
        """Pickle it empty."""
        return type(self), (self.head, self._budget)

    def transform(self, features: MatrixLike, condition: MatrixLike | None) -> Array:
        """Return embeddings, (n, k) float32; as :meth:`FittedHead.transform`."""
        check_features(self.head, features, condition)
        n, features = len(features), as_matrix(features)
        shared = as_matrix(np.empty((0, 0)) if condition is None else condition)
        first, which = shared.unique()
        which = np.broadcast_to(which, n)
        order = np.argsort(which, kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(first)))
        output = np.empty((n, self.head.settings.dim), dtype=np.float32)
        for start in range(0, len(first), AT_ONCE):
            part = first[start : start + AT_ONCE]
            for i, factors in enumerate(self._factors(shared.read(part)), start):
                rows = order[ends[i - 1] if i else 0 : ends[i]]
                values = features.read(rows)
                for factor in factors:
                    values = values @ factor
                output[rows] = values
        return ACTIVATIONS[self.head.settings.activation](output)

    def _factors(self, vectors: Array) -> list[list[Array]]:
        """Return the factors of conditions, made where they are not kept."""
        keys = [vector.tobytes() for vector in vectors]
        with self._lock:
            found = {key: self._kept[key] for key in keys if key in self._kept}
            absent = [i for i, key in enumerate(keys) if key not in found]
            self.hits += len(keys) - len(absent)
            self.misses += len(absent)
            if absent:
                made = self.head.module.generated_matrices(vectors[absent])
                for position, i in enumerate(absent):
                    # Copies: a view would keep what was made of all of them.
                    found[keys[i]] = [factor[position].copy() for factor in made]
            for key in keys:
                if key not in self._kept:
                    self._size += len(key) + sum(factor.nbytes for factor in found[key])
                self._kept[key] = found[key]
                self._kept.move_to_end(key)
            while self._size > self._budget:
                old, gone = self._kept.popitem(last=False)
                self._size -= len(old) + sum(factor.nbytes for factor in gone)
        return [found[key] for key in keys]


def fitted_class(family: type[HeadModule]) -> type[Fitted]:
    """Return the class of a family's fitted heads."""
    return family.Fitted or FittedHead
