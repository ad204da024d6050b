"""Ranks replies to a dialogue, or plans towards a later turn, for ``llmcond reply``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcond.data.datasets import read_candidates
from llmcond.display import Displayed
from llmcond.errors import UserError
from llmcond.kinds.dialogue.replies import Reply, load_dialogue
from llmcond.log import log
from llmcond.workflows.options.ranking import ReplyOptions


@dataclass(frozen=True)
class Replies(Displayed):
    r"""The candidates that fit best, with the query that they answer.

    Attributes:
        replies: the candidates, best first.
        about: the head, the score and the query, as ``to_json`` returns them.

    Examples:
        >>> import llmcond
        >>> from pathlib import Path
        >>> dialogues = [["Hello!", "Hi!"], ["How are you?", "Fine."], ["Bye.", "See you."]]
        >>> rows = [{"utterances": turns} for turns in dialogues]
        >>> _ = llmcond.extract(task="dialogue", data=rows, model="minilm", run="dialogues")
        >>> _ = Path("candidates.txt").write_text("Yes, at noon.\nIt is red.\n")
        >>> result = llmcond.reply(
        ...     turns=["Shall we meet?"], candidates="candidates.txt", run="dialogues", k=1
        ... )
        >>> result.replies[0].text
        'Yes, at noon.'
    """

    replies: Sequence[Reply]
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Convert the result to a dictionary of JSON values, which ``--json`` prints.

        Returns:
            The query, with the replies under ``results``.
        """
        return {**self.about, "results": [reply.to_json() for reply in self.replies]}


def reply(options: ReplyOptions) -> Replies:
    """Rank candidates as the next turn, or by how well they lead to a goal.

    Raises:
        UserError: The run, head or file does not exist, a text is empty, or there are fewer than
            two candidates.
    """
    if options.goal is not None and options.score is not None:
        raise UserError(
            "--score is for the next turn, but planning for --goal has its own score. Leave one of "
            "them out."
        )
    texts = read_candidates(Path(options.candidates), options.read_options())
    model = load_dialogue(
        Path(options.run),
        options.head,
        prompt=options.prompt,
        score=options.score,
        device=options.device,
    )
    dialogue, pool = model.start(options.turns), model.candidates(texts)
    if (
        options.goal is None
        and len(dialogue) == 1
        and model.head.score.kind not in ("bi", "weighted")
    ):
        log.info("a single turn has no pairs: candidates are compared with it, as by the score bi")
    if options.goal is None:
        replies = model.top(dialogue, pool, options.k)
    else:
        replies = model.plan(dialogue, pool, options.goal, options.k)
    about = {
        "head": model.name,
        "score": "plan" if options.goal is not None else str(model.head.score),
        "turns": list(options.turns),
        "goal": options.goal,
        "n_candidates": len(pool),
    }
    return Replies(replies, about)
