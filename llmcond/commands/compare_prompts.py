"""``llmcond compare-prompts``: which prompt is better, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import RESUMES, Command, verb
from llmcond.workflows.options.scoring import ComparePromptsOptions

if TYPE_CHECKING:
    from llmcond.workflows.compare import Comparison


@dataclass(frozen=True, kw_only=True)
class ComparePrompts(ComparePromptsOptions, Command):
    """Compare prompts on the same rows, splits, seeds and heads, with paired evidence."""

    position = 90
    example = (
        "llmcond compare-prompts --model minilm --prompts my/*.toml --heads mlp --report page.html"
    )
    formats = True
    if_interrupted = RESUMES

    def execute(self) -> Comparison:
        """Compare."""
        from llmcond.workflows.compare import compare_prompts

        return compare_prompts(self)

    def show(self, result: Comparison, form: str) -> None:
        """Print what was found in words, then a table."""
        from llmcond.report.comparisons import comparison_table, summary
        from llmcond.report.terminal import say, show

        say(summary(result.results, result.baseline), form)
        bars = form == "table"  # elsewhere characters do not line up
        show(comparison_table(result.results, result.baseline, self.run, bars=bars), form)


compare_prompts = verb(ComparePrompts)
