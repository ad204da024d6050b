"""``llmcond analyse``: explain heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from llmcond.commands.base import verb
from llmcond.commands.shared import InRun
from llmcond.options import option
from llmcond.workflows.options import WithSplit

if TYPE_CHECKING:
    from llmcond.workflows.analyse import AnalysisResult

Analysis = Literal["isotropy", "clusters", "conditions", "norms", "examples"]


@dataclass(frozen=True, kw_only=True)
class Analyse(InRun, WithSplit):
    """Explain heads: isotropy, condition clusters, unseen conditions, norms, changed rows."""

    example: ClassVar[str] = (
        "llmcond analyse --head mlp --what clusters --conditions 4 --out pictures"
    )
    formats: ClassVar[bool] = True

    head: Sequence[str] = option((), metavar="NAME", help="fitted heads (default: all)")
    what: Sequence[Analysis] = option((), help="which analyses (default: all)")
    out: str | Path | None = option(None, metavar="DIR", help="for pictures (default: in the run)")
    conditions: int = option(3, metavar="N", help="number of conditions to cluster")
    sentences: int = option(20, metavar="N", help="sentences of each condition to cluster")
    top: int = option(5, metavar="N", help="number of rows to list whose similarity changed most")
    seed: int = option(0, metavar="S", help="seed of everything random")

    def execute(self) -> AnalysisResult:
        """Analyse."""
        from llmcond.workflows.analyse import ANALYSES, analyse

        return self.call(
            analyse,
            run_folder=self.run,
            heads=self.head,
            what=self.what or ANALYSES,
            n_conditions=self.conditions,
            n_sentences=self.sentences,
        )

    def show(self, result: AnalysisResult, form: str) -> None:
        """Print a table for each analysis."""
        from llmcond.report.analyses import show_analyses

        show_analyses(result, self.run, form)


analyse = verb(Analyse)
