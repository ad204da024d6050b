"""``llmcond complete``: the entities that best complete a triple of a knowledge graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import Command, verb
from llmcond.workflows.options.ranking import CompleteOptions

if TYPE_CHECKING:
    from llmcond.kinds.ranking.complete import Completions


@dataclass(frozen=True, kw_only=True)
class Complete(CompleteOptions, Command):
    """Complete a triple of a run's knowledge graph: the entities that fit best."""

    position = 100
    example = "llmcond complete --run runs/wn18rr --head-entity 02084071 --relation _hypernym"
    formats = True

    def execute(self) -> Completions:
        """Rank all entities."""
        from llmcond.kinds.ranking.complete import complete

        return complete(self)

    def show(self, result: Completions, form: str) -> None:
        """Print a table."""
        from llmcond.log import log
        from llmcond.report.terminal import listing, show

        log.info(f"by {result.about['head']}")
        if not result.completions:
            log.info("no entity is left: all that there are complete it in the data already")
        show(listing([one.to_json() for one in result.completions]), form)


complete = verb(Complete)
