"""The task of knowledge-graph completion: find the entity that completes a triple.

The head entity is the sentence, the relation is the condition, and every entity is a candidate
(Hyper-CL, section 3.3). Each triple gives two queries: (h, r, ?) and, with the inverse relation,
(t, r', ?).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.arrays import MatrixLike
from llmcond.data.datasets import DataOptions
from llmcond.data.rows import QueryRows
from llmcond.errors import UserError
from llmcond.kinds.ranking.graph import (
    Graph,
    KnownTriples,
    add_external_split,
    both_directions,
    read_graph,
)
from llmcond.kinds.ranking.task import QueryTexts, RankingTask

if TYPE_CHECKING:
    from llmcond.kinds.ranking.heads import QueryArrays


class Kgc(RankingTask[Graph]):
    """Ranks entities that complete triples of a head entity, a relation and a tail entity."""

    name, unit, clusters = "kgc", "triples", "head and tail entities"

    @override
    def read(self, data: DataOptions) -> Graph:
        self._check_data(data)
        return read_graph(data.source)

    @override
    def add_external_data(
        self, dataset: Graph, data: DataOptions, split: str | None
    ) -> tuple[Graph, str]:
        self._check_data(data)
        return add_external_split(dataset, data.source, split)

    def _check_data(self, data: DataOptions) -> None:
        """Raise a UserError for options of other tasks, or for data that is not a path."""
        self.check_options(data)
        if data.source is not None and not isinstance(data.source, str | Path):
            raise UserError(
                f"data is {type(data.source).__name__}, but the task {self.name} reads a folder. "
                "Give the path of a folder with train, valid and test triples, and the texts of "
                "entities and relations."
            )

    @override
    def rows(self, dataset: Graph, split: str) -> QueryRows:
        # Queries are described by the ids and by the texts of their entities and relations.
        entities, relations = dataset.entities, dataset.relations
        head, relation, answer = dataset.queries(split).T.tolist()
        n, relation_texts = dataset.n_relations, [*relations.texts, *relations.inverse]
        columns = {
            "direction": ["forward" if r < n else "backward" for r in relation],
            "head": [entities.ids[i] for i in head],
            "relation": [relations.ids[r % n] for r in relation],
            "answer": [entities.ids[i] for i in answer],
            "head_text": [entities.texts[i] for i in head],
            "relation_text": [relation_texts[r] for r in relation],
            "answer_text": [entities.texts[i] for i in answer],
        }
        texts = ("head_text", "answer_text")
        return QueryRows(columns, ("relation_text",), texts, group_column="relation_text")

    @override
    def pool_keys(self, dataset: Graph) -> list[Any]:
        # The texts of entities may differ: their ids and all known triples determine the ranks.
        entities, relations = dataset.entities.ids, dataset.relations.ids
        triples = np.concatenate(list(dataset.splits.values())).tolist()
        named = [(entities[h], relations[r], entities[t]) for h, r, t in triples]
        return [*sorted(entities), *sorted(named)]

    @override
    def load(self, folder: Path, record: Mapping[str, Any]) -> Graph:
        return Graph.load(folder)

    @override
    def count_examples(self, dataset: Graph) -> str:
        splits = ", ".join(f"{len(triples):,} {name}" for name, triples in dataset.splits.items())
        n, relations = dataset.n_entities, dataset.n_relations
        return f"{splits} triples of {n:,} entities and {relations:,} relations"

    @override
    def texts(self, dataset: Graph) -> QueryTexts:
        # Every relation is a condition in both directions.
        entities, relations = dataset.entities.texts, dataset.relations
        queries = np.concatenate([dataset.queries(split) for split in dataset.splits])
        return QueryTexts(
            sentences=entities,
            conditions=[*relations.texts, *relations.inverse],
            candidates=entities,
            query_pairs=np.unique(queries[:, :2].astype(np.int64), axis=0),
            names=("entity", "relation", "entity"),
        )

    @override
    def known(self, dataset: Graph) -> KnownTriples:
        return KnownTriples(dataset)

    def arrays(
        self,
        dataset: Graph,
        candidates: MatrixLike,
        conditions: MatrixLike | None,
        joint: MatrixLike | None,
        query_pairs: NDArray[np.int64],
    ) -> QueryArrays:
        """Return the arrays of the graph; only answers in train are known in training."""
        from llmcond.kinds.ranking.heads import QueryArrays, joint_keys

        n, n_relations = dataset.n_entities, dataset.n_relations
        train = dataset.splits["train"]
        known = KnownTriples(both_directions(train, n_relations), n)
        keys = (
            None if joint is None else joint_keys(query_pairs[:, 0], query_pairs[:, 1], n_relations)
        )
        return QueryArrays(candidates, train, n_relations, known, conditions, joint, keys)
