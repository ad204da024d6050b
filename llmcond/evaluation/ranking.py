"""Ranks of right answers among candidates, and ranking metrics.

A query and every candidate have a vector. A candidate's score is their inner product (the cosine
for unit vectors), to which terms may be added. The protocol is that of SimKGC (arXiv 2203.02167):
all candidates are ranked, and the other known answers of a query are left out. ``ranks_among``
ranks by scores of any other kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Array, MatrixLike, Positions, as_matrix
from llmcond.data.rows import KnownAnswers
from llmcond.errors import UserError
from llmcond.evaluation.paired import RESAMPLES, bootstrap_metrics
from llmcond.evaluation.results import Subset
from llmcond.metrics import RANKING_NAMES, Estimate, Floats, Metric, choose_metrics
from llmcond.options import Ties

Numbers = NDArray[np.integer[Any]]

#: The numbers of queries and of candidates that are scored at once; their scores take 64 MiB at
#: most.
BLOCK, TILE = 256, 65_536

#: Added scores in coordinate format: (k,) the query, (k,) the entity, (k,) the added score. Each
#: pair of query and entity occurs once.
Added = tuple[Positions, Positions, Array]


#: Returns the scores added to entities for m queries: heads (m,) and relations (m,), r or r + R. It
#: does not get the answers.
Term = Callable[[Numbers, Numbers], Added]


@dataclass(frozen=True)
class Ranks:
    """The ranks of right answers, from 1.

    Attributes:
        optimistic: (m,) ranks if the answer comes before all candidates with the same score.
        pessimistic: (m,) ranks if the answer comes after all candidates with the same score.
    """

    optimistic: Floats
    pessimistic: Floats

    def resolve_ties(self, ties: Ties = "realistic") -> Floats:
        """Return the ranks, (m,). Realistic ranks are the mean of the other two, as in PyKEEN."""
        if ties == "realistic":
            return (self.optimistic + self.pessimistic) / 2
        return self.optimistic if ties == "optimistic" else self.pessimistic


def rank(
    queries: MatrixLike,
    candidates: MatrixLike,
    triples: Numbers,
    known: KnownAnswers | None,
    terms: Sequence[Term] = (),
    exclude_head: bool = False,
    tile: int = TILE,
) -> Ranks:
    """Rank the answer of each query among all entities.

    Memory is bounded by the scores of ``BLOCK`` queries and ``tile`` candidates. Candidates on disk
    are read a tile at a time, once for each block of queries.

    Args:
        queries: (m, k) vectors.
        candidates: (n, k) vectors of all entities. With k = 0 scores are the terms alone.
        triples: (m, 3) head, relation (r or r + R) and answer of each query.
        known: The known answers, which are left out except for the right one; None: no answers are
            left out.
        terms: The terms that are added to scores.
        exclude_head: Whether a query's head is not a candidate, unless it is the answer.
        tile: The number of candidates at once.

    Raises:
        UserError: A vector is not finite.
    """
    pool = CandidatePool(candidates, known, terms, exclude_head, tile)
    return rank_each(queries, pool, triples, ())[0]


def rank_each(
    queries: MatrixLike,
    pool: CandidatePool,
    triples: Numbers,
    variants: Sequence[Term],
    block: int = BLOCK,
) -> list[Ranks]:
    """Rank as ``rank`` does, and again with each variant as an additional last term.

    Products are computed once, and scores that a variant does not change are compared once.

    Returns:
        The ranks without a variant, followed by the ranks with each variant.
    """
    tile = pool.tile
    head, relation, answer = np.asarray(triples, dtype=np.int64).T
    above, equal = np.zeros((2, 1 + len(variants), len(answer)))
    # Queries whose answers are in the same tile are scored together.
    order = np.argsort(answer // tile, kind="stable")
    for begin in range(0, len(order), block):
        query_indices = order[begin : begin + block]
        rows, block_answers = np.arange(len(query_indices)), answer[query_indices]
        query_block = _QueryBlock(
            pool,
            _read_queries(queries, query_indices),
            head[query_indices],
            relation[query_indices],
        )
        answer_scores = query_block.scores_of(block_answers)
        variant_scores = [
            _VariantScores(
                term(head[query_indices], relation[query_indices]), block_answers, answer_scores
            )
            for term in variants
        ]
        for first in range(0, pool.n, tile):
            scores = query_block.scores(first)
            _exclude(scores, first, rows, block_answers)
            base_counts = _count_above_and_equal(scores, answer_scores)
            for number, (n_above, n_equal) in enumerate(
                [
                    base_counts,
                    *(variant.count(scores, first, *base_counts) for variant in variant_scores),
                ]
            ):
                above[number, query_indices] += n_above
                equal[number, query_indices] += n_equal
    return [Ranks(1 + a, 1 + a + b) for a, b in zip(above, equal, strict=True)]


class _VariantScores:
    """The scores of a block of m queries and of their answers, (m,), with an additional term."""

    def __init__(self, added: Added, answer: Positions, answer_scores: Array) -> None:
        self._added, self._answer_scores = added, answer_scores.copy()
        row, entity, value = added
        is_answer = entity == answer[row]
        self._answer_scores[row[is_answer]] += value[is_answer]
        self._moved = np.flatnonzero(self._answer_scores != answer_scores)

    def count(
        self, scores: Array, first: int, above: Positions, equal: Positions
    ) -> tuple[Positions, Positions]:
        """Count a tile's scores, (m, t), above and equal to each answer's score, (m,) each.

        ``above`` and ``equal`` are the counts without this term.
        """
        row, entity, value = self._added
        inside = (entity >= first) & (entity < first + scores.shape[1])
        row = row[inside]
        before = scores[row, entity[inside] - first]
        after, answer_scores = before + value[inside], self._answer_scores[row]
        counts = []
        moved = _count_above_and_equal(scores[self._moved], self._answer_scores[self._moved])
        for base_count, moved_count, compare in zip(
            (above, equal), moved, (np.greater, np.equal), strict=True
        ):
            count = base_count.copy()
            count[self._moved] = moved_count
            for sign, values in ((1, after), (-1, before)):
                count += sign * np.bincount(
                    row[compare(values, answer_scores)], minlength=len(count)
                )
            counts.append(count)
        return counts[0], counts[1]


def _count_above_and_equal(scores: Array, answer_scores: Array) -> tuple[Positions, Positions]:
    """Count the scores, (m, n), above and equal to each answer's score, (m,) each."""
    thresholds = answer_scores[:, None]
    return np.count_nonzero(scores > thresholds, axis=1), np.count_nonzero(
        scores == thresholds, axis=1
    )


