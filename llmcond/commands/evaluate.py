"""``llmcond evaluate``: score a run's heads, with zero-shot for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import REUSES_VECTORS, Command, as_function
from llmcond.workflows.options.scoring import EvaluateOptions

if TYPE_CHECKING:
    from llmcond.evaluation.results import Results


@dataclass(frozen=True, kw_only=True)
class Evaluate(EvaluateOptions, Command):
    """Score a run's heads, with zero-shot for comparison."""

    position = 70
    example = "llmcond evaluate --head mlp --split dev --json"
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> Results:
        """Score the heads.

        Returns:
            ``Results``, one ``Result`` for each head and for zero-shot: its metrics, with 95 %
            confidence intervals.

        Raises:
            UserError: there is no such run, head or split, or the data has no rated rows.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> result = llmcond.extract(model="minilm", data=rows)
            >>> results = llmcond.evaluate(split="train")
            >>> [(result.head, result.subtract) for result in results]
            [('none', False), ('none', True)]
        """
        from llmcond.workflows.evaluate import evaluate

        return evaluate(self)

    def show(self, result: Results, form: str) -> None:
        """Print a table."""
        from llmcond.report.tables import results_table

        results_table(result, self.run).print(form)


evaluate = as_function(Evaluate)
