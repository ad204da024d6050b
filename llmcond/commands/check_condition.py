"""``llmcond check-condition``: will conditions work on these texts?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llmcond.commands.base import REUSES_VECTORS, verb
from llmcond.commands.shared import TEXT_HELP, WithConditions, WithEmbedder, check_source
from llmcond.data.readers import TEXT_FILES
from llmcond.options import option

if TYPE_CHECKING:
    from llmcond.workflows.check_condition import ConditionChecks


@dataclass(frozen=True, kw_only=True)
class CheckCondition(WithConditions, WithEmbedder):
    """Say whether conditions are expected to work on texts, without labels.

    The texts are embedded under each condition. How clearly they fall into groups predicts the
    share of comparisons that follow the condition, where 50 % is chance. It cannot tell by which
    aspect they are grouped. At most 200 texts are sampled; fewer than 20 tell nothing.
    """

    example: ClassVar[str] = (
        "llmcond check-condition texts.csv --condition 'the topic' --condition 'the mood'"
    )
    formats: ClassVar[bool] = True
    if_interrupted: ClassVar[str] = REUSES_VECTORS

    texts: Any = option(
        flag="",
        metavar="TEXTS",
        help=f"{TEXT_FILES} (from Python also a list of texts, or a table)",
    )
    condition: Sequence[str] = option(
        metavar="TEXT", repeat=True, help="condition to check; may be repeated"
    )
    text: str | None = option(None, metavar="COL", help=TEXT_HELP)
    seed: int = option(0, metavar="S", help="random seed of the sample of texts")

    def execute(self) -> ConditionChecks:
        """Check the conditions."""
        check_source(self.texts, TEXT_FILES)
        from llmcond.workflows.check_condition import check_condition

        return self.call(check_condition, run_folder=self.folder(), condition=self.conditions())

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
