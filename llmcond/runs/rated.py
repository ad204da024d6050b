"""Rated pairs as examples: heads are fitted on ratings and predict similarities."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.errors import UserError, format_count
from llmcond.base.metrics import Estimate, Metric, choose_metrics, get_metric
from llmcond.base.output import log
from llmcond.data.datasets import DataOptions, Dataset
from llmcond.data.rows import Rows, fold_of_pair, join_rows, leaked_pairs, shares_sentence
from llmcond.evaluation.analyses import seen_unseen
from llmcond.evaluation.paired import bootstrap_metrics
from llmcond.evaluation.results import (
    Result,
    Results,
    add_subsets,
    check_fold_count,
    cross_validated_gain,
    score_subset,
)
from llmcond.features.view import FeatureView
from llmcond.heads import FittedHead, PairArrays, Recipe, fit_recipe
from llmcond.heads.numpy_heads import HeldOut, NumpyHead, OnEpoch, in_stage, score_key
from llmcond.prompts import Prompt
from llmcond.prompts.template import SplitInputs
from llmcond.runs.cross import CrossEncoder, load_cross_encoder
from llmcond.runs.examples import (
    AnyPredictor,
    Evaluation,
    Examples,
    RowFeatures,
    check_scorable,
    predict,
    resolve_predictors,
    score_predictors,
)
from llmcond.runs.open import extract_other_data
from llmcond.runs.run import Run, RunHead


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

    def _dev(self, view: FeatureView) -> PairArrays | None:
        """Return the rated rows of dev; None without any, or if the encoder was trained on dev."""
        return None if "dev" in self.run.trained_on else self.rated(view, "dev") or None

    @override
    def dim(self, view: FeatureView) -> int:
        return self.rated(view, "train").dim

    @override
    def counts(self) -> Mapping[str, int]:
        """Return the number of rows that fitting uses; ``n_dropped`` counts unrated train rows."""
        train, dev = self.run.rows("train").rated, self.run.rows("dev").rated
        return {
            "n_train": int(train.sum()),
            "n_dev": 0 if "dev" in self.run.trained_on else int(dev.sum()),
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
        train, dev = self.rated(view, "train"), self._dev(view)
        metric = get_metric(self.run.dev_metric)
        curve_splits = {curve_split: self.rated(view, curve_split)} if curve_split else None
        return fit_recipe(recipe, train, dev, seed, on_epoch, device, metric, start, curve_splits)

    @override
    def score_on_dev(self, head: FittedHead | NumpyHead, view: FeatureView) -> float:
        dev = self._dev(view)
        if dev is None:
            return math.nan
        similarity = head.similarity(dev.first, dev.second, dev.condition)
        metric = get_metric(self.run.dev_metric)
        return metric(similarity.astype(np.float64), dev.rating, dev.groups)

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
        rows: Rows = self.run.rows(split)
        check_scorable(rows, self.run, is_other_data=False)
        return rows

    @override
    def rows(self, split: str) -> Rows:
        rows: Rows = self.run.rows(split)
        return rows

    @override
    def subsets(
        self, split: str, trained_on: Collection[str] = (), others: Sequence[Run] = ()
    ) -> Mapping[str, NDArray[np.bool_]]:
        """Return whether conditions, and sentences, occur in rated rows of training."""
        rows = self.run.rows(split)
        runs = (self.run, *others)
        known = [part for run in runs for part in training_rows(run, trained_on, split)]
        conditions = {text for part in known for text in part.condition}
        seen = np.array([text in conditions for text in rows.condition], dtype=np.bool_)
        shared = shares_sentence(rows, {text for part in known for text in part.folded_sentences()})
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
        known = training_rows(self.run, (), split)
        return add_new_sentences(results, similarity, self.run.rows(split), known, metrics)


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


@dataclass(frozen=True)
class DevFit:
    """The fit of a recipe on train and dev of a run, for all epochs of its settings.

    No split is left to choose the epoch, so the last epoch is used.

    Attributes:
        run: The run.
        recipe: The recipe, sized to the features.
        view: The features that the head is fitted on.
        seed: The random seed.
        device: The device to fit on.
        weight: How often an epoch contains each row of dev.
        on_epoch: Called after each epoch of every fit.
    """

    run: Run
    recipe: Recipe
    view: FeatureView
    seed: int
    device: str
    weight: int
    on_epoch: OnEpoch

    def __post_init__(self) -> None:
        """Check that the recipe can be fitted on dev.

        Raises:
            UserError: The run has no ratings, the head does not learn from them, dev has no rated
                rows, or the inputs of a prompt depend on the other rows of the split.
        """
        if not self.run.is_rated:
            raise UserError(
                f"--with dev is for rated pairs, whose dev rows are rated by people, and "
                f"{self.run.folder} is a run of the task {self.run.task.name}. Leave it out."
            )
        if not self.recipe.family.supervised:
            raise UserError(
                f"the head {self.recipe.name} does not learn from ratings, so dev has no effect on "
                "it. Leave out --with."
            )
        if not self.run.rows("dev").rated.any():
            raise UserError(f"{self.run.folder} has no rated dev rows. Leave out --with.")
        for prompt in self.view.prompts:
            if prompt.control:
                raise UserError(
                    f"the prompt {prompt.name} is a control, and controls are fitted on train "
                    "only. Leave out --with."
                )

    def fit(self) -> FittedHead:
        """Fit on all rated rows of train and dev, and record this in ``trained_on``."""
        head = self._fit(self._dev, self.on_epoch)
        record = {**head.fit.record, "trained_on": ["train", "dev"], "weight": self.weight}
        return replace(head, fit=replace(head.fit, record=record))

    def folds(self, count: int) -> dict[str, Any]:
        """Fit ``count`` times, each time without one fold of dev, and once without dev.

        All fits run for the same number of epochs.

        Raises:
            UserError: The encoder was trained on dev, or dev has fewer sentence pairs than folds.
        """
        if "dev" in self.run.trained_on:
            raise UserError(
                f"the encoder of {self.run.folder} was trained on dev, so folds of dev would "
                "measure nothing. Leave out --folds."
            )
        dev = self._dev
        check_fold_count(dev, count)
        fold = fold_of_pair(dev, count, self.seed)
        without = self._predict(self._fit(None, in_stage(self.on_epoch, "without-dev")), dev)
        trained = np.empty_like(without)
        for number in range(count):
            is_held_out = fold == number
            on_epoch = in_stage(self.on_epoch, f"fold-{number}")
            head = self._fit(dev.take(~is_held_out), on_epoch)
            trained[is_held_out] = self._predict(head, dev.take(is_held_out))
        metric = self.run.task.main_metric
        return cross_validated_gain(count, without, trained, dev, self.run.rows("train"), metric)

    @property
    def _dev(self) -> Rows:
        rows: Rows = self.run.rows("dev")
        return rows.take(rows.rated)

    def _fit(self, dev: Rows | None, on_epoch: OnEpoch) -> FittedHead:
        train = self.run.rows("train")
        parts = [train.take(train.rated), *([] if dev is None else [dev] * self.weight)]
        pairs = RowFeatures(join_rows(parts), self.run.store()).pairs(self.view)
        return fit_recipe(self.recipe, pairs, None, self.seed, on_epoch, self.device)

    def _predict(self, head: FittedHead, rows: Rows) -> NDArray[np.float32]:
        pairs = RowFeatures(rows, self.run.store()).pairs(self.view)
        return predict(RunHead("", head, self.view, {}), pairs)


def training_rows(run: Run, trained_on: Collection[str], split: str | None) -> list[Rows]:
    """Return the rated rows of train and of each split that models were trained on.

    Args:
        run: run, with the splits that its encoder was trained on.
        trained_on: splits that other models, such as heads, were trained on.
        split: split of the run that is scored; its rows are not included.
    """
    names = {"train", *run.trained_on, *trained_on}
    parts = map(run.rows, names.intersection(run.splits) - {split})
    return [rows.take(rows.rated) for rows in parts]


def add_new_sentences(
    results: Sequence[Result],
    similarity: Sequence[NDArray[np.floating]],
    rows: Rows,
    known: Sequence[Rows],
    metrics: Sequence[Metric],
) -> list[Result]:
    """Add the scores on rows that share no sentence with ``known`` rows, and on the other rows.

    Results are unchanged if no row shares any. ``similarity`` holds, for each result, the (seeds,
    n) predictions of all rows, including unrated ones.
    """
    sentences = {text for part in known for text in part.folded_sentences()}
    is_new = rows.rated & ~shares_sentence(rows, sentences)
    if is_new.sum() == rows.rated.sum():
        return list(results)
    masks = {"unseen_sentences": is_new, "shared_sentences": rows.rated & ~is_new}
    parts = {}
    for name, mask in masks.items():
        about = {"n_pairs": len(rows.take(mask).pair_keys())}
        scored = score_subset(similarity, rows, metrics, mask)
        parts[name] = [replace(subset, about=about) for subset in scored]
    return add_subsets(results, {"sentences": parts})


# -- evaluation --------------------------------------------------------------------------------


def evaluate_pairs(run: Run, options: Any) -> Evaluation:
    """Score a run of rated pairs with an ``EvaluateOptions``; see ``AnyTask.evaluate``."""
    data = options.data_options()
    metrics = choose_metrics(run.task.metrics, options.metric)
    if "dev" in run.trained_on:
        log.info(f"the encoder of {run.folder} was trained on dev as well as on train")
    rows, split = _choose_rows(run, data, options.split)
    has_other_data = data.source is not None
    if run.cross and options.head:
        raise UserError(
            f"{run.folder} holds a cross-encoder, which has no separate heads. Leave out --head."
        )
    run_split = None if has_other_data else split
    heads: list[AnyPredictor] = []
    prompts: list[Prompt] = []
    if not run.cross:
        heads, prompts = resolve_predictors(run, options.head, run_split)
    check_scorable(
        rows, run, has_other_data, predictions=options.predictions is not None, heads=heads
    )
    predictors: list[AnyPredictor | CrossEncoder] = [*heads]
    store = None
    if run.cross:
        cross = load_cross_encoder(run.folder, device=options.device)
        predictors, predictions = [cross], [cross.predict(rows)]
    else:
        store = run.store()
        if has_other_data:
            inputs = partial(SplitInputs, [rows])
            store = extract_other_data(run, prompts, inputs, options.device)
        features = RowFeatures(rows, store)
        predictions = [predict(head, features.pairs(head.view)) for head in heads]
    scored = score_predictors(predictors, predictions, rows, split, metrics, task=run.task.name)
    trained_on = {name for head in heads for name in head.trained_on}
    known, single_seed = training_rows(run, trained_on, run_split), [p[None] for p in predictions]
    results = add_new_sentences(scored, single_seed, rows, known, metrics)
    if run_split == "dev":
        results = list(map(_add_held_out, results, predictors))
    results = _add_condition_scores(results, predictors, predictions, rows, known, metrics[0])
    return Evaluation(Results(tuple(results)), predictions, rows, store)


def _choose_rows(run: Run, options: DataOptions, split: str | None) -> tuple[Rows, str]:
    """Return the rows to score, and the name of their split."""
    if options.source is not None:
        rows, split = run.task.read_split(options.with_defaults(run.data_options), split)
        log.info(f"scoring all {len(rows):,} rows of {rows.file}, as {split}")
        return rows, split
    split = run.scored_split(split)
    return run.rows(split), split


def _add_held_out(result: Result, predictor: AnyPredictor | CrossEncoder) -> Result:
    """Add the held-out score on dev that the fit recorded, if dev chose the epoch."""
    record = {} if isinstance(predictor, CrossEncoder) else predictor.record.get("held_out", {})
    name = result.primary.name
    if name not in record:
        return result
    return replace(result, held_out=Estimate.from_json(record[name], record[f"{name}_ci"]))


def _add_condition_scores(
    results: list[Result],
    predictors: Sequence[AnyPredictor | CrossEncoder],
    predicted: Sequence[NDArray[np.float32]],
    rows: Rows,
    known: Sequence[Rows],
    metric: Metric,
) -> list[Result]:
    """Add the scores on rows with seen and with unseen conditions to results of fitted heads.

    Conditions of the ``known`` rows are seen.
    """
    rated, seen = rows.take(rows.rated), {text for part in known for text in part.condition}
    if not 0 < sum(text in seen for text in rated.condition) < len(rated):
        return results
    added = []
    for result, predictor, similarity in zip(results, predictors, predicted, strict=True):
        if predictor.is_fitted:
            parts = seen_unseen(seen, rated, similarity[rows.rated], metric, 0)
            del parts["overall"]
            added.append(replace(result, subsets={"conditions": parts, **result.subsets}))
        else:
            added.append(result)
    return added
