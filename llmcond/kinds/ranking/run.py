"""A run of queries against candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmcond.features.view import View
from llmcond.kinds.ranking.task import QueryData, RankingTask
from llmcond.prompts import Prompt
from llmcond.runs.saved import Saved
from llmcond.runs.task_runs import UnratedRun

if TYPE_CHECKING:
    from llmcond.kinds.ranking.heads import FittedQueryHead


class RankingRun(UnratedRun):
    """A run of queries against candidates."""

    kind, own_command = "ranking", "complete"
    task: RankingTask[Any]
    data: QueryData

    def zero_shot_views(self, prompt: Prompt) -> list[View]:
        """Return the views that zero-shot compares; separate features ignore the condition."""
        if prompt.separate:
            return [View((prompt,), False, "separate", conditioned=True)]
        return super().zero_shot_views(prompt)

    def load_head(self, name: str) -> Saved[FittedQueryHead]:
        """Load a head that ranks candidates; see :class:`AnyRun`."""
        from llmcond.kinds.ranking.heads import load_query_head

        return self._loaded(name, load_query_head(self.head_folder(name)))
