"""``llmcond analyse``: explain heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import Command, as_function
from llmcond.workflows.options.scoring import AnalyseOptions

if TYPE_CHECKING:
    from llmcond.workflows.analyse import AnalysisResult


@dataclass(frozen=True, kw_only=True)
class Analyse(AnalyseOptions, Command):
    """Explain heads: isotropy, condition clusters, unseen conditions, norms and changed rows.

    With --answers, also compare given sentences and answer words before and after each head.
    """

    position = 80
    example = "llmcond analyse --head mlp --what clusters --conditions 4 --out pictures"
    formats = True

    def execute(self) -> AnalysisResult:
        """Run the analyses.

        Returns:
            An ``AnalysisResult``, a dictionary: the rows of each analysis by its name, the
            ``split``, and ``n``, the number of rated rows.

        Raises:
            UserError: there is no such run or head, or the split has no rated rows.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> result = llmcond.extract(model="minilm", data=rows)
            >>> analysis = llmcond.analyse(what=["isotropy"], split="train")
            >>> analysis["n"]
            16
        """
        from llmcond.workflows.analyse import analyse

        return analyse(self)

    def show(self, result: AnalysisResult, form: str) -> None:
        """Print one table per analysis."""
        from llmcond.report.analyses import analysis_tables

        for table in analysis_tables(result, self.run):
            table.print(form)


analyse = as_function(Analyse)
