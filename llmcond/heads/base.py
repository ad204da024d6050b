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
from typing_extensions import override

from llmcond.arrays import Array, MatrixLike, SharedRows, as_matrix, cosine
from llmcond.errors import UserError
from llmcond.heads.batches import SharedConditions
from llmcond.heads.module import CONDITIONS_PER_BLOCK, HeadModule
from llmcond.heads.numpy_heads import ACTIVATIONS, DenseLayer, check_features, transform_blocks
from llmcond.heads.pairs import FitReport
from llmcond.heads.settings import Sizes
from llmcond.system import choose_device


@dataclass(frozen=True, eq=False)
class FittedModule:
    """A fitted module with its settings, as it is saved.

    Attributes:
        kind: name of its family in recipes and in head.json.
        family: class of the module, or of each member of an ensemble.
        module: the module with its parameters, as ``HeadModule.freeze`` returns it.
        seed: random seed of initialisation, dropout and row order.
        fit: record of the fit.
        Sizes: dataclass of the sizes that the module's constructor takes besides its settings; they
            are recorded in head.json.
        mismatch_reason: predicate with which errors reject a head of another class ("it ...").
    """

    Sizes: ClassVar[type[Sizes]] = Sizes
    mismatch_reason: ClassVar[str]

    kind: str
    family: type[HeadModule]
    module: HeadModule
    seed: int
    fit: FitReport = field(default_factory=FitReport)

    @property
    def settings(self) -> Any:
        """Settings that it was fitted with."""
        return self.module.settings

    @property
    def dim_in(self) -> int:
        """Size of the sentence features."""
        return self.module.dim_in

    @property
    def dim_condition(self) -> int:
        """Size of the condition features; 0 if it reads none."""
        return self.module.dim_condition

    @property
    def features(self) -> str:
        """Sentence features that it reads: ``joint``, ``separate`` or ``both``."""
        return str(getattr(self.settings, "features", self.family.features))

    @property
    def conditioned(self) -> bool:
        """Whether it reads the features of the condition."""
        return self.family.conditioned

    @property
    def is_identity(self) -> bool:
        """Whether embeddings are the unchanged features."""
        return self.family.is_identity

    @property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """Parameters by their names in the weights file."""
        return {name: value.cpu().numpy() for name, value in self.module.state_dict().items()}

    @property
    def dim_out(self) -> int:
        """Size of the embeddings."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class FittedHead(FittedModule):
    """A fitted head, which maps features to embeddings and never changes.

    Create one with ``fit_recipe`` or ``load_head``.

    Attributes:
        kind: name of its family in recipes and in head.json.
        family: class of the module, or of each member of an ensemble.
        module: the module with its parameters.
        seed: random seed of initialisation, dropout and row order.
        fit: record of the fit, and notes for the user.

    Examples:
        >>> import numpy as np
        >>> from llmcond.heads import PairArrays, fit_recipe, load_recipe
        >>> first, second = np.random.default_rng(0).normal(size=(2, 20, 8))
        >>> pairs = PairArrays(first, second, rating=np.linspace(0, 1, 20))
        >>> recipe = load_recipe("pca").with_settings({"dim": 3}, "example")
        >>> head = fit_recipe(recipe, pairs, None, seed=0, on_epoch=lambda *_: None)
        >>> head.transform(first).shape
        (20, 3)
        >>> head.similarity(first, second).shape
        (20,)
    """

    mismatch_reason = "ranks candidates and compares no pairs"

    @property
    def generates_matrices(self) -> bool:
        """Whether it generates a matrix from each condition."""
        return self.module.generates_matrices

    @property
    def compares_by_cosine(self) -> bool:
        """Whether the similarity of embeddings is their cosine."""
        return self.family.similarity is HeadModule.similarity

    @property
    @override
    def dim_out(self) -> int:
        features = np.zeros((1, self.dim_in), dtype=np.float32)
        condition = np.zeros((1, self.dim_condition), dtype=np.float32)
        return int(self.transform(features, condition if self.dim_condition else None).shape[1])

    def to(self, device: str) -> FittedHead:
        """Copy the head to a device.

        Args:
            device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

        Returns:
            A copy of the head on that device.

        Raises:
            UserError: the machine does not have this device.
        """
        return replace(self, module=copy.deepcopy(self.module).to(choose_device(device)))

    def transform(self, features: MatrixLike, condition: MatrixLike | None = None) -> Array:
        """Compute embeddings of features.

        Args:
            features: (n, dim) features of sentences.
            condition: (n, dim_c) features of the conditions, or (1, dim_c) if all rows share one;
                None for heads that read no conditions.

        Returns:
            (n, k) float32 embeddings.

        Raises:
            UserError: the features have another size, or conditions are missing or not expected.
        """
        check_features(self, features, condition)
        n = len(features)
        if condition is not None and len(condition) == 1:
            condition = SharedRows(condition, np.zeros(n, dtype=np.int64))
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
        """Compute the similarity of each row of two feature matrices.

        Args:
            first: (n, dim) features of the first sentences.
            second: (n, dim) features of the second sentences.
            condition: (n, dim_c) or (1, dim_c) features of the conditions; None for heads that read
                none.

        Returns:
            (n,) float32 similarities, as ``compare`` computes them.

        Raises:
            UserError: the features have another size, or conditions are missing or not expected.
        """
        return self.compare(self.transform(first, condition), self.transform(second, condition))

    def compare(self, first: Array, second: Array) -> Array:
        """Compute the similarity of each row of two embedding matrices.

        Args:
            first: (n, k) embeddings.
            second: (n, k) embeddings.

        Returns:
            (n,) similarities: cosines, unless the head's family defines another similarity.
        """
        if self.compares_by_cosine:
            return cosine(first, second)
        with torch.inference_mode():
            sides = [torch.from_numpy(np.ascontiguousarray(side)) for side in (first, second)]
            return np.asarray(self.module.similarity(*sides).float().numpy())

    def dense_layers(self, condition: Array | None = None) -> Sequence[DenseLayer[Any]] | None:
        """Express the head as dense layers under one condition.

        Args:
            condition: (1, dim_c) features of the condition; None for heads that read none.

        Returns:
            The layers, or None if the head cannot be expressed that way; see
            ``HeadModule.dense_layers``.
        """
        return self.module.dense_layers(None if condition is None else torch.from_numpy(condition))

    def matrix_norms(self, condition: MatrixLike) -> NDArray[np.float64]:
        """Compute the Frobenius norm of the matrix W_c of each condition (Hyper-CL, section 5.4.1).

        In low rank the norm is computed from small products of the factors, without forming W_c:
        ||W_1 W_2||^2 = trace((W_1^T W_1)(W_2 W_2^T)).

        Args:
            condition: (u, dim_c) features of the conditions.

        Returns:
            (u,) norms.

        Raises:
            UserError: the head generates no matrices.
        """
        if not self.generates_matrices:
            raise UserError(f"a {self.kind} head generates no matrices.")
        norms = [np.zeros(0)]
        for start in range(0, len(condition), CONDITIONS_PER_BLOCK):
            part = as_matrix(condition).read(slice(start, start + CONDITIONS_PER_BLOCK))
            factors = [f.astype(np.float64) for f in self.module.generated_matrices(part)]
            if len(factors) == 1:
                norms.append(np.sqrt(np.square(factors[0]).sum(axis=(1, 2))))
                continue
            left = np.einsum("uak,ual->ukl", factors[0], factors[0])
            right = np.einsum("ukb,ulb->ukl", factors[1], factors[1])
            norms.append(np.sqrt(np.maximum(np.einsum("ukl,ukl->u", left, right), 0)))
        return np.concatenate(norms)


class ConditionCache:
    """A fitted hypernetwork with a cache of the matrices of conditions (Hyper-CL, section 3.5).

    A condition that occurs again, in any later call, needs two small products and no new matrix.
    The least recently used matrices are dropped when the cache exceeds its budget in bytes. The
    cache is safe to use from several threads.

    Attributes:
        hits: number of distinct conditions, over all calls, that were in the cache.
        misses: number of those that were not.
    """

    def __init__(self, head: FittedHead, budget: int = 2**28) -> None:
        if not head.generates_matrices:
            raise UserError(f"a {head.kind} head generates no matrices that could be cached.")
        self.head, self.hits, self.misses = head, 0, 0
        self._budget, self._size = budget, 0
        self._cached: OrderedDict[bytes, list[Array]] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[ConditionCache], tuple[FittedHead, int]]:
        """Pickle the head without cached matrices."""
        return type(self), (self.head, self._budget)

    def transform(self, features: MatrixLike, condition: MatrixLike | None) -> Array:
        """Compute embeddings, (n, k) float32, as ``FittedHead.transform`` does."""
        check_features(self.head, features, condition)
        n, features = len(features), as_matrix(features)
        shared = as_matrix(np.empty((0, 0)) if condition is None else condition)
        first, condition_index = shared.unique()
        condition_index = np.broadcast_to(condition_index, n)
        order = np.argsort(condition_index, kind="stable")
        ends = np.cumsum(np.bincount(condition_index, minlength=len(first)))
        output = np.empty((n, self.head.settings.dim), dtype=np.float32)
        for start in range(0, len(first), CONDITIONS_PER_BLOCK):
            part = first[start : start + CONDITIONS_PER_BLOCK]
            for i, factors in enumerate(self._generate_factors(shared.read(part)), start):
                rows = order[ends[i - 1] if i else 0 : ends[i]]
                values = features.read(rows)
                for factor in factors:
                    values = values @ factor
                output[rows] = values
        return ACTIVATIONS[self.head.settings.activation](output)

    def _generate_factors(self, vectors: Array) -> list[list[Array]]:
        """Return the factors of conditions; generate those that are not cached."""
        keys = [vector.tobytes() for vector in vectors]
        with self._lock:
            factors = {key: self._cached[key] for key in keys if key in self._cached}
            missing = [i for i, key in enumerate(keys) if key not in factors]
            self.hits += len(keys) - len(missing)
            self.misses += len(missing)
            if missing:
                generated = self.head.module.generated_matrices(vectors[missing])
                for position, i in enumerate(missing):
                    # Copy, as a view would keep the matrices of all these conditions in memory.
                    factors[keys[i]] = [factor[position].copy() for factor in generated]
            for key in keys:
                if key not in self._cached:
                    self._size += len(key) + sum(factor.nbytes for factor in factors[key])
                self._cached[key] = factors[key]
                self._cached.move_to_end(key)
            while self._size > self._budget:
                dropped_key, dropped_factors = self._cached.popitem(last=False)
                self._size -= len(dropped_key) + sum(factor.nbytes for factor in dropped_factors)
        return [factors[key] for key in keys]


def fitted_class(family: type[HeadModule]) -> type[FittedModule]:
    """Return the class of fitted heads of a family."""
    return family.Fitted or FittedHead
