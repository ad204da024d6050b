"""Runs of ranking tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from llmcond.features.view import FeatureView
from llmcond.kinds.ranking.task import QueryData, RankingTask
from llmcond.prompts import Prompt
from llmcond.runs.run_heads import RunHead
from llmcond.runs.task_runs import UnratedRun

if TYPE_CHECKING:
    from llmcond.kinds.ranking.heads import FittedQueryHead


class RankingRun(UnratedRun):
    """A run of a task that ranks candidates for queries."""

    kind, task_command = "ranking", "complete"
    task: RankingTask[Any]
    data: QueryData

    @override
    def zero_shot_views(self, prompt: Prompt) -> list[FeatureView]:
        # Zero-shot with separate features ignores the condition.
        if prompt.separate:
            return [FeatureView((prompt,), False, "separate", conditioned=True)]
        return super().zero_shot_views(prompt)

    @override
    def load_head(self, name: str) -> RunHead[FittedQueryHead]:
        from llmcond.kinds.ranking.heads import load_query_head

        return self._check_loaded_head(name, load_query_head(self.head_folder(name)))
