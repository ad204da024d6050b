"""Rated pairs as a kind of task; what it does is the core of the package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmcond.data.datasets import Dataset
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import SplitInputs
from llmcond.runs.kind import CardText, Kind
from llmcond.runs.task_runs import Run
from llmcond.tasks import Task

if TYPE_CHECKING:
    from llmcond.evaluation.results import Results
    from llmcond.runs.rated import RatedExamples
    from llmcond.workflows.account import TrainingResult
    from llmcond.workflows.options.scoring import EvaluateOptions
    from llmcond.workflows.options.training import TrainLoraOptions


class Rated(Kind):
    """See :class:`Kind`."""

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

    def inputs(self, task: Task, data: Dataset, prompt: Prompt) -> SplitInputs:
        """See :class:`Kind`."""
        return SplitInputs(data.splits.values(), prompt)

    def examples(self, run: Run) -> RatedExamples:
        """See :class:`Kind`."""
        from llmcond.runs.rated import RatedExamples

        return RatedExamples(run)

    def evaluate(self, run: Run, asked: EvaluateOptions) -> Results[Any]:
        """See :class:`Kind`."""
        from llmcond.workflows.evaluate import evaluate_pairs

        return evaluate_pairs(run, asked)

    def train(self, asked: TrainLoraOptions, task: Task) -> TrainingResult:
        """See :class:`Kind`."""
        from llmcond.workflows.finetune import train_pairs

        return train_pairs(asked, task)

    def log_data(self, data: Dataset) -> None:
        """See :class:`Kind`: unrated rows, and what dev and test share with train."""
        from llmcond.runs.rated import log_rows

        log_rows(data)
