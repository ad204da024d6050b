"""Effects of conditions on a head: unseen conditions, the size of W_c, and changes of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError
from llmcond.evaluation.paired import RESAMPLES, bootstrap_metrics
from llmcond.evaluation.results import Subset
from llmcond.metrics import Estimate, Floats, Metric


def seen_unseen(
    train_condition: Iterable[str],
    condition: Sequence[str],
    rating: Floats,
    similarity: NDArray[np.floating],
    pair: NDArray[np.int64],
    metric: Metric,
    resamples: int = RESAMPLES,
) -> dict[str, Subset]:
    """Score rows with seen and with unseen conditions separately (Hyper-CL, section 5.3).

    A condition is seen if its exact text occurs in training: "The sport." is unseen if training has
    "The sport".

    Args:
        train_condition: The conditions of the rows that a head was fitted on, with or without
            repeats.
        condition: (n,) the conditions of the scored rows.
        rating: (n,) ratings on any scale, without NaN.
        similarity: (n,) predictions.
        pair: (n,) number of each row's sentence pair, which the intervals resample.
        metric: The metric of the score.
        resamples: The number of bootstrap samples; with 0 the intervals are NaN.

    Returns:
        The scores of ``overall``, ``seen`` and ``unseen`` rows.

    Raises:
        UserError: Predictions are not finite.
    """
    _check_finite(similarity, "predictions")
    known = frozenset(train_condition)
    is_seen = np.array([text in known for text in condition], dtype=np.bool_)
    parts = {"overall": np.ones_like(is_seen), "seen": is_seen, "unseen": ~is_seen}
    subsets = {}
    for name, rows in parts.items():
        score = Estimate(math.nan)
        if rows.any():
            predicted = similarity[None, rows]
            resampled = bootstrap_metrics(
                [predicted], rating[rows], pair[rows], [metric], resamples
            )
            score = resampled.estimates(0)[metric.name]
        distinct = {text for text, is_in_part in zip(condition, rows, strict=True) if is_in_part}
        subsets[name] = Subset(
            int(rows.sum()), {metric.name: score}, {"n_conditions": len(distinct)}
        )
    return subsets


@dataclass(frozen=True, slots=True)
class FrobeniusVariance:
    """The variance of the size of W_c over conditions (Hyper-CL, section 5.4.1).

    Attributes:
        raw: The variance of ||W_c||_F over the conditions.
        normalised: The variance of ||W_c||_F / sqrt(number of elements), which is comparable
            between matrices of different sizes.
        n: The number of conditions.
    """

    raw: float
    normalised: float
    n: int


def frobenius_variance(norms: NDArray[np.floating], n_elements: int) -> FrobeniusVariance:
    """Compute the variance over conditions of ||W_c||_F, raw and normalised.

    It is the population variance (the divisor is n); the paper does not say which one it uses.

    Args:
        norms: (n,) ||W_c||_F, one for each distinct condition.
        n_elements: The number of valid elements of a W_c: H * H, also for a product of low rank; H
            for the diagonal matrix that a Hadamard product is equivalent to.

    Raises:
        UserError: There are fewer than two conditions.
    """
    sizes = np.asarray(norms, dtype=np.float64)
    if len(sizes) < 2:
        raise UserError(
            f"the norms have the shape {sizes.shape}. A variance over conditions needs at least "
            "two conditions, with one norm for each."
        )
    raw = float(sizes.var())
    return FrobeniusVariance(raw=raw, normalised=raw / n_elements, n=len(sizes))


@dataclass(frozen=True, slots=True)
class Change:
    """A row with its similarity ``before`` a head (of the encoder's vectors) and ``after`` it."""

    sentence1: str
    sentence2: str
    condition: str
    rating: float
    before: float
    after: float


def change_table(changes: Sequence[Change]) -> list[Change]:
    """Sort rows as in tables 3 and 8 of CASE.

    The rows of a sentence pair stay together, with the lower rating first. Pairs keep their given
    order.
    """
    order: dict[tuple[str, str], int] = {}
    for change in changes:
        order.setdefault((change.sentence1, change.sentence2), len(order))
    return sorted(
        changes, key=lambda change: (order[change.sentence1, change.sentence2], change.rating)
    )


def most_changed(
    rating: Floats, before: NDArray[np.floating], after: NDArray[np.floating]
) -> tuple[list[int], list[int]]:
    """Return the positions of rows that improved, and of rows that got worse, largest change first.

    A row's change is |before - rating| - |after - rating|, because heads are fitted to reduce the
    distance of similarity to rating (CASE, equation 2). Rows that got worse are included, since the
    improved rows alone would make any head look good. All columns are (n,), ratings on 0 to 1
    without NaN.

    Raises:
        UserError: Similarities are not finite.
    """
    _check_finite(before, "similarities before")
    _check_finite(after, "similarities after")
    gain = np.abs(np.asarray(before, np.float64) - rating)
    gain -= np.abs(np.asarray(after, np.float64) - rating)
    better = np.argsort(-gain, kind="stable")[: np.count_nonzero(gain > 0)]
    worse = np.argsort(gain, kind="stable")[: np.count_nonzero(gain < 0)]
    return better.tolist(), worse.tolist()


def _check_finite(values: NDArray[np.floating], name: str) -> None:
    bad = int((~np.isfinite(values)).sum())
    if bad:
        raise UserError(
            f"{bad:,} of {len(values):,} {name} are NaN or infinite. Leave those rows out."
        )
