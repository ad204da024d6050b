"""An encoder of entities and relations, and a head that maps queries, trained together on a graph.

The objective is that of fitting heads (SimKGC, ACL 2022, section 3.3; Hyper-CL, ACL 2024, section
4.2). A step takes triples in both directions, so that all entities of its triples are candidates,
each encoded once; a tri-encoder reads nothing else but the few relations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from llmcond.arrays import Positions
from llmcond.encoders.engine.engine import Engine
from llmcond.encoders.engine.tokenizing import Tokens
from llmcond.errors import UserError
from llmcond.evaluation.ranking import rank
from llmcond.finetune.base import Shared, TrainedModel
from llmcond.heads import Recipe
from llmcond.heads.module import seeded
from llmcond.heads.pairs import SCORE
from llmcond.kinds.ranking.arrays import QueryArrays, joint_keys
from llmcond.kinds.ranking.contrastive import Masked
from llmcond.kinds.ranking.fit import check_queries
from llmcond.kinds.ranking.graph import Known, Triples, both_directions
from llmcond.kinds.ranking.heads import FittedQueryHead, QueryHead
from llmcond.metrics import METRICS, Metric

#: What dev is scored on, always the same: triples, and entities that are candidates besides theirs.
SCORED, CANDIDATES = 500, 8_192


@dataclass(frozen=True)
class GraphInputs:
    """Triples of a split, (m, 3), with all texts of their graph, each tokenised once.

    Attributes:
        n_relations: R.
        known: tails that are no negatives of a query: those of train in training, of all on dev.
        entities: tokens of all entities, (n,).
        relations: tokens of all relations in both directions, (2 R,), for heads that take those.
        joint: tokens of heads under relations, for heads that read those; ``joint_of``, sorted,
            says which: see :func:`~llmcond.kinds.ranking.arrays.joint_keys`.
    """

    triples: Triples
    n_relations: int
    known: Known
    entities: list[Tokens]
    relations: Sequence[Tokens] = ()
    joint: Sequence[Tokens] = ()
    joint_of: Positions = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.triples)

    def queries(self, rows: Positions) -> Positions:
        """Return both directions of some triples, (2 k, 3)."""
        return both_directions(self.triples[rows], self.n_relations).astype(np.int64)

    def keys(self, queries: Positions) -> Positions:
        """Return the keys of the joint inputs of queries, (m, 3) with their tails."""
        return joint_keys(queries[:, 0], queries[:, 1], self.n_relations)

    @cached_property
    def scored(self) -> tuple[Positions, Positions]:
        """Return what stands for a split: (k, 3) queries, and entities that are candidates too."""
        drawn = np.random.default_rng(0)
        rows = np.sort(drawn.permutation(len(self))[:SCORED])
        return self.queries(rows), drawn.permutation(len(self.entities))[:CANDIDATES]


class QueryModel(TrainedModel[GraphInputs, FittedQueryHead]):
    """From triples to the contrastive objective of their queries and tails."""

    on_dev = SCORE
    head: QueryHead

    def __init__(
        self,
        engine: Engine,
        recipe: Recipe,
        inputs: GraphInputs,
        seed: int,
        start: FittedQueryHead | None = None,
        metric: Metric = METRICS["mrr"],
    ) -> None:
        """Put a head behind an engine, as ``start`` was fitted or as it is drawn by the seed.

        Raises:
            UserError: a recipe with what is known of cached features only, or a head that goes
                with other features.
        """
        check_recipe(recipe)
        family: Any = recipe.family
        dims = engine.dim, family.dim_of_relations(recipe.settings, engine.dim), inputs.n_relations
        head, _ = seeded(lambda: family(recipe.settings, *dims), seed)
        if start is not None:
            start.check(dims)
            head.load_state_dict(start.module.state_dict())
        super().__init__(engine, head, recipe.kind, seed, metric)
        if start is None:
            # Of the encoder as it is now: a training that goes on begins from the same.
            reads = self.head.reads_relations
            features = (
                normalize(torch.from_numpy(self.vectors(inputs.relations))) if reads else None
            )
            seeded(lambda: self.head.begin(features), seed)

    def forward(self, inputs: GraphInputs, rows: Positions, seed: list[int]) -> Tensor:
        """Return the mean loss of triples in both directions, a scalar."""
        self.seed_dropout(seed)
        settings = self.head.settings
        drawn = np.random.Generator(np.random.SFC64(seed))
        triples = inputs.queries(rows)
        head, relation, tail = triples.T
        count = 2 * inputs.n_relations
        others = [
            (relation + drawn.integers(1, count, size=len(relation))) % count
            for _ in range(settings.relation_negatives)
        ]
        # All heads are among them: each is the tail of the other direction.
        extra = drawn.integers(len(inputs.entities), size=settings.random_candidates)
        used = _Used.of(self.head, inputs, triples, np.concatenate([relation, *others]), extra)
        vectors = self.engine.embed(used.tokens)
        with torch.autocast(vectors.device.type, enabled=False):
            parts = torch.split(normalize(vectors.float()), used.sizes)
            queries = self._queries(inputs, used, parts, triples)
            candidates = self.head.candidate(parts[0])
            target = torch.from_numpy(np.searchsorted(used.entities, tail)).to(candidates.device)
            mask = inputs.known.mask(head, relation, used.entities)
            if not settings.self_negatives:
                mask |= used.entities == head[:, None]
            contrast: Masked | None = None
            if others:
                own = candidates.index_select(0, target)
                asked = [np.stack([head, other, tail], axis=1) for other in others]
                scores = [self._queries(inputs, used, parts, one) * own for one in asked]
                known = np.stack([inputs.known.contains(one) for one in asked], axis=1)
                left_out = torch.from_numpy(known).to(own.device)
                contrast = torch.stack(scores, dim=1).sum(dim=2), left_out
            loss: Tensor = self.head.contrast(
                queries @ candidates.T,
                target,
                torch.from_numpy(mask).to(target.device),
                relations=contrast,
            )
            return loss

    def _queries(
        self, inputs: GraphInputs, used: _Used, parts: Sequence[Tensor], triples: Positions
    ) -> Tensor:
        """Return embeddings of queries, given the vectors of what is used of a graph."""
        head, relation, _ = triples.T
        entities, relations, joint = parts
        places = np.searchsorted(used.entities, head)
        if self.head.reads_joint:
            places = np.searchsorted(used.joint, inputs.keys(triples))
        which = np.searchsorted(used.relations, relation) if len(relations) else relation
        # Not vectors[positions]: gradients of an index are added in any order.
        read = (joint if self.head.reads_joint else entities).index_select(
            0, torch.from_numpy(places).to(entities.device)
        )
        number = torch.from_numpy(np.ascontiguousarray(which)).to(entities.device)
        return self.head.query(read, relations if len(relations) else None, number)

    def score(self, inputs: GraphInputs, shared: Shared) -> float | None:
        """Return the metric of filtered ranks of some dev queries among some of the entities.

        Ranking all entities would take longer than an epoch of a small graph's training.
        """
        queries, others = inputs.scored
        count = 2 * inputs.n_relations
        used = _Used.of(self.head, inputs, queries, np.arange(count), others)
        vectors = shared(
            len(used.tokens), lambda which: self.vectors([used.tokens[i] for i in which])
        )
        if not np.isfinite(vectors).all():
            return None
        entities, relations, joint = np.split(vectors, np.cumsum(used.sizes)[:-1])
        # Entities by their places among those that are used, which are in the same order.
        head, relation, tail = queries.T
        place = np.searchsorted(used.entities, head)
        arrays = QueryArrays(
            entities=entities,
            triples=np.empty((0, 3), dtype=np.int64),
            n_relations=inputs.n_relations,
            known=inputs.known,
            relations=relations if len(relations) else None,
            joint=joint if len(joint) else None,
            joint_of=np.unique(joint_keys(place, relation, inputs.n_relations)),
        )
        row, right = inputs.known.gather(head, relation)
        there = np.isin(right, used.entities)
        row, right = row[there], np.searchsorted(used.entities, right[there])
        known = Known(np.stack([place[row], relation[row], right], axis=1), len(used.entities))
        fitted = self.fitted().on(arrays)
        asked = np.stack([place, relation, np.searchsorted(used.entities, tail)], axis=1)
        ranks = rank(fitted.queries(place, relation), fitted.candidates(), asked, known).of()
        return self.metric(ranks, np.zeros(len(ranks)), np.arange(len(ranks)))


@dataclass(frozen=True)
class _Used:
    """What is encoded of a graph at once, each distinct text once.

    Attributes:
        entities, relations, joint: sorted; joint inputs by their keys. Relations are none where the
            head takes no features of them, and joint inputs where it reads those of entities.
        tokens: of all of them, in this order.
    """

    entities: Positions
    relations: Positions
    joint: Positions
    tokens: list[Tokens]

    @classmethod
    def of(
        cls,
        head: QueryHead,
        inputs: GraphInputs,
        queries: Positions,
        relations: Positions,
        others: Positions,
    ) -> _Used:
        """Take queries with their tails, (m, 3), some relations, and other entities."""
        none = np.empty(0, dtype=np.int64)
        entities = np.unique(np.concatenate([queries[:, 0], queries[:, 2], others]))
        relations = np.unique(relations) if head.reads_relations else none
        joint = np.unique(inputs.keys(queries)) if head.reads_joint else none
        tokens = [
            *(inputs.entities[i] for i in entities),
            *(inputs.relations[i] for i in relations),
            *(inputs.joint[i] for i in np.searchsorted(inputs.joint_of, joint)),
        ]
        return cls(entities, relations, joint, tokens)

    @property
    def sizes(self) -> list[int]:
        """Return how many there are of each kind."""
        return [len(self.entities), len(self.relations), len(self.joint)]


def check_recipe(recipe: Recipe) -> None:
    """Raise a UserError unless a head can be trained with an encoder."""
    check_queries(recipe)
    settings = recipe.settings
    if settings.neighbours:
        raise UserError(
            "neighbours are means of cached features. Train without them, and fit a head that "
            "takes them on the trained encoder: llmcond fit-head --set neighbours=true"
        )
    if settings.queue:
        raise UserError(
            "a queue of earlier batches is for cached features: in training an encoder it would "
            "be lost where training is stopped. Set queue to 0, and raise --batch-size."
        )
    if settings.members > 1:
        raise UserError(
            f"the head {recipe.name} has {settings.members} members, each fitted by itself; with "
            "an encoder one is trained. Give --set members=1."
        )
    if settings.relation_negatives and recipe.features == "joint":
        raise UserError(
            "relation_negatives need a head that takes relations by themselves; this one reads "
            "them in its joint inputs. Set relation_negatives to 0."
        )
