"""A fitted hypernetwork with a cache of the matrices that it makes of conditions."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from llmcond.arrays import Array, MatrixLike, as_matrix
from llmcond.errors import UserError
from llmcond.heads.base import FittedHead
from llmcond.heads.layers import ACTIVATIONS
from llmcond.heads.module import AT_ONCE


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
        self.head.check(features, condition)
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
