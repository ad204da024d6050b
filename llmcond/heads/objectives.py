"""What fitting minimises: errors of the similarity, errors of its order, and contrastive losses.

Contrastive objectives read *contrastive pairs*: the two rows of one sentence pair under two
conditions. The row with the higher rating is the positive, the other the negative.

A custom objective is a function ``(first, second, rating, batch, settings) -> scalar``, or a class
of ``torch.nn.Module`` that is created without arguments and called with the same ones; its
parameters are trained too. A recipe names it: ``objective = "my_objectives.py:margin_loss"``. Its
attribute ``contrasts = True`` requests contrastive pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmcond.errors import UserError
from llmcond.heads.settings import ObjectiveSettings

#: Above this threshold softplus equals the identity to the last bit of float64. At 20, PyTorch's
#: default, it does not.
_SOFTPLUS_THRESHOLD = 40.0

#: Function from two (n, k) embedding matrices to (n,) similarities.
Similarity = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RatedBatch:
    """Inputs of objectives besides the embeddings and ratings of a batch.

    Attributes:
        similarity: how the head compares embeddings: (n, k) twice -> (n,).
        pair: (n,) int64 sentence pair of each row; None if the data has none.
        contrastive: (p, 2) int64 positions in the batch of the contrastive pairs, in either order
            of rating. Both rows of a pair have its sentences in the same order. None if no
            objective needs them.
    """

    similarity: Similarity = torch.cosine_similarity
    pair: Tensor | None = None
    contrastive: Tensor | None = None


class Objective(nn.Module):
    """The weighted sum of the objectives that have a weight.

    Raises:
        UserError: the settings name an objective that has not been loaded or registered.
    """

    def __init__(self, settings: ObjectiveSettings) -> None:
        super().__init__()
        self.settings = settings
        self.custom: Any = None
        if settings.objective and settings.objective_weight:
            custom = settings.load_objective()
            self.custom = custom() if isinstance(custom, type) else custom

    def forward(
        self, first: Tensor, second: Tensor, rating: Tensor, batch: RatedBatch | None = None
    ) -> Tensor:
        """Compute the weighted sum, a scalar.

        An objective that can compare nothing in the batch, for example because all ratings are
        equal, is 0 and has gradients of 0.

        Args:
            first: (n, k) embeddings of the first sentences.
            second: (n, k) embeddings of the second sentences.
            rating: (n,) ratings on 0 to 1.
            batch: further inputs; required if the settings need contrastive pairs.

        Raises:
            ValueError: contrastive pairs are needed and missing.
            UserError: a size of ``matryoshka`` is larger than the embeddings.
        """
        rows = batch or RatedBatch()
        loss = partial(self._weighted_sum, rating, rows)
        return average_truncations(loss, self.settings.matryoshka, first, second)

    def _weighted_sum(
        self, rating: Tensor, batch: RatedBatch, first: Tensor, second: Tensor
    ) -> Tensor:
        settings = self.settings
        scored = _ScoredBatch(first, second, batch.similarity(first, second), rating, batch)
        terms: list[Tensor] = [
            weight * objective(scored, settings)
            for name, objective in OBJECTIVES.items()
            if (weight := getattr(settings, name))
        ]
        if self.custom is not None:
            custom = self.custom(first, second, rating, batch, settings)
            terms.append(settings.objective_weight * custom)
        return sum(terms[1:], terms[0])


def average_truncations(
    loss: Callable[..., Tensor], dims: Sequence[int], *embeddings: Tensor
) -> Tensor:
    """Average a loss over full embeddings and their first dimensions.

    This is Matryoshka representation learning (arXiv 2205.13147, equation 1) with equal weights.
    Without ``dims``, the result is the loss of the full embeddings.

    Args:
        loss: function of as many tensors as there are ``embeddings``.
        dims: sizes that the embeddings are truncated to.
        embeddings: (n, k) embeddings.

    Raises:
        UserError: a size is larger than k.
    """
    if not dims:
        return loss(*embeddings)
    size = embeddings[0].shape[1]
    if max(dims) > size:
        raise UserError(
            f"matryoshka names {max(dims)} dimensions, but the embeddings have {size}. Give "
            "smaller sizes."
        )
    sizes = sorted({size, *dims}, reverse=True)
    losses = [loss(*(values[:, :dim] for values in embeddings)) for dim in sizes]
    return torch.stack(losses).mean()


@dataclass(frozen=True, slots=True)
class _ScoredBatch:
    """The embeddings and ratings of a batch, and the cosines (or other similarities) of rows."""

    first: Tensor
    second: Tensor
    cosine: Tensor
    rating: Tensor
    batch: RatedBatch


def _mse(scored: _ScoredBatch, settings: ObjectiveSettings) -> Tensor:
    return (scored.cosine - scored.rating).square().mean()


def _cosent(scored: _ScoredBatch, settings: ObjectiveSettings) -> Tensor:
    """log(1 + sum over rating_i > rating_j of e^(scale (cos_j - cos_i)))."""
    excess = settings.scale * (scored.cosine[None, :] - scored.cosine[:, None])
    exponent = torch.where(scored.rating[:, None] > scored.rating[None, :], excess, -torch.inf)
    # The exponent 0 adds the 1. Without it, logsumexp of only -inf (if all ratings are equal) would
    # have no gradient.
    return torch.cat([exponent.new_zeros(1), exponent.flatten()]).logsumexp(dim=0)


def _ranking(scored: _ScoredBatch, settings: ObjectiveSettings) -> Tensor:
    """Mean over rating_i > rating_j of log(1 + e^(scale (cos_j - cos_i)))."""
    excess = settings.scale * (scored.cosine[None, :] - scored.cosine[:, None])
    gap = (scored.rating[:, None] - scored.rating[None, :]).relu()
    loss = torch.nn.functional.softplus(excess, threshold=_SOFTPLUS_THRESHOLD)
    return _weighted_mean(loss, _gap_weight(gap, settings.ties))


def _info_nce(scored: _ScoredBatch, settings: ObjectiveSettings) -> Tensor:
    (high, low, weight), first, second = (
        _split_contrastive(scored, settings),
        scored.first,
        scored.second,
    )
    if settings.info_nce_form == "v1":
        sides = [(first[high], second[low]), (first[low], second[high])]
    else:
        sides = [(first[high], second[high]), (first[low], second[low])]
    rivals = [scored.batch.similarity(*side) for side in sides]
    if settings.info_nce_form == "self-negatives":
        rivals += [0.5 * scored.batch.similarity(side[high], side[low]) for side in (first, second)]
    exponent = (torch.stack(rivals, dim=1) - scored.cosine[high][:, None]) / settings.temperature
    return _weighted_mean(exponent.logsumexp(dim=1), weight)


def _quadruplet(scored: _ScoredBatch, settings: ObjectiveSettings) -> Tensor:
    high, low, weight = _split_contrastive(scored, settings)
    return _weighted_mean(
        (settings.margin - scored.cosine[high] + scored.cosine[low]).relu(), weight
    )


#: Setting with the weight of an objective -> the objective. To add one, write a function and add a
#: line to this mapping.
OBJECTIVES: Mapping[str, Callable[[_ScoredBatch, ObjectiveSettings], Tensor]] = {
    "mse": _mse,
    "cosent": _cosent,
    "ranking": _ranking,
    "info_nce": _info_nce,
    "quadruplet": _quadruplet,
}


def _split_contrastive(
    scored: _ScoredBatch, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positives and negatives of contrastive pairs, (p,), and the pairs' weights."""
    if scored.batch.contrastive is None:
        raise ValueError("contrastive pairs are missing: (p, 2) positions in the batch")
    first, second = scored.batch.contrastive.unbind(dim=1)
    gap = scored.rating[first] - scored.rating[second]
    swapped = gap < 0
    high, low = torch.where(swapped, second, first), torch.where(swapped, first, second)
    weight = (
        torch.ones_like(gap) if settings.ties == "keep" else _gap_weight(gap.abs(), settings.ties)
    )
    return high, low, weight


