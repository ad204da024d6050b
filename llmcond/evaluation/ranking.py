"""Ranks of the right answers among all entities, and what a knowledge graph itself tells of them.

A query (h, r, ?) and every candidate have a vector; a candidate's score is their product (of unit
vectors, their cosine), to which terms of the graph may add. The protocol is that of SimKGC
(arXiv 2203.02167): every entity is a candidate, the other known answers of a query are left out,
and each triple is asked from both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from llmcond.arrays import Array, MatrixLike, Positions, as_matrix
from llmcond.errors import UserError
from llmcond.evaluation.paired import RESAMPLES, Resampled, resample
from llmcond.metrics import Estimate, Floats, Metric, choose_metrics, finite
from llmcond.options import Ties
from llmcond.tasks.graph import Graph, Known, Numbers, Triples, both_directions
from llmcond.tasks.ranking import METRICS

#: Queries and candidates that are scored at once: their scores take 64 MiB at most.
BLOCK, TILE = 256, 65_536

#: Added scores, flat: (k,) the query, (k,) the entity, each pair of them once, and (k,) what is
#: added.
Added = tuple[Positions, Positions, Array]


class Term(Protocol):
    """Something added to the scores of some entities; it sees queries, never their answers."""

    def __call__(self, head: Numbers, relation: Numbers, /) -> Added:
        """Return what is added for m queries, heads (m,) and relations (m,), r or r + R."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of right answers, from 1.

    Attributes:
        optimistic, pessimistic: (m,) as if all candidates of the same score came after, or before.
    """

    optimistic: Floats
    pessimistic: Floats

    def of(self, ties: Ties = "realistic") -> Floats:
        """Return (m,) ranks; realistic ones are the mean of the other two, as in PyKEEN."""
        if ties == "realistic":
            return (self.optimistic + self.pessimistic) / 2
        return self.optimistic if ties == "optimistic" else self.pessimistic


def rank(
    queries: MatrixLike,
    candidates: MatrixLike,
    triples: Triples,
    known: Known | None,
    terms: Sequence[Term] = (),
    exclude_head: bool = False,
    block: int = BLOCK,
    tile: int = TILE,
) -> Ranks:
    """Rank the answer of each query among all entities.

    Memory is bounded by ``block`` times ``tile`` scores. Candidates that lie on disk are read a
    tile at a time, once for each block of queries.

    Args:
        queries: (m, k) vectors.
        candidates: (n, k) vectors of all entities. With k = 0 the terms alone decide.
        triples: (m, 3) head, relation (r or r + R) and answer of each query.
        known: answers that are left out, but for the one asked for; None: none are.
        terms: what is added to scores.
        exclude_head: whether a query's head is no candidate, unless it is the answer.
        block: queries at once.
        tile: candidates at once.

    Raises:
        UserError: a vector is not finite.
    """
    every = _Candidates(candidates, known, terms, exclude_head, tile)
    head, relation, answer = np.asarray(triples, dtype=np.int64).T
    above, level = np.zeros(len(answer)), np.zeros(len(answer))
    # Queries whose answers are in the same tile are asked together.
    order = np.argsort(answer // tile, kind="stable")
    for begin in range(0, len(order), block):
        chosen = order[begin : begin + block]
        asked = _Asked(every, _read(queries, chosen), head[chosen], relation[chosen])
        right = asked.scores_of(answer[chosen])[:, None]
        for first in range(0, every.n, tile):
            scores = asked.scores(first)
            _leave_out(scores, first, np.arange(len(chosen)), answer[chosen])
            above[chosen] += np.count_nonzero(scores > right, axis=1)
            level[chosen] += np.count_nonzero(scores == right, axis=1)
    return Ranks(1 + above, 1 + above + level)


def top(
    queries: MatrixLike,
    candidates: MatrixLike,
    head: Numbers,
    relation: Numbers,
    k: int,
    known: Known | None = None,
    terms: Sequence[Term] = (),
    exclude_head: bool = False,
    tile: int = TILE,
) -> tuple[Positions, Array]:
    """Return (m, k) the entities that score best for each query, and (m, k) their scores.

    Arguments and errors are those of :func:`rank`, heads and relations (m,); ``known`` answers are
    left out. Equal scores are in the order of the entities. Where fewer than k candidates are left,
    the last scores are -inf.
    """
    every = _Candidates(candidates, known, terms, exclude_head, tile)
    rows = np.arange(len(head))
    asked = _Asked(every, _read(queries, rows), head, relation)
    entities = np.zeros((len(rows), 0), dtype=np.int64)
    best = np.zeros((len(rows), 0), dtype=np.float32)
    for first in range(0, every.n, tile):
        scores = asked.scores(first)
        columns = np.arange(scores.shape[1])
        if scores.shape[1] > k:
            # Only what can be among the best is sorted, equal scores included.
            least = np.partition(scores, -k, axis=1)[:, [-k]]
            columns = np.flatnonzero((scores >= least).any(axis=0))
            scores = scores[:, columns]
        entities = np.concatenate(
            [entities, np.broadcast_to(first + columns, scores.shape)], axis=1
        )
        best = np.concatenate([best, scores], axis=1)
        order = np.argsort(-best, axis=1, kind="stable")[:, :k]
        entities = np.take_along_axis(entities, order, axis=1)
        best = np.take_along_axis(best, order, axis=1)
    return entities, best


class _Candidates:
    """All entities' vectors, read a tile at a time, and what else their scores depend on."""

    def __init__(
        self,
        vectors: MatrixLike,
        known: Known | None,
        terms: Sequence[Term],
        exclude_head: bool,
        tile: int,
    ) -> None:
        self.vectors, self.n, self.tile = as_matrix(vectors), len(vectors), tile
        self.known, self.terms, self.exclude_head = known, terms, exclude_head
        self._last: tuple[int, Array] | None = None

    def read(self, first: int) -> Array:
        """Return the vectors of a tile, which stay in memory until another one is read."""
        if self._last is None or self._last[0] != first:
            # Pages of the tile before would count as memory in use.
            self.vectors.release()
            self._last = first, self.vectors.read(slice(first, first + self.tile))
        return self._last[1]


