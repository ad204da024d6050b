"""Scores of the next turn: query vectors, MaxSim, planning and the context state."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers.vectors import normalize

from llmcond.errors import UserError
from llmcond.kinds.dialogue.heads import (
    Coefficients,
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
PAIR_SUMS = ["average", "last:1", "last:2", "last:30", "bi", "neighbours", "weighted"]
PAIR_SUMS += ["average+bi", "average:b1", "average:b2", "bi:b1", "bi:both"]


def random_vectors(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(5)
    return DistanceWeights(rng.uniform(size=(4, 4)), rng.uniform(size=4))


def score_by_pairs(b1, b2, candidate, score, weights):
    """Compute equation 3 and its variants for one candidate, pair by pair, in float64."""
    b1, b2, n = b1.astype(np.float64), b2.astype(np.float64), len(b1)
    b1, b2 = (b2 if score.endswith(":b2") else b1), (b1 if score.endswith(":b1") else b2)

    def distance_index(i):
        return min(n - i, 4) - 1

    total = 0.0
    for j in range(n):
        if score in ("bi", "bi:b1", "bi:both", "average+bi") or n == 1:
            total += normalize(b2[j]) @ candidate
            total += normalize(b1[j]) @ candidate * (score == "bi:both")
        elif score == "weighted":
            total += weights.singles[distance_index(j)] * normalize(b2[j]) @ candidate
        for i in range(j):
            cosine = normalize((b1[i] + b2[j]) / 2) @ candidate
            if score == "weighted":
                total += weights.pairs[distance_index(i), distance_index(j)] * cosine
            elif (
                score in ("average", "average+bi", "average:b1", "average:b2")
                or (score.startswith("last") and j >= n - int(score[5:]))
                or (score == "neighbours" and i == j - 1)
            ):
                total += cosine
    return total


@pytest.mark.parametrize("score", PAIR_SUMS)
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_query_vector_gives_sum_over_pairs(score, n, weights):
    b1, b2, after = (
        random_vectors(3, n, K),
        2 * random_vectors(3, n, K, seed=1),
        normalize(random_vectors(5, K, seed=2)),
    )
    if score == "weighted" and n == 1:
        expected = [[weights.singles[0] * normalize(b2[m, 0]) @ a for a in after] for m in range(3)]
    else:
        expected = [
            [score_by_pairs(b1[m], b2[m], a, score, weights) for a in after] for m in range(3)
        ]
    query = query_vectors(b1, b2, score, weights)
    assert query.shape == (3, K)
    assert query.dtype == np.float32
    np.testing.assert_allclose(query @ after.T, expected, atol=1e-5)
    np.testing.assert_array_equal(turn_scores(b1, b2, after, score, weights), query @ after.T)


def run_algorithm_1(scores, n):
    """Compute MaxSim from one candidate's score of each pair, as in the paper's appendix A."""
    used, total, count = set(), 0.0, 0
    for pair in sorted(scores, key=scores.get, reverse=True):
        if not set(pair) <= used:
            used |= set(pair)
            total, count = total + scores[pair], count + 1
    assert len(used) == n
    return total / count


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("block", [1, 2**22])
def test_maxsim_matches_algorithm_1(monkeypatch, n, block):
    monkeypatch.setattr("llmcond.kinds.dialogue.heads._BLOCK", block)
    b1, b2, after = (
        random_vectors(3, n, K),
        random_vectors(3, n, K, seed=1),
        normalize(random_vectors(7, K, seed=2)),
    )
    expected = [
        [
            run_algorithm_1(
                {(i, j): normalize(b1[m, i] + b2[m, j]) @ a for j in range(n) for i in range(j)}, n
            )
            for a in after
        ]
        for m in range(3)
    ]
    np.testing.assert_allclose(maxsim(b1, b2, after), expected, atol=1e-5)
    np.testing.assert_array_equal(turn_scores(b1, b2, after, "maxsim"), maxsim(b1, b2, after))


@pytest.mark.parametrize("score", [*PAIR_SUMS, "maxsim"])
def test_state_matches_recomputation_at_every_turn(score, weights):
    vectors, after = random_vectors(20, K), normalize(random_vectors(9, K, seed=2))
    matrix = random_vectors(2, K, K, seed=3)

    def map_roles(x):
        return x @ matrix[0], x @ matrix[1]

    state = empty = ContextState(map_roles, ContextScore.parse(score), weights)
    for n in range(1, 21):
        state = state.add(vectors[n - 1])
        b1, b2 = map_roles(vectors[None, :n])
        expected = turn_scores(b1, b2, after, score, weights)[0]
        np.testing.assert_allclose(state.scores(after), expected, atol=1e-5 * n)
        assert len(state) == n
    assert len(empty) == 0


def test_states_are_immutable_and_shared_by_threads():
    vectors, after = random_vectors(40, K), normalize(random_vectors(5, K, seed=1))
    start = ContextState(lambda x: (x, x), ContextScore("average")).add(vectors[0]).add(vectors[1])
    before = start.scores(after)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda vector: start.add(vector).scores(after), vectors))
    for vector, scores in zip(vectors, results, strict=True):
        np.testing.assert_array_equal(scores, start.add(vector).scores(after))
    np.testing.assert_array_equal(start.scores(after), before)


def test_plan_scores_match_equation_4():
    b1, candidates, goal = (
        random_vectors(3, 4, K),
        random_vectors(3, 6, K, seed=1),
        normalize(random_vectors(3, K, seed=2)),
    )
    expected = np.array(
        [
            [
                normalize(c) @ goal[m] + np.mean([normalize((u + c) / 2) @ goal[m] for u in b1[m]])
                for c in candidates[m]
            ]
            for m in range(3)
        ]
    )
    np.testing.assert_allclose(plan_scores(b1, candidates, goal), expected, atol=1e-5)
    # All contexts may share the candidates, and a state takes its candidates as well.
    shared = plan_scores(b1, candidates[0], goal)
    np.testing.assert_allclose(shared[0], expected[0], atol=1e-5)
    without_context = plan_scores(b1[:, :0], candidates, goal)
    alone = [[normalize(c) @ goal[m] for c in candidates[m]] for m in range(3)]
    np.testing.assert_allclose(without_context, alone, atol=1e-5)
    # Plans read both roles, whatever the roles in the score of next turns.
    state = ContextState(lambda x: (x, -x), ContextScore.parse("average:b2"))
    for vector in b1[0]:
        state = state.add(vector)
    np.testing.assert_allclose(state.plan(candidates[0], goal[0]), expected[0], atol=1e-5)


def test_opposite_vectors_have_no_weight():
    b1 = random_vectors(1, 3, K)
    b2 = random_vectors(1, 3, K, seed=1)
    b2[0, 1] = -b1[0, 0]
    expected = normalize(b1[0, 0] + b2[0, 2]) + normalize(b1[0, 1] + b2[0, 2])
    np.testing.assert_allclose(query_vectors(b1, b2, "average")[0], expected, atol=1e-5)
    np.testing.assert_array_equal(query_vectors(0 * b1, 0 * b2, "average"), np.zeros((1, K)))
    roles = [torch.from_numpy(role).requires_grad_() for role in (b1, b2)]
    pairs = Coefficients(torch.ones(3, 3).triu(1), torch.zeros(3), torch.zeros(3))
    sum_of_pairs(*roles, pairs).sum().backward()
    assert all(bool(role.grad.isfinite().all()) for role in roles)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("last", r"unknown score 'last'. Scores: last:L \(such as last:2\), average, "),
        ("average:both", "unknown score 'average:both'"),
        ("last:2:b1", "unknown score 'last:2:b1'"),
        ("last:0", "unknown score 'last:0'"),
        ("weighted", "needs a head with learned weights"),
        ("maxsim", "maxsim is not a sum over pairs"),
    ],
)
def test_score_without_query_vector_is_rejected(score, message):
    with pytest.raises(UserError, match=message):
        query_vectors(random_vectors(1, 2, K), random_vectors(1, 2, K), score)


def test_empty_dialogue_is_rejected():
    empty = ContextState(lambda x: (x, x), ContextScore("average"))
    for compute in (
        lambda: empty.query,
        lambda: empty.plan(random_vectors(2, K), random_vectors(K)),
    ):
        with pytest.raises(UserError, match="no utterance yet"):
            compute()
    assert str(ContextScore.parse("last:12")) == "last:12"
