"""Scores of candidates for the next turn of a dialogue, from three vectors of each utterance.

Triple-Encoders (ACL 2024) give an utterance one vector for each role: before-1, before-2 and after.
A context of n utterances is the set of its pairs (B1_i + B2_j) / 2, i < j, and equation 3 sums
their cosines with a candidate's after vector A. As A has length 1, that is one product with one
vector, the sum over i < j of (B1_i + B2_j) / |B1_i + B2_j|: any index of inner products serves it.
No pair is formed for that either: it takes the lengths of pairs, which products of B1 and B2 give.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.arrays import Array
from llmcond.errors import UserError

#: Of squared lengths: vectors whose sum is shorter cancel each other, and it has no direction.
_CANCELS = 1e-6
#: Values that MaxSim has in memory at a time, a few times over.
_BLOCK = 2**22

#: What maps utterances' features to the roles before-1 and before-2, (n, k) each.
Before = Callable[[Array], tuple[Array, Array]]


class DistanceWeights(NamedTuple):
    """What pairs and utterances weigh by their distance from the next turn, 1 to w.

    Utterances that are farther away weigh as those of distance w. Each is an array or a tensor.

    Attributes:
        pairs: (w, w), of the pair of before-1 at one distance and before-2 at another.
        singles: (w,), of before-2 by itself.
    """

    pairs: Any
    singles: Any


@dataclass(frozen=True, slots=True)
class Score:
    """How a context is compared with a candidate.

    ``average`` sums over all pairs (equation 3; within a query, sum and mean rank alike);
    ``last:L`` over those whose before-2 is of the last L utterances (section 4.1.2);
    ``neighbours`` over pairs of adjacent utterances, and ``bi`` over before-2 alone (table 5);
    ``weighted`` over pairs and before-2, weighted by learned weights of their distances; ``maxsim``
    is algorithm 1 of appendix A. One utterance has no pairs: it is compared as ``bi`` does.

    Attributes:
        kind: the name without a number.
        rows: L of ``last:L``; 0 for others.
    """

    kind: str
    rows: int = 0

    @classmethod
    def parse(cls, text: str) -> Score:
        """Return a score by its name.

        Raises:
            UserError: there is none of that name.
        """
        found = re.fullmatch(r"last:([1-9]\d{0,5})", text)
        if found:
            return cls("last", int(found[1]))
        if text not in ("average", "bi", "neighbours", "maxsim", "weighted"):
            raise UserError(
                f"unknown score {text!r}. Scores: average, last:L (such as last:2), bi, "
                "neighbours, maxsim, weighted."
            )
        return cls(text)

    def __str__(self) -> str:
        return f"last:{self.rows}" if self.rows else self.kind

    def coefficients(self, n: int, weights: DistanceWeights | None = None) -> tuple[Any, Any]:
        """Return what pairs (n, n) and before-2 by itself (n,) of n utterances are weighted by.

        They are tensors; where the weights are trained, gradients go through them.

        Raises:
            UserError: no utterances, a weighted score without weights, or MaxSim, which is no sum.
        """
        if n < 1:
            raise UserError("there is no utterance yet that a reply could follow. Add one first.")
        if self.kind == "maxsim":
            raise UserError("maxsim is no sum over pairs, so that no one vector stands for it.")
        pairs = torch.ones(n, n).triu(1)
        if self.kind == "weighted":
            if weights is None:
                raise UserError(
                    "the score weighted takes the weights of a head that learned them. Name such "
                    "a head, or another score, such as average."
                )
            by_pair, by_single = (torch.as_tensor(own, dtype=torch.float32) for own in weights)
            distance = torch.arange(n, 0, -1, device=by_pair.device).clamp(max=len(by_single)) - 1
            by_pair = by_pair.index_select(0, distance).index_select(1, distance)
            return by_pair * pairs.to(by_pair.device), by_single.index_select(0, distance)
        if self.kind == "bi" or n == 1:
            return torch.zeros(n, n), torch.ones(n)
        if self.kind == "last":
            pairs[:, : -self.rows] = 0
        elif self.kind == "neighbours":
            pairs = pairs - pairs.triu(2)
        return pairs, torch.zeros(n)


def inverse_lengths(b1: Tensor, b2: Tensor) -> Tensor:
    """Return 1 / |B1_i + B2_j|, (..., n, c), of (..., n, k) and (..., c, k).

    It is 0 where the two cancel each other.
    """
    own = b1.square().sum(dim=-1)[..., :, None] + b2.square().sum(dim=-1)[..., None, :]
    squared = own + 2 * b1 @ b2.mT
    apart = squared > _CANCELS * own
    return torch.where(apart, squared, 1.0).rsqrt() * apart


def sum_of_pairs(b1: Tensor, b2: Tensor, pairs: Tensor, singles: Tensor) -> Tensor:
    """Return the sum of weighted directions of pairs and of before-2, (m, k), of (m, n, k) roles.

    That is equation 3 without its candidate. ``pairs`` is (n, n), or (m, n, n), and 0 for i >= j;
    ``singles`` is (n,), or (m, n).
    """
    return _combined(b1, b2, inverse_lengths(b1, b2) * pairs, singles)


def _combined(b1: Tensor, b2: Tensor, scaled: Tensor, singles: Tensor) -> Tensor:
    of_b1 = scaled.sum(dim=-1)
    of_b2 = scaled.sum(dim=-2) + singles / b2.norm(dim=-1).clamp(min=1e-12)
    total: Tensor = of_b1[..., None, :] @ b1 + of_b2[..., None, :] @ b2
    return total[..., 0, :]


def query_vectors(
    b1: Array, b2: Array, score: str | Score, weights: DistanceWeights | None = None
) -> Array:
    """Return the vector of each context, (m, k) float32, whose products with candidates are scores.

    Args:
        b1: (m, n, k) the role before-1 of each context's n utterances, in order.
        b2: (m, n, k) their role before-2.
        score: any but ``maxsim``.
        weights: learned ones, for ``weighted``.

    Raises:
        UserError: see :meth:`Score.coefficients`.
    """
    first, second = _tensor(b1), _tensor(b2)
    own = Score.parse(score) if isinstance(score, str) else score
    coefficients = own.coefficients(first.shape[1], weights)
    return sum_of_pairs(first, second, *coefficients).numpy()


def maxsim(b1: Array, b2: Array, candidates: Array) -> Array:
    """Return MaxSim of contexts and candidates, (m, c) float32 (appendix A, algorithm 1).

    Of a candidate's cosines with all pairs, from the largest down, those are averaged that bring
    an utterance which none before them has.

    Args:
        b1: (m, n, k) the role before-1 of each context's n utterances, in order.
        b2: (m, n, k) their role before-2.
        candidates: (c, k) after vectors of length 1.
    """
    first, second, after = _tensor(b1), _tensor(b2), _tensor(candidates)
    m, n, _ = first.shape
    if n < 2:
        return _tensor(query_vectors(b1, b2, "bi")).matmul(after.mT).numpy()
    i, j = torch.triu_indices(n, n, 1)
    found = torch.empty(m, len(after))
    block = max(1, _BLOCK // (len(i) * max(1, len(after))))
    for start in range(0, m, block):
        rows = slice(start, start + block)
        inverse = inverse_lengths(first[rows], second[rows])[:, i, j]
        scores = (first[rows] @ after.mT)[:, i] + (second[rows] @ after.mT)[:, j]
        found[rows] = _mean_of_best(scores * inverse[..., None], i, j, n)
    return found.numpy()


def _mean_of_best(scores: Tensor, i: Tensor, j: Tensor, n: int) -> Tensor:
    """Return the mean (m, c) of the scores (m, pairs, c) that algorithm 1 takes.

    From the largest down, a pair brings an utterance that none before it has just where it is the
    best pair of that utterance: taken are the best pairs of all utterances, each pair once.
    """
    values, best = [], []
    for utterance in range(n):
        own = torch.nonzero((i == utterance) | (j == utterance)).flatten()
        value, place = scores.index_select(1, own).max(dim=1)
        values.append(value)
        best.append(own[place])
    total, taken = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for later in range(n):
        # The best pair of an earlier utterance is there already.
        seen = torch.zeros_like(taken, dtype=torch.bool)
        for earlier in range(later):
            seen |= best[earlier] == best[later]
        total += values[later] * ~seen
        taken += ~seen
    return total / taken


def turn_scores(
    b1: Array,
    b2: Array,
    candidates: Array,
    score: str | Score,
    weights: DistanceWeights | None = None,
) -> Array:
    """Return the scores of contexts and candidates, (m, c) float32, by any score.

    Arguments as in :func:`query_vectors` and :func:`maxsim`.
    """
    if str(score) == "maxsim":
        return maxsim(b1, b2, candidates)
    return np.asarray(query_vectors(b1, b2, score, weights) @ candidates.T)


def plan_scores(b1: Array, candidates: Array, goal: Array) -> Array:
    """Return how likely candidates lead from contexts to goals, (m, c) float32 (equation 4).

    cos(B2_c, A_g) + 1/n sum over i of cos((B1_i + B2_c) / 2, A_g), by products of any two of the
    three alone.

    Args:
        b1: (m, n, k) the role before-1 of each context's utterances.
        candidates: (c, k), or (m, c, k) of each context's own, in the role before-2.
        goal: (m, k) after vectors of length 1.
    """
    first, second, after = _tensor(b1), _tensor(candidates), _tensor(goal)[..., None]
    to_goal = second @ after  # (m, c, 1)
    alone = to_goal[..., 0] / second.norm(dim=-1).clamp(min=1e-12)
    inverse = inverse_lengths(first, second)
    return np.asarray((alone + ((first @ after + to_goal.mT) * inverse).mean(dim=-2)).numpy())


@dataclass(frozen=True, eq=False)
class State:
    """A dialogue so far: an immutable value, which threads may share.

    Adding an utterance takes its two vectors and the lengths of its pairs with those before, and
    what comes out is what all utterances at once would give, after every turn.

    Attributes:
        before: maps features of utterances to their roles.
        b1, b2: (n, k) the roles of its utterances.
        inverse: (n, n) 1 / |B1_i + B2_j|; only i < j are looked at.
    """

    before: Before
    score: Score
    weights: DistanceWeights | None = None
    b1: Array | None = None
    b2: Array | None = None
    inverse: Array | None = None

    def __len__(self) -> int:
        return 0 if self.b1 is None else len(self.b1)

    def add(self, vector: NDArray[Any]) -> State:
        """Return the state after one more utterance, of which ``vector`` (d,) has the features."""
        new1, new2 = self.before(np.asarray(vector, dtype=np.float32)[None])
        n = len(self)
        inverse = np.zeros((n + 1, n + 1), dtype=np.float32)
        if self.b1 is None or self.b2 is None or self.inverse is None:
            return replace(self, b1=new1, b2=new2, inverse=inverse)
        inverse[:n, :n] = self.inverse
        inverse[:n, n:] = inverse_lengths(_tensor(self.b1), _tensor(new2)).numpy()
        b1, b2 = np.concatenate([self.b1, new1]), np.concatenate([self.b2, new2])
        return replace(self, b1=b1, b2=b2, inverse=inverse)

    @cached_property
    def query(self) -> Array:
        """Return the vector (k,) whose products with candidates are their scores.

        Raises:
            UserError: see :meth:`Score.coefficients`.
        """
        pairs, singles = self.score.coefficients(len(self), self.weights)
        b1, b2, inverse = (_tensor(own) for own in self._parts())
        return np.asarray(_combined(b1, b2, inverse * pairs, singles).numpy())

    def scores(self, candidates: Array) -> Array:
        """Return the score of each candidate as the next turn, (c,), of after vectors (c, k)."""
        if self.score.kind == "maxsim":
            b1, b2, _ = self._parts()
            return np.asarray(maxsim(b1[None], b2[None], candidates)[0])
        return np.asarray(candidates @ self.query)

    def plan(self, candidates: Array, goal: Array) -> Array:
        """Return how likely candidates lead to a goal, (c,); see :func:`plan_scores`.

        ``candidates`` (c, k) are in the role before-2, and ``goal`` (k,) is an after vector.
        """
        return np.asarray(plan_scores(self._parts()[0][None], candidates, goal[None])[0])

    def _parts(self) -> tuple[Array, Array, Array]:
        if self.b1 is None or self.b2 is None or self.inverse is None:
            raise UserError("the dialogue has no utterance yet. Add one first.")
        return self.b1, self.b2, self.inverse


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
