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
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Le
from numpy.typing import NDArray
from torch import Tensor, nn

from llmcond import plugins
from llmcond.config import STRICT
from llmcond.errors import UserError

#: Beyond any use, and below what overflows; so is the least temperature.
_LARGEST = 1_000_000

Weight = Annotated[float, Ge(0), Le(_LARGEST)]
_Positive = Annotated[float, Ge(1 / _LARGEST), Le(_LARGEST)]

#: Above it softplus is the identity to the last bit of float64; PyTorch takes 20, where it is not.
_LINEAR = 40.0

#: (n, k) twice -> (n,).
Similarity = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """What is minimised: a weighted sum of objectives.

    Attributes:
        mse: weight of the mean of (cos(z1, z2) - r)^2 (CASE, equation 2, as a mean over the batch).
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
        objective: an objective of the user's own, ``FILE.py:NAME`` or ``package.module:NAME``.
        objective_weight: its weight.
        temperature: t of ``info_nce``.
        margin: of ``quadruplet``.
        scale: of ``cosent`` and ``ranking``.
        ties: ``drop``: ``info_nce`` and ``quadruplet`` leave out contrastive pairs of equal rating;
            ``keep``: the first row of such pairs counts as the higher, as in the code of C-STS and
            Hyper-CL; ``gap``: each contrastive pair weighs as much as its ratings differ, and so
            does each i and j of ``ranking``.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    mse: Weight = 1.0
    info_nce: Weight = 0.0
    info_nce_form: Literal["acl", "v1", "self-negatives"] = "acl"
    quadruplet: Weight = 0.0
    cosent: Weight = 0.0
    ranking: Weight = 0.0
    objective: str = ""
    objective_weight: Weight = 1.0
    temperature: _Positive = 1.5
    margin: Weight = 1.0
    scale: _Positive = 20.0
    ties: Literal["drop", "keep", "gap"] = "drop"

    def __post_init__(self) -> None:
        """Refuse settings that leave nothing to minimise."""
        own = bool(self.objective) and self.objective_weight > 0
        if not own and not any(getattr(self, name) for name in OBJECTIVES):
            raise ValueError(
                f"the weights {', '.join(OBJECTIVES)} are all 0, so there is nothing to minimise: "
                "set one of them at least above 0"
            )

    @property
    def contrasts(self) -> bool:
        """Return whether contrastive pairs are needed."""
        if self.info_nce > 0 or self.quadruplet > 0:
            return True
        return bool(self.objective) and bool(getattr(_custom(self), "contrasts", False))


def _custom(settings: ObjectiveSettings) -> Any:
    return plugins.recorded(settings.objective, "the setting objective")


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
            found = _custom(settings)
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
