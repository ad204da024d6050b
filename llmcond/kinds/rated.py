"""Rated sentence pairs as a kind of task; the core of the package implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from llmcond.data.datasets import Dataset
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import SplitInputs
from llmcond.runs.kind import CardText, Kind
from llmcond.runs.task_runs import Run
from llmcond.tasks import Task

if TYPE_CHECKING:
    from llmcond.evaluation.results import Results
    from llmcond.runs.rated import RatedExamples
    from llmcond.workflows.options.scoring import EvaluateOptions
    from llmcond.workflows.options.training import TrainLoraOptions
    from llmcond.workflows.train_job import DataReader, TrainingJob


class Rated(Kind):
    """Tasks of rated sentence pairs."""

    name, run = "rated", Run
    card = CardText(
        subject="condition-aware text",
        purpose="The same two sentences get one similarity for each condition.",
        loader="load_embedder",
        usage='loaded.similarity(["A man rides a horse."], ["A girl cycles."], "the activity")',
        rows="rows",
        groups="sentence pairs",
        tags=("conditional-semantic-textual-similarity", "sentence-similarity"),
    )

    @override
    def inputs(self, task: Task, data: Dataset, prompt: Prompt) -> SplitInputs:
        return SplitInputs(data.splits.values(), prompt)

    @override
    def examples(self, run: Run) -> RatedExamples:
        from llmcond.runs.rated import RatedExamples

        return RatedExamples(run)

    @override
    def evaluate(self, run: Run, options: EvaluateOptions) -> Results:
        from llmcond.workflows.evaluate import evaluate_pairs

        return evaluate_pairs(run, options)

    @override
    def plan_training(
        self, options: TrainLoraOptions, task: Task, read: DataReader | None = None
    ) -> TrainingJob:
        from llmcond.workflows.train import plan_pairs

        return plan_pairs(options, task, read)

    @override
    def log_data(self, data: Dataset) -> None:
        from llmcond.runs.rated import log_rows

        # Reports unrated rows, and the rows that dev and test share with train.
        log_rows(data)
