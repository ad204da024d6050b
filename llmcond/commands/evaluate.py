"""``llmcond evaluate``: score a run's heads, with zero-shot for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import REUSES_VECTORS, Command, verb
from llmcond.workflows.options.scoring import EvaluateOptions

if TYPE_CHECKING:
    from llmcond.evaluation.results import Result, Results


@dataclass(frozen=True, kw_only=True)
class Evaluate(EvaluateOptions, Command):
    """Score a run's heads, with zero-shot for comparison."""

    position = 70
    example = "llmcond evaluate --head mlp --split dev --json"
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> Results[Result]:
        """Score."""
        from llmcond.workflows.evaluate import evaluate

        return evaluate(self)

    def show(self, result: Results[Result], form: str) -> None:
        """Print a table."""
        from llmcond.report.rankings import evaluation_table
        from llmcond.report.terminal import show

        show(evaluation_table(result, self.run), form)


evaluate = verb(Evaluate)
