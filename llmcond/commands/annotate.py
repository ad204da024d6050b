"""``llmcond annotate``: rate sentence pairs under conditions by a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import RESUMES, Command, verb
from llmcond.workflows.options.texts import AnnotateOptions

if TYPE_CHECKING:
    from llmcond.workflows.annotate import AnnotationResult


@dataclass(frozen=True, kw_only=True)
class Annotate(AnnotateOptions, Command):
    """Rate sentence pairs under conditions by a language model.

    The server speaks OpenAI's chat protocol. A key, if it needs one, is in OPENAI_API_KEY. Each
    answer is stored as it comes, so that the same command goes on where it was stopped.
    """

    position = 200
    example = (
        "llmcond annotate my.csv --endpoint http://localhost:8000/v1 --model NAME --out rated.csv"
    )
    formats = True
    if_interrupted = RESUMES

    def execute(self) -> AnnotationResult:
        """Rate."""
        from llmcond.workflows.annotate import annotate

        return annotate(self)

    def show(self, result: AnnotationResult, form: str) -> None:
        """Print how far people's ratings agree, where there are any."""
        if result.agreement is not None:
            from llmcond.report.agreement import show_agreement

            show_agreement(result.agreement, result.model, form)


annotate = verb(Annotate)
