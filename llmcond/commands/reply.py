"""``llmcond reply``: what fits best as the next turn of a dialogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import REUSES_VECTORS, Command, verb
from llmcond.workflows.options.ranking import ReplyOptions

if TYPE_CHECKING:
    from llmcond.kinds.dialogue.reply import Replies


@dataclass(frozen=True, kw_only=True)
class Reply(ReplyOptions, Command):
    """Rank candidates as the next turn of a dialogue, or by how well they lead to a later one."""

    position = 110
    example = (
        "llmcond reply 'Hi!' 'Hey, how are you?' --candidates replies.txt --run runs/dialogues"
    )
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> Replies:
        """Encode the turns, and rank the candidates."""
        from llmcond.kinds.dialogue.reply import reply

        return reply(self)

    def show(self, result: Replies, form: str) -> None:
        """Print a table."""
        from llmcond.log import log
        from llmcond.report.terminal import listing, show

        about = result.about
        log.info(f"by {about['head']}, score {about['score']}, of {about['n_candidates']:,}")
        show(listing([one.to_json() for one in result.replies]), form)


reply = verb(Reply)
