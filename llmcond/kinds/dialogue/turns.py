"""Scores of candidates for the next turn of a dialogue, from three vectors of each utterance.

In Triple-Encoders (ACL 2024), an utterance has one vector for each role: before-1, before-2 and
after. A context of n utterances is the set of its pairs (B1_i + B2_j) / 2, i < j, and equation 3
sums their cosines with a candidate's after vector A. As A has unit length, this is the inner
product of A with a single vector, the sum over i < j of (B1_i + B2_j) / |B1_i + B2_j|, so any index
of inner products can be used. No pair is computed explicitly: only the lengths of pairs are needed,
which follow from products of B1 and B2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.arrays import Array
from llmcond.errors import UserError

#: Minimum squared length of a sum, relative to its terms: below it, the vectors cancel each other
#: and the sum has no direction.
_MIN_SQUARED_LENGTH = 1e-6
#: Number of values that MaxSim processes at once; it needs a few times this memory.
_BLOCK = 2**22

#: Names of scores, except ``last:L``.
SCORES = (
    "average",
    "average+bi",
    "average:b1",
    "average:b2",
    "neighbours",
    "bi",
    "bi:b1",
    "bi:both",
    "maxsim",
    "weighted",
)

#: Maps features of utterances to the roles before-1 and before-2, (n, k) each.
RoleMap = Callable[[Array], tuple[Array, Array]]

V = TypeVar("V", Array, Tensor)


class Coefficients(NamedTuple):
    """Weights of the terms of a score, a sum over pairs and single utterances, as tensors.

    Attributes:
        pairs: weights of pairs (before-1, before-2), (n, n), or (m, n, n) for m contexts.
        first: weights of single utterances in before-1, (n,) or (m, n).
        second: weights of single utterances in before-2, (n,) or (m, n).
    """

    pairs: Tensor
    first: Tensor
    second: Tensor

    @property
    def total(self) -> Tensor:
        """The sum of all weights, by which a score is divided to become a mean of cosines."""
        pairs, first, second = self
        return pairs.sum(dim=(-2, -1)) + first.sum(dim=-1) + second.sum(dim=-1)


class DistanceWeights(NamedTuple):
    """Weights of pairs and single utterances by their distance from the next turn, 1 to w.

    Utterances at larger distances have the weight of distance w. Each field is an array or a
    tensor.

    Attributes:
        pairs: weights of pairs, by the distances of before-1 and before-2, (w, w).
        singles: weights of before-2 alone, (w,).
    """

    pairs: Any
    singles: Any


@dataclass(frozen=True, slots=True)
class ContextScore:
    """A score that compares a context with a candidate.

    ``average`` sums over all pairs (equation 3; within a query, sum and mean give the same ranks).
    ``last:L`` sums over pairs whose before-2 is one of the last L utterances (section 4.1.2).
    ``neighbours`` sums over pairs of adjacent utterances, and ``bi`` over before-2 alone (table 5).
    The other scores of table 5 are ``average+bi``, the sum of both; ``average:b1`` and
    ``average:b2``, in which both utterances of a pair have the same role; ``bi:b1``, which sums
    over before-1 alone; and ``bi:both``, which sums over both roles alone.
    ``weighted`` sums over pairs and before-2, with learned weights by distance. ``maxsim`` is
    algorithm 1 of appendix A. A single utterance has no pairs and is always compared like ``bi``.

    Attributes:
        kind: name of the score, without a number or role.
        last: L of ``last:L``; 0 for other scores.
        role: the only role before that is compared, ``b1`` or ``b2``; empty for both.
    """

    kind: str
    last: int = 0
    role: str = ""

    @classmethod
    def parse(cls, text: str) -> ContextScore:
        """Return the score with a name.

        Raises:
            UserError: The name is unknown.
        """
        match = re.fullmatch(r"last:([1-9]\d{0,5})", text)
        if match:
            return cls("last", int(match[1]))
        if text not in SCORES:
            raise UserError(
                f"unknown score {text!r}. Scores: last:L (such as last:2), {', '.join(SCORES)}."
            )
        kind, _, role = text.partition(":")
        return cls(text) if role == "both" else cls(kind, role=role)

    def __str__(self) -> str:
        return f"last:{self.last}" if self.last else f"{self.kind}{self.role and ':'}{self.role}"

    def select_roles(self, b1: V, b2: V) -> tuple[V, V]:
        """Return what the score reads as before-1 and before-2, given both roles."""
        return (b2 if self.role == "b2" else b1), (b1 if self.role == "b1" else b2)

    def coefficients(self, n: int, weights: DistanceWeights | None = None) -> Coefficients:
        """Return the weights of the score's terms for n utterances.

        Gradients flow through weights that are trained.

        Raises:
            UserError: There are no utterances, the score ``weighted`` has no weights, or the score
                is MaxSim, which is not a sum.
        """
        if n < 1:
            raise UserError("the dialogue has no utterance yet. Add one first.")
        if self.kind == "maxsim":
            raise UserError(
                "maxsim is not a sum over pairs, so no single vector represents the context."
            )
        pairs = torch.ones(n, n).triu(1)
        if self.kind == "weighted":
            if weights is None:
                raise UserError(
                    "the score weighted needs a head with learned weights. Choose such a head, or "
                    "another score, such as average."
                )
            by_pair, by_single = (torch.as_tensor(array, dtype=torch.float32) for array in weights)
            distance = torch.arange(n, 0, -1, device=by_pair.device).clamp(max=len(by_single)) - 1
            by_pair = by_pair.index_select(0, distance).index_select(1, distance)
            by_single = by_single.index_select(0, distance)
            pairs = by_pair * pairs.to(by_pair.device)
            return Coefficients(pairs, torch.zeros_like(by_single), by_single)
        no_pairs = self.kind in ("bi", "bi:both") or n == 1
        first = torch.full((n,), float(self.kind == "bi:both"))
        second = torch.full((n,), float(no_pairs or self.kind == "average+bi"))
        if no_pairs:
            pairs = torch.zeros(n, n)
        elif self.kind == "last":
            pairs[:, : -self.last] = 0
        elif self.kind == "neighbours":
            pairs = pairs - pairs.triu(2)
        return Coefficients(pairs, first, second)


def inverse_lengths(b1: Tensor, b2: Tensor) -> Tensor:
    """Return 1 / |B1_i + B2_j|, (..., n, c), for vectors (..., n, k) and (..., c, k).

    The value is 0 if the two vectors cancel each other.
    """
    squared_norms = b1.square().sum(dim=-1)[..., :, None] + b2.square().sum(dim=-1)[..., None, :]
    squared = squared_norms + 2 * b1 @ b2.mT
    is_nonzero = squared > _MIN_SQUARED_LENGTH * squared_norms
    return torch.where(is_nonzero, squared, 1.0).rsqrt() * is_nonzero


def sum_of_pairs(b1: Tensor, b2: Tensor, coefficients: Coefficients) -> Tensor:
    """Return the weighted sum of the directions of pairs and single utterances of contexts, (m, k).

    This is equation 3 without the candidate.

    Args:
        b1: role before-1, (m, n, k).
        b2: role before-2, (m, n, k).
        coefficients: weights of the terms; those of pairs are 0 for i >= j.
    """
    return _sum_directions(b1, b2, inverse_lengths(b1, b2), coefficients)


def _sum_directions(b1: Tensor, b2: Tensor, inverse: Tensor, coefficients: Coefficients) -> Tensor:
    scaled = inverse * coefficients.pairs
    of_b1 = scaled.sum(dim=-1) + coefficients.first / b1.norm(dim=-1).clamp(min=1e-12)
    of_b2 = scaled.sum(dim=-2) + coefficients.second / b2.norm(dim=-1).clamp(min=1e-12)
    total: Tensor = of_b1[..., None, :] @ b1 + of_b2[..., None, :] @ b2
    return total[..., 0, :]


def query_vectors(
    b1: Array, b2: Array, score: str | ContextScore, weights: DistanceWeights | None = None
) -> Array:
    """Return the vector of each context, (m, k) float32.

    Its inner products with candidates are their scores.

    Args:
        b1: role before-1 of each context's n utterances, in order, (m, n, k).
        b2: role before-2, (m, n, k).
        score: any score except ``maxsim``.
        weights: learned weights, for ``weighted``.

    Raises:
        UserError: As for ``ContextScore.coefficients``.
    """
    parsed = ContextScore.parse(score) if isinstance(score, str) else score
    first, second = map(_to_tensor, parsed.select_roles(b1, b2))
    return sum_of_pairs(first, second, parsed.coefficients(first.shape[1], weights)).numpy()


def maxsim(b1: Array, b2: Array, candidates: Array) -> Array:
    """Return MaxSim of contexts and candidates, (m, c) float32 (appendix A, algorithm 1).

    The cosines of a candidate with all pairs are visited in descending order. MaxSim is the mean of
    those whose pair contains an utterance that is in no pair before it.

    Args:
        b1: role before-1 of each context's n utterances, in order, (m, n, k).
        b2: role before-2, (m, n, k).
        candidates: role after of the candidates, (c, k), of unit length.
    """
    first, second, after = _to_tensor(b1), _to_tensor(b2), _to_tensor(candidates)
    m, n, _ = first.shape
    if n < 2:
        return _to_tensor(query_vectors(b1, b2, "bi")).matmul(after.mT).numpy()
    i, j = torch.triu_indices(n, n, 1)
    scores_per_context = torch.empty(m, len(after))
    block = max(1, _BLOCK // (len(i) * max(1, len(after))))
    for start in range(0, m, block):
        rows = slice(start, start + block)
        inverse = inverse_lengths(first[rows], second[rows])[:, i, j]
        scores = (first[rows] @ after.mT)[:, i] + (second[rows] @ after.mT)[:, j]
        scores_per_context[rows] = _mean_of_best(scores * inverse[..., None], i, j, n)
    return scores_per_context.numpy()


def _mean_of_best(scores: Tensor, i: Tensor, j: Tensor, n: int) -> Tensor:
    """Return the mean (m, c) of the scores (m, pairs, c) that algorithm 1 selects.

    In descending order, a pair contains a new utterance exactly if it is the best pair of that
    utterance. So the algorithm selects the best pair of each utterance, and each pair once.
    """
    values, best = [], []
    for utterance in range(n):
        pairs_of_utterance = torch.nonzero((i == utterance) | (j == utterance)).flatten()
        value, best_index = scores.index_select(1, pairs_of_utterance).max(dim=1)
        values.append(value)
        best.append(pairs_of_utterance[best_index])
    total, count = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for later in range(n):
        # Do not count a pair twice if it is also the best pair of an earlier utterance.
        is_counted = torch.zeros_like(count, dtype=torch.bool)
        for earlier in range(later):
            is_counted |= best[earlier] == best[later]
        total += values[later] * ~is_counted
        count += ~is_counted
    return total / count


def turn_scores(
    b1: Array,
    b2: Array,
    candidates: Array,
    score: str | ContextScore,
    weights: DistanceWeights | None = None,
) -> Array:
    """Return the scores (m, c) float32 of contexts and candidates, by any score.

    The arguments are those of ``query_vectors`` and ``maxsim``.
    """
    if str(score) == "maxsim":
        return maxsim(b1, b2, candidates)
    return np.asarray(query_vectors(b1, b2, score, weights) @ candidates.T)


def plan_scores(b1: Array, candidates: Array, goal: Array) -> Array:
    """Score how likely candidates are to lead from contexts to goals, (m, c) float32 (equation 4).

    The score is cos(B2_c, A_g) + 1/n sum over i of cos((B1_i + B2_c) / 2, A_g). Only products of
    two of the three roles are computed. Without a context, n = 0, the score is cos(B2_c, A_g), that
    of the bi-encoder (section 4.2.1).

    Args:
        b1: role before-1 of each context's utterances, (m, n, k).
        candidates: role before-2 of candidates, (c, k), or (m, c, k) if contexts have different
            candidates.
        goal: role after of the goals, (m, k), of unit length.
    """
    first, second, after = _to_tensor(b1), _to_tensor(candidates), _to_tensor(goal)[..., None]
    to_goal = second @ after  # (m, c, 1)
    alone = to_goal[..., 0] / second.norm(dim=-1).clamp(min=1e-12)
    if not first.shape[1]:
        return np.asarray(alone.numpy())
    inverse = inverse_lengths(first, second)
    return np.asarray((alone + ((first @ after + to_goal.mT) * inverse).mean(dim=-2)).numpy())


@dataclass(frozen=True, eq=False)
class ContextState:
    """The vectors of a dialogue up to its current turn; immutable, so that threads may share it.

    Adding an utterance needs only its two vectors and the lengths of its pairs with previous
    utterances. After every turn, the result is the same as from all utterances at once.

    Attributes:
        before: function that maps features of utterances to their roles.
        score: score of candidates.
        weights: learned weights, for ``weighted``.
        b1: role before-1 of the utterances, (n, k).
        b2: role before-2 of the utterances, (n, k).
        inverse: 1 / |B1_i + B2_j|, (n, n), for the roles that the score reads; only values with
            i < j are used.
    """

    before: RoleMap
    score: ContextScore
    weights: DistanceWeights | None = None
    b1: Array | None = None
    b2: Array | None = None
    inverse: Array | None = None

    def __len__(self) -> int:
        return 0 if self.b1 is None else len(self.b1)

    def add(self, vector: NDArray[Any]) -> ContextState:
        """Return the state after one more utterance, whose features are ``vector`` (d,)."""
        new1, new2 = self.before(np.asarray(vector, dtype=np.float32)[None])
        n = len(self)
        inverse = np.zeros((n + 1, n + 1), dtype=np.float32)
        if self.b1 is None or self.b2 is None or self.inverse is None:
            return replace(self, b1=new1, b2=new2, inverse=inverse)
        inverse[:n, :n] = self.inverse
        first, _ = self.score.select_roles(self.b1, self.b2)
        _, second = self.score.select_roles(new1, new2)
        inverse[:n, n:] = inverse_lengths(_to_tensor(first), _to_tensor(second)).numpy()
        b1, b2 = np.concatenate([self.b1, new1]), np.concatenate([self.b2, new2])
        return replace(self, b1=b1, b2=b2, inverse=inverse)

    @cached_property
    def query(self) -> Array:
        """The vector (k,) whose inner products with candidates are their scores.

        Raises:
            UserError: As for ``ContextScore.coefficients``.
        """
        coefficients = self.score.coefficients(len(self), self.weights)
        b1, b2, inverse = map(_to_tensor, self._require_vectors())
        b1, b2 = self.score.select_roles(b1, b2)
        return np.asarray(_sum_directions(b1, b2, inverse, coefficients).numpy())

    def scores(self, candidates: Array) -> Array:
        """Return the scores (c,) of candidates, whose role after is (c, k), as the next turn."""
        if self.score.kind == "maxsim":
            b1, b2, _ = self._require_vectors()
            return np.asarray(maxsim(b1[None], b2[None], candidates)[0])
        return np.asarray(candidates @ self.query)

    def plan(self, candidates: Array, goal: Array) -> Array:
        """Score how likely candidates are to lead to a goal, (c,); see ``plan_scores``.

        Args:
            candidates: role before-2 of the candidates, (c, k).
            goal: role after of the goal, (k,).
        """
        return np.asarray(plan_scores(self._require_vectors()[0][None], candidates, goal[None])[0])

    def _require_vectors(self) -> tuple[Array, Array, Array]:
        if self.b1 is None or self.b2 is None or self.inverse is None:
            raise UserError("the dialogue has no utterance yet. Add one first.")
        return self.b1, self.b2, self.inverse


def _to_tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