def ranks_among(
    scores: NDArray[np.floating], answer: Positions, left_out: NDArray[np.bool_] | None = None
) -> Ranks:
    """Rank the answer of each query by scores of any kind.

    Args:
        scores: (m, n) the scores of each query's candidates.
        answer: (m,) the column of the right answer.
        left_out: (m, n) mask of candidates that are left out; an answer is never left out.

    Raises:
        UserError: A score that is not left out is not finite.
    """
    answer_scores = np.take_along_axis(scores, answer[:, None], axis=1)[:, 0]
    if left_out is not None:
        scores = np.where(left_out, -np.inf, scores)
        scores[np.arange(len(answer)), answer] = answer_scores
    bad = ~np.isfinite(scores)
    if left_out is not None:
        bad &= ~left_out
        bad[np.arange(len(answer)), answer] = ~np.isfinite(answer_scores)
    if bad.any():
        raise UserError(
            f"scores contain NaN or infinity: {bad.sum():,} in total, the first of query "
            f"{np.flatnonzero(bad.any(axis=1))[0]:,}. Fit the head again with a lower learning "
            "rate, or extract in float32."
        )
    above, equal = (
        counts.astype(np.float64) for counts in _count_above_and_equal(scores, answer_scores)
    )
    return Ranks(1 + above, above + equal)


def top_entities(
    queries: MatrixLike, pool: CandidatePool, head: Numbers, relation: Numbers, k: int
) -> tuple[Positions, Array]:
    """Return the k entities with the best scores for each query, and their scores, (m, k) each.

    Arguments and errors are those of ``rank``, with heads and relations as (m,). Known answers are
    left out. Entities with equal scores keep their order. If fewer than k candidates remain, the
    last scores are -inf.
    """
    rows = np.arange(len(head))
    query_block = _QueryBlock(pool, _read_queries(queries, rows), head, relation)
    entities = np.zeros((len(rows), 0), dtype=np.int64)
    best = np.zeros((len(rows), 0), dtype=np.float32)
    for first in range(0, pool.n, pool.tile):
        scores = query_block.scores(first)
        columns = np.arange(scores.shape[1])
        if scores.shape[1] > k:
            # Only scores that can be among the best k, including ties, are sorted.
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


class CandidatePool:
    """The vectors of all entities, read a tile at a time, with the settings of their scores.

    Arguments are those of ``rank``.
    """

    def __init__(
        self,
        vectors: MatrixLike,
        known: KnownAnswers | None,
        terms: Sequence[Term] = (),
        exclude_head: bool = False,
        tile: int = TILE,
    ) -> None:
        self.vectors, self.n, self.tile = as_matrix(vectors), len(vectors), tile
        self.known, self.terms, self.exclude_head = known, terms, exclude_head
        self._last: tuple[int, Array] | None = None

    def read(self, first: int) -> Array:
        """Return a tile's vectors, (t, k), which stay in memory until another tile is read."""
        if self._last is None or self._last[0] != first:
            # Otherwise, the pages of the previous tile would count as memory in use.
            self.vectors.release()
            self._last = first, self.vectors.read(slice(first, first + self.tile))
        return self._last[1]


