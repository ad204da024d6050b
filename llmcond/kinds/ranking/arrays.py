"""Queries and candidates: the arrays of a graph that heads are fitted on.

A query is a head entity and a relation, a candidate any entity. Bi-encoders read the joint features
e(h; r) of a query, tri-encoders e(h) and e(r) by themselves (Hyper-CL, ACL 2024, section 4.2).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from llmcond.arrays import Array, MatrixLike, Positions
from llmcond.errors import UserError
from llmcond.heads.batches import UnitRows
from llmcond.kinds.ranking.graph import Known, adjacency, both_directions


@dataclass(frozen=True, slots=True)
class QueryArrays:
    """A graph's features and training triples, as heads take them.

    Attributes:
        entities: (n, d) the features of all entities, which are the candidates, in any float type.
        triples: (m, 3) head, relation, tail of the training split, relations below R.
        n_relations: R; relation r + R is r from tail to head.
        known: the known tails of training, in both directions.
        relations: (2 R, d_c) the features of relations, for heads that take them.
        joint: (j, d) the features of distinct joint inputs (h, r), for heads that take those.
        joint_of: (j,) int64 which they are of, sorted: see :func:`joint_keys`.
    """

    entities: MatrixLike
    triples: NDArray[np.integer[Any]]
    n_relations: int
    known: Known
    relations: MatrixLike | None = None
    joint: MatrixLike | None = None
    joint_of: Positions | None = None

    @property
    def dims(self) -> tuple[int, int, int]:
        """Return the sizes of what entities and relations have, and R, as a head is made for."""
        dim_condition = 0 if self.relations is None else int(self.relations.shape[1])
        return int(self.entities.shape[1]), dim_condition, self.n_relations

    def queries(self) -> Positions:
        """Return both directions of the triples, (2 m, 3): (h, r, t), and then (t, r + R, h)."""
        return both_directions(self.triples, self.n_relations).astype(np.int64)


def joint_keys(
    heads: NDArray[np.integer[Any]], relations: NDArray[np.integer[Any]], n_relations: int
) -> Positions:
    """Return (m,) int64 h * 2 R + r of heads h and relations r, which identify joint inputs."""
    return np.asarray(heads, dtype=np.int64) * (2 * n_relations) + relations


class QueryFeatures:
    """What heads read of a graph, by entities and relations: vectors of length 1, float32.

    Lengths are those of SimKGC's pooling; a mean of neighbours has that of the mean.
    """

    def __init__(self, arrays: QueryArrays) -> None:
        self.arrays = arrays
        self._entities = UnitRows(arrays.entities)

    def with_joint(self, joint: MatrixLike, joint_of: Positions) -> QueryFeatures:
        """Return the same entities and relations with other joint features (j, d) of keys (j,)."""
        found = copy.copy(self)
        found.arrays = replace(self.arrays, joint=joint, joint_of=joint_of)
        found.__dict__.pop("_joint", None)
        return found

    @cached_property
    def relations(self) -> Tensor | None:
        """Return the features of all relations, (2 R, d_c); None where there are none."""
        given = self.arrays.relations
        return None if given is None else UnitRows(given).read(np.arange(len(given)))

    @cached_property
    def _joint(self) -> UnitRows | None:
        return None if self.arrays.joint is None else UnitRows(self.arrays.joint)

    @cached_property
    def _graph(self) -> csr_array:
        return adjacency(self.arrays.triples, len(self.arrays.entities))

    @cached_property
    def _sums(self) -> Array | None:
        """Return the sums of neighbours' features, (n, d); None where they are too large."""
        table = self._entities.table
        return None if table is None else self._graph @ table.numpy()

    def entities(
        self, rows: Positions, neighbours: bool = False, drop: Positions | None = None
    ) -> Tensor:
        """Return the features of entities, (m, d), or with their neighbours' means (m, 2 d).

        ``drop``, (m,), is left out of each one's neighbours: the other end of the triple that is
        to be found. The mean is (sum - e_drop) / (degree - 1), and zero where no neighbour is left.
        """
        own = self._entities.read(rows)
        return torch.cat([own, self._means(rows, drop)], dim=1) if neighbours else own

    def heads(
        self,
        rows: Positions,
        relations: Positions,
        joint: bool,
        neighbours: bool = False,
        drop: Positions | None = None,
    ) -> Tensor:
        """Return what is read of queries' heads, (m, d) or (m, 2 d): their joint features or own.

        Raises:
            UserError: joint features that are not there.
        """
        if not joint:
            return self.entities(rows, neighbours, drop)
        own = self._joint_features(rows, relations)
        return torch.cat([own, self._means(rows, drop)], dim=1) if neighbours else own

    def _joint_features(self, rows: Positions, relations: Positions) -> Tensor:
        keys = self.arrays.joint_of
        if self._joint is None or keys is None or not len(keys):
            raise UserError(
                "this head takes joint features of heads and relations, and none were given. "
                "Extract them with a prompt that joins both."
            )
        wanted = joint_keys(rows, relations, self.arrays.n_relations)
        found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        absent = int((keys[found] != wanted).sum())
        if absent:
            raise UserError(
                f"{absent:,} of {len(wanted):,} queries have no joint features. Extract those of "
                "all queries that are asked for, or take a head for separate features."
            )
        return self._joint.read(found)

    def _means(self, rows: Positions, drop: Positions | None) -> Tensor:
        graph = self._graph
        degree = graph.indptr[rows + 1] - graph.indptr[rows]
        if self._sums is not None:
            sums = self._sums[rows]
        else:
            part = graph[rows]
            used, position = np.unique(part.indices, return_inverse=True)
            shape = len(rows), len(used)
            local = csr_array((part.data, position.reshape(-1), part.indptr), shape=shape)
            sums = local @ self._entities.read(used).numpy()
        if drop is not None:
            linked = rows != drop  # a loop is no neighbour
            sums = sums - self._entities.read(drop).numpy() * linked[:, None]
            degree = degree - linked
        # Of a sum without its only term, rounding may be left.
        means = sums / np.maximum(degree, 1)[:, None] * (degree > 0)[:, None]
        return torch.from_numpy(means.astype(np.float32))
