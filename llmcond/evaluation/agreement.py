"""How far two raters of the same rows agree: in order, step by step, and by condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import Rows
from llmcond.evaluation.breakdown import by_condition
from llmcond.evaluation.paired import resample
from llmcond.metrics import DEFAULT, Estimate, Floats, estimates_json, finite, spearman

#: Steps of a scale that ratings are rounded to: 1 to 5.
STEPS = 5


@dataclass(frozen=True, slots=True)
class ConditionAgreement:
    """Rows of one condition that both rated.

    Attributes:
        n: rows.
        human, model: mean ratings, on 1 to 5, with two decimals.
        spearman: NaN for a single row, or where one side is constant.
    """

    condition: str
    n: int
    human: float
    model: float
    spearman: float


@dataclass(frozen=True)
class Agreement:
    """Ratings of a model beside those of people.

    Attributes:
        n: rows that both rated.
        metrics: name -> figure of the model's ratings as predictions, with its 95 % interval; none
            where there are no such rows.
        confusion: (6, 6) rows by people's rating and the model's, both rounded to 1 to 5; the last
            of each: ill-defined, or unrated.
        by_condition: the most frequent conditions first.
    """

    n: int
    metrics: Mapping[str, Estimate]
    confusion: NDArray[np.int64]
    by_condition: Sequence[ConditionAgreement]

    def to_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it, means on 1 to 5."""
        conditions = [
            {**asdict(one), "spearman": finite(one.spearman)} for one in self.by_condition
        ]
        return {
            "n": self.n,
            **estimates_json(self.metrics),
            "confusion": self.confusion.tolist(),
            "by_condition": conditions,
        }


def agreement(rows: Rows, model: Floats) -> Agreement:
    """Compare a model's ratings with those of rows.

    Args:
        rows: with people's ratings.
        model: (n,) its ratings on 0 to 1; NaN where it finds a row ill-defined.
    """
    confusion = np.zeros((STEPS + 1, STEPS + 1), dtype=np.int64)
    np.add.at(confusion, (_step(rows.rating), _step(model)), 1)
    both = rows.rated & ~np.isnan(model)
    kept = rows.take(both)
    if not both.any():
        return Agreement(0, {}, confusion, ())
    predicted = model[both]
    found = resample([predicted[None]], kept.rating, kept.pair, DEFAULT).estimates(0)
    groups = by_condition(kept.condition)
    means = [groups.mean(own).tolist() for own in (kept.rating, predicted)]
    parts = []
    for i in np.argsort(-groups.count, kind="stable").tolist():
        chosen = groups.index == i
        score = spearman(predicted[chosen], kept.rating[chosen])
        human, own = (round(1 + (STEPS - 1) * mean[i], 2) for mean in means)
        parts.append(ConditionAgreement(groups.label[i], int(groups.count[i]), human, own, score))
    return Agreement(len(kept), found, confusion, tuple(parts))


def _step(rating: Floats) -> NDArray[np.int64]:
    """Return (n,) the step that each rating rounds to, from 0; the one behind them for NaN."""
    step = np.floor((STEPS - 1) * rating + 0.5)
    return np.where(np.isnan(step), STEPS, step).astype(np.int64)
