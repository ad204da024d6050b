"""What training on dev as well brings: each fold of dev predicted by what has not seen it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.evaluation.paired import Difference, differences, resample
from llmcond.metrics import METRICS, Estimate, finite


@dataclass(frozen=True, slots=True)
class Folded:
    """Predictions of dev's rows by what was not trained on them, against those without dev.

    Attributes:
        folds: how many parts; all rows of a sentence pair are in one.
        n, n_pairs: rated rows, and their sentence pairs.
        without: Spearman where no row of dev was trained on.
        trained: Spearman where all parts but the row's own were, all parts taken together.
        difference: ``trained`` less ``without``, on the same rows.
    """

    folds: int
    n: int
    n_pairs: int
    without: Estimate
    trained: Estimate
    difference: Difference

    @classmethod
    def of(
        cls,
        folds: int,
        without: NDArray[np.floating],
        trained: NDArray[np.floating],
        rating: NDArray[np.float64],
        pair: NDArray[np.int64],
    ) -> Folded:
        """Compare predictions, (n,) each, of rated rows and their sentence pairs, (n,)."""
        metric = METRICS["spearman"]
        found = resample([without[None], trained[None]], rating, pair, [metric])
        before, after = (found.estimates(i)[metric.name] for i in (0, 1))
        difference = differences(found, {0: [1]})[1][metric.name]
        return cls(folds, len(rating), len(np.unique(pair)), before, after, difference)

    def to_json(self) -> dict[str, Any]:
        """Return what records and ``--json`` have."""
        return {
            "folds": self.folds,
            "n": self.n,
            "n_pairs": self.n_pairs,
            **{
                name: {
                    "spearman": finite(own.value),
                    "spearman_ci": [finite(own.low), finite(own.high)],
                }
                for name, own in (
                    ("without", self.without),
                    ("trained", self.trained),
                    ("difference", self.difference),
                )
            },
            "p": finite(self.difference.p),
        }
