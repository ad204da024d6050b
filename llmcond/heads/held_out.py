"""Held-out predictions of dev: each fold is predicted by the epoch that the other folds choose.

The epoch with the best dev score has an optimistic dev score. The held-out predictions give an
unbiased figure of the same procedure, without further fits. Early stopping still uses all of dev.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import EqualByValue
from llmcond.metrics import Floats, Metric

#: The number of folds of dev, each with about the same number of sentence pairs.
FOLDS = 10
#: Predictions of all epochs are stored up to this number; with more, nothing is held out.
MAX_VALUES = 2**22


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut(EqualByValue):
    """Held-out predictions of dev.

    Attributes:
        predictions: (n,) the prediction of each row by the epoch that the other folds choose.
        scores: (folds,) the score of that epoch on the other folds; NaN if it is undefined.
    """

    predictions: NDArray[np.float32]
    scores: Floats


def assign_folds(groups: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the fold of each row, (n,), from 0. All rows of a group, (n,), are in one fold."""
    distinct, group = np.unique(groups, return_inverse=True)
    order = np.random.default_rng(0).permutation(len(distinct))
    return np.asarray(order[group] % FOLDS, dtype=np.int64)


def choose_settings(
    settings: Sequence[Sequence[HeldOut]], metric: Metric, groups: NDArray[np.int64]
) -> tuple[list[HeldOut], list[int]]:
    """Choose the best of several settings on all folds but one, and predict this fold.

    Args:
        settings: The held-out predictions of each setting's seeds; all have as many seeds.
        metric: The metric that chooses.
        groups: (n,) the sentence pair of each row.

    Returns:
        The held-out predictions of each seed, and the position of each fold's setting.
    """
    fold = assign_folds(groups)
    scores = np.array([np.mean([seed.scores for seed in seeds], axis=0) for seeds in settings])
    scores = np.nan_to_num(scores if metric.higher_is_better else -scores, nan=-np.inf)
    selected = scores.argmax(axis=0).tolist()
    predictions = np.empty((len(settings[0]), len(groups)), dtype=np.float32)
    for number, setting in enumerate(selected):
        for seed, held_out in enumerate(settings[setting]):
            predictions[seed, fold == number] = held_out.predictions[fold == number]
    return [HeldOut(values, scores.max(axis=0)) for values in predictions], selected


def hold_out(
    members: Sequence[NDArray[np.float32]],
    metric: Metric,
    rating: Floats,
    groups: NDArray[np.int64],
) -> HeldOut | None:
    """Choose the epoch of each member on all folds but one, and predict this fold.

    Args:
        members: The predictions of each member of an ensemble after each epoch, (epochs, n); the
            ensemble predicts their mean.
        metric: The metric that chooses the epoch.
        rating: (n,) the ratings.
        groups: (n,) the sentence pair of each row.

    Returns:
        The predictions; None if there are fewer sentence pairs than folds.
    """
    if len(np.unique(groups)) < FOLDS:
        return None
    fold = assign_folds(groups)
    predictions, scores = np.empty(len(rating), dtype=np.float32), np.empty(FOLDS)
    for number in range(FOLDS):
        others = fold != number

        def score(predicted: NDArray[np.float32], rows: NDArray[np.bool_] = others) -> float:
            return metric(predicted[rows].astype(np.float64), rating[rows], groups[rows])

        selected = []
        for epochs in members:
            by_epoch = np.array([score(predicted) for predicted in epochs])
            by_epoch = by_epoch if metric.higher_is_better else -by_epoch
            # As in the fit: the first of equal scores, and the last epoch if none is defined.
            best = -1 if np.isnan(by_epoch).all() else int(np.nanargmax(by_epoch))
            selected.append(epochs[best])
        mean = np.asarray(np.stack(selected).mean(axis=0))
        predictions[~others], scores[number] = mean[~others], score(mean)
    return HeldOut(predictions, scores)
