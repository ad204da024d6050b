"""``llmcond annotate``: rate sentence pairs under conditions with a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import RESUMES, Command, as_function
from llmcond.workflows.options.texts import AnnotateOptions

if TYPE_CHECKING:
    from llmcond.workflows.annotate import AnnotationResult


@dataclass(frozen=True, kw_only=True)
class Annotate(AnnotateOptions, Command):
    """Rate sentence pairs under conditions with a language model.

    The model runs on a server with OpenAI's chat protocol. The environment variable OPENAI_API_KEY
    holds its key, if it needs one. Each answer is stored when it arrives, so that the same command
    resumes after an interruption.
    """

    position = 200
    example = (
        "llmcond annotate my.csv --endpoint http://localhost:8000/v1 --model NAME --out rated.csv"
    )
    formats = True
    if_interrupted = RESUMES

    def execute(self) -> AnnotationResult:
        """Rate the rows.

        Returns:
            An ``AnnotationResult``: the file, the numbers of rows, questions and tokens, the cost,
            and the agreement with ratings that the data already had.

        Raises:
            UserError: an option, the data or a prompt is invalid, the server rejects the requests,
                or you decline the estimated cost.
            LlmcondError: the server fails, after all retries.

        Examples:
            >>> import llmcond
            >>> result = llmcond.annotate(  # doctest: +SKIP
            ...     data="my.csv",
            ...     endpoint="http://localhost:8000/v1",
            ...     model="NAME",
            ...     out="rated.csv",
            ... )
        """
        from llmcond.workflows.annotate import annotate

        return annotate(self)

    def show(self, result: AnnotationResult, form: str) -> None:
        """Print the agreement with the ratings of the data, if it has any."""
        if result.agreement is not None:
            from llmcond.report.tables import show_agreement

            show_agreement(result.agreement, result.model, form)


annotate = as_function(Annotate)
