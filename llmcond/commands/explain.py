"""``llmcond explain``: show which tokens of a sentence count under conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import Command, as_function
from llmcond.workflows.options.texts import ExplainOptions

if TYPE_CHECKING:
    from llmcond.runs.explanation import Explanation


@dataclass(frozen=True, kw_only=True)
class Explain(ExplainOptions, Command):
    """Show which tokens of a sentence count under conditions.

    With a router, these are the weights that the embedding is computed with. With --to, they are
    contributions to the similarity: exact for routed pooling without a fitted head, otherwise the
    fall of the similarity if the sentence is encoded without the token (leave-one-out). Without a
    router and without --to, they say how far the embedding moves without the token.
    """

    position = 125
    example = "llmcond explain 'A man rides a horse.' --condition 'the activity' --out tokens.html"
    formats = True

    def execute(self) -> Explanation:
        """Explain the embedding of the sentence, or its similarity to another sentence.

        Returns:
            An ``Explanation`` with the values of the tokens under each condition, and the name of
            its method.

        Raises:
            UserError: a text is empty, the sentence has only one token, the figure cannot be
                written, or the run has no embeddings of sentences.
            LlmcondError: the encoder fails.

        Examples:
            >>> import llmcond
            >>> explanation = llmcond.explain(sentence="A dog runs.", condition=["the animal"])
            >>> explanation.method
            'leave-one-out'
            >>> max(explanation.rows(), key=lambda row: row["contribution"])["token"]
            'dog'
        """
        from llmcond.workflows.explain import explain

        return explain(self)

    def show(self, result: Explanation, form: str) -> None:
        """Print a table of the tokens."""
        from llmcond.report.explanations import show_explanation

        show_explanation(result, form)


explain = as_function(Explain)
