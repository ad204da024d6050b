"""The arrays that heads are fitted on, the record of a fit, and held-out predictions of dev.

Each fold of dev is predicted by the epoch that the other folds choose. The epoch with the best dev
score has an optimistic dev score. The held-out predictions give an unbiased figure of the same
procedure, without further fits. Early stopping still uses all of dev.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import EqualByValue, MatrixLike, as_matrix
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


H = TypeVar("H")

#: Key of the dev score in learning curves of query heads and dialogue heads, for any metric.
DEV_SCORE_KEY = "dev_score"


def score_key(split: str, metric: str = "score") -> str:
    """Return the key of a split's score in learning curves, such as ``test_spearman``."""
    return f"{split}_{metric}"


@dataclass(frozen=True, slots=True, eq=False)
class PairArrays(EqualByValue):
    """The rated pairs of a split, as the arrays that heads read.

    Attributes:
        first: (n, dim) features of the first sentences, in any float type: a NumPy array, a memory
            map, or a matrix of ``llmcond.arrays``.
        second: (n, dim) features of the second sentences, likewise.
        rating: (n,) float64 on 0 to 1, without NaN.
        condition: (n, dim_c) features e(c) of each row's condition, for heads that read them.
        pair: (n,) sentence pair of each row, for objectives that contrast its two conditions.

    Examples:
        >>> import numpy as np
        >>> from llmcond.heads import PairArrays
        >>> first, second = np.random.default_rng(0).normal(size=(2, 6, 4))
        >>> pairs = PairArrays(first, second, rating=np.linspace(0, 1, 6))
        >>> len(pairs), pairs.dim, pairs.dim_condition
        (6, 4, 0)
        >>> len(pairs.take(pairs.rating > 0.5))
        3
    """

    first: MatrixLike
    second: MatrixLike
    rating: NDArray[np.float64]
    condition: MatrixLike | None = None
    pair: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.rating)

    @property
    def dim(self) -> int:
        """Size of the features."""
        return int(self.first.shape[1])

    @property
    def dim_condition(self) -> int:
        """Size of the conditions' features; 0 if there are none."""
        return 0 if self.condition is None else int(self.condition.shape[1])

    @property
    def groups(self) -> NDArray[np.int64]:
        """Sentence pair of each row, (n,); without ``pair``, each row is its own group."""
        return np.arange(len(self)) if self.pair is None else self.pair

    def take(self, rows: NDArray[Any]) -> PairArrays:
        """Select rows without reading their vectors.

        Args:
            rows: positions, or a boolean mask, (n,).

        Returns:
            The selected rows, (m,), as arrays that are read when needed.
        """
        condition = self.condition
        return replace(
            self,
            first=as_matrix(self.first).take(rows),
            second=as_matrix(self.second).take(rows),
            rating=self.rating[rows],
            condition=None if condition is None else as_matrix(condition).take(rows),
            pair=None if self.pair is None else self.pair[rows],
        )


@dataclass(frozen=True, slots=True)
class FitReport:
    """The report of a fit.

    Attributes:
        record: The record of the fit for head.json.
        notes: Notes for the user, each a sentence.
        held_out: The held-out predictions of dev; None if dev did not choose the epoch.
    """

    record: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    held_out: HeldOut | None = None


@dataclass(frozen=True, slots=True)
class DevScore(Generic[H]):
    """A metric on dev that selects the epoch, and functions that score a head after each epoch.

    A score of NaN means undefined.

    Attributes:
        metric: The metric that selects the epoch.
        compute: The function that scores a head on dev.
        others: Functions that score a head on other splits, by their keys in the learning curve.
            They do not influence the fit.
    """

    metric: Metric
    compute: Callable[[H], float]
    others: Mapping[str, Callable[[H], float]] = field(default_factory=dict)


#: Called after each epoch, and after each step within an epoch except the last. The arguments are
#: the number of finished epochs (1.5: half of the second epoch is done), the maximum number of
#: epochs, and the epoch's entry in the learning curve (None except after an epoch). If several
#: heads are fitted, the entry also has the key ``stage``, such as ``member-0``.
OnEpoch = Callable[[float, int, Mapping[str, Any] | None], None]


def in_stage(on_epoch: OnEpoch, stage: str) -> OnEpoch:
    """Return a function that adds the name of one of several fits to the entries of its epochs."""

    def report(epoch: float, epochs: int, entry: Mapping[str, Any] | None) -> None:
        if entry is not None:
            names = [stage, entry["stage"]] if "stage" in entry else [stage]
            entry = {**entry, "stage": "/".join(names)}
        on_epoch(epoch, epochs, entry)

    return report
