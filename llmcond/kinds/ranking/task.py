"""Ranking as a kind of task: a query is a text under a condition, and a candidate answers it.

The bundled task is the completion of knowledge graphs. The head entity is the sentence, the
relation is the condition, and every entity is a candidate (Hyper-CL, section 3.3). Each triple
gives two queries: (h, r, ?) and, with the inverse relation, (t, r', ?).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.arrays import MatrixLike
from llmcond.base.errors import UserError
from llmcond.base.metrics import RANKING_NAMES
from llmcond.data.datasets import DataOptions
from llmcond.data.formats import ReadOptions
from llmcond.data.rows import KnownAnswers, QueryRows
from llmcond.heads.storage import load_fitted
from llmcond.kinds.ranking.graph import (
    Graph,
    KnownTriples,
    QueryInputs,
    QueryTexts,
    add_external_split,
    both_directions,
    read_graph,
)
from llmcond.prompts.template import Prompt
from llmcond.tasks import AnyTask, CardText

if TYPE_CHECKING:
    from llmcond.heads import Recipe
    from llmcond.kinds.ranking.examples import QueryExamples
    from llmcond.kinds.ranking.heads import FittedQueryHead, QueryArrays
    from llmcond.options.scoring import EvaluateOptions
    from llmcond.runs import Run
    from llmcond.runs.examples import Evaluation


#: A dataset of queries: ``splits`` holds the examples of each split, and ``queries(split)`` returns
#: the positions of each query's sentence, condition and answer, (n, 3).
Q = TypeVar("Q", bound=Any)


class RankingTask(AnyTask[Q]):
    """A task that ranks candidates for queries, each of which is a text under a condition.

    The sentence under its condition is rendered by the conditional parts of a template, a candidate
    by the template's ``[plain]`` part, which is the unchanged text by default.
    """

    kind: ClassVar[str] = "ranking"
    metrics: ClassVar[Sequence[str]] = RANKING_NAMES
    recipes: ClassVar[str | None] = "kgc"
    #: The default prompt encodes sentences and conditions separately, because their pairs are many.
    prompt: ClassVar[str | None] = "separate"
    command = "complete"
    fields_text = "sentences and conditions"
    #: Noun for the sentences and answers that confidence intervals resample, because several
    #: examples share them; empty: examples are independent.
    clusters: ClassVar[str] = ""
    heads_need_data = True
    dev_is_sample = True
    card = CardText(
        subject="knowledge-graph",
        purpose="An entity and a relation are completed by the entity that ranks first.",
        loader="load_completer",
        usage='loaded.top(head="ENTITY", relation="RELATION", k=10)',
        rows="queries",
        groups="triples",
        tags=("knowledge-graph-completion",),
    )

    # -- the data ------------------------------------------------------------------------------

    @abstractmethod
    def texts(self, dataset: Q) -> QueryTexts:
        """Return the texts that are encoded."""

    @abstractmethod
    def known(self, dataset: Q) -> KnownAnswers:
        """Return the correct answers of all queries; all but the target are left out of ranks."""

    @abstractmethod
    def arrays(
        self,
        dataset: Q,
        candidates: MatrixLike,
        conditions: MatrixLike | None,
        joint: MatrixLike | None,
        query_pairs: NDArray[np.int64],
    ) -> QueryArrays:
        """Return the arrays on which heads are fitted.

        Args:
            dataset: the dataset.
            candidates: features of all candidates, (n, d).
            conditions: features of all conditions, (c, d), for heads that read them.
            joint: features of sentences under conditions, (m, d), for heads that read them.
            query_pairs: positions of the sentence and the condition of each row of ``joint``,
                (m, 2).
        """

    def rows(self, dataset: Q, split: str) -> QueryRows:
        """Return a split's queries in readable form: by default, their texts."""
        texts = self.texts(dataset)
        sentence, condition, answer = dataset.queries(split).T.tolist()
        columns = {
            "sentence": [texts.sentences[i] for i in sentence],
            "condition": [texts.conditions[i] for i in condition],
            "answer": [texts.candidates[i] for i in answer],
        }
        return QueryRows(columns, ("condition",), ("sentence", "answer"), group_column="condition")

    def pool_keys(self, dataset: Q) -> list[Any]:
        """Return what determines ranks besides queries: by default, the candidates' texts."""
        return list(self.texts(dataset).candidates)

    def add_external_data(self, dataset: Q, data: DataOptions, split: str | None) -> tuple[Q, str]:
        """Return a dataset with an additional split, ``OTHER_SPLIT``, of queries from elsewhere.

        These queries have sentences, conditions and candidates of the dataset. Their answers are
        known answers, like all others.

        Args:
            dataset: the dataset.
            data: options that say where the queries are.
            split: split of a folder; by default test, or dev if there is no test file.

        Returns:
            The dataset, and the split's name in results.

        Raises:
            UserError: The task cannot read other queries, or the queries are invalid.
        """
        raise UserError(
            f"--data: the task {self.name} can only read the queries of the run. Leave it out, or "
            "implement add_external_data() for the task."
        )

    @override
    def check_options(self, data: DataOptions) -> None:
        super().check_options(data)
        if data.reading != ReadOptions():
            raise UserError(
                "--encoding, --delimiter and --skip-empty are for rated rows and dialogues. Leave "
                f"them out; the task {self.name} reads files in UTF-8 whose columns tabs separate."
            )
        if data.split_seed is not None:
            raise UserError(
                f"--split-seed splits a single file of rows; the task {self.name} reads its splits "
                "from files. Leave it out."
            )

    # -- the kind of task ----------------------------------------------------------------------

    @override
    def inputs(self, dataset: Q, prompt: Prompt) -> QueryInputs:
        return QueryInputs(self.texts(dataset), prompt)

    @override
    def zero_shot_settings(self, prompt: Prompt) -> list[dict[str, Any]]:
        if prompt.separate:  # without the features of the condition, zero-shot would ignore it
            return [{"subtract": False, "features": "separate", "conditioned": True}]
        return super().zero_shot_settings(prompt)

    @override
    def load_head(self, folder: Path) -> tuple[FittedQueryHead, dict[str, Any]]:
        from llmcond.kinds.ranking.heads import FittedQueryHead

        return load_fitted(folder, FittedQueryHead)

    @override
    def examples(self, run: Run) -> QueryExamples:
        from llmcond.kinds.ranking.examples import QueryExamples

        return QueryExamples(run)

    @override
    def evaluate(self, run: Run, options: EvaluateOptions) -> Evaluation:
        from llmcond.kinds.ranking.examples import evaluate_ranking

        return evaluate_ranking(run, options)

    @override
    def check_training(self, recipe: Recipe, dataset: Any) -> None:
        from llmcond.kinds.ranking.train import check_recipe

        check_recipe(recipe, dataset)

    @override
    def training_parts(self, job: Any, trainable: Any) -> tuple[Any, Any, Any]:
        from llmcond.kinds.ranking.train import build_training_parts

        return build_training_parts(self, job, trainable)


class Kgc(RankingTask[Graph]):
    """Ranks entities that complete triples of a head entity, a relation and a tail entity."""

    name, unit, clusters = "kgc", "triples", "head and tail entities"

    @override
    def read(self, data: DataOptions) -> Graph:
        self.check_options(data)
        return read_graph(data.source)

    @override
    def add_external_data(
        self, dataset: Graph, data: DataOptions, split: str | None
    ) -> tuple[Graph, str]:
        self.check_options(data)
        return add_external_split(dataset, data.source, split)

    @override
    def check_options(self, data: DataOptions) -> None:
        super().check_options(data)
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
        return dataset.known

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
