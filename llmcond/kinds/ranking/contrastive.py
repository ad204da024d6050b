"""InfoNCE of queries and candidates: the objective of SimKGC, which Hyper-CL trains with as well.

SimKGC (ACL 2022), equation 4, section 3.3 and released code; Hyper-CL (ACL 2024), section 3.3.
Fitting of heads and training of encoders share it: both give it scores, of which it knows no more
than which column is a row's own, and which are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llmcond.arrays import Positions
from llmcond.config import STRICT
from llmcond.heads.settings import LARGEST, Weight

#: Scores, (m, k), and a mask of the same shape that is true where one is left out.
Masked = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastSettings:
    """What queries are contrasted with, and how.

    The defaults are those of SimKGC's commands for WN18RR.

    Attributes:
        temperature: of the scores, at the start.
        learn_temperature: whether it is trained along.
        margin: subtracted from the score of each query with its own candidate.
        directions: ``both``: each query finds its candidate among those of the batch, and each
            candidate its query; ``query``: the first only.
        negatives: candidates of a batch: its ``tails``, or all its ``entities``, heads as well.
        self_negatives: whether a query's own head is a candidate too.
        queue: earlier batches whose candidates are still contrasted with, as they were then.
        queue_weight: what the scores of those are multiplied by.
        random_candidates: entities drawn for each batch, besides those of its triples.
        relation_negatives: other relations that each triple is contrasted with: its tail is to be
            nearer to the head under its relation than under those (Hyper-CL's contrast of one
            sentence under two conditions, of which SimKGC has nothing); 0: none.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    temperature: Annotated[float, Gt(0), Le(LARGEST)] = 0.05
    learn_temperature: bool = True
    margin: Weight = 0.02
    directions: Literal["both", "query"] = "both"
    negatives: Literal["tails", "entities"] = "tails"
    self_negatives: bool = True
    queue: Annotated[int, Ge(0), Le(1_000)] = 0
    queue_weight: Weight = 0.5
    random_candidates: Annotated[int, Ge(0), Le(LARGEST)] = 0
    relation_negatives: Annotated[int, Ge(0), Le(1_000)] = 0


class Contrast(nn.Module):
    """The objective with its temperature, which is trained along where the settings say so."""

    def __init__(self, settings: ContrastSettings) -> None:
        super().__init__()
        self.settings = settings
        start = torch.tensor(-math.log(settings.temperature))
        self.log_scale = nn.Parameter(start, requires_grad=settings.learn_temperature)

    @property
    def scale(self) -> float:
        """Return what scores are multiplied by: 1 / temperature."""
        return math.exp(float(self.log_scale.detach()))

    def forward(
        self,
        scores: Tensor,
        target: Tensor,
        mask: Tensor,
        others: Sequence[Masked] = (),
        relations: Masked | None = None,
    ) -> Tensor:
        """Return :func:`contrastive` at the temperature as it is now."""
        scale = self.log_scale.exp()
        return contrastive(scores, target, mask, self.settings, scale, others, relations)


def contrastive(
    scores: Tensor,
    target: Tensor,
    mask: Tensor,
    settings: ContrastSettings,
    scale: Tensor | float,
    others: Sequence[Masked] = (),
    relations: Masked | None = None,
) -> Tensor:
    """Return the objective of a batch, a scalar: the sum of its directions, each a mean over rows.

    With the score s_ij of query i and candidate j, and t_i the candidate of query i, a row adds
    -log(e^((s_it - margin) scale) / (e^((s_it - margin) scale) + sum over j of e^(s_ij scale)));
    the other direction is the same over the queries of candidate t_i.

    Args:
        scores: (m, n) of each query with each candidate of the batch.
        target: (m,) int64 the column of each query's own candidate.
            Several may have one column, where an entity is there once; as often as it is in the
            batch, as in SimKGC, it weighs as much more as a negative of others.
        mask: (m, n) bool, true where a candidate is known to be right for a query: it is no
            negative, in either direction. What it says of a query's own one is not looked at.
        settings: see :class:`ContrastSettings`.
        scale: what scores are multiplied by, 1 / temperature.
        others: (m, k) each, scores of further candidates, which have no query of their own in the
            batch, and the mask of those.
        relations: (m, r) scores of each query's candidate with its head under other relations, and
            the mask of those.
    """
    rows = torch.arange(len(scores), device=scores.device)
    own = target[:, None] == torch.arange(scores.shape[1], device=scores.device)
    logits = (scores - settings.margin * own.to(scores.dtype)) * scale
    # Masked when it is scaled: the gradient of a temperature by -inf is no number.
    every = [logits.masked_fill(mask & ~own, -torch.inf)]
    every += [(found * scale).masked_fill(left_out, -torch.inf) for found, left_out in others]
    total = cross_entropy(torch.cat(every, dim=1), target)
    if settings.directions == "both":
        # Queries of one candidate are no negatives of each other.
        right = mask.T[target] | (target[:, None] == target)
        right[rows, rows] = False
        columns = logits.index_select(1, target).T
        total = total + cross_entropy(columns.masked_fill(right, -torch.inf), rows)
    if relations is not None:
        found, left_out = relations
        others_of = (found * scale).masked_fill(left_out, -torch.inf)
        both = torch.cat([logits.gather(1, target[:, None]), others_of], dim=1)
        total = total + cross_entropy(both, torch.zeros_like(target))
    return total


class Queue:
    """Candidates of earlier batches, detached: SimKGC's pre-batch negatives.

    SimKGC fills it with random vectors at first; here it is empty until there are batches.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._kept: list[tuple[Positions, Tensor]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def entities(self) -> Positions:
        """Return the candidates' entities, (k,)."""
        return np.concatenate([entities for entities, _ in self._kept])

    def vectors(self) -> Tensor:
        """Return the candidates' embeddings, (k, dim)."""
        return torch.cat([vectors for _, vectors in self._kept])

    def add(self, entities: Positions, vectors: Tensor) -> None:
        """Put in a batch, (k,) and (k, dim), and drop the oldest one above their number."""
        if self._batches:
            self._kept = [*self._kept, (entities, vectors.detach())][-self._batches :]
