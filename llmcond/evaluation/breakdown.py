"""Where predictions are off: rows out of place in the order, by condition and by rating."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from llmcond.metrics import Floats

#: So many distinct ratings are shown one by one; more are put into classes of equal width.
_FEW_RATINGS = 11
_CLASSES = 10


def rank_share(values: NDArray[np.floating]) -> Floats:
    """Return each value's place in ascending order: 0 for the least, 1 for the greatest.

    Ties have their mean place; a single value is in the middle. Values are (n,), finite.
    """
    n = len(values)
    return (rankdata(values) - 1) / (n - 1) if n > 1 else np.full(n, 0.5)


def rating_span(rating: Floats) -> tuple[Floats, Floats]:
    """Return the first and the last place (0 to 1) that the rows of each row's rating take.

    Ratings are few and shared by many rows, so that a rating gives a row no single place: in a
    perfect order the rows of one rating stand anywhere within their span.
    """
    n = len(rating)
    if n < 2:
        return np.full(n, 0.5), np.full(n, 0.5)
    first, last = (rankdata(rating, method=method) - 1 for method in ("min", "max"))
    return first / (n - 1), last / (n - 1)


def rank_error(similarity: NDArray[np.floating], rating: Floats) -> Floats:
    """Return (n,) how far each row is out of place: from its place to the span of its rating.

    It is a share of all places, signed: above 0, the row is predicted more alike than its rating
    says. 0 everywhere is a perfect order. Unlike a difference of prediction and rating it compares
    predictions of any range, and unlike a correlation it says something about a single row.
    """
    place = rank_share(similarity)
    first, last = rating_span(rating)
    return np.maximum(place - last, 0) - np.maximum(first - place, 0)


def chance_error(rating: Floats) -> Floats:
    """Return (n,) the absolute rank error of each row in the mean over all random orders.

    Rows of the lowest and the highest rating are further off by chance than those in the middle,
    so that an error means little without it.
    """
    n = len(rating)
    if n < 2:
        return np.zeros(n)
    first, last = (bound * (n - 1) for bound in rating_span(rating))
    below, above = first * (first + 1) / 2, (n - 1 - last) * (n - last) / 2
    return np.asarray((below + above) / n / (n - 1))


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows by condition.

    Attributes:
        label: how each group's condition is first written, groups in the order of their rows.
        index: (n,) each row's group.
        count: (groups,) rows in each.
    """

    label: tuple[str, ...]
    index: NDArray[np.int64]
    count: NDArray[np.int64]

    def mean(self, values: NDArray[np.floating]) -> Floats:
        """Return (g,) the mean of each group's values (n,); NaN ones do not count, none is NaN."""
        known = ~np.isnan(values)
        total = np.bincount(self.index[known], values[known], minlength=len(self.label))
        counted = np.bincount(self.index[known], minlength=len(self.label))
        with np.errstate(invalid="ignore"):
            return np.asarray(total / counted)


def by_condition(condition: Sequence[str]) -> Groups:
    """Group rows by condition: case, white space and a full stop at the end make no difference."""
    keys = [" ".join(text.split()).removesuffix(".").casefold() for text in condition]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    index = np.array([numbers[key] for key in keys], dtype=np.int64)
    # Backwards, so that the first of the labels is kept.
    label = dict(zip(reversed(keys), reversed(condition), strict=True))
    labels = tuple(label[key] for key in numbers)
    return Groups(labels, index, np.bincount(index, minlength=len(labels)))


@dataclass(frozen=True, slots=True)
class Level:
    """What is predicted for the rows of one rating, or of one class of ratings.

    Attributes:
        rating: the rating; for a class the mean over its rows.
        n: rows.
        mean: of their predictions.
        low, median, high: their quartiles.
    """

    rating: float
    n: int
    mean: float
    low: float
    median: float
    high: float


def calibration(similarity: NDArray[np.floating], rating: Floats) -> list[Level]:
    """Return what is predicted, (n,), at each rating, (n,), ratings in ascending order.

    More than a few distinct ratings are put into classes of equal width.
    """
    distinct, level = np.unique(rating, return_inverse=True)
    if len(distinct) > _FEW_RATINGS:
        edges = np.linspace(distinct[0], distinct[-1], _CLASSES + 1)
        level = np.digitize(rating, edges[1:-1])
    found = []
    for number in np.unique(level):
        values = similarity[level == number].astype(np.float64)
        quartiles = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
        place = float(rating[level == number].mean())
        found.append(Level(place, len(values), float(values.mean()), *quartiles))
    return found
