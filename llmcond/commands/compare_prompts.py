"""``llmcond compare-prompts``: which prompt is better, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from llmcond.commands.base import verb
from llmcond.commands.shared import (
    InRun,
    WithEncoder,
    WithMetrics,
    WithSplit,
    WithTask,
    WithTrials,
    data_options,
)
from llmcond.options import option

if TYPE_CHECKING:
    from llmcond.workflows.compare import Comparison


@dataclass(frozen=True, kw_only=True)
class ComparePrompts(InRun, WithTask, WithEncoder, WithSplit, WithMetrics, WithTrials):
    """Compare prompts on the same rows, splits, seeds and heads, with paired evidence."""

    example: ClassVar[str] = (
        "llmcond compare-prompts --model minilm --prompts my/*.toml --heads mlp --report page.html"
    )
    formats: ClassVar[bool] = True

    prompts: Sequence[str] = option(
        (), metavar="FILE", help="names or files (default: every bundled one the model can use)"
    )
    baseline: str | None = option(
        None,
        metavar="NAME",
        help="what the others are compared with (default: the one that suits the model)",
    )
    heads: Sequence[str] = option(
        ("linear", "mlp"),
        metavar="NAME",
        help="recipes to fit in addition to zero-shot; none: none",
    )
    plain: bool = option(False, help="fit heads without subtraction as well")
    report: Path | None = option(
        None, metavar="FILE.html", help="a page to read: charts, texts, settings"
    )

    def execute(self) -> Comparison:
        """Compare."""
        from llmcond.workflows.compare import CompareOptions, compare_prompts

        return compare_prompts(
            self.model,
            self.encoder_options(),
            self.run,
            data_options(self),
            CompareOptions(
                prompts=self.prompts,
                baseline=self.baseline,
                heads=self.heads,
                changes=self.set or {},
                seeds=self.seeds,
                plain=self.plain,
                split=self.split,
                workers=self.workers,
                metrics=self.metric,
                task=self.task,
            ),
            self.report,
        )

    def show(self, result: Comparison, form: str) -> None:
        """Print what was found in words, then a table."""
        from llmcond.report.comparisons import comparison_table, summary
        from llmcond.report.terminal import say, show

        say(summary(result.results, result.baseline), form)
        bars = form == "table"  # elsewhere characters do not line up
        show(comparison_table(result.results, result.baseline, self.run, bars=bars), form)


compare_prompts = verb(ComparePrompts)
