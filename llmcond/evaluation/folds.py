"""What training on dev as well brings: each fold of dev predicted by what has not seen it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import Rows
from llmcond.errors import UserError
from llmcond.evaluation.paired import Difference, differences, resample
from llmcond.metrics import Estimate, Metric, estimates_json, finite


@dataclass(frozen=True, slots=True)
class Gain:
    """The scores of some rows without dev and with it.

    Attributes:
        n, n_pairs: rated rows, and their sentence pairs.
        metric: what the scores are.
        without: the score where no row of dev was trained on.
        trained: the score where all folds but the row's own were, all folds taken together.
        difference: ``trained`` less ``without``, on the same rows.
    """

    n: int
    n_pairs: int
    metric: Metric
    without: Estimate
    trained: Estimate
    difference: Difference

    @classmethod
    def of(
        cls,
        without: NDArray[np.floating],
        trained: NDArray[np.floating],
        rows: Rows,
        metric: Metric,
    ) -> Gain:
        """Compare predictions, (n,) each, of rated rows by a metric."""
        found = resample([without[None], trained[None]], rows.rating, rows.pair, [metric])
        before, after = (found.estimates(i)[metric.name] for i in (0, 1))
        difference = differences(found, {0: [1]})[1][metric.name]
        return cls(len(rows), len(rows.pair_keys()), metric, before, after, difference)

    def to_json(self) -> dict[str, Any]:
        """Return what records and ``--json`` have."""
        difference = Estimate(self.difference.value, self.difference.low, self.difference.high)
        scores = {"without": self.without, "trained": self.trained, "difference": difference}
        figures = {name: estimates_json({self.metric.name: one}) for name, one in scores.items()}
        return {"n": self.n, "n_pairs": self.n_pairs, **figures, "p": finite(self.difference.p)}


@dataclass(frozen=True, slots=True)
class Folded:
    """Predictions of dev's rows by what was not trained on them, against those without dev.

    Attributes:
        folds: how many parts of like size; all rows of a sentence pair are in one.
        gain: of all rated rows.
        by_condition: of rows whose condition train has (``seen``), and of the others (``unseen``);
            those that there are.
    """

    folds: int
    gain: Gain
    by_condition: Mapping[str, Gain]

    @classmethod
    def of(
        cls,
        folds: int,
        without: NDArray[np.floating],
        trained: NDArray[np.floating],
        dev: Rows,
        train: Rows,
        metric: Metric,
    ) -> Folded:
        """Compare predictions, (n,) each, of dev's rated rows by a metric.

        ``train`` is what was trained on.
        """
        known = set(train.condition)
        seen = np.array([text in known for text in dev.condition], dtype=np.bool_)
        parts = {
            name: Gain.of(without[rows], trained[rows], dev.take(rows), metric)
            for name, rows in (("seen", seen), ("unseen", ~seen))
            if rows.any()
        }
        return cls(folds, Gain.of(without, trained, dev, metric), parts)

    def to_json(self) -> dict[str, Any]:
        """Return what records and ``--json`` have."""
        parts = {name: own.to_json() for name, own in self.by_condition.items()}
        return {"folds": self.folds, **self.gain.to_json(), "by_condition": parts}


def check_fold_count(dev: Rows, count: int) -> None:
    """Raise a UserError where rated rows of dev have fewer sentence pairs than folds."""
    if len(dev.pair_keys()) < count:
        raise UserError(
            f"dev has {len(dev.pair_keys())} sentence pairs with ratings, too few for {count} "
            "folds. Lower --folds."
        )
