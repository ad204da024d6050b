"""Knowledge-graph completion: which entity has a relation to another one.

The head entity is the sentence, the relation the condition, and every entity a candidate (Hyper-CL,
section 3.3). Each triple asks twice: (h, r, ?) and, by the relation's other direction, (t, r', ?).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import MatrixLike
from llmcond.data.datasets import DataOptions
from llmcond.errors import UserError
from llmcond.heads import QueryArrays, joint_keys
from llmcond.tasks.graph import Graph, Known, both_directions, read_graph
from llmcond.tasks.ranking import QueryTexts, RankingTask


class Kgc(RankingTask[Graph]):
    """Triples of a head entity, a relation and a tail entity."""

    name, unit = "kgc", "triples"

    def read(self, data: DataOptions) -> Graph:
        """Return a graph; see :func:`llmcond.tasks.graph.read_graph`."""
        self.check_options(data)
        if data.source is not None and not isinstance(data.source, str | Path):
            raise UserError(
                f"data is {type(data.source).__name__}; the task {self.name} reads a folder with "
                "train, valid and test triples, and texts of entities and relations."
            )
        return read_graph(data.source)

    def load(self, folder: Path, record: Mapping[str, Any]) -> Graph:
        """Return the graph of a run."""
        return Graph.load(folder)

    def counted(self, dataset: Graph) -> str:
        """Return how many triples each split has."""
        splits = ", ".join(f"{len(own):,} {name}" for name, own in dataset.splits.items())
        n, relations = dataset.n_entities, dataset.n_relations
        return f"{splits} triples of {n:,} entities and {relations:,} relations"

    def texts(self, dataset: Graph) -> QueryTexts:
        """Return the texts of all entities, and of each relation in both directions."""
        entities, relations = dataset.entities.texts, dataset.relations
        queries = np.concatenate([dataset.queries(split) for split in dataset.splits])
        return QueryTexts(
            sentences=entities,
            conditions=[*relations.texts, *relations.inverse],
            candidates=entities,
            asked=np.unique(queries[:, :2].astype(np.int64), axis=0),
            names=("entity", "relation", "entity"),
        )

    def known(self, dataset: Graph) -> Known:
        """Return the known tails of each head and relation, in all splits."""
        return Known(dataset)

    def arrays(
        self,
        dataset: Graph,
        candidates: MatrixLike,
        conditions: MatrixLike | None,
        joint: MatrixLike | None,
        asked: NDArray[np.int64],
    ) -> QueryArrays:
        """Return the graph as heads take it; in training only train is known."""
        n, n_relations = dataset.n_entities, dataset.n_relations
        train = dataset.splits["train"]
        keys = joint_keys(asked[:, 0], asked[:, 1], n_relations)
        return QueryArrays(
            entities=candidates,
            triples=train,
            n_relations=n_relations,
            known=Known(both_directions(train, n_relations), n),
            relations=conditions,
            joint=joint,
            joint_of=None if joint is None else keys,
        )