def _gap_weight(gap: Tensor, ties: str) -> Tensor:
    return gap if ties == "gap" else (gap > 0).to(gap.dtype)


def _weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean; if all weights are 0, it is 0 and its gradient too."""
    return (values * weight).sum() / weight.sum().clamp(min=torch.finfo(weight.dtype).tiny)


def contrast_groups(pair: NDArray[np.int64]) -> NDArray[np.int64]:
    """Group rows into contrastive pairs; return (n,) the position of each group's first row.

    Two consecutive rows of a sentence pair form a group, wherever they are in the data. If their
    number is odd, the last row is a group of one, which is not contrasted.

    Args:
        pair: (n,) sentence pair of each row.
    """
    order = np.argsort(pair, kind="stable")
    positions = np.arange(len(pair))
    is_first = np.diff(pair[order], prepend=pair[order[:1]] - 1) != 0
    second = (positions - np.maximum.accumulate(np.where(is_first, positions, 0))) % 2
    group = np.empty_like(positions)
    group[order] = order[positions - second]
    return group


def adjacent_pairs(group: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions, (p, 2), of adjacent rows of one group; groups have at most two rows."""
    first = np.flatnonzero(group[1:] == group[:-1])
    return np.stack([first, first + 1], axis=1)


def check_contrasts(
    pair: NDArray[np.int64] | None, rating: NDArray[np.float64], settings: ObjectiveSettings
) -> dict[str, int]:
    """Count contrastive pairs if an objective needs them; raise an error if there are none.

    Pairs with equal ratings, which ``settings.ties`` is about, are also counted.

    Args:
        pair: (n,) sentence pair of each row.
        rating: (n,) ratings.
        settings: the objectives and their weights.

    Returns:
        The counts for the fit's record; empty if no objective needs contrastive pairs.

    Raises:
        UserError: no sentence pairs were given, or none has two rows.
    """
    if not settings.contrasts:
        return {}
    problem = "info_nce and quadruplet contrast the two conditions of a sentence pair, and no"
    if pair is None:
        raise UserError(f"{problem} pairs were given. Pass the sentence pair of each row as pair=.")
    group = contrast_groups(pair)
    second = np.flatnonzero(group != np.arange(len(pair)))
    if not len(second):
        raise UserError(
            f"{problem} sentence pair has two rated rows. Use mse, cosent or ranking instead: "
            "--set info_nce=0 quadruplet=0."
        )
    n_tied = int((rating[group[second]] == rating[second]).sum())
    return {"n_contrastive_pairs": len(second), "n_tied_pairs": n_tied}
