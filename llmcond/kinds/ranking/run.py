"""A run of queries against candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from llmcond.data.datasets import DataOptions
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

    @property
    def task(self) -> RankingTask[Any]:
        """Return the run's task; errors as of :class:`AnyRun`."""
        return cast(RankingTask[Any], super().task)

    @property
    def queries(self) -> QueryData:
        """Return its data set, see :attr:`data`."""
        return cast(QueryData, self.data)

    @property
    def read_by(self) -> DataOptions:
        """Return how the data was read: in the only way there is."""
        return DataOptions()

    def zero_shot_views(self, prompt: Prompt) -> list[View]:
        """Return the views that zero-shot compares; separate features ignore the condition."""
        if prompt.separate:
            return [View((prompt,), False, "separate", conditioned=True)]
        return super().zero_shot_views(prompt)

    def load_head(self, name: str) -> Saved[FittedQueryHead]:
        """Load a head that ranks candidates; see :class:`AnyRun`."""
        from llmcond.kinds.ranking.heads import load_query_head

        return self._loaded(name, load_query_head(self.head_folder(name)))
