"""Rank replies to a dialogue, or plan the way to a later turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcond.data.candidates import read_candidates
from llmcond.display import Displayed
from llmcond.errors import UserError
from llmcond.kinds.dialogue.replies import Reply, load_dialogue
from llmcond.log import log
from llmcond.workflows.options.ranking import ReplyOptions


@dataclass(frozen=True)
class Replies(Displayed):
    """The candidates that fit best, and what was asked of what."""

    replies: Sequence[Reply]
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {**self.about, "results": [one.to_json() for one in self.replies]}


def reply(asked: ReplyOptions) -> Replies:
    """Return the candidates that fit best as the next turn, or lead best to a goal.

    Raises:
        UserError: no such run, head or file, an empty text, or fewer than two candidates.
    """
    if asked.goal is not None and asked.score is not None:
        raise UserError(
            "--score is of the next turn, and a goal has a score of its own. Leave one out."
        )
    texts = read_candidates(Path(asked.candidates))
    model = load_dialogue(
        Path(asked.run), asked.head, prompt=asked.prompt, score=asked.score, device=asked.device
    )
    talk, pool = model.start(asked.turns), model.candidates(texts)
    if asked.goal is None and len(talk) == 1 and model.head.score.kind not in ("bi", "weighted"):
        log.info("one turn has no pairs: candidates are compared with it alone, as by the score bi")
    if asked.goal is None:
        found = model.top(talk, pool, asked.k)
    else:
        found = model.plan(talk, pool, asked.goal, asked.k)
    about = {
        "head": model.name,
        "score": "plan" if asked.goal is not None else str(model.head.score),
        "turns": list(asked.turns),
        "goal": asked.goal,
        "n_candidates": len(pool),
    }
    return Replies(found, about)
