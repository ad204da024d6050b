"""The arrays of a knowledge graph on which heads are fitted: queries and candidates.

A query is a head entity and a relation, and every entity is a candidate. Bi-encoders read the joint
features e(h; r) of a query, tri-encoders read e(h) and e(r) separately (Hyper-CL, ACL 2024, section
4.2).
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
from llmcond.kinds.ranking.graph import KnownTriples, adjacency, both_directions


@dataclass(frozen=True, slots=True)
class QueryArrays:
    """The features and training triples of a graph, in the form that heads read.

    Attributes:
        entities: features of all entities, which are the candidates: (n, d), any float type.
        triples: head, relation and tail of the training split: (m, 3), with relations below R.
        n_relations: number of relations, R. Relation r + R is relation r from tail to head.
        known: known tails of the training split, in both directions.
        relations: features of relations, (2 R, d_c), for heads that read them.
        joint: features of the distinct joint inputs (h, r), (j, d), for heads that read them.
        joint_input_keys: keys of these joint inputs in ascending order, (j,) int64; see
            ``joint_keys``.
    """

    entities: MatrixLike
    triples: NDArray[np.integer[Any]]
    n_relations: int
    known: KnownTriples
    relations: MatrixLike | None = None
    joint: MatrixLike | None = None
    joint_input_keys: Positions | None = None

    @property
    def dims(self) -> tuple[int, int, int]:
        """The sizes that a head is created with: d, d_c (0 without relation features) and R."""
        dim_condition = 0 if self.relations is None else int(self.relations.shape[1])
        return int(self.entities.shape[1]), dim_condition, self.n_relations

    def queries(self) -> Positions:
        """Return the triples in both directions, (2 m, 3): (h, r, t), and then (t, r + R, h)."""
        return both_directions(self.triples, self.n_relations).astype(np.int64)


def joint_keys(
    heads: NDArray[np.integer[Any]], relations: NDArray[np.integer[Any]], n_relations: int
) -> Positions:
    """Return the key h * 2 R + r of each joint input of a head h and a relation r, (m,) int64."""
    return np.asarray(heads, dtype=np.int64) * (2 * n_relations) + relations


class QueryFeatures:
    """Reads the features of entities, relations and queries of a graph, as float32 tensors.

    Features are scaled to unit length, as SimKGC's pooling does. The mean of an entity's neighbours
    is not scaled.
    """

    def __init__(self, arrays: QueryArrays) -> None:
        self.arrays = arrays
        self._entities = UnitRows(arrays.entities)

    def with_joint(self, joint: MatrixLike, joint_of: Positions) -> QueryFeatures:
        """Return a copy with other joint features, (j, d), of the keys ``joint_of``, (j,)."""
        features = copy.copy(self)
        features.arrays = replace(self.arrays, joint=joint, joint_input_keys=joint_of)
        features.__dict__.pop("_joint", None)
        return features

    @cached_property
    def relations(self) -> Tensor | None:
        """The features of all relations, (2 R, d_c); None if there are none."""
        relations = self.arrays.relations
        return None if relations is None else UnitRows(relations).read(np.arange(len(relations)))

    @cached_property
    def _joint(self) -> UnitRows | None:
        return None if self.arrays.joint is None else UnitRows(self.arrays.joint)

    @cached_property
    def _graph(self) -> csr_array:
        return adjacency(self.arrays.triples, len(self.arrays.entities))

    @cached_property
    def _sums(self) -> Array | None:
        """The sums of the features of each entity's neighbours, (n, d); None if too large."""
        table = self._entities.table
        return None if table is None else self._graph @ table.numpy()

    def entities(
        self, rows: Positions, neighbours: bool = False, drop: Positions | None = None
    ) -> Tensor:
        """Return the features of entities.

        Args:
            rows: entities, (m,).
            neighbours: whether to append the mean of each entity's neighbours.
            drop: one entity per row, (m,), that does not count as a neighbour: the other end of
                the triple to predict. The mean is then (sum - e_drop) / (degree - 1), and zero if
                no neighbour is left.

        Returns:
            Features of shape (m, d), or (m, 2 d) with neighbours.
        """
        features = self._entities.read(rows)
        return torch.cat([features, self._means(rows, drop)], dim=1) if neighbours else features

    def heads(
        self,
        rows: Positions,
        relations: Positions,
        joint: bool,
        neighbours: bool = False,
        drop: Positions | None = None,
    ) -> Tensor:
        """Return the features of the queries' heads.

        Args:
            rows: head entities, (m,).
            relations: relations of the queries, (m,).
            joint: whether to read the joint features of head and relation.
            neighbours: as in ``entities``.
            drop: as in ``entities``.

        Returns:
            Features of shape (m, d), or (m, 2 d) with neighbours.

        Raises:
            UserError: Joint features are missing.
        """
        if not joint:
            return self.entities(rows, neighbours, drop)
        features = self._joint_features(rows, relations)
        return torch.cat([features, self._means(rows, drop)], dim=1) if neighbours else features

    def _joint_features(self, rows: Positions, relations: Positions) -> Tensor:
        keys = self.arrays.joint_input_keys
        if self._joint is None or keys is None or not len(keys):
            raise UserError(
                "this head reads joint features of head entities and relations, and the data has "
                "none. Extract them with a prompt that joins both."
            )
        query_keys = joint_keys(rows, relations, self.arrays.n_relations)
        positions = np.minimum(np.searchsorted(keys, query_keys), len(keys) - 1)
        n_missing = int((keys[positions] != query_keys).sum())
        if n_missing:
            raise UserError(
                f"{n_missing:,} of {len(query_keys):,} queries have no joint features. Extract the "
                "features of all these queries, or use a head for separate features."
            )
        return self._joint.read(positions)

    def _means(self, rows: Positions, drop: Positions | None) -> Tensor:
        graph = self._graph
        degree = graph.indptr[rows + 1] - graph.indptr[rows]
        if self._sums is not None:
            sums = self._sums[rows]
        else:
            subgraph = graph[rows]
            neighbours, columns = np.unique(subgraph.indices, return_inverse=True)
            shape = len(rows), len(neighbours)
            local = csr_array((subgraph.data, columns.reshape(-1), subgraph.indptr), shape=shape)
            sums = local @ self._entities.read(neighbours).numpy()
        if drop is not None:
            linked = rows != drop  # An entity is not its own neighbour.
            sums = sums - self._entities.read(drop).numpy() * linked[:, None]
            degree = degree - linked
        # Subtracting the only term of a sum may leave a rounding error, so the mean is set to 0.
        means = sums / np.maximum(degree, 1)[:, None] * (degree > 0)[:, None]
        return torch.from_numpy(means.astype(np.float32))
