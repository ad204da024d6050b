"""What a head does with conditions: new ones, the size of its W_c, and single rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError
from llmcond.evaluation.paired import RESAMPLES, Candidate, estimate
from llmcond.metrics import Estimate, Floats


@dataclass(frozen=True, slots=True)
class Subset:
    """Scores of some rows.

    Attributes:
        n: rows.
        metrics: name -> figure with its 95 % interval.
    """

    n: int
    metrics: Mapping[str, Estimate]


@dataclass(frozen=True, slots=True)
class SeenUnseen:
    """Scores for conditions that occur in training and for those that do not.

    Attributes:
        overall: of all rows.
        seen: of rows whose condition occurs in training; None where there are none.
        unseen: of the others; None where there are none.
        n_seen_conditions, n_unseen_conditions: distinct conditions among the rows scored.
    """

    overall: Subset
    seen: Subset | None
    unseen: Subset | None
    n_seen_conditions: int
    n_unseen_conditions: int


def seen_unseen(
    train_condition: Iterable[str],
    condition: Sequence[str],
    rating: Floats,
    similarity: NDArray[np.floating],
    pair: NDArray[np.int64],
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> SeenUnseen:
    """Score rows apart by whether their condition occurs in training (Hyper-CL, section 5.3).

    Conditions match by their exact text: "The sport." is new where training has "The sport".
    Accuracy compares the two conditions of a sentence pair, so in each part it is of the pairs
    that have both there; Spearman is what the paper reports.

    Args:
        train_condition: the conditions of the rows that a head was fitted on, repeated or not.
        condition: (n,) of the rows scored.
        rating: (n,) on any scale, no NaN.
        similarity: (n,) predicted.
        pair: (n,) number of each row's sentence pair, which the intervals resample.
        resamples: bootstrap samples; 0 leaves the intervals NaN.
        seed: of the bootstrap.

    Raises:
        UserError: no rows, columns of different length, or values that are not finite.
    """
    _check_columns(
        {"conditions": condition, "ratings": rating, "predictions": similarity, "pairs": pair}
    )
    _check_finite({"ratings": rating, "predictions": similarity})
    known = frozenset(train_condition)
    is_seen = np.array([text in known for text in condition], dtype=np.bool_)

    def part(rows: NDArray[np.bool_]) -> Subset:
        system = Candidate("predictions", similarity[None, rows])
        kept = rating[rows], pair[rows]
        (found,) = estimate([system], *kept, resamples=resamples, seed=seed)
        return Subset(int(rows.sum()), found.metrics)

    distinct = frozenset(condition)
    return SeenUnseen(
        overall=part(np.ones_like(is_seen)),
        seen=part(is_seen) if is_seen.any() else None,
        unseen=part(~is_seen) if not is_seen.all() else None,
        n_seen_conditions=len(distinct & known),
        n_unseen_conditions=len(distinct - known),
    )


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
        UserError: fewer than two conditions, norms that are negative or not finite, or no elements.
    """
    sizes = np.asarray(norms, dtype=np.float64)
    if sizes.ndim != 1 or len(sizes) < 2:
        raise UserError(
            f"norms of shape {sizes.shape} were given; a variance over conditions needs two "
            "conditions at least, one norm for each."
        )
    if not (np.isfinite(sizes) & (sizes >= 0)).all():
        raise UserError("a Frobenius norm is finite and not negative; some of those given are not.")
    if n_elements < 1:
        raise UserError(f"a matrix of {n_elements} elements was given; expected 1 at least.")
    raw = float(sizes.var())
    return FrobeniusVariance(raw=raw, normalised=raw / n_elements, n=len(sizes))


@dataclass(frozen=True, slots=True)
class Change:
    """One row of the before-and-after table (CASE, tables 3 and 8).

    Attributes:
        sentence1, sentence2, condition: its texts; the condition is empty for the unconditional
            similarity of the two sentences.
        rating: on any scale; None where it has none.
        before: similarity of the encoder's own vectors.
        after: similarity of the head's embeddings.
    """

    sentence1: str
    sentence2: str
    condition: str
    rating: float | None
    before: float
    after: float


