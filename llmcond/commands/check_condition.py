"""``llmcond check-condition``: check how clearly texts form groups under conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import REUSES_VECTORS, Command, as_function
from llmcond.workflows.options.texts import CheckConditionOptions

if TYPE_CHECKING:
    from llmcond.workflows.check_condition import ConditionChecks


@dataclass(frozen=True, kw_only=True)
class CheckCondition(CheckConditionOptions, Command):
    """Check without labels how clearly texts form groups under conditions.

    The texts are embedded under each condition. How clearly they fall into groups predicts the
    share of comparisons that follow the condition; 50 % is chance. The check cannot know by which
    aspect the texts are grouped, so it is a hint and no proof that a condition works. At most 200
    texts are sampled, and at least 20 are needed.
    """

    position = 170
    example = "llmcond check-condition texts.csv --condition 'the topic' --condition 'the mood'"
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> ConditionChecks:
        """Check the conditions.

        Returns:
            ``ConditionChecks`` with one check for each condition: its verdict, expected accuracy
            and indicators.

        Raises:
            UserError: a condition is empty, the texts cannot be read, or the model has no
                calibration.
            LlmcondError: the encoder fails.

        Examples:
            >>> import llmcond
            >>> texts = [f"A {pet} has {n} toys." for pet in ("dog", "cat") for n in range(10)]
            >>> result = llmcond.check_condition(texts=texts, condition="the animal")
            >>> result.texts
            20
        """
        from llmcond.workflows.check_condition import check_condition

        return check_condition(self)

    def show(self, result: ConditionChecks, form: str) -> None:
        """Print the expected accuracy of each condition, and the evidence."""
        from llmcond.conditions import condition_titles
        from llmcond.display import Table, print_sentences
        from llmcond.evaluation.condition_checks import INDICATORS

        titles = condition_titles([check.condition for check in result.checks])
        print_sentences(
            [
                f"{title}: {check.sentence()}."
                for title, check in zip(titles, result.checks, strict=True)
            ]
        )
        rows = [
            {"condition": title, "verdict": check.verdict}
            | {INDICATORS[key]: value for key, value in check.indicators.items()}
            for title, check in zip(titles, result.checks, strict=True)
            if check.indicators
        ]
        if rows:
            Table.of_rows(rows).print(form)


check_condition = as_function(CheckCondition)
