"""The arrays that heads are fitted on, and the record of a fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import EqualByValue, MatrixLike, as_matrix
from llmcond.heads.held_out import HeldOut
from llmcond.metrics import Metric

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
