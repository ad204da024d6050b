"""What a knowledge graph itself tells of right answers: terms, a rule, and parts of figures.

Every entity is a candidate, and each triple is asked from both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from llmcond.arrays import MatrixLike, Positions, as_matrix
from llmcond.evaluation.ranking import BLOCK, Added, CandidatePool, Ranks, Term, rank, rank_each
from llmcond.kinds.ranking.graph import Graph, Known, Numbers, Triples, adjacency, both_directions
from llmcond.metrics import Floats


class Context:
    """The train graph: neighbours, hops and reversed edges.

    Args:
        triples: (m, 3) of train.
        n_entities, n_relations: of the graph.

    Attributes:
        known: train triples in both directions.
        adjacency: see :func:`~llmcond.kinds.ranking.graph.adjacency`.
    """

    def __init__(self, triples: Triples, n_entities: int, n_relations: int) -> None:
        self.n_entities, self.n_relations = n_entities, n_relations
        self.known = Known(both_directions(triples, n_relations), n_entities)
        self.adjacency = adjacency(triples, n_entities)

    @classmethod
    def of(cls, graph: Graph) -> Context:
        """Return the context of a graph."""
        return cls(graph.splits["train"], graph.n_entities, graph.n_relations)

    def within(self, head: Numbers, hops: int) -> tuple[Positions, Positions]:
        """Return the entities within so many hops of each of m heads, flat; itself is one."""
        distinct, which = np.unique(head, return_inverse=True)
        n = len(distinct)
        start = (np.ones(n, dtype=np.float32), (np.arange(n), distinct))
        step = reached = csr_array(start, shape=(n, self.n_entities))
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


#: Weights that are tried, in standard deviations of the scores, the first one nothing; the smallest
#: one of equals is best.
_WEIGHTS = (0, 0.5, -0.5, 1, -1, 2, -2, 4, -4, 8, -8)
#: Fewer queries say nothing about a relation, whose weight stays 0.
_LEAST_QUERIES = 10
#: The number of queries that are looked at, at most, spread over the relations.
_MOST_QUERIES = 1_000


def fit_reverse(
    queries: MatrixLike,
    candidates: MatrixLike,
    triples: Triples,
    known: Known | None,
    context: Context,
    terms: Sequence[Term] = (),
    exclude_head: bool = False,
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
    """
    matrix, relation = as_matrix(queries), triples[:, 1] % context.n_relations
    row, _ = context.reversed_edges(triples[:, 0], triples[:, 1])
    changed = np.random.default_rng(0).permutation(np.unique(row))
    changed = changed[np.argsort(relation[changed], kind="stable")]
    # The first of each relation, then the second of each, and so on.
    turn = np.arange(len(changed)) - np.searchsorted(relation[changed], relation[changed])
    changed = changed[np.argsort(turn, kind="stable")][:_MOST_QUERIES]
    if not len(changed):
        return np.zeros(2 * context.n_relations)
    vectors, own = matrix.read(changed), triples[changed]
    sample = slice(None, None, max(1, len(candidates) // 4_096))
    unit = float(np.std(vectors[:BLOCK] @ as_matrix(candidates).read(sample).T, axis=1).mean())
    tried = [context.reverse(weight * unit) for weight in _WEIGHTS[1:]]
    pool = CandidatePool(candidates, known, terms, exclude_head)
    ranks = rank_each(vectors, pool, own, tried)
    gained = [1 / found.of() for found in ranks]
    weights = np.zeros(context.n_relations)
    for one in np.unique(relation[changed]):
        at = relation[changed] == one
        if at.sum() >= _LEAST_QUERIES:
            best = int(np.argmax([own[at].mean() for own in gained]))
            weights[one] = _WEIGHTS[best] * unit
    return np.tile(weights, 2)


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
