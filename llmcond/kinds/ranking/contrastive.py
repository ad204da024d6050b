"""The InfoNCE objective of queries and candidates of SimKGC, which Hyper-CL uses as well.

References: SimKGC (ACL 2022), equation 4, section 3.3 and released code; Hyper-CL (ACL 2024),
section 3.3. Fitting a head and training an encoder share this objective. Both pass it scores, the
target column of each row, and a mask of the scores to leave out.
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
MaskedScores = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastSettings:
    """Settings of the contrastive objective: its negatives and its temperature.

    The defaults are those of SimKGC's commands for WN18RR.

    Attributes:
        temperature: initial temperature of the scores.
        learn_temperature: whether the temperature is trained.
        margin: margin that is subtracted from the score of each query with its target.
        directions: ``both`` ranks the target of each query among the candidates of the batch, and
            the query of each target among the queries; ``query`` does only the former.
        negatives: candidates of a batch: its ``tails``, or all its ``entities`` (heads and tails).
        self_negatives: whether the head of a query is a candidate for the query.
        queue: number of previous batches whose candidates are used as negatives too, with the
            embeddings that they had in their batch.
        queue_weight: factor of the scores of these candidates.
        random_candidates: number of entities sampled for each batch, in addition to the entities
            of its triples.
        relation_negatives: number of other relations that each triple is contrasted with; 0 for
            none. The tail must be nearer to the head under the triple's relation than under the
            others. This is Hyper-CL's contrast of one sentence under two conditions; SimKGC has
            no such term.
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
    """The objective with its temperature, which is a trained parameter if the settings say so."""

    def __init__(self, settings: ContrastSettings) -> None:
        super().__init__()
        self.settings = settings
        start = torch.tensor(-math.log(settings.temperature))
        self.log_scale = nn.Parameter(start, requires_grad=settings.learn_temperature)

    @property
    def scale(self) -> float:
        """The factor of the scores: 1 / temperature."""
        return math.exp(float(self.log_scale.detach()))

    def forward(
        self,
        scores: Tensor,
        target: Tensor,
        mask: Tensor,
        others: Sequence[MaskedScores] = (),
        relations: MaskedScores | None = None,
    ) -> Tensor:
        """Return ``contrastive`` at the current temperature."""
        scale = self.log_scale.exp()
        return contrastive(scores, target, mask, self.settings, scale, others, relations)


def contrastive(
    scores: Tensor,
    target: Tensor,
    mask: Tensor,
    settings: ContrastSettings,
    scale: Tensor | float,
    others: Sequence[MaskedScores] = (),
    relations: MaskedScores | None = None,
) -> Tensor:
    """Return the loss of a batch, a scalar: the sum over directions, each a mean over rows.

    With the score s_ij of query i and candidate j, and t the target of query i, a row's loss is
    -log(e^((s_it - margin) scale) / (e^((s_it - margin) scale) + sum over j of e^(s_ij scale))).
    The other direction is the same, summed over the queries instead of the candidates.

    Args:
        scores: scores of each query with each candidate of the batch, (m, n).
        target: column of the target of each query, (m,) int64. Several queries may share a column,
            if each entity has a single column. If an entity has a column for each of its
            occurrences, as in SimKGC, it has correspondingly more weight as a negative.
        mask: mask, (m, n) bool, that is true where a candidate is a known answer of a query. Known
            answers are not negatives, in either direction. The values at the targets are ignored.
        settings: settings of the objective.
        scale: factor of the scores, 1 / temperature.
        others: scores (m, k) and masks of additional candidates, which are not the target of any
            query of the batch.
        relations: scores (m, r) of the target of each query with its head under other relations,
            and their mask.
    """
    rows = torch.arange(len(scores), device=scores.device)
    is_target = target[:, None] == torch.arange(scores.shape[1], device=scores.device)
    logits = (scores - settings.margin * is_target.to(scores.dtype)) * scale
    # The mask is applied after scaling: -inf times the temperature would have a NaN gradient.
    logit_groups = [logits.masked_fill(mask & ~is_target, -torch.inf)]
    logit_groups += [
        (other_scores * scale).masked_fill(other_mask, -torch.inf)
        for other_scores, other_mask in others
    ]
    total = cross_entropy(torch.cat(logit_groups, dim=1), target)
    if settings.directions == "both":
        # Queries with the same target are not negatives of each other.
        is_known_answer = mask.T[target] | (target[:, None] == target)
        is_known_answer[rows, rows] = False
        columns = logits.index_select(1, target).T
        total = total + cross_entropy(columns.masked_fill(is_known_answer, -torch.inf), rows)
    if relations is not None:
        other_scores, other_mask = relations
        other_logits = (other_scores * scale).masked_fill(other_mask, -torch.inf)
        pair_logits = torch.cat([logits.gather(1, target[:, None]), other_logits], dim=1)
        total = total + cross_entropy(pair_logits, torch.zeros_like(target))
    return total


class Queue:
    """Candidates of previous batches, detached: SimKGC's pre-batch negatives.

    SimKGC initialises it with random vectors; this one is empty at first.
    """

    def __init__(self, batches: int) -> None:
        self._limit = batches
        self._batches: list[tuple[Positions, Tensor]] = []

    def __len__(self) -> int:
        return len(self._batches)

    def entities(self) -> Positions:
        """Return the entities of the candidates, (k,)."""
        return np.concatenate([entities for entities, _ in self._batches])

    def vectors(self) -> Tensor:
        """Return the embeddings of the candidates, (k, dim)."""
        return torch.cat([vectors for _, vectors in self._batches])

    def add(self, entities: Positions, vectors: Tensor) -> None:
        """Add the candidates of a batch, (k,) and (k, dim), and drop the oldest batch if full."""
        if self._limit:
            self._batches = [*self._batches, (entities, vectors.detach())][-self._limit :]
