"""What fitting minimises: errors of the cosine, its order, and contrasts of two conditions.

Contrastive objectives take *twos*: the rows of one sentence pair under two conditions. The row
with the higher rating is the positive, the other the negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.config import STRICT
from llmcond.errors import UserError

_WEIGHTS = ("mse", "info_nce", "quadruplet", "cosent", "ranking")
_FORMS = ("acl", "v1", "self-negatives")
_TIES = ("drop", "keep", "gap")

#: Beyond any use, and below what overflows; so is the least temperature.
_LARGEST = 1_000_000
_SMALLEST = 1 / _LARGEST

#: Above it softplus is the identity to the last bit of float64; PyTorch takes 20, where it is not.
_LINEAR = 40.0

#: Rows that a message names before it only counts.
_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """What is minimised: a weighted sum of objectives.

    Attributes:
        mse: weight of :func:`cosine_mse`.
        info_nce: weight of the contrastive objective of Hyper-CL (section 3.3), with the cosines
            p of the positive and n of the negative, and the temperature t.
        info_nce_form: ``acl``: -log(e^(p/t) / (e^(p/t) + e^(n/t))), as in ACL 2024 and the
            released code; ``v1``: as in arXiv version 1, where the denominator has the cosines of
            each first sentence with the second one under the other condition, and not p, so that
            it may be below 0;
            ``self-negatives``: ``acl`` with half the cosine of each sentence with itself under the
            other condition added to the denominator (the released code's ``cl_in_batch_neg``).
        quadruplet: weight of max(0, margin + (1 - p) - (1 - n)), the quadruplet objective of C-STS.
        cosent: weight of CoSENT, log(1 + sum of e^(scale (cos_j - cos_i))) over the rows i and j
            of the batch with rating_i > rating_j.
        ranking: weight of RankNet on cosines, the mean over the same i and j of
            log(1 + e^(scale (cos_j - cos_i))).
        temperature: t of ``info_nce``.
        margin: of ``quadruplet``.
        scale: of ``cosent`` and ``ranking``.
        ties: ``drop``: ``info_nce`` and ``quadruplet`` leave out twos of equal rating; ``keep``:
            the first row of such twos counts as the higher, as in the code of C-STS and Hyper-CL;
            ``gap``: each two weighs as much as its ratings differ, and so does each i and j of
            ``ranking``.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    mse: float = 1.0
    info_nce: float = 0.0
    info_nce_form: str = "acl"
    quadruplet: float = 0.0
    cosent: float = 0.0
    ranking: float = 0.0
    temperature: float = 1.5
    margin: float = 1.0
    scale: float = 20.0
    ties: str = "drop"

    def __post_init__(self) -> None:
        """Refuse values that no objective can have."""
        for name in (*_WEIGHTS, "margin"):
            _check_number(name, getattr(self, name), 0)
        for name in ("temperature", "scale"):
            _check_number(name, getattr(self, name), _SMALLEST)
        _check_choice("info_nce_form", self.info_nce_form, _FORMS)
        _check_choice("ties", self.ties, _TIES)
        if not any(getattr(self, name) for name in _WEIGHTS):
            raise ValueError(
                f"the weights {', '.join(_WEIGHTS)} are all 0, so there is nothing to minimise: "
                "set one of them at least above 0"
            )

    @property
    def contrasts(self) -> bool:
        """Return whether twos are needed."""
        return self.info_nce > 0 or self.quadruplet > 0


def _check_number(name: str, value: float, least: float) -> None:
    if not least <= value <= _LARGEST:  # NaN is refused too
        raise ValueError(
            f"{name} is {value:g}; it must be at least {least:g} and at most {_LARGEST:,}"
        )


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, known))}")


def cosine_mse(first: Tensor, second: Tensor, rating: Tensor) -> Tensor:
    """Return the mean of (cos(z1, z2) - r)^2 (CASE, equation 2, as a mean over the batch).

    Args:
        first: (n, k) embeddings of the first sentences.
        second: (n, k) embeddings of the second ones.
        rating: (n,) on 0 to 1.
    """
    return _squared_error(_cosine(first, second), rating)


