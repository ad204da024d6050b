"""Breakdowns of prediction errors: by row, by condition and by rating."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from llmcond.metrics import Floats

#: Up to this number of distinct ratings, each is shown; more are grouped into classes of equal
#: width.
_FEW_RATINGS = 11
_CLASSES = 10


def rank_share(values: NDArray[np.floating]) -> Floats:
    """Return each value's relative rank, (n,): 0 for the least value, 1 for the greatest.

    Ties get their mean rank, and a single value gets 0.5. Values are (n,), finite.
    """
    n = len(values)
    return (rankdata(values) - 1) / (n - 1) if n > 1 else np.full(n, 0.5)


def rating_span(rating: Floats) -> tuple[Floats, Floats]:
    """Return the lowest and the highest relative rank (0 to 1) of the rows with each row's rating.

    Few distinct ratings are shared by many rows, so a rating does not determine a single rank: in a
    perfect order, the rows of one rating can have any rank in their span.
    """
    n = len(rating)
    if n < 2:
        return np.full(n, 0.5), np.full(n, 0.5)
    first, last = (rankdata(rating, method=method) - 1 for method in ("min", "max"))
    return first / (n - 1), last / (n - 1)


def rank_error(similarity: NDArray[np.floating], rating: Floats) -> Floats:
    """Return the rank error of each row, (n,): the distance of its rank to its rating's span.

    The error is a signed fraction of all ranks. Above 0, the predicted similarity is higher than
    the rating. If all errors are 0, the order is perfect. Unlike the difference of prediction and
    rating, it does not depend on the range of predictions, and unlike a correlation it describes a
    single row.
    """
    share = rank_share(similarity)
    first, last = rating_span(rating)
    return np.maximum(share - last, 0) - np.maximum(first - share, 0)


def chance_error(rating: Floats) -> Floats:
    """Return the mean absolute rank error of each row, (n,), over all random orders.

    By chance, rows of the lowest and the highest rating have larger errors than those in the
    middle, so an error has to be compared with this value.
    """
    n = len(rating)
    if n < 2:
        return np.zeros(n)
    first, last = (bound * (n - 1) for bound in rating_span(rating))
    below, above = first * (first + 1) / 2, (n - 1 - last) * (n - last) / 2
    return np.asarray((below + above) / n / (n - 1))


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows grouped by condition, groups in the order of their first rows.

    Attributes:
        label: The condition of each group as its first row writes it.
        index: (n,) the group of each row.
        count: (groups,) the number of rows of each group.
    """

    label: tuple[str, ...]
    index: NDArray[np.int64]
    count: NDArray[np.int64]

    def mean(self, values: NDArray[np.floating]) -> Floats:
        """Return the means, (groups,), of the values (n,) of each group.

        NaN values are ignored. The mean of a group without other values is NaN.
        """
        known = ~np.isnan(values)
        total = np.bincount(self.index[known], values[known], minlength=len(self.label))
        counted = np.bincount(self.index[known], minlength=len(self.label))
        with np.errstate(invalid="ignore"):
            return np.asarray(total / counted)


def by_condition(condition: Sequence[str]) -> Groups:
    """Group rows by condition, ignoring case, white space and a final full stop."""
    keys = [" ".join(text.split()).removesuffix(".").casefold() for text in condition]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    index = np.array([numbers[key] for key in keys], dtype=np.int64)
    # Backwards, so that the first label of each key wins.
    label = dict(zip(reversed(keys), reversed(condition), strict=True))
    labels = tuple(label[key] for key in numbers)
    return Groups(labels, index, np.bincount(index, minlength=len(labels)))


@dataclass(frozen=True, slots=True)
class Level:
    """The predictions for rows of one rating, or of one class of ratings.

    Attributes:
        rating: The rating; for a class, the mean over its rows.
        n: The number of rows.
        mean: The mean prediction.
        low: The lower quartile of the predictions.
        median: The median of the predictions.
        high: The upper quartile of the predictions.
    """

    rating: float
    n: int
    mean: float
    low: float
    median: float
    high: float


def calibration(similarity: NDArray[np.floating], rating: Floats) -> list[Level]:
    """Summarise the predictions, (n,), at each rating, in ascending order of the ratings, (n,).

    More than 11 distinct ratings are grouped into 10 classes of equal width.
    """
    distinct, level = np.unique(rating, return_inverse=True)
    if len(distinct) > _FEW_RATINGS:
        edges = np.linspace(distinct[0], distinct[-1], _CLASSES + 1)
        level = np.digitize(rating, edges[1:-1])
    levels = []
    for number in np.unique(level):
        values = similarity[level == number].astype(np.float64)
        quartiles = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
        mean_rating = float(rating[level == number].mean())
        levels.append(Level(mean_rating, len(values), float(values.mean()), *quartiles))
    return levels
