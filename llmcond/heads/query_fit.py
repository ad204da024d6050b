"""Fitting a head that maps queries and candidates on cached features of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.arrays import Positions
from llmcond.errors import UserError
from llmcond.heads.contrastive import Masked, Queue
from llmcond.heads.fit import best_epoch, check_memory, in_bfloat16, spread_seeds
from llmcond.heads.module import finished_copy, seeded
from llmcond.heads.pairs import DevScore, Fit, OnEpoch, OnStep
from llmcond.heads.queries import FittedQueryHead, QueryArrays, QueryFeatures
from llmcond.heads.query_maps import QueryEnsemble, QueryHead
from llmcond.heads.recipes import Recipe
from llmcond.system import choose_device

#: What a learning curve calls the score on dev, whatever that is.
SCORE = "dev_score"


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
    family, settings = recipe.family, recipe.settings
    if not issubclass(family, QueryHead):
        raise UserError(f"the head {recipe.name} compares rated pairs; it ranks no candidates.")
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
    n_parameters = check_memory(family, settings, dims, where)
    fitted = []
    for own in spread_seeds(seed, settings.members):
        fitting = _Fitting(family, recipe, dims, data, own, where)
        fit = fitting.run(dev, on_epoch, n_parameters)
        fitted.append((fitting.module.finished(), fit))
    module, fit = fitted[0]
    if len(fitted) == 1:
        return FittedQueryHead(recipe.kind, family, module, seed, fit, data)
    curves = [{key: own.record.get(key) for key in ("best_epoch", "curve")} for _, own in fitted]
    ensemble = QueryEnsemble([module for module, _ in fitted]).finished()
    fit = Fit({**fit.record, "members": curves}, fit.notes)
    return FittedQueryHead(recipe.kind, family, ensemble, seed, fit, data)


class _Fitting:
    """One head while it is fitted."""

    def __init__(
        self,
        family: type[QueryHead],
        recipe: Recipe,
        dims: tuple[int, int, int],
        data: QueryFeatures,
        seed: int,
        device: torch.device,
    ) -> None:
        self.recipe, self.data, self.seed, self.device = recipe, data, seed, device
        self.settings = recipe.settings

        def make() -> QueryHead:
            made = family(recipe.settings, *dims)
            made.begin(data.relations)
            return made

        self.module, self._generator = seeded(make, seed)
        self._draws = np.random.Generator(np.random.SFC64(seed))
        self._queue = Queue(self.settings.queue)
        self._triples = data.arrays.queries()

    def run(
        self, dev: DevScore[FittedQueryHead] | None, on_epoch: OnEpoch, n_parameters: int
    ) -> Fit:
        """Fit the module in place."""
        settings, module = self.settings, self.module
        if not any(value.numel() for value in module.parameters() if value.ndim):
            note = "the head has no parameters, so nothing is fitted"
            return Fit({"selected_on": None}, (note,))
        module.seed_dropout(self.seed)
        module.to(self.device)
        optimiser = self._optimiser()
        steps = -(-len(self._triples) // settings.batch_size)
        module.multiply_in_bfloat16(in_bfloat16(settings.precision, self.device))

        def train(epoch: int, on_step: OnStep) -> float:
            return self._run_epoch(optimiser, steps, epoch - 1, on_step)

        chosen, curve = best_epoch(module, train, self._as_it_is, dev, on_epoch, SCORE)
        return Fit(
            {
                **chosen,
                "n_parameters": n_parameters,
                "steps_per_epoch": steps,
                "precision": "bfloat16" if module.in_bfloat16 else "float32",
                "temperature": 1 / module.scale,
                "curve": curve,
            }
        )

    def _optimiser(self) -> torch.optim.Optimizer:
        settings, module = self.settings, self.module
        decayed: dict[str, Any] = {"params": [own for own in module.parameters() if own.ndim]}
        # Decay would pull the temperature to 1.
        others = {"params": list(module.contrast.parameters()), "weight_decay": 0.0}
        return torch.optim.AdamW(
            [decayed, others],
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def _run_epoch(
        self, optimiser: torch.optim.Optimizer, steps: int, done: int, on_step: OnStep
    ) -> float:
        """Train on all queries after so many epochs; return the mean loss of one."""
        settings = self.settings
        self.module.train()
        total = torch.zeros((), device=self.device)
        order = torch.randperm(len(self._triples), generator=self._generator).numpy()
        for number, rows in enumerate(np.array_split(order, steps)):
            if settings.schedule == "linear":
                share = (done * steps + number) / (settings.epochs * steps)
                for group in optimiser.param_groups:
                    group["lr"] = settings.learning_rate * (1 - share)
            loss = self._loss(self._triples[rows])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            total += loss.detach() * len(rows)
            on_step(number + 1, steps)
        return float(total) / len(self._triples)

    def _as_it_is(self) -> FittedQueryHead:
        """Return the head as it is now; what is drawn for dropout goes on as if it were not."""
        module = finished_copy(self.module, *self.module.dims)
        return FittedQueryHead(self.recipe.kind, type(module), module, self.seed, data=self.data)

    def _loss(self, triples: Positions) -> Tensor:
        """Return the objective of a batch of queries and their tails, (m, 3), a scalar."""
        settings, module = self.settings, self.module
        known = self.data.arrays.known
        head, relation, tail = triples.T
        batch = self._columns(head, tail)
        candidates = module.candidate(batch.features.to(self.device))
        read = self.data.heads(head, relation, module.reads_joint, settings.neighbours, drop=tail)
        queries = self._queries(read, relation)
        target = self._tensor(batch.target)
        mask = self._tensor(known.mask(head, relation, batch.entities))
        others = self._others(triples, queries)
        self._queue.add(batch.entities, candidates)
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

    def _columns(self, head: Positions, tail: Positions) -> _Columns:
        """Return the candidates of a batch, each entity once where its features allow it."""
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
            return _Columns(np.concatenate([entities, drawn]), features, np.arange(len(tail)))
        entities = np.unique(np.concatenate([tail, head, drawn] if both else [tail, drawn]))
        return _Columns(entities, data.entities(entities), np.searchsorted(entities, tail))

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


@dataclass(frozen=True)
class _Columns:
    """The candidates of a batch: (n,) entities, (n, d) features, (m,) the column of each row."""

    entities: Positions
    features: Tensor
    target: Positions
