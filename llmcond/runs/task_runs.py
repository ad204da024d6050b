"""Runs of rated pairs, and the base class of runs of other kinds of task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmcond.data.datasets import DataOptions, Dataset, RatingScale
from llmcond.data.rows import Rows
from llmcond.errors import UserError
from llmcond.heads.storage import load_embedding_head
from llmcond.runs.run import AnyRun
from llmcond.runs.run_heads import RunEmbeddingHead, RunFittedHead
from llmcond.tasks import Task


class Run(AnyRun):
    """A run of rated rows."""

    kind, subtracts = "rated", True
    task: Task
    data: Dataset

    @property
    def splits(self) -> list[str]:
        """The names of the run's splits."""
        return list(self.manifest["data"]["rows"])

    @property
    def rating_range(self) -> tuple[float, float]:
        """The lowest and the highest rating of the scale that the data was read with."""
        scale = RatingScale(**self.manifest["data"]["scale"])
        return scale.low, scale.high

    @property
    def data_options(self) -> DataOptions:
        """The options that the data was read with, without its source."""
        return replace(super().data_options, extra=tuple(self.rows("train").extra))

    def rows(self, split: str) -> Rows:
        """Return the rows of a split.

        Raises:
            UserError: The run does not have the split, or its rows cannot be read.
            LlmcondError: The number of rows differs from the record in run.json.
        """
        if split not in self.data.splits:
            raise UserError(f"{self.folder} has no {split} split; it has {', '.join(self.splits)}.")
        return self.data.splits[split]

    def load_head(self, name: str) -> RunFittedHead:
        """Load a head that compares pairs; see ``AnyRun.load_head``."""
        from llmcond.heads import load_head

        return self._check_loaded_head(name, load_head(self.head_folder(name)))

    def load_applied_head(self, name: str) -> RunEmbeddingHead:
        """Load a head that embeds texts. Linear maps need no torch; see ``AnyRun.load_head``."""
        return self._check_loaded_head(name, load_embedding_head(self.head_folder(name)))

    def default_split(self) -> str:
        """Return ``test`` if it has rated rows, otherwise ``dev``.

        Test comes first because dev scores chose the epoch.
        """
        data = self.manifest["data"]
        if "dev" in self.trained_on:
            return "test"
        return "test" if data["rows"].get("test", 0) > data["unrated"].get("test", 0) else "dev"


class UnratedRun(AnyRun):
    """A run whose examples have right answers instead of ratings."""

    #: Candidates have no condition, so a query with subtraction would lie in another space.
    subtracts = False
    data: Any

    @property
    def splits(self) -> list[str]:
        """The names of the run's splits."""
        return list(self.data.splits)

    def default_split(self) -> str:
        """Return ``test`` if the run has it, otherwise ``dev``."""
        return "test" if "test" in self.splits else "dev"
