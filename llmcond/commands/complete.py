"""``llmcond complete``: find the entities that best complete a triple of a knowledge graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import Command, as_function
from llmcond.workflows.options.ranking import CompleteOptions

if TYPE_CHECKING:
    from llmcond.kinds.ranking.complete import Completions


@dataclass(frozen=True, kw_only=True)
class Complete(CompleteOptions, Command):
    """Find the entities that best complete a triple of a run's knowledge graph."""

    position = 100
    example = "llmcond complete --run runs/wn18rr --head-entity 02084071 --relation _hypernym"
    formats = True

    def execute(self) -> Completions:
        """Rank all entities.

        Returns:
            ``Completions``: the best entities with their ranks and scores, the best first, and the
            head and query that they are ranked by.

        Raises:
            UserError: there is no such run, head, entity or relation, or the run has no knowledge
                graph.

        Examples:
            >>> import llmcond
            >>> result = llmcond.extract(model="minilm", task="kgc", run="runs/graph")
            >>> completions = llmcond.complete(
            ...     run="runs/graph", head_entity="tolman_vest", relation="suits", k=3
            ... )
            >>> len(completions.completions)
            3
        """
        from llmcond.kinds.ranking.complete import complete

        return complete(self)

    def show(self, result: Completions, form: str) -> None:
        """Print a table."""
        from llmcond.display import Table
        from llmcond.log import log

        log.info(f"ranked by {result.about['head']}")
        if not result.completions:
            log.info("no entity is left: all of them complete the triple in the data already")
        Table.of_rows([completion.to_json() for completion in result.completions]).print(form)


complete = as_function(Complete)