def objective(
    first: Tensor,
    second: Tensor,
    rating: Tensor,
    settings: ObjectiveSettings,
    twos: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of the objectives that have a weight, as a scalar.

    An objective that finds nothing to compare in the batch, such as equal ratings only, is 0 and
    has gradients of 0.

    Args:
        first: (n, k) embeddings of the first sentences.
        second: (n, k) embeddings of the second ones.
        rating: (n,) on 0 to 1, no NaN.
        settings: weights and forms; see :class:`ObjectiveSettings` for the equations.
        twos: (p, 2) int64 positions in the batch of the twos, in either order of rating. Both rows
            of a two must name its sentences in the same order, for ``v1`` and ``self-negatives``
            compare across rows. Needed where ``settings.contrasts``, else not looked at.

    Raises:
        ValueError: twos are needed and there are none.
    """
    cosine = _cosine(first, second)
    terms: list[Tensor] = []
    if settings.mse:
        terms.append(settings.mse * _squared_error(cosine, rating))
    if settings.cosent:
        terms.append(settings.cosent * _cosent(cosine, rating, settings.scale))
    if settings.ranking:
        terms.append(settings.ranking * _ranking(cosine, rating, settings))
    if settings.contrasts:
        if twos is None:
            raise ValueError("twos are missing: info_nce and quadruplet contrast (p, 2) positions")
        terms.append(_contrast(first, second, cosine, rating, settings, twos))
    return sum(terms[1:], terms[0])


#: (n, k) twice -> (n,); a zero vector has cosine 0 with everything.
_cosine = torch.cosine_similarity


def _squared_error(cosine: Tensor, rating: Tensor) -> Tensor:
    return (cosine - rating).square().mean()


def _cosent(cosine: Tensor, rating: Tensor, scale: float) -> Tensor:
    """log(1 + sum over rating_i > rating_j of e^(scale (cos_j - cos_i)))."""
    excess = scale * (cosine[None, :] - cosine[:, None])
    exponent = torch.where(rating[:, None] > rating[None, :], excess, -torch.inf)
    # The 1 is an exponent of 0: logsumexp of -inf alone, where all ratings are equal, has no
    # gradient.
    return torch.cat([exponent.new_zeros(1), exponent.flatten()]).logsumexp(dim=0)


def _ranking(cosine: Tensor, rating: Tensor, settings: ObjectiveSettings) -> Tensor:
    """Mean over rating_i > rating_j of log(1 + e^(scale (cos_j - cos_i)))."""
    excess = settings.scale * (cosine[None, :] - cosine[:, None])
    gap = (rating[:, None] - rating[None, :]).relu()
    loss = torch.nn.functional.softplus(excess, threshold=_LINEAR)
    return _weighted_mean(loss, _weight(gap, settings.ties))


def _contrast(
    first: Tensor,
    second: Tensor,
    cosine: Tensor,
    rating: Tensor,
    settings: ObjectiveSettings,
    twos: Tensor,
) -> Tensor:
    """Return the weighted mean over twos of the contrastive objectives.

    Args:
        first: (n, k) embeddings of the first sentences.
        second: (n, k) embeddings of the second ones.
        cosine: (n,) of both.
        rating: (n,).
        settings: weights and forms.
        twos: (p, 2) positions.
    """
    gap = rating[twos[:, 0]] - rating[twos[:, 1]]
    swapped = gap < 0
    high = torch.where(swapped, twos[:, 1], twos[:, 0])
    low = torch.where(swapped, twos[:, 0], twos[:, 1])
    positive, negative = cosine[high], cosine[low]
    loss = torch.zeros_like(positive)
    if settings.info_nce:
        rivals = _rivals(first, second, high, low, settings.info_nce_form)
        exponent = (rivals - positive[:, None]) / settings.temperature
        loss = loss + settings.info_nce * exponent.logsumexp(dim=1)
    if settings.quadruplet:
        loss = loss + settings.quadruplet * (settings.margin - positive + negative).relu()
    weight = torch.ones_like(gap) if settings.ties == "keep" else _weight(gap.abs(), settings.ties)
    return _weighted_mean(loss, weight)


def _rivals(first: Tensor, second: Tensor, high: Tensor, low: Tensor, form: str) -> Tensor:
    """Return what a form of InfoNCE has in its denominator, as cosines (p, 2 or 4)."""
    if form == "v1":
        found = [_cosine(first[high], second[low]), _cosine(first[low], second[high])]
    else:
        found = [_cosine(first[high], second[high]), _cosine(first[low], second[low])]
    if form == "self-negatives":
        found += [0.5 * _cosine(side[high], side[low]) for side in (first, second)]
    return torch.stack(found, dim=1)


def _weight(gap: Tensor, ties: str) -> Tensor:
    return gap if ties == "gap" else (gap > 0).to(gap.dtype)


def _weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Return the mean, 0 where all weights are 0; then too there is a gradient, of 0."""
    return (values * weight).sum() / weight.sum().clamp(min=torch.finfo(weight.dtype).tiny)


def stretches(pair: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (n,) the number of each row's stretch: rows of one pair, one right after the other."""
    return np.cumsum(np.diff(pair, prepend=pair[:1]) != 0).astype(np.int64)


def neighbours(stretch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions, (p, 2), of adjacent rows of one stretch, whose rows are two at most."""
    first = np.flatnonzero(stretch[1:] == stretch[:-1])
    return np.stack([first, first + 1], axis=1)


def find_twos(pair: NDArray[np.int64], numbers: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the positions, (p, 2), of the rows that stand in twos.

    A pair with a single row has nothing to be contrasted with. A pair that occurs again elsewhere,
    as some of C-STS do, gives a two each time.

    Args:
        pair: (n,) the sentence pair of each row.
        numbers: (n,) what messages call the rows; their positions from 1 where it is None.

    Raises:
        UserError: a pair has several rows that do not all stand in twos.
    """
    _, start, count = np.unique(stretches(pair), return_index=True, return_counts=True)
    pairs, rows = np.unique(pair, return_counts=True)
    several = np.isin(pair[start], pairs[rows > 1])
    wrong = np.unique(pair[start[several & (count != 2)]])
    if len(wrong):
        named = np.flatnonzero(pair == pair[np.isin(pair, wrong)][0])
        shown = named + 1 if numbers is None else numbers[named]
        raise UserError(_not_twos(shown.tolist(), len(wrong) - 1))
    start = start[count == 2]
    return np.stack([start, start + 1], axis=1).astype(np.int64)


def _not_twos(rows: list[int], others: int) -> str:
    named = [str(row) for row in rows[:_NAMED]]
    if len(rows) > _NAMED:
        named.append(f"{len(rows) - _NAMED:,} more")
    also = f" (one of {others + 1:,} pairs at fault)" if others else ""
    remedy = "Keep two rows of each pair" if len(rows) > 2 else "Put the two next to each other"
    return (
        f"rows {', '.join(named[:-1])} and {named[-1]} have the same sentence pair{also}. "
        "Contrastive objectives take adjacent twos: the two rows of a pair, one right after the "
        f"other, under two conditions. {remedy}, or fit without info_nce and quadruplet."
    )


@dataclass(frozen=True, slots=True)
class TieCount:
    """How many twos there are.

    Attributes:
        n_twos: all of them.
        n_tied: those whose rows have equal ratings.
    """

    n_twos: int
    n_tied: int


def count_ties(twos: NDArray[np.int64], rating: NDArray[np.float64]) -> TieCount:
    """Count twos, and those of equal rating, which ``settings.ties`` is about.

    Args:
        twos: (p, 2) positions.
        rating: (n,).
    """
    tied = rating[twos[:, 0]] == rating[twos[:, 1]]
    return TieCount(len(twos), int(tied.sum()))
