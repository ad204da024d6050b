"""``llmcond compare-prompts``: which prompt is better, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from llmcond.commands.base import RESUMES, verb
from llmcond.commands.shared import InRun, WithEncoder, WithTask, data_options
from llmcond.options import option
from llmcond.workflows.options import CompareOptions

if TYPE_CHECKING:
    from llmcond.workflows.compare import Comparison


@dataclass(frozen=True, kw_only=True)
class ComparePrompts(CompareOptions, InRun, WithTask, WithEncoder):
    """Compare prompts on the same rows, splits, seeds and heads, with paired evidence."""

    example: ClassVar[str] = (
        "llmcond compare-prompts --model minilm --prompts my/*.toml --heads mlp --report page.html"
    )
    formats: ClassVar[bool] = True
    if_interrupted: ClassVar[str] = RESUMES

    report: str | Path | None = option(
        None, metavar="FILE.html", help="a page to read: charts, texts, settings"
    )

    def execute(self) -> Comparison:
        """Compare."""
        data = data_options(self)
        from llmcond.workflows.compare import compare_prompts

        return self.call(
            compare_prompts,
            options=self.encoder_options(),
            run_folder=self.run,
            data=data,
            asked=self.part(CompareOptions),
        )

    def show(self, result: Comparison, form: str) -> None:
        """Print what was found in words, then a table."""
        from llmcond.report.comparisons import comparison_table, summary
        from llmcond.report.terminal import say, show

        say(summary(result.results, result.baseline), form)
        bars = form == "table"  # elsewhere characters do not line up
        show(comparison_table(result.results, result.baseline, self.run, bars=bars), form)


compare_prompts = verb(ComparePrompts)
