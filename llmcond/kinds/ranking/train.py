"""Joint training of an encoder and a head on a knowledge graph, into a new run.

The objective is the one with which heads are fitted (SimKGC, ACL 2022, section 3.3; Hyper-CL, ACL
2024, section 4.2). A training step uses triples in both directions, so that all entities of its
triples are candidates, each encoded once. In addition, a tri-encoder encodes only the relations,
which are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from llmcond.base.arrays import Positions
from llmcond.base.errors import UserError
from llmcond.base.metrics import METRICS, Metric
from llmcond.encoders.torch.engine import Engine
from llmcond.evaluation.results import rank
from llmcond.finetune.model import DistributedCompute, TokenizedInputs, TrainedModel
from llmcond.heads import Recipe
from llmcond.heads.fit import load_start
from llmcond.heads.module import seeded
from llmcond.heads.numpy_heads import DEV_SCORE_KEY
from llmcond.kinds.ranking.graph import (
    Graph,
    KnownTriples,
    QueryInputs,
    Triples,
    both_directions,
)
from llmcond.kinds.ranking.heads import (
    FittedQueryHead,
    QueryArrays,
    QueryHead,
    check_queries,
    contrast_relations,
    joint_keys,
    replace_relations,
)

if TYPE_CHECKING:
    from llmcond.finetune.encoder import TrainableEncoder


#: Sizes of the fixed sample of dev that is scored: triples, and candidates besides their entities.
_DEV_TRIPLES, _DEV_CANDIDATES = 500, 8_192


@dataclass(frozen=True)
class GraphInputs:
    """The triples of a split, with all texts of their graph.

    Attributes:
        triples: triples of the split, (m, 3).
        n_relations: number of relations, R.
        n_entities: number of entities, n.
        known: tails that are not negatives of a query: the known tails of train in training, and
            of all splits on dev.
        texts: inputs of the n entities, then, for heads that read them, of all relations in both
            directions, (2 R,), and of head entities under relations.
        joint_of: keys of the head entities under relations in ascending order; see ``joint_keys``.
    """

    triples: Triples
    n_relations: int
    n_entities: int
    known: KnownTriples
    texts: TokenizedInputs
    joint_of: Positions = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.triples)

    def queries(self, rows: Positions) -> Positions:
        """Return k of the triples in both directions, (2 k, 3)."""
        return both_directions(self.triples[rows], self.n_relations).astype(np.int64)

    def keys(self, queries: Positions) -> Positions:
        """Return the keys of the joint inputs of queries with their tails, (m, 3)."""
        return joint_keys(queries[:, 0], queries[:, 1], self.n_relations)

    def relation_positions(self, relations: Positions) -> Positions:
        """Return the positions of relations in ``texts``."""
        return self.n_entities + relations

    def joint_positions(self, keys: Positions) -> Positions:
        """Return the positions of head entities under relations in ``texts``, by their keys."""
        return len(self.texts) - len(self.joint_of) + np.searchsorted(self.joint_of, keys)

    @cached_property
    def dev_sample(self) -> tuple[Positions, Positions]:
        """The sample of the split that is scored: queries (k, 3), and further candidates."""
        rng = np.random.default_rng(0)
        rows = np.sort(rng.permutation(len(self))[:_DEV_TRIPLES])
        return self.queries(rows), rng.permutation(self.n_entities)[:_DEV_CANDIDATES]


class QueryModel(TrainedModel[GraphInputs, FittedQueryHead]):
    """Computes the contrastive objective of triples: their queries and tails."""

    dev_score_name = DEV_SCORE_KEY
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
        """Add a head to an engine, with the weights of ``start`` or initialised with the seed.

        Raises:
            UserError: The recipe has settings that need cached features, or ``start`` was fitted on
                features of other sizes.
        """
        check_recipe(recipe)
        family: Any = recipe.family
        dims = engine.dim, family.dim_of_relations(recipe.settings, engine.dim), inputs.n_relations
        head, _ = seeded(lambda: family(recipe.settings, *dims), seed)
        if start is not None:
            start.check_sizes(dims)
            load_start(head, start.module)
        super().__init__(engine, head, recipe.kind, seed, metric)
        if start is None:
            # The relations are encoded before any training step, so a resumed training starts from
            # the same head.
            features = None
            if self.head.reads_relations:
                relations = inputs.relation_positions(np.arange(2 * inputs.n_relations))
                features = normalize(torch.from_numpy(self.encode(inputs.texts, relations)))
            seeded(lambda: self.head.initialise(features), seed)

    def forward(self, inputs: GraphInputs, rows: Positions, seed: list[int]) -> Tensor:
        """Return the mean loss of triples in both directions, a scalar."""
        self.seed_dropout(seed)
        settings = self.head.settings
        rng = np.random.Generator(np.random.SFC64(seed))
        triples = inputs.queries(rows)
        head, relation, tail = triples.T
        others = replace_relations(triples, 2 * inputs.n_relations, settings, rng)
        # All heads are candidates: each is the tail of the inverse query.
        random_entities = rng.integers(inputs.n_entities, size=settings.random_candidates)
        relations = np.concatenate([relation, *(other[:, 1] for other in others)])
        encoded = _EncodedTexts.of(self.head, inputs, triples, relations, random_entities)
        vectors = inputs.texts.embed(self.engine, encoded.texts)
        with torch.autocast(vectors.device.type, enabled=False):
            parts = torch.split(normalize(vectors.float()), encoded.sizes)
            embed = partial(self._embed_queries, inputs, encoded, parts)
            queries = embed(triples)
            candidates = self.head.candidate(parts[0])
            target = torch.from_numpy(np.searchsorted(encoded.entities, tail)).to(candidates.device)
            mask = inputs.known.mask(head, relation, encoded.entities)
            if not settings.self_negatives:
                mask |= encoded.entities == head[:, None]
            targets = candidates.index_select(0, target)
            contrast = contrast_relations(embed, others, targets, inputs.known)
            known = torch.from_numpy(mask).to(target.device)
            scores = queries @ candidates.T
            return self.head.loss(scores, target, known, relations=contrast)

    def _embed_queries(
        self,
        inputs: GraphInputs,
        encoded: _EncodedTexts,
        parts: Sequence[Tensor],
        triples: Positions,
    ) -> Tensor:
        """Return the embeddings of queries, from the vectors of the encoded texts."""
        head, relation, _ = triples.T
        vectors, relations, joint = parts
        positions = np.searchsorted(encoded.entities, head)
        if self.head.reads_joint:
            vectors, positions = joint, np.searchsorted(encoded.joint, inputs.keys(triples))
        if len(relations):
            relation = np.searchsorted(encoded.relations, relation)
        which = torch.from_numpy(np.ascontiguousarray(relation)).to(vectors.device)
        # index_select, because indexing (vectors[positions]) adds gradients in arbitrary order.
        features = vectors.index_select(0, torch.from_numpy(positions).to(vectors.device))
        return self.head.query(features, relations if len(relations) else None, which)

    @override
    def score(self, inputs: GraphInputs, shared: DistributedCompute) -> float | None:
        # Filtered ranks of a sample of dev among a sample of the entities: ranking all entities
        # would take longer than an epoch of training on a small graph.
        queries, further_candidates = inputs.dev_sample
        count = 2 * inputs.n_relations
        encoded = _EncodedTexts.of(self.head, inputs, queries, np.arange(count), further_candidates)
        vectors = shared(
            len(encoded.texts), lambda which: self.encode(inputs.texts, encoded.texts[which])
        )
        if not np.isfinite(vectors).all():
            return None
        entities, relations, joint = np.split(vectors, np.cumsum(encoded.sizes)[:-1])
        # Entities are numbered by their positions among the encoded ones, in the same order.
        head, relation, tail = queries.T
        head_positions = np.searchsorted(encoded.entities, head)
        arrays = QueryArrays(
            entities=entities,
            triples=np.empty((0, 3), dtype=np.int64),
            n_relations=inputs.n_relations,
            known=inputs.known,
            relations=relations if len(relations) else None,
            joint=joint if len(joint) else None,
            joint_input_keys=np.unique(joint_keys(head_positions, relation, inputs.n_relations)),
        )
        row, answers = inputs.known.gather(head, relation)
        is_encoded = np.isin(answers, encoded.entities)
        row, answers = row[is_encoded], np.searchsorted(encoded.entities, answers[is_encoded])
        known = KnownTriples(
            np.stack([head_positions[row], relation[row], answers], axis=1), len(encoded.entities)
        )
        fitted = self.fitted_head().bind(arrays)
        local_queries = np.stack(
            [head_positions, relation, np.searchsorted(encoded.entities, tail)], axis=1
        )
        ranks = rank(
            fitted.queries(head_positions, relation), fitted.candidates(), local_queries, known
        ).resolve_ties()
        return self.metric(ranks, np.zeros(len(ranks)), np.arange(len(ranks)))


@dataclass(frozen=True)
class _EncodedTexts:
    """The texts of a graph that are encoded for some queries, each distinct text once.

    Attributes:
        entities: entities, in ascending order.
        relations: relations, in ascending order; empty if the head does not read their features.
        joint: keys of joint inputs, in ascending order; empty if the head does not read them.
        texts: positions of the entities, relations and joint inputs, in this order.
    """

    entities: Positions
    relations: Positions
    joint: Positions
    texts: Positions

    @classmethod
    def of(
        cls,
        head: QueryHead,
        inputs: GraphInputs,
        queries: Positions,
        relations: Positions,
        further_entities: Positions,
    ) -> _EncodedTexts:
        """Collect the texts of queries with their tails (m, 3), of relations and of entities."""
        empty = np.empty(0, dtype=np.int64)
        entities = np.unique(np.concatenate([queries[:, 0], queries[:, 2], further_entities]))
        relations = np.unique(relations) if head.reads_relations else empty
        joint = np.unique(inputs.keys(queries)) if head.reads_joint else empty
        texts = np.concatenate(
            [entities, inputs.relation_positions(relations), inputs.joint_positions(joint)]
        )
        return cls(entities, relations, joint, texts)

    @property
    def sizes(self) -> list[int]:
        """The numbers of entities, relations and joint inputs."""
        return [len(self.entities), len(self.relations), len(self.joint)]


def check_recipe(recipe: Recipe, dataset: Any = None) -> None:
    """Raise a UserError if the head of a recipe cannot be trained with an encoder on a dataset."""
    if dataset is not None and not isinstance(dataset, Graph):
        raise UserError(
            "only knowledge graphs can train an encoder, and the data of this task are none."
        )
    check_queries(recipe)
    settings = recipe.settings
    if settings.neighbours:
        raise UserError(
            "the setting neighbours needs cached features. Train without it, and then fit a head "
            "on the features of the trained encoder: llmcond fit-head --set neighbours=true"
        )
    if settings.queue:
        raise UserError(
            "the setting queue needs cached features: when an encoder is trained, the queue would "
            "be lost if training stops. Set queue to 0, and raise --batch-size."
        )
    if settings.members > 1:
        raise UserError(
            f"the head {recipe.name} has {settings.members} members, which are fitted "
            "separately; with an encoder, only one head can be trained. Give --set members=1."
        )
    if settings.relation_negatives and recipe.features == "joint":
        raise UserError(
            "relation_negatives needs a head that reads relations separately, but this one reads "
            "them in joint inputs. Set relation_negatives to 0."
        )


def build_training_parts(
    task: Any, job: Any, trainable: TrainableEncoder
) -> tuple[QueryModel, GraphInputs, GraphInputs | None]:
    """Return the model and the triples of train and dev; see ``AnyTask.training_parts``."""
    graph, (prompt,) = job.dataset, job.view.prompts
    texts = task.texts(graph)
    inputs = QueryInputs(texts, prompt)
    joint = job.view.features == "joint"
    if joint:
        inputs.check_distinct()
    directions = both_directions(graph.splits["train"], graph.n_relations)
    items = list(inputs.candidates)
    if job.view.conditioned:
        items += inputs.conditions
    keys = np.empty(0, dtype=np.int64)
    if joint:
        items += inputs.joint
        heads, relations = texts.query_pairs.T
        keys = joint_keys(heads, relations, graph.n_relations)
    train = GraphInputs(
        triples=graph.splits["train"],
        n_relations=graph.n_relations,
        n_entities=graph.n_entities,
        known=KnownTriples(directions, graph.n_entities),
        texts=TokenizedInputs.of(items, trainable.tokenizer),
        joint_of=keys,
    )
    dev = None
    if len(graph.splits.get("dev", ())):
        dev = replace(train, triples=graph.splits["dev"], known=graph.known)
    recipe = job.recipe
    if job.start is None:
        recipe = job.sized_recipe(trainable.engine.dim)
    metric = task.main_metric
    model = QueryModel(trainable.engine, recipe, train, job.seed, job.start, metric)
    return model, train, dev
