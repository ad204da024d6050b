"""Runs of the dialogue task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from llmcond.features.view import FeatureView
from llmcond.kinds.dialogue.data import Dialogues
from llmcond.kinds.dialogue.task import DialogueTask
from llmcond.prompts import Prompt
from llmcond.runs.run_heads import RunHead
from llmcond.runs.task_runs import UnratedRun

if TYPE_CHECKING:
    from llmcond.kinds.dialogue.heads import FittedRoleHead


class DialogueRun(UnratedRun):
    """A run of the dialogue task."""

    kind, task_command = "dialogue", "reply"
    task: DialogueTask
    data: Dialogues

    @override
    def zero_shot_views(self, prompt: Prompt) -> list[FeatureView]:
        # Utterances have no condition, so there is a single view.
        return [FeatureView((prompt,), subtract=False, features="alone")]

    @override
    def load_head(self, name: str) -> RunHead[FittedRoleHead]:
        from llmcond.kinds.dialogue.heads import load_roles_head

        return self._check_loaded_head(name, load_roles_head(self.head_folder(name)))
