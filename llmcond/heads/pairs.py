"""The arrays that heads are fitted on, and how fitting went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import MatrixLike, as_matrix
from llmcond.metrics import Metric

H = TypeVar("H")

#: What the learning curve of queries or dialogues calls the score on dev, whatever metric that is.
SCORE = "dev_score"


@dataclass(frozen=True, slots=True)
class PairArrays:
    """The rated pairs of a split, as heads take them.

    Attributes:
        first, second: (n, dim) the features of both sentences, in any float type: NumPy arrays,
            memory maps, or what :mod:`llmcond.arrays` has.
        rating: (n,) float64 on 0 to 1, no NaN.
        condition: (n, dim_c) the features e(c) of each row's condition, for heads that take them.
        pair: (n,) the sentence pair of each row, for objectives that contrast its two conditions.
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
        """Return the features' size."""
        return int(self.first.shape[1])

    @property
    def dim_condition(self) -> int:
        """Return the size of the conditions' features, 0 where there are none."""
        return 0 if self.condition is None else int(self.condition.shape[1])

    @property
    def groups(self) -> NDArray[np.int64]:
        """The sentence pair of each row, (n,); each row is one of its own where none is named."""
        return np.arange(len(self)) if self.pair is None else self.pair

    def take(self, rows: NDArray[Any]) -> PairArrays:
        """Return some rows, by positions or a mask, without reading their vectors."""
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
class Fit:
    """How fitting went: what head.json records, and what the user should know, in sentences."""

    record: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DevScore(Generic[H]):
    """What chooses the epoch: a metric on dev, and what computes it of a head; NaN: undefined."""

    metric: Metric
    of: Callable[[H], float]


#: Called after each step of an epoch but the last, and after each epoch, with the epochs that are
#: done (1.5: half of the second one), their number, and after an epoch its score on dev, else None.
OnEpoch = Callable[[float, int, float | None], None]
