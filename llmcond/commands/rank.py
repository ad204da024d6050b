"""Commands for one kind of task each: knowledge graphs and dialogues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import REUSES_VECTORS, Command, as_function
from llmcond.workflows.options.ranking import CompleteOptions, ReplyOptions

if TYPE_CHECKING:
    from llmcond.kinds.dialogue.reply import Replies
    from llmcond.kinds.ranking.complete import Completions


@dataclass(frozen=True, kw_only=True)
class Complete(CompleteOptions, Command):
    """Find the entities that best complete a triple of a run's knowledge graph."""

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


@dataclass(frozen=True, kw_only=True)
class Reply(ReplyOptions, Command):
    """Rank candidates for the next turn of a dialogue, or by how well they lead to a later turn."""

    example = (
        "llmcond reply 'Hi!' 'Hey, how are you?' --candidates replies.txt --run runs/dialogues"
    )
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> Replies:
        r"""Encode the turns, and rank the candidates.

        Returns:
            ``Replies``: the best candidates with their scores, the best first, and the head and
            score that they are ranked by.

        Raises:
            UserError: there is no such run, head or file, a text is empty, or there are fewer than
                two candidates.

        Examples:
            >>> import llmcond
            >>> from pathlib import Path
            >>> result = llmcond.extract(model="minilm", task="dialogue", run="runs/dialogues")
            >>> n = Path("replies.txt").write_text("I am fine.\nThe train is late.\n")
            >>> ranked = llmcond.reply(
            ...     turns=["Hi!", "How are you?"], candidates="replies.txt", run="runs/dialogues"
            ... )
            >>> len(ranked.replies)
            2
        """
        from llmcond.kinds.dialogue.reply import reply

        return reply(self)

    def show(self, result: Replies, form: str) -> None:
        """Print a table."""
        from llmcond.display import Table
        from llmcond.log import log

        about = result.about
        log.info(
            f"{about['n_candidates']:,} candidates ranked by {about['head']}, score "
            f"{about['score']}"
        )
        Table.of_rows([reply.to_json() for reply in result.replies]).print(form)


reply = as_function(Reply)
