"""``llmcond evaluate``: score a run's heads, with zero-shot for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmcond.commands.base import REUSES_VECTORS, verb
from llmcond.commands.shared import (
    DATA,
    InRun,
    WithColumns,
    WithDevice,
    data_options,
)
from llmcond.options import option
from llmcond.workflows.options import DialogueOptions, RankingOptions, WithMetrics, WithSplit

if TYPE_CHECKING:
    from llmcond.evaluation.results import Result, Results


@dataclass(frozen=True, kw_only=True)
class Evaluate(
    InRun, WithColumns, WithSplit, WithMetrics, WithDevice, DialogueOptions, RankingOptions
):
    """Score a run's heads, with zero-shot for comparison."""

    example: ClassVar[str] = "llmcond evaluate --head mlp --split dev --json"
    formats: ClassVar[bool] = True
    if_interrupted: ClassVar[str] = REUSES_VECTORS

    head: Sequence[str] = option(
        (), metavar="NAME", help="fitted heads (default: all; none: zero-shot only)"
    )
    data: Any = option(
        None, metavar="SRC", help=f"score other rows: {DATA}; a single file is scored whole"
    )
    predictions: str | Path | None = option(
        None,
        metavar="FILE.csv",
        help="write what is predicted of each row: its similarity, or its answer's rank",
    )
    report: str | Path | None = option(
        None, metavar="FILE.html", help="a page to read: charts, texts, settings"
    )

    def execute(self) -> Results[Result]:
        """Score."""
        data = data_options(self)
        from llmcond.workflows.evaluate import evaluate

        return self.call(
            evaluate,
            run_folder=self.run,
            heads=self.head,
            data=data,
            metrics=self.metric,
            ranking=self.part(RankingOptions),
            dialogue=self.part(DialogueOptions),
        )

    def show(self, result: Results[Result], form: str) -> None:
        """Print a table."""
        from llmcond.report.rankings import evaluation_table
        from llmcond.report.terminal import show

        show(evaluation_table(result, self.run), form)


evaluate = verb(Evaluate)
