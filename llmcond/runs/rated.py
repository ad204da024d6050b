"""Rated pairs as examples: heads are fitted on ratings and predict similarities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.data.datasets import Dataset
from llmcond.data.rows import Rows, leaked_pairs, shares_sentence
from llmcond.errors import format_count
from llmcond.evaluation.paired import bootstrap_metrics
from llmcond.evaluation.results import Result
from llmcond.features.view import FeatureView
from llmcond.heads import FittedHead, PairArrays, Recipe, fit_recipe
from llmcond.heads.numpy_heads import NumpyHead
from llmcond.heads.pairs import HeldOut, OnEpoch, score_key
from llmcond.log import log
from llmcond.metrics import Estimate, Metric, get_metric
from llmcond.runs.dev_fit import DevFit
from llmcond.runs.examples import Examples
from llmcond.runs.features import RowFeatures
from llmcond.runs.new_sentences import add_new_sentences, collect_training_sentences
from llmcond.runs.predictors import AnyPredictor, check_scorable, predict
from llmcond.runs.run_heads import zero_shot_head
from llmcond.runs.task_runs import Run


class RatedExamples(Examples):
    """The rated pairs of a run with their features."""

    run: Run
    unit = "rows"

    def __init__(self, run: Run) -> None:
        self.run = run
        store = cache(run.store)
        self._split = cache(lambda split: RowFeatures(run.rows(split), store()))

    def pairs(self, view: FeatureView, split: str) -> PairArrays:
        """Return the features of all rows of a split, including unrated rows (NaN)."""
        return self._split(split).pairs(view)

    def rated(self, view: FeatureView, split: str) -> PairArrays:
        """Return the features of the rated rows of a split."""
        return self.pairs(view, split).take(self.run.rows(split).rated)

    @property
    def _dev_scores(self) -> bool:
        """Whether a score on dev is meaningful: the encoder was not trained on dev."""
        return "dev" not in self.run.trained_on

    @override
    def dim(self, view: FeatureView) -> int:
        return self.rated(view, "train").dim

    @override
    def counts(self) -> Mapping[str, int]:
        """Return the number of rows that fitting uses; ``n_dropped`` counts unrated train rows."""
        train, dev = self.run.rows("train").rated, self.run.rows("dev").rated
        return {
            "n_train": int(train.sum()),
            "n_dev": int(dev.sum()) if self._dev_scores else 0,
            "n_dropped": int((~train).sum()),
        }

    @property
    @override
    def epoch_score_key(self) -> str:
        return score_key("dev", self.run.dev_metric)

    @override
    def fit(
        self,
        recipe: Recipe,
        view: FeatureView,
        seed: int,
        on_epoch: OnEpoch,
        device: str,
        start: FittedHead | None = None,
        curve_split: str | None = None,
    ) -> FittedHead:
        dev = self.rated(view, "dev") if self._dev_scores else None
        train = self.rated(view, "train")
        metric = get_metric(self.run.dev_metric)
        curve_splits = {curve_split: self.rated(view, curve_split)} if curve_split else None
        return fit_recipe(
            recipe, train, dev or None, seed, on_epoch, device, metric, start, curve_splits
        )

    @override
    def score_on_dev(self, head: FittedHead | NumpyHead, view: FeatureView) -> float:
        dev = self.rated(view, "dev") if self._dev_scores else None
        if dev is None or not len(dev):
            return math.nan
        similarity = head.similarity(dev.first, dev.second, dev.condition)
        metric = get_metric(self.run.dev_metric)
        return metric(similarity.astype(np.float64), dev.rating, dev.groups)

    @override
    def score_zero_shot_on_dev(self, view: FeatureView) -> tuple[str, float]:
        zero_shot = zero_shot_head(self.run.zero_shot_view(view.prompts[0]))
        return zero_shot.name, self.score_on_dev(zero_shot.head, zero_shot.view)

    @override
    def score_held_out(self, held_out: Sequence[HeldOut | None]) -> Mapping[str, Estimate]:
        predictions = [part.predictions for part in held_out if part is not None]
        if not predictions or len(predictions) < len(held_out):
            return {}
        dev, metric = self.run.rows("dev"), get_metric(self.run.dev_metric)
        system, rated = np.stack(predictions), dev.rated
        draws = bootstrap_metrics([system], dev.rating[rated], dev.pair[rated], [metric])
        return draws.estimates(0)

    @override
    def scored_rows(self, split: str) -> Rows:
        rows = self.run.rows(split)
        check_scorable(rows, self.run, is_other_data=False)
        return rows

    @override
    def rows(self, split: str) -> Rows:
        return self.run.rows(split)

    @override
    def subsets(self, split: str) -> Mapping[str, NDArray[np.bool_]]:
        """Return whether conditions, and sentences, occur in rated rows of training."""
        rows = self.run.rows(split)
        trained = [self.run.rows(name) for name in {"train", *self.run.trained_on} - {split}]
        known = [part.take(part.rated) for part in trained]
        conditions = {text for part in known for text in part.condition}
        seen = np.array([text in conditions for text in rows.condition], dtype=np.bool_)
        sentences = {text for part in known for text in part.folded_sentences()}
        shared = shares_sentence(rows, sentences)
        return {
            "condition in training": seen,
            "condition not in training": ~seen,
            "sentence shared with training": shared,
            "no sentence shared with training": ~shared,
        }

    @override
    def predict(self, predictor: AnyPredictor, split: str) -> NDArray[np.float32]:
        """Return the predicted similarity of all rows, (n,), including unrated ones."""
        return predict(predictor, self.pairs(predictor.view, split))

    @override
    def add_new_sentences(
        self,
        results: Sequence[Result],
        similarity: Sequence[NDArray[np.floating]],
        split: str,
        metrics: Sequence[Metric],
    ) -> Sequence[Result]:
        known = collect_training_sentences(self.run, (), split)
        return add_new_sentences(results, similarity, self.run.rows(split), known, metrics)

    @override
    def with_dev(
        self,
        recipe: Recipe,
        view: FeatureView,
        seed: int,
        device: str,
        weight: int,
        on_epoch: OnEpoch,
    ) -> DevFit:
        return DevFit(self.run, recipe, view, seed, device, weight, on_epoch)


def log_rows(dataset: Dataset) -> None:
    """Log the number of unrated rows, and of dev and test rows that overlap with train."""
    train = dataset.splits["train"]
    for name, rows in dataset.splits.items():
        unrated = int((~rows.rated).sum())
        if unrated:
            log.info(f"{name}: {unrated:,} of {len(rows):,} rows are unrated and not used")
        if name == "train":
            continue
        if leaked := leaked_pairs(rows, train):
            pairs = f"{format_count(leaked, 'sentence pair')} of {name}"
            log.warning(
                f"{pairs} {'is' if leaked == 1 else 'are'} also in train and scored nevertheless; "
                "to leave them out, remove their rows from one of the splits"
            )
        sentences = train.take(train.rated).folded_sentences()
        shared = int((shares_sentence(rows, sentences) & rows.rated).sum())
        if shared:
            log.info(
                f"{name}: {shared:,} of {int(rows.rated.sum()):,} rated rows share a sentence with "
                "train; evaluate and compare-prompts also report the score on the other rows"
            )
