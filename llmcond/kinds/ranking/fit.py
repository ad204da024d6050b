"""Fitting of heads that map queries and candidates, on cached features of a graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.arrays import Positions
from llmcond.errors import UserError
from llmcond.heads.fit import HeadTrainer, fit_members
from llmcond.heads.pairs import DevScore, OnEpoch
from llmcond.heads.recipes import Recipe
from llmcond.kinds.ranking.arrays import QueryArrays, QueryFeatures
from llmcond.kinds.ranking.contrastive import MaskedScores, Queue
from llmcond.kinds.ranking.heads import FittedQueryHead, QueryHead
from llmcond.schedules import learning_rate_factor
from llmcond.system import choose_device


def fit_queries(
    recipe: Recipe,
    arrays: QueryArrays,
    dev: DevScore[FittedQueryHead] | None,
    seed: int,
    on_epoch: OnEpoch,
    device: str = "auto",
    start: FittedQueryHead | None = None,
) -> FittedQueryHead:
    """Fit a head on the triples of a graph, in both directions.

    The score on ``dev`` chooses the epoch; without ``dev`` the last epoch is kept. The parameters
    of ``start``, if it is given, are the initial ones. The same seed gives the same head on the
    same machine, bit for bit on one thread.

    Raises:
        UserError: The recipe is for rated pairs, there are no triples, features that the head reads
            are missing, ``dim`` exceeds the dimension of the features, the parameters do not fit
            into memory, those of ``start`` have other shapes, or the loss diverges.
    """
    family, settings = check_queries(recipe), recipe.settings
    if not len(arrays.triples):
        raise UserError("the training split has no triples to fit a head on.")
    dim, dim_condition, n_relations = arrays.dims
    if recipe.dim is not None and recipe.dim > dim:
        raise UserError(
            f"dim is {recipe.dim}, but the features have {dim} dimensions, and a head never adds "
            f"dimensions. Set dim to {dim} or less."
        )
    data, torch_device = QueryFeatures(arrays), torch.device(choose_device(device))
    if family.dim_of_relations(settings, 1) and not dim_condition:
        raise UserError(
            "this head reads the features of relations, and the data has none. Add them, or set "
            "relations to one-hot."
        )
    dims = dim, family.dim_of_relations(settings, dim_condition), n_relations
    fitting = partial(_QueryFitting, recipe, dims, data, dev, torch_device)
    module, fit = fit_members(fitting, settings.members, seed, on_epoch, start)
    return FittedQueryHead(recipe.kind, family, module, seed, fit, data)


def check_queries(recipe: Recipe) -> type[QueryHead]:
    """Return the family of a recipe's head.

    Raises:
        UserError: The family does not map queries.
    """
    if not issubclass(recipe.family, QueryHead):
        raise UserError(f"the head {recipe.name} compares rated pairs and cannot rank candidates.")
    return recipe.family


class _QueryFitting(HeadTrainer[QueryHead, FittedQueryHead]):
    """Fits one head on the queries of a graph."""

    data: QueryFeatures

    def create_module(self) -> QueryHead:
        module = super().create_module()
        module.initialise(self.data.relations)
        return module

    def prepare(self) -> None:
        self._rng = np.random.Generator(np.random.SFC64(self.seed))
        self._queue = Queue(self.settings.queue)
        self._triples = self.data.arrays.queries()
        self.n_rows = len(self._triples)

    def parameter_groups(self) -> list[dict[str, Any]]:
        parameters = [value for value in self.module.parameters() if value.ndim]
        # Weight decay would pull the temperature to 1.
        temperature = list(self.module.contrast.parameters())
        return [{"params": parameters}, {"params": temperature, "weight_decay": 0.0}]

    def learning_rate_factor(self, step: int, steps: int) -> float:
        return learning_rate_factor(step, steps, 0.0, self.settings.schedule)

    def record(self) -> dict[str, Any]:
        return {"temperature": 1 / self.module.scale}

    def current_head(self) -> FittedQueryHead:
        module = self.frozen_copy()
        return FittedQueryHead(self.recipe.kind, type(module), module, self.seed, data=self.data)

    def loss(self, batch: Positions) -> Tensor:
        """Return the loss of a batch of queries with their tails, a scalar."""
        settings, module, triples = self.settings, self.module, self._triples[batch]
        known = self.data.arrays.known
        head, relation, tail = triples.T
        entities, features, columns = self._batch_candidates(head, tail)
        candidates = module.candidate(features.to(self.device))
        head_features = self.data.heads(
            head, relation, module.reads_joint, settings.neighbours, drop=tail
        )
        queries = self._embed_queries(head_features, relation)
        target = self._to_device(columns)
        mask = self._to_device(known.mask(head, relation, entities))
        further_negatives = self._score_other_candidates(triples, queries)
        self._queue.add(entities, candidates)
        loss: Tensor = module.contrast(
            module.product(queries, candidates),
            target,
            mask,
            further_negatives,
            self._score_other_relations(triples, head_features, candidates.index_select(0, target)),
        )
        return loss

    def _score_other_candidates(self, triples: Positions, queries: Tensor) -> list[MaskedScores]:
        """Return the scores of candidates that are not in the batch: own heads, and the queue."""
        settings, known = self.settings, self.data.arrays.known
        head, relation, tail = triples.T
        negatives: list[MaskedScores] = []
        if settings.self_negatives and settings.negatives == "tails":
            head_features = self.data.entities(head, settings.neighbours, drop=tail)
            scores = (queries * self.module.candidate(head_features.to(self.device))).sum(
                dim=1, keepdim=True
            )
            loops = known.contains(np.stack([head, relation, head], axis=1))
            negatives.append((scores, self._to_device(loops[:, None])))
        if len(self._queue):
            queue_mask = known.mask(head, relation, self._queue.entities())
            scores = self.module.product(queries, self._queue.vectors())
            negatives.append((scores * settings.queue_weight, self._to_device(queue_mask)))
        return negatives

    def _batch_candidates(
        self, head: Positions, tail: Positions
    ) -> tuple[Positions, Tensor, Positions]:
        """Return the candidates of a batch, each entity once unless it is read with neighbours.

        Returns:
            The entities (n,), their features (n, d), and the column of each row's target (m,).
        """
        settings, data = self.settings, self.data
        n_random, n = settings.random_candidates, len(data.arrays.entities)
        random_entities = self._rng.integers(n, size=n_random)
        with_heads = settings.negatives == "entities"
        if settings.neighbours:
            # Head and tail of a triple do not count as neighbours of each other, so the features of
            # an entity depend on the triple, and every row gets a column.
            entities, drop = (tail, head)
            if with_heads:
                entities, drop = np.concatenate([tail, head]), np.concatenate([head, tail])
            features = data.entities(entities, neighbours=True, drop=drop)
            if n_random:
                features = torch.cat([features, data.entities(random_entities, neighbours=True)])
            return np.concatenate([entities, random_entities]), features, np.arange(len(tail))
        entities = np.unique(
            np.concatenate([tail, head, random_entities] if with_heads else [tail, random_entities])
        )
        return entities, data.entities(entities), np.searchsorted(entities, tail)

    def _embed_queries(self, head_features: Tensor, relation: Positions) -> Tensor:
        relations = self.data.relations
        return self.module.query(
            head_features.to(self.device),
            None if relations is None else relations.to(self.device),
            self._to_device(relation),
        )

    def _score_other_relations(
        self, triples: Positions, head_features: Tensor, target_vectors: Tensor
    ) -> MaskedScores | None:
        """Return the scores (m, r) of tails with their heads under other relations, and a mask."""
        count, n = self.settings.relation_negatives, 2 * self.data.arrays.n_relations
        if not count:
            return None
        scores, masks = [], []
        head, relation, tail = triples.T
        for _ in range(count):
            other = (relation + self._rng.integers(1, n, size=len(relation))) % n
            scores.append((self._embed_queries(head_features, other) * target_vectors).sum(dim=1))
            masks.append(self.data.arrays.known.contains(np.stack([head, other, tail], axis=1)))
        return torch.stack(scores, dim=1), self._to_device(np.stack(masks, axis=1))

    def _to_device(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
