"""What fitting minimises: errors of the similarity, its order, and contrasts of two conditions.

Contrastive objectives take *contrastive pairs*: the two rows of one sentence pair under two
conditions. The row with the higher rating is the positive, the other the negative.

An objective of a user's own is a function ``(first, second, rating, batch, settings) -> scalar``,
or a class of ``torch.nn.Module`` that is made without arguments and called with the same; its
parameters are trained along. A recipe names it: ``objective = "my_objectives.py:margin_loss"``. Its
attribute ``contrasts = True`` asks for contrastive pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmcond.errors import UserError
from llmcond.heads.settings import ObjectiveSettings

#: Above it softplus is the identity to the last bit of float64; PyTorch takes 20, where it is not.
_LINEAR = 40.0

#: (n, k) twice -> (n,).
Similarity = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RatedBatch:
    """What objectives see of a batch besides both sentences' embeddings and the ratings.

    Attributes:
        similarity: how the head compares embeddings: (n, k) twice -> (n,).
        pair: (n,) int64 the sentence pair of each row; None where none were given.
        contrastive: (p, 2) int64 positions in the batch of the contrastive pairs, in either order
            of rating. Both rows of a pair name its sentences in the same order. None where no
            objective asks for them.
    """

    similarity: Similarity = torch.cosine_similarity
    pair: Tensor | None = None
    contrastive: Tensor | None = None


class Objective(nn.Module):
    """The weighted sum of the objectives that have a weight.

    Raises:
        UserError: the settings name an objective that the user has not loaded or registered.
    """

    def __init__(self, settings: ObjectiveSettings) -> None:
        super().__init__()
        self.settings = settings
        self.custom: Any = None
        if settings.objective and settings.objective_weight:
            found = settings.load_objective()
            self.custom = found() if isinstance(found, type) else found

    def forward(
        self, first: Tensor, second: Tensor, rating: Tensor, batch: RatedBatch | None = None
    ) -> Tensor:
        """Return the sum, a scalar.

        An objective that finds nothing to compare in the batch, such as equal ratings only, is 0
        and has gradients of 0.

        Embeddings are (n, k), ratings (n,) on 0 to 1; ``batch`` is needed where the settings ask
        for contrastive pairs.

        Raises:
            ValueError: contrastive pairs are needed and there are none.
        """
        settings, batch = self.settings, batch or RatedBatch()
        own = _Compared(first, second, batch.similarity(first, second), rating, batch)
        terms: list[Tensor] = [
            weight * objective(own, settings)
            for name, objective in OBJECTIVES.items()
            if (weight := getattr(settings, name))
        ]
        if self.custom is not None:
            custom = self.custom(first, second, rating, batch, settings)
            terms.append(settings.objective_weight * custom)
        return sum(terms[1:], terms[0])


@dataclass(frozen=True, slots=True)
class _Compared:
    """The embeddings and ratings of a batch, and the cosines (or similarities) of its rows."""

    first: Tensor
    second: Tensor
    cosine: Tensor
    rating: Tensor
    batch: RatedBatch


def _mse(own: _Compared, settings: ObjectiveSettings) -> Tensor:
    return (own.cosine - own.rating).square().mean()


def _cosent(own: _Compared, settings: ObjectiveSettings) -> Tensor:
    """log(1 + sum over rating_i > rating_j of e^(scale (cos_j - cos_i)))."""
    excess = settings.scale * (own.cosine[None, :] - own.cosine[:, None])
    exponent = torch.where(own.rating[:, None] > own.rating[None, :], excess, -torch.inf)
    # The 1 is an exponent of 0: logsumexp of -inf alone, where all ratings are equal, has no
    # gradient.
    return torch.cat([exponent.new_zeros(1), exponent.flatten()]).logsumexp(dim=0)


def _ranking(own: _Compared, settings: ObjectiveSettings) -> Tensor:
    """Mean over rating_i > rating_j of log(1 + e^(scale (cos_j - cos_i)))."""
    excess = settings.scale * (own.cosine[None, :] - own.cosine[:, None])
    gap = (own.rating[:, None] - own.rating[None, :]).relu()
    loss = torch.nn.functional.softplus(excess, threshold=_LINEAR)
    return _weighted_mean(loss, _weight(gap, settings.ties))


def _info_nce(own: _Compared, settings: ObjectiveSettings) -> Tensor:
    (high, low, weight), first, second = _contrast(own, settings), own.first, own.second
    if settings.info_nce_form == "v1":
        sides = [(first[high], second[low]), (first[low], second[high])]
    else:
        sides = [(first[high], second[high]), (first[low], second[low])]
    rivals = [own.batch.similarity(*side) for side in sides]
    if settings.info_nce_form == "self-negatives":
        rivals += [0.5 * own.batch.similarity(side[high], side[low]) for side in (first, second)]
    exponent = (torch.stack(rivals, dim=1) - own.cosine[high][:, None]) / settings.temperature
    return _weighted_mean(exponent.logsumexp(dim=1), weight)


def _quadruplet(own: _Compared, settings: ObjectiveSettings) -> Tensor:
    high, low, weight = _contrast(own, settings)
    return _weighted_mean((settings.margin - own.cosine[high] + own.cosine[low]).relu(), weight)


#: Name of the weight among the settings -> objective: a new one is a function and a line here.
OBJECTIVES: Mapping[str, Callable[[_Compared, ObjectiveSettings], Tensor]] = {
    "mse": _mse,
    "cosent": _cosent,
    "ranking": _ranking,
    "info_nce": _info_nce,
    "quadruplet": _quadruplet,
}


def _contrast(own: _Compared, settings: ObjectiveSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positives and negatives of contrastive pairs, (p,), and each pair's weight."""
    if own.batch.contrastive is None:
        raise ValueError("contrastive pairs are missing: (p, 2) positions in the batch")
    one, other = own.batch.contrastive.unbind(dim=1)
    gap = own.rating[one] - own.rating[other]
    swapped = gap < 0
    high, low = torch.where(swapped, other, one), torch.where(swapped, one, other)
    weight = torch.ones_like(gap) if settings.ties == "keep" else _weight(gap.abs(), settings.ties)
    return high, low, weight


