"""What a head does with conditions: new ones, the size of its W_c, and single rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError
from llmcond.evaluation.paired import RESAMPLES, resample
from llmcond.metrics import Estimate, Floats, Metric


@dataclass(frozen=True, slots=True)
class Subset:
    """The score of some rows.

    Attributes:
        n: rows.
        n_conditions: their distinct conditions.
        score: with its 95 % interval; NaN where there are no rows.
    """

    n: int
    n_conditions: int
    score: Estimate


def seen_unseen(
    train_condition: Iterable[str],
    condition: Sequence[str],
    rating: Floats,
    similarity: NDArray[np.floating],
    pair: NDArray[np.int64],
    metric: Metric,
    resamples: int = RESAMPLES,
) -> dict[str, Subset]:
    """Score rows apart by whether their condition occurs in training (Hyper-CL, section 5.3).

    Conditions match by their exact text: "The sport." is new where training has "The sport".

    Args:
        train_condition: the conditions of the rows that a head was fitted on, repeated or not.
        condition: (n,) of the rows scored.
        rating: (n,) on any scale, no NaN.
        similarity: (n,) predicted.
        pair: (n,) number of each row's sentence pair, which the intervals resample.
        metric: what rows are scored by.
        resamples: bootstrap samples; 0 leaves the intervals NaN.

    Returns:
        The scores of ``overall``, ``seen`` and ``unseen`` rows.

    Raises:
        UserError: predictions that are not finite.
    """
    _check_finite(similarity, "predictions")
    known = frozenset(train_condition)
    is_seen = np.array([text in known for text in condition], dtype=np.bool_)
    parts = {"overall": np.ones_like(is_seen), "seen": is_seen, "unseen": ~is_seen}
    found = {}
    for name, rows in parts.items():
        score = Estimate(math.nan)
        if rows.any():
            predicted = similarity[None, rows]
            drawn = resample([predicted], rating[rows], pair[rows], [metric], resamples)
            score = drawn.estimates(0)[metric.name]
        distinct = {text for text, taken in zip(condition, rows, strict=True) if taken}
        found[name] = Subset(int(rows.sum()), len(distinct), score)
    return found


@dataclass(frozen=True, slots=True)
class FrobeniusVariance:
    """How much the size of W_c varies with the condition (Hyper-CL, section 5.4.1).

    Attributes:
        raw: variance of ||W_c||_F over the conditions.
        normalised: variance of ||W_c||_F / sqrt(number of elements), which matrices of different
            size can be compared by.
        n: number of conditions.
    """

    raw: float
    normalised: float
    n: int


def frobenius_variance(norms: NDArray[np.floating], n_elements: int) -> FrobeniusVariance:
    """Return the variance over conditions of ||W_c||_F, raw and normalised.

    It is the population variance (the divisor is n); the paper does not say which it takes.

    Args:
        norms: (n,) ||W_c||_F, one for each distinct condition.
        n_elements: valid elements of a W_c: H * H, also where it is a product of low rank; H for
            the diagonal matrix that the Hadamard product amounts to.

    Raises:
        UserError: fewer than two conditions.
    """
    sizes = np.asarray(norms, dtype=np.float64)
    if len(sizes) < 2:
        raise UserError(
            f"norms of shape {sizes.shape} were given; a variance over conditions needs two "
            "conditions at least, one norm for each."
        )
    raw = float(sizes.var())
    return FrobeniusVariance(raw=raw, normalised=raw / n_elements, n=len(sizes))


@dataclass(frozen=True, slots=True)
class Change:
    """A row, its similarity ``before`` (of the encoder's own vectors) and ``after`` a head."""

    sentence1: str
    sentence2: str
    condition: str
    rating: float
    before: float
    after: float


def change_table(changes: Sequence[Change]) -> list[Change]:
    """Return rows in the order of tables 3 and 8 of CASE.

    The rows of a sentence pair stand together, pairs in the order in which they are given, the
    lower rating first.
    """
    places: dict[tuple[str, str], int] = {}
    for one in changes:
        places.setdefault((one.sentence1, one.sentence2), len(places))
    return sorted(changes, key=lambda one: (places[one.sentence1, one.sentence2], one.rating))


def most_changed(
    rating: Floats, before: NDArray[np.floating], after: NDArray[np.floating]
) -> tuple[list[int], list[int]]:
    """Return the positions of rows that moved towards their rating, and away, the most first.

    A row's change is |before - rating| - |after - rating|: what heads are fitted to lessen is the
    distance of similarity to rating (CASE, equation 2). Rows that got better alone would show any
    head in a good light, so those that got worse are chosen too. All columns are (n,), ratings on
    0 to 1 without NaN.

    Raises:
        UserError: similarities that are not finite.
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
