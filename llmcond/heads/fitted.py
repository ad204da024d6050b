"""Fitted heads with a cache of generated matrices, and the batches of rows that heads read."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from llmcond.base.arrays import (
    Array,
    DenseMatrix,
    Matrix,
    MatrixLike,
    Positions,
    SharedRows,
    as_matrix,
    cosine,
)
from llmcond.base.system import move_to_device
from llmcond.heads.module import (
    CONDITIONS_PER_BLOCK,
    Batch,
    HeadModule,
    adjacent_pairs,
    contrast_groups,
    members_of,
)
from llmcond.heads.numpy_heads import (
    ACTIVATIONS,
    DenseLayer,
    FitReport,
    PairArrays,
    check_features,
    transform_blocks,
)
from llmcond.heads.settings import Sizes, TrainingSettings

#: Features that are computed, gathered or scaled to length 1 are kept in memory as plain float32
#: arrays if these need at most this many bytes.
_DENSE_BYTES = 2**29
#: Number of adjacent rows that are read from disk at a time, and number of such blocks that are
#: shuffled together.
_BLOCK, _BLOCKS = 512, 16
#: Number of rows scored at a time.
_SCORED = 4_096


class GroupSampler:
    """Orders rows by a permutation of their groups, (n,), and cuts batches between groups.

    The rows of a group stay together: the two conditions of a sentence pair, for example.
    """

    def __init__(self, group: Positions) -> None:
        self.group: Positions = np.unique(group, return_inverse=True)[1].reshape(-1)

    def __len__(self) -> int:
        """Return the number of groups."""
        return int(self.group.max()) + 1

    def order(self, permutation: Positions) -> tuple[Positions, Positions]:
        """Return all rows, (n,), sorted by their permuted groups, and the groups' bounds, (g + 1,).

        Args:
            permutation: (g,) new position of each group.
        """
        rank = permutation[self.group]
        rows = np.argsort(rank, kind="stable")
        return rows, np.flatnonzero(np.diff(rank[rows], prepend=-1, append=len(rank)))

    def batches(self, permutation: Positions, size: int) -> Iterator[Positions]:
        """Yield batches of at most ``size`` rows, (b,), cut where the next group would not fit.

        A group larger than ``size`` becomes a batch by itself.
        """
        rows, bounds = self.order(permutation)
        group = 0
        while group < len(self):
            last = int(np.searchsorted(bounds, bounds[group] + size, side="right")) - 1
            last = max(last, group + 1)
            yield rows[bounds[group] : bounds[last]]
            group = last


class SharedConditions:
    """The conditions of rows; each distinct one is read once per batch."""

    def __init__(self, vectors: MatrixLike | None) -> None:
        """Store (n, dim_c) features of conditions; None for heads that read none."""
        self._vectors = None if vectors is None else as_matrix(vectors)
        self.which: Positions | None = None
        if self._vectors is not None:
            self._first, self.which = self._vectors.unique()

    def batch(self, sides: list[Matrix], rows: Any, dtype: torch.dtype) -> Batch:
        """Return rows of several matrices, concatenated, with their conditions."""
        parts = [_to_tensor(side, rows, dtype) for side in sides]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._vectors is None or self.which is None:
            return Batch(x)
        distinct, which = np.unique(self.which[rows], return_inverse=True)
        condition = _to_tensor(self._vectors, self._first[distinct], torch.float32)
        return Batch(x, condition, torch.from_numpy(which.reshape(-1)).repeat(len(parts)))


def _to_tensor(matrix: Matrix, rows: Any, dtype: torch.dtype) -> Tensor:
    # torch rejects arrays that are read-only or have negative strides.
    return torch.from_numpy(np.require(np.asarray(matrix[rows]), requirements=["C", "W"])).to(dtype)


#: A batch of the n first sentences followed by the n second ones; (n,) float32 ratings; and for
#: objectives the (n,) sentence pair of each row and the (p, 2) positions of contrastive pairs.
RatedRows = tuple[Batch, Tensor, Tensor | None, Tensor | None]


class Loader:
    """Batches of rows; rows on disk are read when needed.

    Attributes:
        steps: number of batches in the last epoch.
        rating: (n,) ratings of all rows.
    """

    def __init__(
        self,
        pairs: PairArrays,
        settings: TrainingSettings,
        generator: torch.Generator,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._settings, self._generator = settings, generator
        self._dtype, self._device = dtype, device
        self._sides = [as_matrix(pairs.first), as_matrix(pairs.second)]
        self._on_disk = any(side.on_disk for side in self._sides)
        if not self._on_disk:
            small = 4 * math.prod(self._sides[0].shape) <= _DENSE_BYTES
            self._sides = [
                DenseMatrix(side.read()) if side.parts and small else side for side in self._sides
            ]
        self._conditions = SharedConditions(pairs.condition)
        self.rating = pairs.rating
        self._pair = pairs.pair
        pair = pairs.pair if settings.contrasts else None
        self._group = None if pair is None else contrast_groups(pair)
        self.steps = -(-len(pairs) // settings.batch_size)

    def shuffled(self) -> Iterator[RatedRows]:
        """Yield batches of all rows in a new random order."""
        self.steps = 0
        device = self._device
        for sides, rows in self._read_parts():
            for positions in self._cut_batches(rows):
                batch_rows = rows[positions]
                self.steps += 1
                batch = self._conditions.batch(sides, batch_rows, self._dtype).to(device)
                rating = torch.from_numpy(self.rating[batch_rows].astype(np.float32))
                pair = contrastive = None
                if self._pair is not None:
                    pair = move_to_device(torch.from_numpy(self._pair[batch_rows]), device)
                if self._group is not None:
                    adjacent = torch.from_numpy(adjacent_pairs(self._group[batch_rows]))
                    contrastive = move_to_device(adjacent, device)
                yield batch, move_to_device(rating, device), pair, contrastive

    def in_order(self) -> Iterator[Batch]:
        """Yield batches of all rows in their order."""
        for start in range(0, len(self.rating), _SCORED):
            rows = np.arange(start, min(start + _SCORED, len(self.rating)))
            yield self._conditions.batch(self._sides, rows, self._dtype).to(self._device)
            self._release()

    def _read_parts(self) -> Iterator[tuple[list[Matrix], Positions]]:
        """Yield matrices with those of their rows that are shuffled together."""
        n = len(self.rating)
        if not self._on_disk:
            yield self._sides, np.arange(n)
            return
        starts = np.arange(0, n, _BLOCK)
        if self._group is not None:
            # Keep both rows of a contrastive pair in the same block.
            starts[1:] += self._group[starts[1:]] == self._group[starts[1:] - 1]
            # The last block may have contained only that row.
            starts = starts[starts < n]
        ends = np.append(starts[1:], n)
        order = self._permute(len(starts))
        for start in range(0, len(order), _BLOCKS):
            blocks = order[start : start + _BLOCKS]
            rows = np.concatenate([np.arange(starts[block], ends[block]) for block in blocks])
            # Sort, so that adjacent rows are read together, in their order on disk.
            stored = np.sort(rows)
            position = np.zeros(n, dtype=np.int64)
            position[stored] = np.arange(len(stored))
            sides: list[Matrix] = [SharedRows(side[stored], position) for side in self._sides]
            self._release()
            yield sides, rows

    def _release(self) -> None:
        for side in self._sides:
            side.release()  # has no effect on arrays in memory

    def _permute(self, n: int) -> Positions:
        permutation: Positions = torch.randperm(n, generator=self._generator).numpy()
        return permutation

    def _cut_batches(self, rows: Positions) -> Iterable[Positions]:
        """Return positions in ``rows``, batch by batch, in a new random order."""
        size = self._settings.batch_size
        if self._group is not None:
            sampler = GroupSampler(self._group[rows])
            return sampler.batches(self._permute(len(sampler)), size)
        if self._settings.batches == "conditions" and self._conditions.which is not None:
            sampler = GroupSampler(self._conditions.which[rows])
            order, _ = sampler.order(self._permute(len(sampler)))
        else:
            order = self._permute(len(rows))
        return np.split(order, range(size, len(order), size))


class UnitRows:
    """The rows of a matrix scaled to length 1.

    Attributes:
        table: all rows, if they fit in memory; otherwise None.
    """

    def __init__(self, vectors: MatrixLike) -> None:
        self._matrix = as_matrix(vectors)
        small = 4 * math.prod(self._matrix.shape) <= _DENSE_BYTES
        self.table = normalize(torch.from_numpy(self._matrix.read())) if small else None

    def read(self, rows: Positions) -> Tensor:
        """Return rows by position, (m, d) float32."""
        if self.table is not None:
            return self.table[torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))]
        # Read rows on disk in their order, each one once.
        distinct, which = np.unique(rows, return_inverse=True)
        vectors = torch.from_numpy(self._matrix.read(distinct))
        return normalize(vectors)[torch.from_numpy(which.reshape(-1))]


@dataclass(frozen=True, eq=False)
class FittedModule:
    """A fitted module with its settings, as it is saved.

    Attributes:
        kind: name of its family in recipes and in head.json.
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
    module: HeadModule
    seed: int
    fit: FitReport = field(default_factory=FitReport)

    @property
    def family(self) -> type[HeadModule]:
        """Class of the module, or of each member of an ensemble."""
        return type(members_of(self.module)[0])

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

        def embed(rows: slice) -> Array:
            batch = shared.batch(sides, rows, torch.float32)
            with torch.inference_mode():
                embedded: Array = self.module(*batch).numpy()
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
        """
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
    """

    def __init__(self, head: FittedHead, budget: int = 2**28) -> None:
        self.head, self._budget, self._size = head, budget, 0
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


def fitted_head(kind: str, module: HeadModule, seed: int, fit: FitReport = FitReport()) -> Any:
    """Freeze a module, or an ensemble, and return it as a fitted head of its family's class."""
    fitted = fitted_class(type(members_of(module)[0]))
    return fitted(kind, module.freeze(), seed, fit)
