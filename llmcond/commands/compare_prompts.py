"""``llmcond compare-prompts``: find out which prompt is better, and how certain that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import RESUMES, Command, as_function
from llmcond.workflows.options.scoring import ComparePromptsOptions

if TYPE_CHECKING:
    from llmcond.workflows.compare import Comparison


@dataclass(frozen=True, kw_only=True)
class ComparePrompts(ComparePromptsOptions, Command):
    """Compare prompts on the same rows, splits, seeds and heads, with paired statistics."""

    position = 90
    example = (
        "llmcond compare-prompts --model minilm --prompts my/*.toml --heads mlp --report page.html"
    )
    formats = True
    if_interrupted = RESUMES

    def execute(self) -> Comparison:
        """Compare the prompts.

        Returns:
            A ``Comparison`` with one ``Result`` for each prompt, head and subtraction: its
            metrics, and their difference to the baseline with a confidence interval.

        Raises:
            UserError: an option or the data is invalid, a prompt makes rows of different conditions
                equal, or the report cannot be written.
            LlmcondError: every fit failed.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> comparison = llmcond.compare_prompts(
            ...     model="minilm",
            ...     data=rows,
            ...     prompts=["concat-sent-cond", "pair-sent"],
            ...     heads=["none"],
            ... )
            >>> comparison.baseline
            'concat-sent-cond'
        """
        from llmcond.workflows.compare import compare_prompts

        return compare_prompts(self)

    def show(self, result: Comparison, form: str) -> None:
        """Print a summary in words, then a table."""
        from llmcond.display import print_sentences
        from llmcond.report.tables import comparison_table, summary

        print_sentences(summary(result.results, result.baseline), form)
        bars = form == "table"  # In other formats the characters of bars do not line up.
        comparison_table(result.results, result.baseline, self.run, bars=bars).print(form)


compare_prompts = as_function(ComparePrompts)
