"""Ranks of right answers among candidates, and the figures of ranks.

A query and every candidate have a vector; a candidate's score is their product (of unit vectors,
their cosine), to which terms may add. The protocol is that of SimKGC (arXiv 2203.02167): every
candidate is ranked, and the other known answers of a query are left out. Where scores are no
products, :func:`ranks_among` takes them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Array, MatrixLike, Positions, as_matrix
from llmcond.data.queries import KnownAnswers
from llmcond.errors import UserError
from llmcond.evaluation.paired import RESAMPLES, resample
from llmcond.metrics import RANKING_NAMES, Estimate, Floats, Metric, choose_metrics, estimates_json
from llmcond.options import Ties

Numbers = NDArray[np.integer[Any]]

#: Queries and candidates that are scored at once: their scores take 64 MiB at most.
BLOCK, TILE = 256, 65_536

#: Added scores, flat: (k,) the query, (k,) the entity, each pair of them once, and (k,) what is
#: added.
Added = tuple[Positions, Positions, Array]


#: What is added to the scores of some entities, for m queries: heads (m,) and relations (m,), r or
#: r + R. It never sees their answers.
Term = Callable[[Numbers, Numbers], Added]


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
    triples: Numbers,
    known: KnownAnswers | None,
    terms: Sequence[Term] = (),
    exclude_head: bool = False,
    tile: int = TILE,
) -> Ranks:
    """Rank the answer of each query among all entities.

    Memory is bounded by the scores of :data:`BLOCK` queries and ``tile`` candidates. Candidates
    that lie on disk are read a tile at a time, once for each block of queries.

    Args:
        queries: (m, k) vectors.
        candidates: (n, k) vectors of all entities. With k = 0 the terms alone decide.
        triples: (m, 3) head, relation (r or r + R) and answer of each query.
        known: answers that are left out, but for the one asked for; None: none are.
        terms: what is added to scores.
        exclude_head: whether a query's head is no candidate, unless it is the answer.
        tile: candidates at once.

    Raises:
        UserError: a vector is not finite.
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
    """Rank as :func:`rank` does, and again with each variant as one more term, the last one.

    Products are made once, and what a variant leaves alone is compared once.

    Returns:
        The ranks without a variant, then those with each one.
    """
    tile = pool.tile
    head, relation, answer = np.asarray(triples, dtype=np.int64).T
    above, level = np.zeros((2, 1 + len(variants), len(answer)))
    # Queries whose answers are in the same tile are asked together.
    order = np.argsort(answer // tile, kind="stable")
    for begin in range(0, len(order), block):
        chosen = order[begin : begin + block]
        rows, own = np.arange(len(chosen)), answer[chosen]
        asked = _Asked(pool, _read(queries, chosen), head[chosen], relation[chosen])
        right = asked.scores_of(own)
        tried = [_Variant(one(head[chosen], relation[chosen]), own, right) for one in variants]
        for first in range(0, pool.n, tile):
            scores = asked.scores(first)
            _leave_out(scores, first, rows, own)
            counted = _compared(scores, right)
            for number, (more, as_much) in enumerate(
                [counted, *(one.compared(scores, first, *counted) for one in tried)]
            ):
                above[number, chosen] += more
                level[number, chosen] += as_much
    return [Ranks(1 + a, 1 + a + b) for a, b in zip(above, level, strict=True)]


class _Variant:
    """One more term of a block of m queries: flat what is added, and (m,) scores of answers."""

    def __init__(self, added: Added, answer: Positions, right: Array) -> None:
        self._added, self._right = added, right.copy()
        row, entity, value = added
        own = entity == answer[row]
        self._right[row[own]] += value[own]
        self._moved = np.flatnonzero(self._right != right)

    def compared(
        self, scores: Array, first: int, above: Positions, level: Positions
    ) -> tuple[Positions, Positions]:
        """Return (m,) how many of a tile's scores (m, t) are above, and level with, each answer's.

        ``above`` and ``level`` are those without this term.
        """
        row, entity, value = self._added
        inside = (entity >= first) & (entity < first + scores.shape[1])
        row = row[inside]
        before = scores[row, entity[inside] - first]
        after, right = before + value[inside], self._right[row]
        found = []
        again = _compared(scores[self._moved], self._right[self._moved])
        for one, other, compare in zip((above, level), again, (np.greater, np.equal), strict=True):
            count = one.copy()
            count[self._moved] = other
            for sign, own in ((1, after), (-1, before)):
                count += sign * np.bincount(row[compare(own, right)], minlength=len(count))
            found.append(count)
        return found[0], found[1]


def _compared(scores: Array, right: Array) -> tuple[Positions, Positions]:
    """Return (m,) how many of (m, n) scores are above those of answers, (m,), and as many."""
    own = right[:, None]
    return np.count_nonzero(scores > own, axis=1), np.count_nonzero(scores == own, axis=1)


def ranks_among(
    scores: NDArray[np.floating], answer: Positions, left_out: NDArray[np.bool_] | None = None
) -> Ranks:
    """Rank the answer of each query by scores of whatever kind.

    Args:
        scores: (m, n) of each query's candidates.
        answer: (m,) the column of the right one.
        left_out: (m, n) which candidates do not count; the answer always does.

    Raises:
        UserError: a score that counts is not finite.
    """
    right = np.take_along_axis(scores, answer[:, None], axis=1)[:, 0]
    if left_out is not None:
        scores = np.where(left_out, -np.inf, scores)
        scores[np.arange(len(answer)), answer] = right
    bad = ~np.isfinite(scores)
    if left_out is not None:
        bad &= ~left_out
        bad[np.arange(len(answer)), answer] = ~np.isfinite(right)
    if bad.any():
        raise UserError(
            f"scores hold NaN or infinity: {bad.sum():,}, the first of query "
            f"{np.flatnonzero(bad.any(axis=1))[0]:,}. Fit the head again with a lower learning "
            "rate, or extract in float32."
        )
    above, level = (own.astype(np.float64) for own in _compared(scores, right))
    return Ranks(1 + above, above + level)


def top(
    queries: MatrixLike, pool: CandidatePool, head: Numbers, relation: Numbers, k: int
) -> tuple[Positions, Array]:
    """Return (m, k) the entities that score best for each query, and (m, k) their scores.

    Arguments and errors are those of :func:`rank`, heads and relations (m,); known answers are left
    out. Equal scores are in the order of the entities. Where fewer than k candidates are left,
    the last scores are -inf.
    """
    rows = np.arange(len(head))
    asked = _Asked(pool, _read(queries, rows), head, relation)
    entities = np.zeros((len(rows), 0), dtype=np.int64)
    best = np.zeros((len(rows), 0), dtype=np.float32)
    for first in range(0, pool.n, pool.tile):
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


class CandidatePool:
    """All entities' vectors, read a tile at a time, and what else their scores depend on.

    Arguments are those of :func:`rank`.
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
        """Return a tile's vectors, (t, k), which stay in memory until another one is read."""
        if self._last is None or self._last[0] != first:
            # Pages of the tile before would count as memory in use.
            self.vectors.release()
            self._last = first, self.vectors.read(slice(first, first + self.tile))
        return self._last[1]


class _Asked:
    """A block of queries: (m, k) vectors, heads (m,) and relations (m,)."""

    def __init__(
        self, every: CandidatePool, vectors: Array, head: Numbers, relation: Numbers
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
        return {"n": self.n, **estimates_json(self.metrics)}


def measure_each(
    systems: Sequence[Floats],
    group: Numbers,
    metrics: Sequence[Metric] | None = None,
    resamples: int = RESAMPLES,
    chosen: NDArray[np.bool_] | None = None,
    stratum: NDArray[Any] | None = None,
) -> list[Part]:
    """Return the figures of each system, on the same draws of groups with all of their queries.

    Args:
        systems: (seeds, m) ranks of each.
        group: (m,) what each query is of: its triple, which is asked from both sides, or dialogue.
        metrics: what is computed; None: :data:`llmcond.metrics.RANKING_NAMES`.
        resamples: bootstrap samples.
        chosen: (m,) which queries count; None: all.
        stratum: (m,) for metrics that are means over strata; None: all are of one.
    """
    chosen = np.ones(len(group), dtype=bool) if chosen is None else chosen
    stratum = np.zeros(len(group)) if stratum is None else stratum
    metrics = choose_metrics(RANKING_NAMES) if metrics is None else metrics
    if not chosen.any():
        return [Part(0, {one.name: Estimate(np.nan) for one in metrics}) for _ in systems]
    own, strata = [system[:, chosen] for system in systems], np.asarray(stratum[chosen], float)
    found = resample(own, strata, group[chosen], metrics, resamples)
    return [Part(int(chosen.sum()), found.estimates(i)) for i in range(len(systems))]
