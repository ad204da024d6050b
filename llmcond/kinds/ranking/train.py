"""Joint training of an encoder and a head on a knowledge graph, into a new run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from llmcond.errors import UserError
from llmcond.finetune.inputs import TokenizedInputs
from llmcond.kinds.ranking.arrays import joint_keys
from llmcond.kinds.ranking.graph import Graph, KnownTriples, both_directions
from llmcond.kinds.ranking.heads import FittedQueryHead, load_query_head
from llmcond.kinds.ranking.inputs import QueryInputs
from llmcond.kinds.ranking.model import GraphInputs, QueryModel, check_recipe
from llmcond.kinds.ranking.task import RankingTask
from llmcond.runs.trials import size_recipe
from llmcond.tasks import AnyTask, Data
from llmcond.workflows.options.training import TrainLoraOptions
from llmcond.workflows.training import RankingJob, TrainingParts
from llmcond.workflows.training_options import DataReader

if TYPE_CHECKING:
    from llmcond.finetune.loading import TrainableEncoder


def plan_queries(
    options: TrainLoraOptions, task: RankingTask[Any], read: DataReader | None = None
) -> RankingJob:
    """Plan the training of an encoder and a head on a graph; see ``Kind.plan_training``.

    Raises:
        UserError: The input is invalid, or the head has settings that need cached features.
        LlmcondError: The encoder cannot be loaded.
    """
    return _QueryJob.from_options(options, task, load_query_head, check_recipe, read)


@dataclass(frozen=True, slots=True, kw_only=True)
class _QueryJob(RankingJob):
    """Trains an encoder of entities and relations, and a head that maps queries and candidates."""

    unit: ClassVar[str] = "triples"
    scored_noun: ClassVar[str] = "queries"
    of_sample: ClassVar[bool] = True

    task: RankingTask[Any]
    dataset: Graph
    start: FittedQueryHead | None

    @classmethod
    def check_data(cls, dataset: Data, task: AnyTask[Any]) -> None:
        if not isinstance(dataset, Graph):
            raise UserError(
                f"only knowledge graphs can train an encoder, and the task {task.name} has none."
            )

    def build_parts(self, trainable: TrainableEncoder) -> TrainingParts:
        graph, (prompt,) = self.dataset, self.view.prompts
        texts = self.task.texts(graph)
        inputs = QueryInputs(texts, prompt)
        joint = self.view.features == "joint"
        if joint:
            inputs.check_distinct()
        directions = both_directions(graph.splits["train"], graph.n_relations)
        items = list(inputs.candidates)
        if self.view.conditioned:
            items += inputs.conditions
        keys = np.empty(0, dtype=np.int64)
        if joint:
            items += inputs.joint
            heads, relations = texts.query_pairs.T
            keys = joint_keys(heads, relations, graph.n_relations)
        train = GraphInputs(
            triples=graph.splits["train"],
            n_relations=graph.n_relations,
            n_entities=graph.n_entities,
            known=KnownTriples(directions, graph.n_entities),
            texts=TokenizedInputs.of(items, trainable.tokenizer),
            joint_of=keys,
        )
        dev = None
        if len(graph.splits.get("dev", ())):
            dev = replace(train, triples=graph.splits["dev"], known=KnownTriples(graph))
        recipe = self.recipe
        if self.start is None:
            recipe = size_recipe(recipe, None, trainable.engine.dim)
        metric = self.task.main_metric
        model = QueryModel(trainable.engine, recipe, train, self.seed, self.start, metric)
        return TrainingParts(model, train, dev)
