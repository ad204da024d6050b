"""``llmcond reply``: rank candidates for the next turn of a dialogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import REUSES_VECTORS, Command, as_function
from llmcond.workflows.options.ranking import ReplyOptions

if TYPE_CHECKING:
    from llmcond.kinds.dialogue.reply import Replies


@dataclass(frozen=True, kw_only=True)
class Reply(ReplyOptions, Command):
    """Rank candidates for the next turn of a dialogue, or by how well they lead to a later turn."""

    position = 110
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
