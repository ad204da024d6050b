"""Scores of a dialogue's next turn: one vector for all pairs, MaxSim, planning, and the state."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers.vectors import unit

from llmcond.errors import UserError
from llmcond.kinds.dialogue.turns import (
    ContextScore,
    ContextState,
    DistanceWeights,
    maxsim,
    plan_scores,
    query_vectors,
    sum_of_pairs,
    turn_scores,
)

pytestmark = pytest.mark.usefixtures("one_thread")

K = 8
SUMS = ["average", "last:1", "last:2", "last:30", "bi", "neighbours", "weighted"]


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(5)
    return DistanceWeights(rng.uniform(size=(4, 4)), rng.uniform(size=4))


def slowly(b1, b2, candidate, score, weights):
    """Equation 3 and its variants for one context and candidate, pair by pair, in float64."""
    b1, b2, n = b1.astype(np.float64), b2.astype(np.float64), len(b1)

    def near(i):
        return min(n - i, 4) - 1

    total = 0.0
    for j in range(n):
        if score == "bi" or n == 1:
            total += unit(b2[j]) @ candidate
        elif score == "weighted":
            total += weights.singles[near(j)] * unit(b2[j]) @ candidate
        for i in range(j):
            cosine = unit((b1[i] + b2[j]) / 2) @ candidate
            if score == "weighted":
                total += weights.pairs[near(i), near(j)] * cosine
            elif (
                score == "average"
                or (score.startswith("last") and j >= n - int(score[5:]))
                or (score == "neighbours" and i == j - 1)
            ):
                total += cosine
    return total


@pytest.mark.parametrize("score", SUMS)
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_one_vector_gives_the_sum_over_pairs(score, n, weights):
    b1, b2, after = drawn(3, n, K), 2 * drawn(3, n, K, seed=1), unit(drawn(5, K, seed=2))
    if score == "weighted" and n == 1:
        expected = [[weights.singles[0] * unit(b2[m, 0]) @ a for a in after] for m in range(3)]
    else:
        expected = [[slowly(b1[m], b2[m], a, score, weights) for a in after] for m in range(3)]
    found = query_vectors(b1, b2, score, weights)
    assert found.shape == (3, K)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found @ after.T, expected, atol=1e-5)
    np.testing.assert_array_equal(turn_scores(b1, b2, after, score, weights), found @ after.T)


def algorithm_1(scores, n):
    """MaxSim as the paper's appendix A tells it, for a candidate's score of each pair."""
    used, total, count = set(), 0.0, 0
    for pair in sorted(scores, key=scores.get, reverse=True):
        if not set(pair) <= used:
            used |= set(pair)
            total, count = total + scores[pair], count + 1
    assert len(used) == n
    return total / count


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("block", [1, 2**22])
def test_maxsim_is_algorithm_1(monkeypatch, n, block):
    monkeypatch.setattr("llmcond.kinds.dialogue.turns._BLOCK", block)
    b1, b2, after = drawn(3, n, K), drawn(3, n, K, seed=1), unit(drawn(7, K, seed=2))
    expected = [
        [
            algorithm_1(
                {(i, j): unit(b1[m, i] + b2[m, j]) @ a for j in range(n) for i in range(j)}, n
            )
            for a in after
        ]
        for m in range(3)
    ]
    np.testing.assert_allclose(maxsim(b1, b2, after), expected, atol=1e-5)
    np.testing.assert_array_equal(turn_scores(b1, b2, after, "maxsim"), maxsim(b1, b2, after))


@pytest.mark.parametrize("score", [*SUMS, "maxsim"])
def test_a_state_is_at_every_turn_what_a_recomputation_gives(score, weights):
    vectors, after = drawn(20, K), unit(drawn(9, K, seed=2))
    matrix = drawn(2, K, K, seed=3)

    def before(x):
        return x @ matrix[0], x @ matrix[1]

    state = empty = ContextState(before, ContextScore.parse(score), weights)
    for n in range(1, 21):
        state = state.add(vectors[n - 1])
        b1, b2 = before(vectors[None, :n])
        expected = turn_scores(b1, b2, after, score, weights)[0]
        np.testing.assert_allclose(state.scores(after), expected, atol=1e-5 * n)
        assert len(state) == n
    assert len(empty) == 0


def test_states_are_values_that_threads_share():
    vectors, after = drawn(40, K), unit(drawn(5, K, seed=1))
    start = ContextState(lambda x: (x, x), ContextScore("average")).add(vectors[0]).add(vectors[1])
    kept = start.scores(after)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda vector: start.add(vector).scores(after), vectors))
    for vector, own in zip(vectors, found, strict=True):
        np.testing.assert_array_equal(own, start.add(vector).scores(after))
    np.testing.assert_array_equal(start.scores(after), kept)


def test_plans_are_equation_4():
    b1, own, goal = drawn(3, 4, K), drawn(3, 6, K, seed=1), unit(drawn(3, K, seed=2))
    expected = np.array(
        [
            [
                unit(c) @ goal[m] + np.mean([unit((u + c) / 2) @ goal[m] for u in b1[m]])
                for c in own[m]
            ]
            for m in range(3)
        ]
    )
    np.testing.assert_allclose(plan_scores(b1, own, goal), expected, atol=1e-5)
    # Candidates that all contexts share, and a state's own.
    shared = plan_scores(b1, own[0], goal)
    np.testing.assert_allclose(shared[0], expected[0], atol=1e-5)
    state = ContextState(lambda x: (x, x), ContextScore("average"))
    for vector in b1[0]:
        state = state.add(vector)
    np.testing.assert_allclose(state.plan(own[0], goal[0]), expected[0], atol=1e-5)


def test_vectors_that_cancel_each_other_weigh_nothing():
    b1 = drawn(1, 3, K)
    b2 = drawn(1, 3, K, seed=1)
    b2[0, 1] = -b1[0, 0]
    expected = unit(b1[0, 0] + b2[0, 2]) + unit(b1[0, 1] + b2[0, 2])
    np.testing.assert_allclose(query_vectors(b1, b2, "average")[0], expected, atol=1e-5)
    np.testing.assert_array_equal(query_vectors(0 * b1, 0 * b2, "average"), np.zeros((1, K)))
    given = [torch.from_numpy(own).requires_grad_() for own in (b1, b2)]
    sum_of_pairs(*given, torch.ones(3, 3).triu(1), torch.zeros(3)).sum().backward()
    assert all(bool(own.grad.isfinite().all()) for own in given)


@pytest.mark.parametrize(
    ("score", "told"),
    [
        ("last", r"unknown score 'last'. Scores: average, last:L \(such as last:2\), bi"),
        ("last:0", "unknown score 'last:0'"),
        ("weighted", "needs a head with learned weights"),
        ("maxsim", "maxsim is not a sum over pairs"),
    ],
)
def test_what_has_no_vector_is_told(score, told):
    with pytest.raises(UserError, match=told):
        query_vectors(drawn(1, 2, K), drawn(1, 2, K), score)


def test_an_empty_dialogue_has_no_reply():
    empty = ContextState(lambda x: (x, x), ContextScore("average"))
    for ask in (lambda: empty.query, lambda: empty.plan(drawn(2, K), drawn(K))):
        with pytest.raises(UserError, match="no utterance yet"):
            ask()
    assert str(ContextScore.parse("last:12")) == "last:12"