class _Asked:
    """A block of queries: (m, k) vectors, heads (m,) and relations (m,)."""

    def __init__(
        self, every: _Candidates, vectors: Array, head: Numbers, relation: Numbers
    ) -> None:
        self._every, self._vectors = every, vectors
        self._added = [term(head, relation) for term in every.terms]
        self._left_out = [] if every.known is None else [every.known.gather(head, relation)]
        if every.exclude_head:
            self._left_out.append((np.arange(len(head)), np.asarray(head, dtype=np.int64)))
        self._last: tuple[int, Array] | None = None

    def scores_of(self, answer: Positions) -> Array:
        """Return (m,) the scores of one entity for each query, whether it is left out or not.

        They are taken out of the product that they are compared with: computed in another way they
        could differ in the last bit, and ties would be none.
        """
        tile = self._every.tile
        found = np.empty(len(answer), dtype=np.float32)
        for first in np.unique(answer // tile * tile).tolist():
            self._last = first, self._products(first)
            rows = np.flatnonzero(answer // tile * tile == first)
            found[rows] = self._last[1][rows, answer[rows] - first]
        return found

    def scores(self, first: int) -> Array:
        """Return (m, at most tile) the scores of candidates, -inf where they are left out."""
        if self._last is not None and self._last[0] == first:
            found, self._last = self._last[1], None
        else:
            found = self._products(first)
        for row, entity in self._left_out:
            _leave_out(found, first, row, entity)
        return found

    def _products(self, first: int) -> Array:
        found: Array = self._vectors @ self._every.read(first).T
        # Cheaper than to look at all candidates: one that is not finite spoils its score.
        if not np.isfinite(found).all():
            tile = self._every.read(first)
            _check_finite(tile, np.arange(first, first + len(tile)), "candidate")
        for row, entity, value in self._added:
            inside = (entity >= first) & (entity < first + found.shape[1])
            found[row[inside], entity[inside] - first] += value[inside]
        return found


def _leave_out(scores: Array, first: int, row: Positions, entity: Positions) -> None:
    inside = (entity >= first) & (entity < first + scores.shape[1])
    scores[row[inside], entity[inside] - first] = -np.inf


def _read(queries: MatrixLike, rows: Positions) -> Array:
    """Return some rows in float32; a UserError if one is not finite."""
    found = as_matrix(queries).read(rows)
    _check_finite(found, rows, "query")
    return found


def _check_finite(vectors: Array, rows: Positions, what: str) -> None:
    """Raise a UserError if a vector is not finite; ``rows`` are their numbers."""
    bad = rows[~np.isfinite(vectors).all(axis=1)]
    # A NaN is above nothing, so that it would rank as a perfect answer.
    if len(bad):
        raise UserError(
            f"vectors hold NaN or infinity: {len(bad):,}, the first of {what} {bad[0]:,}. Fit the "
            "head again with a lower learning rate, or extract in float32."
        )


# -- what the graph tells ----------------------------------------------------------------------


class Context:
    """The train graph: neighbours, hops and reversed edges.

    Args:
        triples: (m, 3) of train.
        n_entities, n_relations: of the graph.

    Attributes:
        known: train triples in both directions.
        adjacency: (n, n) sparse, 1 where two entities are linked, whatever the relation and its
            direction; no entity is its own neighbour.
    """

    def __init__(self, triples: Triples, n_entities: int, n_relations: int) -> None:
        self.n_entities, self.n_relations = n_entities, n_relations
        self.known = Known(both_directions(triples, n_relations), n_entities)
        head, tail = triples[triples[:, 0] != triples[:, 2]][:, [0, 2]].T
        both = np.concatenate([[head, tail], [tail, head]], axis=1)
        ends = np.unique(both, axis=1)
        shape = (n_entities, n_entities)
        ones = np.ones(ends.shape[1], dtype=np.float32)
        self.adjacency = sp.csr_matrix((ones, ends), shape=shape)

    @classmethod
    def of(cls, graph: Graph) -> Context:
        """Return the context of a graph."""
        return cls(graph.splits["train"], graph.n_entities, graph.n_relations)

    def within(self, head: Numbers, hops: int) -> tuple[Positions, Positions]:
        """Return the entities within so many hops of each of m heads, flat; itself is one."""
        distinct, which = np.unique(head, return_inverse=True)
        n = len(distinct)
        start = (np.ones(n, dtype=np.float32), (np.arange(n), distinct))
        step = reached = sp.csr_matrix(start, shape=(n, self.n_entities))
        for _ in range(hops):
            step = step @ self.adjacency
            reached = reached + step
        found = reached[which.reshape(-1)].tocoo()
        return found.row.astype(np.int64), found.col.astype(np.int64)

    def hops(self, hops: int, alpha: float, head: bool = True) -> Term:
        """Return what adds ``alpha`` to entities near a query's head (SimKGC, section 3.4).

        Args:
            hops: how near, in links of the train graph.
            alpha: what is added; SimKGC: .05.
            head: whether the head itself counts as near to itself, as it does in SimKGC.
        """

        def term(heads: Numbers, _: Numbers, /) -> Added:
            row, entity = self.within(heads, hops)
            if not head:
                others = entity != np.asarray(heads)[row]
                row, entity = row[others], entity[others]
            return row, entity, np.full(len(row), alpha, dtype=np.float32)

        return term

    def reverse(self, weights: float | NDArray[np.floating] = 1.0) -> Term:
        """Return what adds to every t where train has the reversed edge (t, r, h).

        Args:
            weights: what is added; (2R,) for relations of their own, see :func:`fit_reverse`.
        """
        by_relation = np.broadcast_to(
            np.asarray(weights, dtype=np.float32), (2 * self.n_relations,)
        )

        def term(head: Numbers, relation: Numbers, /) -> Added:
            row, entity = self.reversed_edges(head, relation)
            return row, entity, by_relation[np.asarray(relation)[row]]

        return term

    def reversed_edges(self, head: Numbers, relation: Numbers) -> tuple[Positions, Positions]:
        """Return every t with (t, r, h) in train for m queries (h, r, ?), flat."""
        inverse = (np.asarray(relation) + self.n_relations) % (2 * self.n_relations)
        return self.known.gather(head, inverse)


def rank_rule(context: Context, triples: Triples, known: Known | None) -> Ranks:
    """Rank by the reversed edge alone: what has it comes first, all others are equal."""
    nothing = np.zeros((len(triples), 0)), np.zeros((context.n_entities, 0))
    return rank(*nothing, triples, known, [context.reverse()])


#: Weights that are tried, in standard deviations of the scores; the smallest one of equals is best.
_WEIGHTS = (0, 0.5, -0.5, 1, -1, 2, -2, 4, -4, 8, -8)
#: Fewer queries say nothing about a relation, whose weight stays 0.
_LEAST_QUERIES = 10


def fit_reverse(
    queries: MatrixLike,
    candidates: MatrixLike,
    triples: Triples,
    known: Known | None,
    context: Context,
    terms: Sequence[Term] = (),
    exclude_head: bool = False,
    most: int = 1_000,
    seed: int = 0,
) -> Floats:
    """Return (2R,) the weight of the reversed edge for each relation, the same both ways.

    It is the one of a few weights, in standard deviations of the scores, with the best MRR on the
    dev queries of that relation. A symmetric relation has a weight above 0, one that never goes
    both ways (hypernym) one below.

    Args:
        queries: (m, k) vectors of dev queries; see :func:`rank` for the others.
        candidates: (n, k) vectors.
        triples: (m, 3) dev queries with their answers.
        known: answers that are left out.
        context: the train graph.
        terms: what else is added to scores.
        exclude_head: as in :func:`rank`.
        most: so many queries are looked at, spread over the relations.
        seed: decides which.
    """
    matrix, relation = as_matrix(queries), triples[:, 1] % context.n_relations
    row, _ = context.reversed_edges(triples[:, 0], triples[:, 1])
    changed = np.random.default_rng(seed).permutation(np.unique(row))
    changed = changed[np.argsort(relation[changed], kind="stable")]
    # The first of each relation, then the second of each, and so on.
    turn = np.arange(len(changed)) - np.searchsorted(relation[changed], relation[changed])
    changed = changed[np.argsort(turn, kind="stable")][:most]
    if not len(changed):
        return np.zeros(2 * context.n_relations)
    vectors, own = matrix.read(changed), triples[changed]
    sample = slice(None, None, max(1, len(candidates) // 4_096))
    unit = float(np.std(vectors[:BLOCK] @ as_matrix(candidates).read(sample).T, axis=1).mean())
    gained = []
    for weight in _WEIGHTS:
        tried = [*terms, context.reverse(weight * unit)]
        gained.append(1 / rank(vectors, candidates, own, known, tried, exclude_head).of())
    weights = np.zeros(context.n_relations)
    for one in np.unique(relation[changed]):
        at = relation[changed] == one
        if at.sum() >= _LEAST_QUERIES:
            best = int(np.argmax([own[at].mean() for own in gained]))
            weights[one] = _WEIGHTS[best] * unit
    return np.tile(weights, 2)


# -- figures -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Figures of some queries.

    Attributes:
        n: how many queries.
        metrics: name -> figure with its 95 % interval; NaN where there are no queries.
    """

    n: int
    metrics: Mapping[str, Estimate]

    def to_json(self) -> dict[str, Any]:
        """Return it as ``evaluate --json`` prints it."""
        found: dict[str, Any] = {"n": self.n}
        for name, one in self.metrics.items():
            found |= {name: finite(one.value), f"{name}_ci": [finite(one.low), finite(one.high)]}
        return found


def resample_ranks(
    systems: Sequence[Floats],
    metrics: Sequence[Metric] | None = None,
    resamples: int = RESAMPLES,
    chosen: NDArray[np.bool_] | None = None,
) -> Resampled:
    """Measure systems on the same draws of triples, both directions of a triple together.

    What is returned gives intervals, and with :func:`llmcond.evaluation.paired.differences` those
    of differences.

    Args:
        systems: (seeds, m) ranks of each, for the queries of a split (:meth:`Graph.queries`).
        metrics: what is computed; None: ``METRICS``.
        resamples: bootstrap samples.
        chosen: (m,) which queries count; None: all.
    """
    m = systems[0].shape[1]
    chosen = np.ones(m, dtype=bool) if chosen is None else chosen
    triple = (np.arange(m) % (m // 2))[chosen]
    own = [system[:, chosen] for system in systems]
    metrics = choose_metrics(METRICS) if metrics is None else metrics
    return resample(own, np.zeros(len(triple)), triple, metrics, resamples)


def measure(
    ranks: Floats,
    chosen: NDArray[np.bool_] | None = None,
    metrics: Sequence[Metric] | None = None,
    resamples: int = RESAMPLES,
) -> Part:
    """Return the figures of one system, (seeds, m) ranks; see :func:`resample_ranks`."""
    metrics = choose_metrics(METRICS) if metrics is None else metrics
    n = ranks.shape[1] if chosen is None else int(chosen.sum())
    if not n:
        return Part(0, {metric.name: Estimate(np.nan) for metric in metrics})
    return Part(n, resample_ranks([ranks], metrics, resamples, chosen).estimates(0))


def parts(graph: Graph, split: str) -> dict[str, NDArray[np.bool_]]:
    """Return (2n,) which queries of a split are in each part that figures are told for.

    ``forward`` and ``backward`` are the directions. ``reversible`` triples are those whose reversed
    edge is in train, which a rule answers, and ``rest`` the others. ``unseen`` triples are of an
    entity that no train triple has.
    """
    triples, train = graph.splits[split], graph.splits["train"]
    forward = np.repeat([True, False], len(triples))
    reversible = np.tile(Known(train, graph.n_entities).contains(triples[:, ::-1]), 2)
    seen = np.isin(triples[:, [0, 2]], train[:, [0, 2]]).all(axis=1)
    return {
        "forward": forward,
        "backward": ~forward,
        "reversible": reversible,
        "rest": ~reversible,
        "unseen": np.tile(~seen, 2),
    }


#: A side has many entities for one of the other side from so many on, in the mean.
_MANY = 1.5


def categories(graph: Graph) -> list[str]:
    """Return the category of each relation: ``1-1``, ``1-N``, ``N-1`` or ``N-N``.

    By the mean number of heads of a tail, and of tails of a head, in train (Bordes et al. 2013,
    section 4.2).
    """
    found = []
    for relation in range(graph.n_relations):
        train = graph.splits["train"]
        own = train[train[:, 1] == relation]
        heads, tails = (len(own) / max(len(np.unique(own[:, i])), 1) for i in (2, 0))
        found.append(f"{'N' if heads >= _MANY else '1'}-{'N' if tails >= _MANY else '1'}")
    return found


def relation_parts(graph: Graph, split: str) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield each category of relations and each relation's id, and (2n,) which queries it has."""
    relation = np.tile(graph.splits[split][:, 1], 2)
    category = np.array(categories(graph))
    for name in sorted(set(category.tolist())):
        yield name, category[relation] == name
    for number, name in enumerate(graph.relations.ids):
        yield name, relation == number
