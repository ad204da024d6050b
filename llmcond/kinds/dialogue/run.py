"""Runs of the dialogue task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from llmcond.features.view import View
from llmcond.kinds.dialogue.data import Dialogues
from llmcond.kinds.dialogue.task import Dialogue
from llmcond.prompts import Prompt
from llmcond.runs.saved import Saved
from llmcond.runs.task_runs import UnratedRun

if TYPE_CHECKING:
    from llmcond.kinds.dialogue.roles import FittedRoles


class DialogueRun(UnratedRun):
    """A run of the dialogue task."""

    kind, own_command = "dialogue", "reply"
    task: Dialogue
    data: Dialogues

    @override
    def zero_shot_views(self, prompt: Prompt) -> list[View]:
        # Utterances have no condition, so there is a single view.
        return [View((prompt,), subtract=False, features="alone")]

    @override
    def load_head(self, name: str) -> Saved[FittedRoles]:
        from llmcond.kinds.dialogue.roles import load_roles_head

        return self._loaded(name, load_roles_head(self.head_folder(name)))