class _QueryBlock:
    """A block of queries: (m, k) vectors, heads (m,) and relations (m,)."""

    def __init__(
        self, pool: CandidatePool, vectors: Array, head: Numbers, relation: Numbers
    ) -> None:
        self._pool, self._vectors = pool, vectors
        self._added = [term(head, relation) for term in pool.terms]
        self._left_out = [] if pool.known is None else [pool.known.gather(head, relation)]
        if pool.exclude_head:
            self._left_out.append((np.arange(len(head)), np.asarray(head, dtype=np.int64)))
        self._last: tuple[int, Array] | None = None

    def scores_of(self, answer: Positions) -> Array:
        """Return the score, (m,), of one entity for each query, whether it is left out or not.

        The scores are read from the product that they are compared with. Computed in another way,
        they could differ in the last bit, and ties would be missed.
        """
        tile = self._pool.tile
        answer_scores = np.empty(len(answer), dtype=np.float32)
        for first in np.unique(answer // tile * tile).tolist():
            self._last = first, self._products(first)
            rows = np.flatnonzero(answer // tile * tile == first)
            answer_scores[rows] = self._last[1][rows, answer[rows] - first]
        return answer_scores

    def scores(self, first: int) -> Array:
        """Return the scores of a tile's candidates, (m, t); -inf for those that are left out."""
        if self._last is not None and self._last[0] == first:
            block_scores, self._last = self._last[1], None
        else:
            block_scores = self._products(first)
        for row, entity in self._left_out:
            _exclude(block_scores, first, row, entity)
        return block_scores

    def _products(self, first: int) -> Array:
        products: Array = self._vectors @ self._pool.read(first).T
        # Cheaper than checking all candidates, as the scores of a vector that is not finite are not
        # finite.
        if not np.isfinite(products).all():
            tile = self._pool.read(first)
            _check_finite(tile, np.arange(first, first + len(tile)), "candidate")
        for row, entity, value in self._added:
            inside = (entity >= first) & (entity < first + products.shape[1])
            products[row[inside], entity[inside] - first] += value[inside]
        return products


def _exclude(scores: Array, first: int, row: Positions, entity: Positions) -> None:
    inside = (entity >= first) & (entity < first + scores.shape[1])
    scores[row[inside], entity[inside] - first] = -np.inf


def _read_queries(queries: MatrixLike, rows: Positions) -> Array:
    """Read rows of queries in float32.

    Raises:
        UserError: A vector is not finite.
    """
    vectors = as_matrix(queries).read(rows)
    _check_finite(vectors, rows, "query")
    return vectors


def _check_finite(vectors: Array, rows: Positions, what: str) -> None:
    """Raise a UserError if a vector is not finite; ``rows`` are the numbers of the vectors."""
    bad = rows[~np.isfinite(vectors).all(axis=1)]
    # No score is above NaN, so an answer whose score is NaN would have a perfect rank.
    if len(bad):
        raise UserError(
            f"vectors contain NaN or infinity: {len(bad):,} in total, the first of {what} "
            f"{bad[0]:,}. Fit the head again with a lower learning rate, or extract in float32."
        )


# -- figures -----------------------------------------------------------------------------------


def score_rankings(
    systems: Sequence[Floats],
    group: Numbers,
    metrics: Sequence[Metric] | None = None,
    resamples: int = RESAMPLES,
    mask: NDArray[np.bool_] | None = None,
    stratum: NDArray[Any] | None = None,
    crossed: Sequence[Numbers] = (),
) -> list[Subset]:
    """Compute the figures of each system, on the same bootstrap samples of groups of queries.

    Args:
        systems: (seeds, m) the ranks of each system.
        group: (m,) the group of each query: its dialogue, or its triple, which has two queries.
        metrics: The metrics; None: ``llmcond.metrics.RANKING_NAMES``.
        resamples: The number of bootstrap samples.
        mask: (m,) mask of the queries to use; None: all.
        stratum: (m,) the stratum of each query, for metrics that are means over strata; None: all
            queries are in one stratum.
        crossed: Two kinds of clusters that queries belong to, (m,) each, as in
            ``bootstrap_metrics``.
    """
    mask = np.ones(len(group), dtype=bool) if mask is None else mask
    stratum = np.zeros(len(group)) if stratum is None else stratum
    metrics = choose_metrics(RANKING_NAMES) if metrics is None else metrics
    if not mask.any():
        return [Subset(0, {metric.name: Estimate(np.nan) for metric in metrics}) for _ in systems]
    selected_ranks, strata = (
        [system[:, mask] for system in systems],
        np.asarray(stratum[mask], float),
    )
    clusters = [ids[mask] for ids in crossed]
    resampled = bootstrap_metrics(
        selected_ranks, strata, group[mask], metrics, resamples, crossed=clusters
    )
    return [Subset(int(mask.sum()), resampled.estimates(i)) for i in range(len(systems))]
