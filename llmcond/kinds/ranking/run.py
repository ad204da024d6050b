"""Runs of ranking tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from llmcond.features.view import View
from llmcond.kinds.ranking.task import QueryData, RankingTask
from llmcond.prompts import Prompt
from llmcond.runs.saved import Saved
from llmcond.runs.task_runs import UnratedRun

if TYPE_CHECKING:
    from llmcond.kinds.ranking.heads import FittedQueryHead


class RankingRun(UnratedRun):
    """A run of a task that ranks candidates for queries."""

    kind, own_command = "ranking", "complete"
    task: RankingTask[Any]
    data: QueryData

    @override
    def zero_shot_views(self, prompt: Prompt) -> list[View]:
        # Zero-shot with separate features ignores the condition.
        if prompt.separate:
            return [View((prompt,), False, "separate", conditioned=True)]
        return super().zero_shot_views(prompt)

    @override
    def load_head(self, name: str) -> Saved[FittedQueryHead]:
        from llmcond.kinds.ranking.heads import load_query_head

        return self._loaded(name, load_query_head(self.head_folder(name)))
