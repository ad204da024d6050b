"""Fitting a head that maps queries and candidates on cached features of a graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.arrays import Positions
from llmcond.errors import UserError
from llmcond.heads.fit import Fitting, fit_members
from llmcond.heads.pairs import DevScore, OnEpoch
from llmcond.heads.recipes import Recipe
from llmcond.kinds.ranking.arrays import QueryArrays, QueryFeatures
from llmcond.kinds.ranking.contrastive import Masked, Queue
from llmcond.kinds.ranking.heads import FittedQueryHead, QueryHead
from llmcond.schedules import scheduled
from llmcond.system import choose_device


def fit_queries(
    recipe: Recipe,
    arrays: QueryArrays,
    dev: DevScore[FittedQueryHead] | None,
    seed: int,
    on_epoch: OnEpoch,
    device: str = "auto",
) -> FittedQueryHead:
    """Fit a head on a graph's triples in both directions; ``dev`` chooses the epoch.

    Without it the last epoch is kept. The same seed gives the same head on the same machine, to
    the last bit on one thread.

    Raises:
        UserError: a recipe for rated pairs, no triples, features that the head takes and that are
            missing, a dimension above that of the features, parameters that do not fit into
            memory, or a loss that diverges.
    """
    family, settings = check_queries(recipe), recipe.settings
    if not len(arrays.triples):
        raise UserError("the training split has no triples, so there is nothing to fit.")
    dim, dim_condition, n_relations = arrays.dims
    if recipe.dim is not None and recipe.dim > dim:
        raise UserError(
            f"dim is {recipe.dim}, but the features have {dim}: a head never enlarges them. "
            f"Set dim to {dim} or less."
        )
    data, where = QueryFeatures(arrays), torch.device(choose_device(device))
    if family.dim_of_relations(settings, 1) and not dim_condition:
        raise UserError(
            "this head takes the features of relations, and none were given. Give them, or set "
            "relations to one-hot."
        )
    dims = dim, family.dim_of_relations(settings, dim_condition), n_relations
    fitting = partial(_QueryFitting, recipe, dims, data, dev, where)
    module, fit = fit_members(fitting, settings.members, seed, on_epoch)
    return FittedQueryHead(recipe.kind, family, module, seed, fit, data)


def check_queries(recipe: Recipe) -> type[QueryHead]:
    """Return the family of a recipe's head; a UserError unless it maps queries."""
    if not issubclass(recipe.family, QueryHead):
        raise UserError(f"the head {recipe.name} compares rated pairs; it ranks no candidates.")
    return recipe.family


class _QueryFitting(Fitting[QueryHead, FittedQueryHead]):
    """A head that is fitted on the queries of a graph."""

    data: QueryFeatures

    def make(self) -> QueryHead:
        module = super().make()
        module.begin(self.data.relations)
        return module

    def prepare(self) -> None:
        self._draws = np.random.Generator(np.random.SFC64(self.seed))
        self._queue = Queue(self.settings.queue)
        self._triples = self.data.arrays.queries()
        self.n_rows = len(self._triples)

    def parameter_groups(self) -> list[dict[str, Any]]:
        parameters = [value for value in self.module.parameters() if value.ndim]
        # Decay would pull the temperature to 1.
        temperature = list(self.module.contrast.parameters())
        return [{"params": parameters}, {"params": temperature, "weight_decay": 0.0}]

    def rate(self, step: int, steps: int) -> float:
        return scheduled(step, steps, 0.0, self.settings.schedule)

    def record(self) -> dict[str, Any]:
        return {"temperature": 1 / self.module.scale}

    def current(self) -> FittedQueryHead:
        module = self.finished_copy()
        return FittedQueryHead(self.recipe.kind, type(module), module, self.seed, data=self.data)

    def loss(self, batch: Positions) -> Tensor:
        """Return the objective of queries with their tails, a scalar."""
        settings, module, triples = self.settings, self.module, self._triples[batch]
        known = self.data.arrays.known
        head, relation, tail = triples.T
        entities, features, columns = self._columns(head, tail)
        candidates = module.candidate(features.to(self.device))
        read = self.data.heads(head, relation, module.reads_joint, settings.neighbours, drop=tail)
        queries = self._queries(read, relation)
        target = self._tensor(columns)
        mask = self._tensor(known.mask(head, relation, entities))
        others = self._others(triples, queries)
        self._queue.add(entities, candidates)
        loss: Tensor = module.contrast(
            module.product(queries, candidates),
            target,
            mask,
            others,
            self._other_relations(triples, read, candidates.index_select(0, target)),
        )
        return loss

    def _others(self, triples: Positions, queries: Tensor) -> list[Masked]:
        """Return scores of candidates beside those of the batch: own heads, and earlier ones."""
        settings, known = self.settings, self.data.arrays.known
        head, relation, tail = triples.T
        others: list[Masked] = []
        if settings.self_negatives and settings.negatives == "tails":
            own = self.data.entities(head, settings.neighbours, drop=tail)
            scores = (queries * self.module.candidate(own.to(self.device))).sum(dim=1, keepdim=True)
            loops = known.contains(np.stack([head, relation, head], axis=1))
            others.append((scores, self._tensor(loops[:, None])))
        if len(self._queue):
            earlier = known.mask(head, relation, self._queue.entities())
            scores = self.module.product(queries, self._queue.vectors())
            others.append((scores * settings.queue_weight, self._tensor(earlier)))
        return others

    def _columns(self, head: Positions, tail: Positions) -> tuple[Positions, Tensor, Positions]:
        """Return the candidates of a batch, each entity once where its features allow it.

        They are (n,) entities, (n, d) features, and (m,) the column of each row.
        """
        settings, data = self.settings, self.data
        n_drawn, n = settings.random_candidates, len(data.arrays.entities)
        drawn = self._draws.integers(n, size=n_drawn)
        both = settings.negatives == "entities"
        if settings.neighbours:
            # A triple's two ends are left out of each other's neighbours: a column for each row.
            entities, drop = (tail, head)
            if both:
                entities, drop = np.concatenate([tail, head]), np.concatenate([head, tail])
            features = data.entities(entities, neighbours=True, drop=drop)
            if n_drawn:
                features = torch.cat([features, data.entities(drawn, neighbours=True)])
            return np.concatenate([entities, drawn]), features, np.arange(len(tail))
        entities = np.unique(np.concatenate([tail, head, drawn] if both else [tail, drawn]))
        return entities, data.entities(entities), np.searchsorted(entities, tail)

    def _queries(self, read: Tensor, relation: Positions) -> Tensor:
        relations = self.data.relations
        return self.module.query(
            read.to(self.device),
            None if relations is None else relations.to(self.device),
            self._tensor(relation),
        )

    def _other_relations(self, triples: Positions, read: Tensor, own: Tensor) -> Masked | None:
        """Return scores of tails with their heads under other relations, (m, r), and their mask."""
        count, n = self.settings.relation_negatives, 2 * self.data.arrays.n_relations
        if not count:
            return None
        scores, masks = [], []
        head, relation, tail = triples.T
        for _ in range(count):
            other = (relation + self._draws.integers(1, n, size=len(relation))) % n
            scores.append((self._queries(read, other) * own).sum(dim=1))
            masks.append(self.data.arrays.known.contains(np.stack([head, other, tail], axis=1)))
        return torch.stack(scores, dim=1), self._tensor(np.stack(masks, axis=1))

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