def change_table(
    sentence1: Sequence[str],
    sentence2: Sequence[str],
    condition: Sequence[str],
    rating: Floats,
    before: NDArray[np.floating],
    after: NDArray[np.floating],
) -> list[Change]:
    """Return chosen rows as tables 3 and 8 of CASE have them.

    The rows of a sentence pair stand together, pairs in the order in which they are given. Within
    a pair the unrated rows come first (the tables' unconditional similarity), then the condition
    with the lower rating.

    Args:
        sentence1: (n,) first sentences.
        sentence2: (n,) second sentences.
        condition: (n,) texts, empty for an unconditional similarity.
        rating: (n,) on any scale, NaN where there is none.
        before: (n,) similarities of the encoder's own vectors.
        after: (n,) similarities of the head's embeddings.

    Raises:
        UserError: no rows, columns of different length, or similarities that are not finite.
    """
    columns: dict[str, Any] = {
        "first sentences": sentence1,
        "second sentences": sentence2,
        "conditions": condition,
        "ratings": rating,
        "similarities before": before,
        "similarities after": after,
    }
    _check_columns(columns)
    _check_finite({name: columns[name] for name in ("similarities before", "similarities after")})
    first_place: dict[tuple[str, str], int] = {}
    records: list[tuple[int, float, Change]] = []
    for one, two, text, rated, old, new in zip(*columns.values(), strict=True):
        place = first_place.setdefault((one, two), len(first_place))
        value = None if math.isnan(rated) else float(rated)
        change = Change(one, two, text, value, float(old), float(new))
        records.append((place, -math.inf if value is None else value, change))
    return [record[2] for record in sorted(records, key=lambda record: record[:2])]


@dataclass(frozen=True, slots=True)
class MostChanged:
    """The rows whose similarity moved most, for better and for worse, and how many did.

    Attributes:
        better: positions of the rows that moved most towards their rating, the most first.
        worse: positions of those that moved most away from it, the most first.
        n_better, n_worse: how many of all rows moved towards their rating, and away from it.
        n: rows.
    """

    better: tuple[int, ...]
    worse: tuple[int, ...]
    n_better: int
    n_worse: int
    n: int


def most_changed(
    rating: Floats,
    before: NDArray[np.floating],
    after: NDArray[np.floating],
    top: int,
) -> MostChanged:
    """Choose the rows that changed most, for the table of :func:`change_table`.

    A row's change is |before - rating| - |after - rating|: what heads are fitted to lessen is the
    distance of similarity to rating (CASE, equation 2). Rows that got better alone would show any
    head in a good light, so those that got worse are chosen too.

    Args:
        rating: (n,) on 0 to 1, no NaN.
        before: (n,) similarities of the encoder's own vectors.
        after: (n,) similarities of the head's embeddings.
        top: how many rows of each kind at most.

    Raises:
        UserError: no rows, columns of different length, values that are not finite, or ratings
            beyond 0 to 1.
    """
    columns = {"ratings": rating, "similarities before": before, "similarities after": after}
    _check_columns(columns)
    _check_finite(columns)
    if rating.min() < 0 or rating.max() > 1:
        raise UserError(
            f"ratings from {rating.min():g} to {rating.max():g} were given; similarities can be "
            "compared with ratings on 0 to 1. Scale them by their range first."
        )
    if top < 0:
        raise UserError(f"{top} rows were asked for; give 0 or more.")
    gain = np.abs(np.asarray(before, np.float64) - rating)
    gain -= np.abs(np.asarray(after, np.float64) - rating)
    rising = np.argsort(gain, kind="stable")
    falling = np.argsort(-gain, kind="stable")
    n_better, n_worse = int((gain > 0).sum()), int((gain < 0).sum())
    return MostChanged(
        better=tuple(falling[: min(top, n_better)].tolist()),
        worse=tuple(rising[: min(top, n_worse)].tolist()),
        n_better=n_better,
        n_worse=n_worse,
        n=len(gain),
    )


def _check_columns(columns: Mapping[str, Any]) -> None:
    sizes = {name: len(values) for name, values in columns.items()}
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        given = ", ".join(f"{size} {name}" for name, size in sizes.items())
        raise UserError(f"{given} were given; expected as many of each, and 1 at least.")


def _check_finite(columns: Mapping[str, NDArray[np.floating]]) -> None:
    for name, values in columns.items():
        bad = int((~np.isfinite(values)).sum())
        if bad:
            raise UserError(
                f"{bad:,} of {len(values):,} {name} are NaN or infinite. Leave those rows out."
            )
