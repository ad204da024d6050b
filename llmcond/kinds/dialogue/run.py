"""A run of dialogues."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from llmcond.data.datasets import DataOptions
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

    @property
    def task(self) -> Dialogue:
        """Return the run's task; errors as of :class:`AnyRun`."""
        return cast(Dialogue, super().task)

    @property
    def dialogues(self) -> Dialogues:
        """Return its data set, see :attr:`data`."""
        return cast(Dialogues, self.data)

    @property
    def read_by(self) -> DataOptions:
        """Return how the data was read, without where it was."""
        data = self.manifest["data"]
        return DataOptions(split_seed=data["split_seed"], drop_leaks=data["drop_leaks"])

    def zero_shot_views(self, prompt: Prompt) -> list[View]:
        """Return the one view that zero-shot compares: utterances have no condition."""
        return [View((prompt,), subtract=False, features="alone")]

    def load_head(self, name: str) -> Saved[FittedRoles]:
        """Load a head that maps utterances to their roles; see :class:`AnyRun`."""
        from llmcond.kinds.dialogue.roles import load_roles_head

        return self._loaded(name, load_roles_head(self.head_folder(name)))
