"""Rated pairs as examples: heads are fitted on ratings, and predict similarities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from llmcond.data.datasets import Dataset
from llmcond.data.rows import Rows, leaked_pairs, shares_sentence
from llmcond.features.view import View
from llmcond.heads import FittedHead, PairArrays, Recipe, fit_recipe
from llmcond.heads.pairs import OnEpoch
from llmcond.log import log
from llmcond.metrics import Metric, metric_of
from llmcond.runs.examples import Examples
from llmcond.runs.features import RowFeatures
from llmcond.runs.new_sentences import R, trained_sentences, with_new_sentences
from llmcond.runs.predictors import AnyPredictor, check_scorable, predict
from llmcond.runs.task_runs import Run
from llmcond.runs.with_dev import WithDev


class RatedExamples(Examples):
    """See :class:`Examples`."""

    run: Run
    unit = "rows"

    def __init__(self, run: Run) -> None:
        self.run = run
        store = cache(run.store)
        self._split = cache(lambda split: RowFeatures(run.rows(split), store()))

    def pairs(self, view: View, split: str) -> PairArrays:
        """Return all rows of a split as a head sees them, unrated ones (NaN) included."""
        return self._split(split).pairs(view)

    def rated(self, view: View, split: str) -> PairArrays:
        """Return the rated rows of a split as heads take them."""
        return self.pairs(view, split).take(self.run.rows(split).rated)

    @property
    def _dev_scores(self) -> bool:
        """Return whether a score on dev says anything: the encoder was not trained on it."""
        return "dev" not in self.run.trained_on

    def dim(self, view: View) -> int:
        """See :class:`Examples`."""
        return self.rated(view, "train").dim

    def counts(self) -> Mapping[str, int]:
        """See :class:`Examples`; ``n_dropped`` are unrated rows of train."""
        train, dev = self.run.rows("train").rated, self.run.rows("dev").rated
        return {
            "n_train": int(train.sum()),
            "n_dev": int(dev.sum()) if self._dev_scores else 0,
            "n_dropped": int((~train).sum()),
        }

    def fit(
        self, recipe: Recipe, view: View, seed: int, on_epoch: OnEpoch, device: str
    ) -> FittedHead:
        """See :class:`Examples`."""
        dev = self.rated(view, "dev") if self._dev_scores else None
        train = self.rated(view, "train")
        metric = metric_of(self.run.dev_metric)
        return fit_recipe(recipe, train, dev or None, seed, on_epoch, device, metric)

    def on_dev(self, head: FittedHead, view: View) -> float:
        """See :class:`Examples`."""
        dev = self.rated(view, "dev") if self._dev_scores else None
        if dev is None or not len(dev):
            return math.nan
        similarity = head.similarity(dev.first, dev.second, dev.condition)
        metric = metric_of(self.run.dev_metric)
        return metric(similarity.astype(np.float64), dev.rating, dev.groups)

    def scored(self, split: str) -> Rows:
        """See :class:`Examples`."""
        rows = self.run.rows(split)
        check_scorable(rows, self.run, other=False)
        return rows

    def rows(self, split: str) -> Rows:
        """See :class:`Examples`."""
        return self.run.rows(split)

    def predict(self, predictor: AnyPredictor, split: str) -> NDArray[np.float32]:
        """See :class:`Examples`: the similarity of all rows, unrated ones included."""
        return predict(predictor, self.pairs(predictor.view, split))

    def on_new_sentences(
        self,
        results: Sequence[R],
        similarity: Sequence[NDArray[np.floating]],
        split: str,
        metrics: Sequence[Metric],
    ) -> Sequence[R]:
        """See :class:`Examples`."""
        known = trained_sentences(self.run, (), split)
        return with_new_sentences(results, similarity, self.run.rows(split), known, metrics)

    def with_dev(
        self, recipe: Recipe, view: View, seed: int, device: str, weight: int, on_epoch: OnEpoch
    ) -> WithDev:
        """See :class:`Examples`."""
        return WithDev(self.run, recipe, view, seed, device, weight, on_epoch)


def log_rows(dataset: Dataset) -> None:
    """Log unrated rows, and what dev and test share with train."""
    train = dataset.splits["train"]
    for name, rows in dataset.splits.items():
        unrated = int((~rows.rated).sum())
        if unrated:
            log.info(f"{name}: {unrated:,} of {len(rows):,} rows are unrated and not used")
        if name == "train":
            continue
        if leaked := leaked_pairs(rows, train):
            log.warning(f"{leaked:,} sentence pairs of {name} are in train too")
        sentences = train.take(train.rated).folded_sentences()
        shared = int((shares_sentence(rows, sentences) & rows.rated).sum())
        if shared:
            log.info(
                f"{name}: {shared:,} of {int(rows.rated.sum()):,} rated rows share a sentence with "
                "train; evaluate and compare-prompts score the others apart as well"
            )
