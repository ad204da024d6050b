"""``llmcond extract``: encode a data set's texts under prompts, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from llmcond.commands.base import RESUMES, Command, verb
from llmcond.workflows.options.encoding import ExtractOptions

if TYPE_CHECKING:
    from llmcond.workflows.extract import ExtractResult
    from llmcond.workflows.plan import ExtractionPlan


@dataclass(frozen=True, kw_only=True)
class Extract(ExtractOptions, Command):
    """Encode a data set's texts under prompts, once, into a run.

    What the run holds already is not encoded again; an interrupted call goes on where it stopped.
    """

    position = 10
    example = "llmcond extract --model minilm --data my.csv --prompt concat-sent-cond"
    if_interrupted = RESUMES

    def execute(self) -> ExtractResult | ExtractionPlan:
        """Extract, or tell what would be."""
        if self.plan:
            from llmcond.workflows.plan import plan

            return plan(self)
        from llmcond.workflows.extract import extract

        return extract(self)

    def show(self, result: ExtractResult | ExtractionPlan, form: str) -> None:
        """Print a plan; what was extracted was told while it was."""
        if self.plan:
            from llmcond.report.terminal import listing, show

            show(listing(cast("ExtractionPlan", result).rows()), form)


extract = verb(Extract)
