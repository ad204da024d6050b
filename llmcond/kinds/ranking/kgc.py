"""Knowledge-graph completion: which entity has a relation to another one.

The head entity is the sentence, the relation the condition, and every entity a candidate (Hyper-CL,
section 3.3). Each triple asks twice: (h, r, ?) and, by the relation's other direction, (t, r', ?).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import MatrixLike
from llmcond.data.datasets import DataOptions
from llmcond.data.queries import QueryRows
from llmcond.errors import UserError
from llmcond.kinds.ranking.graph import Graph, Known, both_directions, read_graph, with_others
from llmcond.kinds.ranking.task import QueryTexts, RankingTask

if TYPE_CHECKING:
    from llmcond.kinds.ranking.arrays import QueryArrays


class Kgc(RankingTask[Graph]):
    """Triples of a head entity, a relation and a tail entity."""

    name, unit = "kgc", "triples"

    def read(self, data: DataOptions) -> Graph:
        """Return a graph; see :func:`llmcond.kinds.ranking.graph.read_graph`."""
        self._check(data)
        return read_graph(data.source)

    def with_others(
        self, dataset: Graph, data: DataOptions, split: str | None
    ) -> tuple[Graph, str]:
        """See :class:`RankingTask` and :func:`llmcond.kinds.ranking.graph.with_others`."""
        self._check(data)
        return with_others(dataset, data.source, split)

    def _check(self, data: DataOptions) -> None:
        """Raise a UserError for options of other tasks, or for what is no path."""
        self.check_options(data)
        if data.source is not None and not isinstance(data.source, str | Path):
            raise UserError(
                f"data is {type(data.source).__name__}; the task {self.name} reads a folder with "
                "train, valid and test triples, and texts of entities and relations."
            )

    def rows(self, dataset: Graph, split: str) -> QueryRows:
        """Return a split's queries by the ids of entities and relations, and by their texts."""
        entities, relations = dataset.entities, dataset.relations
        head, relation, answer = dataset.queries(split).T.tolist()
        n, asked = dataset.n_relations, [*relations.texts, *relations.inverse]
        columns = {
            "direction": ["forward" if r < n else "backward" for r in relation],
            "head": [entities.ids[i] for i in head],
            "relation": [relations.ids[r % n] for r in relation],
            "answer": [entities.ids[i] for i in answer],
            "head_text": [entities.texts[i] for i in head],
            "relation_text": [asked[r] for r in relation],
            "answer_text": [entities.texts[i] for i in answer],
        }
        texts = ("head_text", "answer_text")
        return QueryRows(columns, ("relation_text",), texts, by="relation_text")

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
        from llmcond.kinds.ranking.arrays import QueryArrays, joint_keys

        n, n_relations = dataset.n_entities, dataset.n_relations
        train = dataset.splits["train"]
        known = Known(both_directions(train, n_relations), n)
        keys = None if joint is None else joint_keys(asked[:, 0], asked[:, 1], n_relations)
        return QueryArrays(candidates, train, n_relations, known, conditions, joint, keys)