def _weight(gap: Tensor, ties: str) -> Tensor:
    return gap if ties == "gap" else (gap > 0).to(gap.dtype)


def _weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Return the mean, 0 where all weights are 0; then too there is a gradient, of 0."""
    return (values * weight).sum() / weight.sum().clamp(min=torch.finfo(weight.dtype).tiny)


def contrast_groups(pair: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return which rows are a contrastive pair, (n,): each row has the position of its first row.

    The rows of a sentence pair, wherever they stand, are taken two by two in their order. A last
    one without another is a group by itself: it has nothing to be contrasted with.

    Args:
        pair: (n,) the sentence pair of each row.
    """
    order = np.argsort(pair, kind="stable")
    place = np.arange(len(pair))
    begins = np.diff(pair[order], prepend=pair[order[:1]] - 1) != 0
    second = (place - np.maximum.accumulate(np.where(begins, place, 0))) % 2
    group = np.empty_like(place)
    group[order] = order[place - second]
    return group


def adjacent_pairs(group: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions, (p, 2), of adjacent rows of one group, whose rows are two at most."""
    first = np.flatnonzero(group[1:] == group[:-1])
    return np.stack([first, first + 1], axis=1)


def check_contrasts(
    pair: NDArray[np.int64] | None, rating: NDArray[np.float64], settings: ObjectiveSettings
) -> dict[str, int]:
    """Count contrastive pairs where an objective needs them; none is an error.

    Those of equal ratings, which ``settings.ties`` is about, are counted as well.

    Args:
        pair: (n,) the sentence pair of each row.
        rating: (n,).
        settings: which objectives there are.

    Raises:
        UserError: no sentence pairs were given, or none has two rows.
    """
    if not settings.contrasts:
        return {}
    needed = "info_nce and quadruplet contrast the two conditions of a sentence pair, and no"
    if pair is None:
        raise UserError(f"{needed} pairs were given: name that of each row with pair=.")
    group = contrast_groups(pair)
    second = np.flatnonzero(group != np.arange(len(pair)))
    if not len(second):
        raise UserError(
            f"{needed} sentence pair has two rated rows. Use mse, cosent or ranking instead: "
            "--set info_nce=0 quadruplet=0."
        )
    n_tied = int((rating[group[second]] == rating[second]).sum())
    return {"n_contrastive_pairs": len(second), "n_tied_pairs": n_tied}
