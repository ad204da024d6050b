"""The gain from training on dev as well, by cross-validation over folds of dev."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import Rows
from llmcond.errors import UserError
from llmcond.evaluation.paired import PairedDifference, bootstrap_metrics, paired_differences
from llmcond.metrics import Estimate, Metric, estimates_json, finite_or_none


@dataclass(frozen=True, slots=True)
class DevGain:
    """The scores of rows without and with training on dev.

    Attributes:
        n: The number of rated rows.
        n_pairs: The number of their sentence pairs.
        metric: The metric of the scores.
        without: The score without training on dev.
        trained: The score with training on all folds except the row's own, over all folds.
        difference: ``trained`` minus ``without``, on the same rows.
    """

    n: int
    n_pairs: int
    metric: Metric
    without: Estimate
    trained: Estimate
    difference: PairedDifference

    @classmethod
    def of(
        cls,
        without: NDArray[np.floating],
        trained: NDArray[np.floating],
        rows: Rows,
        metric: Metric,
    ) -> DevGain:
        """Compare two predictions, (n,) each, of rated rows by a metric."""
        resampled = bootstrap_metrics(
            [without[None], trained[None]], rows.rating, rows.pair, [metric]
        )
        before, after = (resampled.estimates(i)[metric.name] for i in (0, 1))
        difference = paired_differences(resampled, {0: [1]})[1][metric.name]
        return cls(len(rows), len(rows.pair_keys()), metric, before, after, difference)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value in records and in the output."""
        difference = Estimate(self.difference.value, self.difference.low, self.difference.high)
        scores = {"without": self.without, "trained": self.trained, "difference": difference}
        figures = {
            name: estimates_json({self.metric.name: estimate}) for name, estimate in scores.items()
        }
        return {
            "n": self.n,
            "n_pairs": self.n_pairs,
            **figures,
            "p": finite_or_none(self.difference.p),
        }


@dataclass(frozen=True, slots=True)
class CrossValidatedGain:
    """The gain from dev, measured on each fold of dev with a model trained on the other folds.

    Attributes:
        folds: The number of folds of similar size. All rows of a sentence pair are in one fold.
        gain: The gain on all rated rows.
        by_condition: The gain on rows whose condition occurs in train (``seen``), and on the others
            (``unseen``). Only groups with rows are present.
    """

    folds: int
    gain: DevGain
    by_condition: Mapping[str, DevGain]

    @classmethod
    def of(
        cls,
        folds: int,
        without: NDArray[np.floating],
        trained: NDArray[np.floating],
        dev: Rows,
        train: Rows,
        metric: Metric,
    ) -> CrossValidatedGain:
        """Compare two predictions, (n,) each, of dev's rated rows by a metric.

        ``train`` are the rows of the train split, which determine the seen conditions.
        """
        known = set(train.condition)
        seen = np.array([text in known for text in dev.condition], dtype=np.bool_)
        parts = {
            name: DevGain.of(without[rows], trained[rows], dev.take(rows), metric)
            for name, rows in (("seen", seen), ("unseen", ~seen))
            if rows.any()
        }
        return cls(folds, DevGain.of(without, trained, dev, metric), parts)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value in records and in the output."""
        parts = {name: gain.to_json() for name, gain in self.by_condition.items()}
        return {"folds": self.folds, **self.gain.to_json(), "by_condition": parts}


def check_fold_count(dev: Rows, count: int) -> None:
    """Raise a UserError if the rated dev rows have fewer sentence pairs than folds."""
    if len(dev.pair_keys()) < count:
        raise UserError(
            f"dev has {len(dev.pair_keys())} sentence pairs with ratings, which are too few for "
            f"{count} folds. Lower --folds."
        )
