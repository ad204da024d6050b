"""A run's examples: what heads are fitted on, and what predictors are scored on.

Every verb that fits or scores asks this instead of knowing whether examples are rated pairs or
queries against candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmcond.data.queries import QueryRows
from llmcond.data.rows import Rows
from llmcond.errors import UserError
from llmcond.evaluation.results import Scored
from llmcond.features.view import View
from llmcond.heads import Recipe
from llmcond.heads.base import Fitted
from llmcond.heads.pairs import OnEpoch
from llmcond.metrics import Metric, metric_of
from llmcond.runs.kind import find_kind
from llmcond.runs.new_sentences import R
from llmcond.runs.predictors import AnyPredictor
from llmcond.runs.run import AnyRun

if TYPE_CHECKING:
    from llmcond.runs.with_dev import WithDev


class Examples(ABC):
    """The examples of a run with their features, each read once for a prompt and split."""

    run: AnyRun
    data: Any
    #: What messages call them.
    unit: str

    @abstractmethod
    def dim(self, view: View) -> int:
        """Return the size of the features that a head sees of a text."""

    def counts(self) -> Mapping[str, int]:
        """Return how many examples are fitted on and chosen by: ``n_train``, ``n_dev``, ..."""
        splits = self.data.splits
        return {f"n_{name}": len(splits[name]) for name in ("train", "dev") if name in splits}

    @property
    def dev_sample(self) -> str:
        """Which examples of dev choose an epoch, such as "1,000 queries"; empty: all."""
        return ""

    @property
    def epoch_score(self) -> str:
        """Return what the score that chooses an epoch is called, such as "MRR on 1,000 queries"."""
        heading = metric_of(self.run.dev_metric).heading
        return f"{heading} on {self.dev_sample}" if self.dev_sample else heading

    @abstractmethod
    def fit(self, recipe: Recipe, view: View, seed: int, on_epoch: OnEpoch, device: str) -> Fitted:
        """Fit a head on train; dev chooses the epoch, where there is one."""

    @abstractmethod
    def on_dev(self, head: Any, view: View) -> float:
        """Return a head's score on dev, by the run's ``dev_metric``; NaN where it is undefined."""

    @abstractmethod
    def scored(self, split: str) -> Scored:
        """Return what predictions of a split are compared with.

        Raises:
            UserError: no such split, or nothing in it to compare with.
        """

    @abstractmethod
    def rows(self, split: str) -> Rows | QueryRows:
        """Return the examples of a split as readers see them."""

    @abstractmethod
    def predict(self, predictor: AnyPredictor, split: str) -> NDArray[np.float32]:
        """Return what metrics take of each example, (n,): its similarity, or its answer's rank."""

    def on_new_sentences(
        self,
        results: Sequence[R],
        similarity: Sequence[NDArray[np.floating]],
        split: str,
        metrics: Sequence[Metric],
    ) -> Sequence[R]:
        """Return results that also have the score on examples that share no sentence with train.

        ``similarity`` are for each result the (seeds, n) predictions of a split. Where examples
        are not pairs of sentences, results are as they were.
        """
        return results

    def with_dev(
        self, recipe: Recipe, view: View, seed: int, device: str, weight: int, on_epoch: OnEpoch
    ) -> WithDev:
        """Return how a head is fitted on train and dev; arguments as those of :class:`WithDev`.

        Raises:
            UserError: examples have no ratings, or as :class:`WithDev`.
        """
        raise UserError(
            f"--with dev is for rated pairs, whose dev rows are rated by people, and "
            f"{self.run.folder} is a run of the task {self.run.task.name}. Leave it out."
        )


def examples_of(run: AnyRun) -> Examples:
    """Return the examples of a run, of whatever kind its task is."""
    found: Examples = find_kind(run.kind).examples(run)
    return found
