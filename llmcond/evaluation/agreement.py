"""The agreement of two raters of the same rows: correlation, confusion matrix, by condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import EqualByValue
from llmcond.data.rows import Rows
from llmcond.evaluation.breakdown import by_condition
from llmcond.evaluation.paired import bootstrap_metrics
from llmcond.metrics import (
    DEFAULT_METRICS,
    Estimate,
    Floats,
    estimates_json,
    finite_or_none,
    spearman,
)

#: The number of steps of the scale that ratings are rounded to, 1 to 5.
STEPS = 5


@dataclass(frozen=True, slots=True)
class ConditionAgreement:
    """The agreement on rows of one condition that both raters rated.

    Attributes:
        condition: The condition.
        n: The number of rows.
        human: The mean rating by people, on 1 to 5, with two decimals.
        model: The mean rating by the model, on 1 to 5, with two decimals.
        spearman: Their rank correlation; NaN for a single row, or if the ratings of one rater are
            constant.
    """

    condition: str
    n: int
    human: float
    model: float
    spearman: float


@dataclass(frozen=True, eq=False)
class Agreement(EqualByValue):
    """The agreement of a model's ratings with those of people.

    Attributes:
        n: The number of rows that both rated.
        metrics: The metrics of the model's ratings as predictions by name, with 95 % intervals;
            empty if there are no such rows.
        confusion: (6, 6) the number of rows by people's rating (first axis) and the model's rating,
            both rounded to 1 to 5. The last index is for ill-defined or unrated rows.
        by_condition: The agreement by condition, the most frequent conditions first.
    """

    n: int
    metrics: Mapping[str, Estimate]
    confusion: NDArray[np.int64]
    by_condition: Sequence[ConditionAgreement]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output, with means on 1 to 5."""
        conditions = [
            {**asdict(agreement), "spearman": finite_or_none(agreement.spearman)}
            for agreement in self.by_condition
        ]
        return {
            "n": self.n,
            **estimates_json(self.metrics),
            "confusion": self.confusion.tolist(),
            "by_condition": conditions,
        }


def agreement(rows: Rows, model: Floats) -> Agreement:
    """Compare a model's ratings with the ratings of rows.

    Args:
        rows: The rows, with ratings by people.
        model: (n,) the model's ratings on 0 to 1; NaN for a row that it considers ill-defined.
    """
    confusion = np.zeros((STEPS + 1, STEPS + 1), dtype=np.int64)
    np.add.at(confusion, (_step(rows.rating), _step(model)), 1)
    is_rated = rows.rated & ~np.isnan(model)
    rated = rows.take(is_rated)
    if not is_rated.any():
        return Agreement(0, {}, confusion, ())
    predicted = model[is_rated]
    estimates = bootstrap_metrics(
        [predicted[None]], rated.rating, rated.pair, DEFAULT_METRICS
    ).estimates(0)
    groups = by_condition(rated.condition)
    means = [groups.mean(ratings).tolist() for ratings in (rated.rating, predicted)]
    parts = []
    for i in np.argsort(-groups.count, kind="stable").tolist():
        is_member = groups.index == i
        score = spearman(predicted[is_member], rated.rating[is_member])
        human, model_mean = (round(1 + (STEPS - 1) * mean[i], 2) for mean in means)
        parts.append(
            ConditionAgreement(groups.label[i], int(groups.count[i]), human, model_mean, score)
        )
    return Agreement(len(rated), estimates, confusion, tuple(parts))


def _step(rating: Floats) -> NDArray[np.int64]:
    """Return the step, (n,), that each rating rounds to, from 0 to 4; 5 for NaN."""
    step = np.floor((STEPS - 1) * rating + 0.5)
    return np.where(np.isnan(step), STEPS, step).astype(np.int64)
