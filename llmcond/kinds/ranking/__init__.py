"""Ranking as a kind of task: a query is a text under a condition, and a candidate answers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from llmcond.kinds.ranking.inputs import QueryInputs
from llmcond.kinds.ranking.run import RankingRun
from llmcond.kinds.ranking.task import QueryData, RankingTask
from llmcond.prompts import Prompt
from llmcond.runs.kind import CardText, Kind

if TYPE_CHECKING:
    from llmcond.evaluation.results import Results
    from llmcond.kinds.ranking.examples import QueryExamples
    from llmcond.workflows.options.scoring import EvaluateOptions
    from llmcond.workflows.options.training import TrainLoraOptions
    from llmcond.workflows.train_job import DataReader, TrainingJob


class Ranking(Kind):
    """Tasks that rank candidates for queries."""

    name, run = "ranking", RankingRun
    heads_need_data = True
    card = CardText(
        subject="knowledge-graph",
        purpose="An entity and a relation are completed by the entity that ranks first.",
        loader="load_completer",
        usage='loaded.top(head="ENTITY", relation="RELATION", k=10)',
        rows="queries",
        groups="triples",
        tags=("knowledge-graph-completion",),
    )

    @override
    def inputs(self, task: RankingTask[Any], data: QueryData, prompt: Prompt) -> QueryInputs:
        return QueryInputs(task.texts(data), prompt)

    @override
    def examples(self, run: RankingRun) -> QueryExamples:
        from llmcond.kinds.ranking.examples import QueryExamples

        return QueryExamples(run)

    @override
    def evaluate(self, run: RankingRun, options: EvaluateOptions) -> Results:
        from llmcond.kinds.ranking.evaluate import evaluate_ranking
        from llmcond.workflows.evaluate import write_ranks
        from llmcond.workflows.options.ranking import RankingOptions

        return write_ranks(evaluate_ranking(run, options), run, options, RankingOptions)

    @override
    def plan_training(
        self, options: TrainLoraOptions, task: RankingTask[Any], read: DataReader | None = None
    ) -> TrainingJob:
        from llmcond.kinds.ranking.train import plan_queries

        return plan_queries(options, task, read)
