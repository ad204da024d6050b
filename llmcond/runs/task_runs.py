"""A run of rated pairs, and what runs of other kinds of task share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmcond.data.datasets import DataOptions, Dataset, RatingScale
from llmcond.data.rows import Rows
from llmcond.errors import UserError
from llmcond.heads.loading import load_embedding_head
from llmcond.runs.run import AnyRun
from llmcond.runs.saved import SavedEmbeddingHead, SavedHead
from llmcond.tasks import Task


class Run(AnyRun):
    """A run of rated rows."""

    kind, subtracts = "rated", True
    task: Task
    data: Dataset

    @property
    def splits(self) -> list[str]:
        """Return the names of the run's splits."""
        return list(self.manifest["data"]["rows"])

    @property
    def rating_range(self) -> tuple[float, float]:
        """Return the lowest and the highest rating, by which the data was read."""
        scale = RatingScale(**self.manifest["data"]["scale"])
        return scale.low, scale.high

    @property
    def read_by(self) -> DataOptions:
        """Return how the data was read, without where it was."""
        return replace(super().read_by, extra=tuple(self.rows("train").extra))

    def rows(self, split: str) -> Rows:
        """Return the rows of a split.

        Raises:
            UserError: the run has none of that name, or its rows cannot be read.
            LlmcondError: its rows are not those that run.json counts.
        """
        if split not in self.data.splits:
            raise UserError(f"{self.folder} has no {split} split; it has {', '.join(self.splits)}.")
        return self.data.splits[split]

    def load_head(self, name: str) -> SavedHead:
        """Load a head that compares pairs; see :class:`AnyRun`."""
        from llmcond.heads import load_head

        return self._loaded(name, load_head(self.head_folder(name)))

    def load_applied_head(self, name: str) -> SavedEmbeddingHead:
        """Load a head that embeds texts, without torch if it is plain; see :class:`AnyRun`."""
        return self._loaded(name, load_embedding_head(self.head_folder(name)))

    def default_split(self) -> str:
        """Return ``test`` if it has rated rows, else ``dev``: figures on dev chose the epoch."""
        data = self.manifest["data"]
        if "dev" in self.trained_on:
            return "test"
        return "test" if data["rows"].get("test", 0) > data["unrated"].get("test", 0) else "dev"


class UnratedRun(AnyRun):
    """A run whose examples are right answers, not ratings."""

    #: Candidates have no condition, and what is left of a query would lie elsewhere.
    subtracts = False
    data: Any

    @property
    def splits(self) -> list[str]:
        """Return the names of the run's splits."""
        return list(self.data.splits)

    def default_split(self) -> str:
        """Return ``test`` if there is one, else ``dev``."""
        return "test" if "test" in self.splits else "dev"
