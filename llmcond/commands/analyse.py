"""``llmcond analyse``: explain heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import Command, verb
from llmcond.workflows.options.scoring import AnalyseOptions

if TYPE_CHECKING:
    from llmcond.workflows.analyse import AnalysisResult


@dataclass(frozen=True, kw_only=True)
class Analyse(AnalyseOptions, Command):
    """Explain heads: isotropy, condition clusters, unseen conditions, norms, changed rows."""

    position = 80
    example = "llmcond analyse --head mlp --what clusters --conditions 4 --out pictures"
    formats = True

    def execute(self) -> AnalysisResult:
        """Analyse."""
        from llmcond.workflows.analyse import analyse

        return analyse(self)

    def show(self, result: AnalysisResult, form: str) -> None:
        """Print a table for each analysis."""
        from llmcond.report.analyses import show_analyses

        show_analyses(result, self.run, form)


analyse = verb(Analyse)
