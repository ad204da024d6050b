"""``llmcond check-condition``: will conditions work on these texts?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import REUSES_VECTORS, Command, verb
from llmcond.workflows.options.texts import CheckConditionOptions

if TYPE_CHECKING:
    from llmcond.workflows.check_condition import ConditionChecks


@dataclass(frozen=True, kw_only=True)
class CheckCondition(CheckConditionOptions, Command):
    """Say whether conditions are expected to work on texts, without labels.

    The texts are embedded under each condition. How clearly they fall into groups predicts the
    share of comparisons that follow the condition, where 50 % is chance. It cannot tell by which
    aspect they are grouped. At most 200 texts are sampled; fewer than 20 tell nothing.
    """

    position = 170
    example = "llmcond check-condition texts.csv --condition 'the topic' --condition 'the mood'"
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> ConditionChecks:
        """Check the conditions."""
        from llmcond.workflows.check_condition import check_condition

        return check_condition(self)

    def show(self, result: ConditionChecks, form: str) -> None:
        """Print the expected accuracy of each condition, and the evidence."""
        from llmcond.conditions import condition_titles
        from llmcond.evaluation.condition_checks import INDICATORS
        from llmcond.report.terminal import listing, say, show

        titles = condition_titles([one.condition for one in result.checks])
        say(
            [
                f"{title}: {own.sentence()}."
                for title, own in zip(titles, result.checks, strict=True)
            ]
        )
        rows = [
            {"condition": title, "verdict": own.verdict}
            | {INDICATORS[key]: value for key, value in own.indicators.items()}
            for title, own in zip(titles, result.checks, strict=True)
            if own.indicators
        ]
        if rows:
            show(listing(rows), form)


check_condition = verb(CheckCondition)
