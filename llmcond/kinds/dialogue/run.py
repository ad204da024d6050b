"""A run of dialogues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcond.features.view import View
from llmcond.kinds.dialogue.data import Dialogues
from llmcond.kinds.dialogue.task import Dialogue
from llmcond.prompts import Prompt
from llmcond.runs.saved import Saved
from llmcond.runs.task_runs import UnratedRun

if TYPE_CHECKING:
    from llmcond.kinds.dialogue.roles import FittedRoles


class DialogueRun(UnratedRun):
    """A run of dialogues."""

    kind, own_command = "dialogue", "reply"
    task: Dialogue
    data: Dialogues

    def zero_shot_views(self, prompt: Prompt) -> list[View]:
        """Return the one view that zero-shot compares: utterances have no condition."""
        return [View((prompt,), subtract=False, features="alone")]

    def load_head(self, name: str) -> Saved[FittedRoles]:
        """Load a head that maps utterances to their roles; see :class:`AnyRun`."""
        from llmcond.kinds.dialogue.roles import load_roles_head

        return self._loaded(name, load_roles_head(self.head_folder(name)))
