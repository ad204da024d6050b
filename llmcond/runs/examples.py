"""A run's examples, which heads are fitted on and predictors are scored on.

Commands that fit or score heads use this interface, so that they need not know whether examples
are rated pairs or queries against candidates.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import QueryRows, Rows
from llmcond.errors import UserError
from llmcond.evaluation.results import Result, Scored
from llmcond.features.view import FeatureView
from llmcond.heads import Recipe
from llmcond.heads.fitted import FittedModule
from llmcond.heads.pairs import DEV_SCORE_KEY, HeldOut, OnEpoch
from llmcond.metrics import Estimate, Metric, get_metric
from llmcond.runs.kind import find_kind
from llmcond.runs.predictors import AnyPredictor
from llmcond.runs.run import AnyRun
from llmcond.runs.run_heads import zero_shot_head

if TYPE_CHECKING:
    from llmcond.runs.dev_fit import DevFit


class Examples(ABC):
    """The examples of a run with their features, which are read once per prompt and split."""

    run: AnyRun
    data: Any
    #: The noun for the examples in messages.
    unit: str

    @abstractmethod
    def dim(self, view: FeatureView) -> int:
        """Return the size of the features of a text that are a head's input."""

    def counts(self) -> Mapping[str, int]:
        """Return the number of examples in each split that fitting uses: ``n_train``, ``n_dev``."""
        splits = self.data.splits
        return {f"n_{name}": len(splits[name]) for name in ("train", "dev") if name in splits}

    @property
    def dev_sample(self) -> str:
        """The dev examples that choose the epoch, such as "1,000 queries"; empty: all."""
        return ""

    @property
    def epoch_score(self) -> str:
        """The name of the score that chooses the epoch, such as "MRR on 1,000 queries"."""
        heading = get_metric(self.run.dev_metric).heading
        return f"{heading} on {self.dev_sample}" if self.dev_sample else heading

    @property
    def epoch_score_key(self) -> str:
        """The key of the score that chooses the epoch in learning curves."""
        return DEV_SCORE_KEY

    @abstractmethod
    def fit(
        self,
        recipe: Recipe,
        view: FeatureView,
        seed: int,
        on_epoch: OnEpoch,
        device: str,
        start: Any = None,
        curve_split: str | None = None,
    ) -> FittedModule:
        """Fit a head on train. Dev chooses the epoch, if the run has it.

        ``start`` is a fitted head of the same family whose parameters are the initial ones. With
        dev, the learning curve also has the score on ``curve_split``, if it is named.
        """

    @abstractmethod
    def score_on_dev(self, head: Any, view: FeatureView) -> float:
        """Return a head's score on dev by the run's ``dev_metric``; NaN if it is undefined."""

    def score_zero_shot_on_dev(self, view: FeatureView) -> tuple[str, float]:
        """Return the name of zero-shot under a view's first prompt, and its score on dev.

        Returns:
            The name, and the score by the run's ``dev_metric``; NaN if it is undefined.
        """
        zero_shot = zero_shot_head(self.run.zero_shot_view(view.prompts[0]))
        if "dev" not in self.data.splits:
            return zero_shot.name, math.nan
        dev = self.scored_rows("dev")
        ranks, metric = self.predict(zero_shot, "dev"), get_metric(self.run.dev_metric)
        return zero_shot.name, metric(ranks.astype(np.float64), dev.rating, dev.pair)

    def score_held_out(self, held_out: Sequence[HeldOut | None]) -> Mapping[str, Estimate]:
        """Return the scores of held-out predictions of dev, as means over the fits of a system.

        The result has an entry for the run's ``dev_metric``. It is empty if a fit has no such
        predictions, for example because its epoch was not chosen on dev.
        """
        return {}

    @abstractmethod
    def scored_rows(self, split: str) -> Scored:
        """Return the rows or queries of a split that predictions are scored against.

        Raises:
            UserError: The split does not exist, or has nothing to score.
        """

    @abstractmethod
    def rows(self, split: str) -> Rows | QueryRows:
        """Return the examples of a split as text."""

    def keys(self, split: str) -> list[tuple[Any, ...]]:
        """Return what identifies each example of a split, so that runs can be compared.

        Texts that a run may word differently, such as those of entities with ids, are left out.
        """
        rows = self.rows(split)
        if isinstance(rows, Rows):
            ratings = [None if np.isnan(rating) else float(rating) for rating in rows.rating]
            columns: list[Any] = [rows.sentence1, rows.sentence2, rows.condition, ratings]
        else:
            ids = [values for name, values in rows.columns.items() if not name.endswith("_text")]
            columns = ids
        return list(zip(*columns, strict=True))

    def pool_keys(self) -> list[Any]:
        """Return what else determines the ranks of answers: candidates and known answers."""
        return []

    def subsets(self, split: str) -> Mapping[str, NDArray[np.bool_]]:
        """Return masks (n,) of the subsets of a split's examples that are reported separately."""
        return {}

    @abstractmethod
    def predict(self, predictor: AnyPredictor, split: str) -> NDArray[np.float32]:
        """Return the input of metrics for each example, (n,): its similarity or answer's rank."""

    def add_new_sentences(
        self,
        results: Sequence[Result],
        similarity: Sequence[NDArray[np.floating]],
        split: str,
        metrics: Sequence[Metric],
    ) -> Sequence[Result]:
        """Add the score on examples that share no sentence with train to each result.

        ``similarity`` holds, for each result, the (seeds, n) predictions of a split. Results are
        unchanged if examples are not pairs of sentences.
        """
        return results

    def with_dev(
        self,
        recipe: Recipe,
        view: FeatureView,
        seed: int,
        device: str,
        weight: int,
        on_epoch: OnEpoch,
    ) -> DevFit:
        """Return the fit of a head on train and dev. The arguments are those of ``DevFit``.

        Raises:
            UserError: The examples have no ratings, or as for ``DevFit``.
        """
        raise UserError(
            f"--with dev is for rated pairs, whose dev rows are rated by people, and "
            f"{self.run.folder} is a run of the task {self.run.task.name}. Leave it out."
        )


def load_examples(run: AnyRun) -> Examples:
    """Return the examples of a run of any kind of task."""
    examples: Examples = find_kind(run.kind).examples(run)
    return examples
