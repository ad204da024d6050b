"""Heads that map utterances to roles: objectives, fitting, and the scores of the next turn."""

import numpy as np
import pytest
import torch
from helpers.heads import ignore_progress
from helpers.vectors import normalize

from llmcond.base.errors import UserError
from llmcond.heads import fit_recipe, load_head, load_recipe, save_head
from llmcond.heads.module import seeded
from llmcond.heads.numpy_heads import PairArrays
from llmcond.heads.storage import load_fitted
from llmcond.kinds.dialogue.heads import (
    DistanceWeights,
    FittedRoleHead,
    RoleHead,
    TurnArrays,
    distinct_utterances,
    fit_turns,
    maxsim,
    plan_scores,
    query_vectors,
    windows,
)

pytestmark = pytest.mark.usefixtures("one_thread")

D, K = 6, 8
FAST_SETTINGS = {"epochs": 2, "batch_size": 16, "precision": "float32"}
PAIR_SUMS = ["average", "last:1", "last:2", "last:30", "bi", "neighbours", "weighted"]
PAIR_SUMS += ["average+bi", "average:b1", "average:b2", "bi:b1", "bi:both"]


def make_recipe(name, **changes):
    return load_recipe(name, "dialogue").with_settings({**FAST_SETTINGS, **changes}, "test")


def make_dialogues(seed=0, n=30, lengths=(2, 3, 5, 8, 1, 12)):
    """Make dialogues of few texts, so that equal texts occur in one batch."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *lengths])
    return TurnArrays(
        rng.normal(size=(n, D)).astype(np.float16), rng.integers(n, size=starts[-1]), starts
    )


def make_module(name, seed=0, **changes):
    """Make a float64 module whose parameters differ from their initial values."""

    def build():
        module = RoleHead(make_recipe(name, dropout=0.0, **changes).settings, D)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return module.double()

    return seeded(build, seed)[0]


# -- windows and objectives --------------------------------------------------------------------


def test_every_turn_with_enough_context_is_target():
    # Dialogues of 2, 3 and 6 turns.
    starts = np.array([0, 2, 5, 11])
    assert windows(starts, 5, min_context=2).tolist() == [
        [-1, -1, 2, 3, 4],
        [-1, -1, 5, 6, 7],
        [-1, 5, 6, 7, 8],
        [5, 6, 7, 8, 9],
        [6, 7, 8, 9, 10],
    ]
    assert windows(starts, 3, min_context=1)[:3].tolist() == [[-1, 0, 1], [-1, 2, 3], [2, 3, 4]]
    assert windows(starts[:2], 5, min_context=2).shape == (0, 5)


class RecordingGenerator:
    def __init__(self, seed):
        self._rng, self.draws = np.random.default_rng(seed), []

    def integers(self, *args, **kwargs):
        self.draws.append(self._rng.integers(*args, **kwargs))
        return self.draws[-1]


def compute_roles(module, x):
    """Compute the three roles in float64 by the formulas of linear maps or MLPs."""
    p = {name: value.detach().numpy() for name, value in module.named_parameters()}

    def role(name):
        if module.settings.map == "linear":
            return x @ p[name].T + p[f"{name}_bias"]
        hidden = torch.from_numpy(x * D**0.5 @ p[f"{name}_hidden"].T + p[f"{name}_hidden_bias"])
        return x + torch.nn.functional.gelu(hidden).numpy() @ p[name].T + p[f"{name}_bias"]

    return role("b1"), role("b2"), normalize(role("a"))


def compute_ccl_loss(module, roles, rows, others):
    _, b2, after = roles
    w, errors = rows.shape[1], []
    for m, (*context, target) in enumerate(rows.tolist()):
        for j, u in enumerate(context):
            if u < 0:
                continue
            errors.append(normalize(b2[u]) @ after[target] - (1 - (w - 1 - j) / w))
            if u != target:
                errors.append(normalize(b2[target]) @ after[u])
            if others[0][m][j] not in (*context, target):
                errors.append(normalize(b2[u]) @ after[others[0][m][j]])
    return np.mean(np.square(errors))


def compute_c3l_loss(module, roles, rows, others):
    b1, b2, after = roles
    settings, w, errors = module.settings, rows.shape[1], []
    top, low = 2 - 3 / w, 1 / w if settings.norm == "paper" else 2 - (2 * w - 3) / w
    for m, (*context, target) in enumerate(rows.tolist()):
        if settings.directional_negatives:
            errors += [
                normalize(b1[context[j]] + b2[target]) @ after[context[i]]
                for i, j in list_pairs(context)
                if len({context[i], context[j], target}) == 3
            ]
        if settings.positives == "singles":
            for j, u in enumerate(context):
                label = 1 - (w - 1 - j) / w if settings.curved else 1
                for role in (b1, b2):
                    errors += [normalize(role[u]) @ after[target] - label] if u >= 0 else []
        for i, j in list_pairs(context) if settings.positives == "pairs" else ():
            s = 2 - (w - 1 - i + w - 1 - j) / w
            label = 1 / w + (1 - 1 / w) * (s - low) / (top - low) if settings.curved else 1
            errors.append(normalize(b1[context[i]] + b2[context[j]]) @ after[target] - label)
        for j, u in enumerate(context):
            if u < 0 or not settings.hard_negatives:
                continue
            r1, r2 = others[0][m][j], others[1][m][j]
            valid1, valid2 = (r not in (*context, target) for r in (r1, r2))
            errors += [normalize(b1[u] + b2[r2]) @ after[target]] if valid2 else []
            errors += [normalize(b1[r1] + b2[u]) @ after[target]] if valid1 else []
            errors += [normalize(b1[r1] + b2[r2]) @ after[target]] if valid1 and valid2 else []
    return np.mean(np.square(errors))


def compute_rank_loss(module, roles, rows, others):
    b1, b2, after = roles
    n, entropies, is_weighted = rows.shape[1] - 1, [], module.settings.objective == "weighted"
    b1 = b2 if module.settings.score == "average:b2" else b1
    for m, (*context, target) in enumerate(rows.tolist()):
        pairs = [normalize(b1[context[i]] + b2[context[j]]) for i, j in list_pairs(context)]
        query = np.mean(pairs, axis=0)
        if is_weighted:
            raw = [module.pair_weights[n - i - 1, n - j - 1].item() for i, j in list_pairs(context)]
            query = np.logaddexp(0, 10 * np.array(raw) + 0.5413) @ pairs
            for j, u in enumerate(context):
                weight = np.logaddexp(0, 10 * module.single_weights[n - j - 1].item() - 3)
                query += weight * normalize(b2[u]) if u >= 0 else 0
            query = normalize(query)
        negatives = [k for k in range(len(rows)) if k == m or rows[k, -1] != target]
        scores = after[rows[negatives, -1]] @ query / module.settings.temperature
        entropies.append(
            np.log(np.exp(scores - after[target] @ query / module.settings.temperature).sum())
        )
    return np.mean(entropies)


def list_pairs(context):
    """List the pairs i < j of a context's utterances, without padding."""
    return [
        (i, j) for j in range(len(context)) for i in range(j) if min(context[i], context[j]) >= 0
    ]


def compute_loss(module, x, rows, draws):
    """Compute the loss of each objective, window by window, in float64."""
    pool = [u for row in rows for u in row[:-1] if u >= 0]
    if module.settings.objective == "ccl":
        pool = rows[:, -1]
    others = [[[pool[p] for p in row] for row in draw] for draw in draws]
    compute = {"ccl": compute_ccl_loss, "c3l": compute_c3l_loss}.get(
        module.settings.objective, compute_rank_loss
    )
    return compute(module, compute_roles(module, x), rows, others)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ccl", {}),
        ("c3l-paper", {}),
        ("c3l-released", {"curved": False, "map": "mlp", "hidden": 4}),
        ("c3l-released", {"hard_negatives": False, "window": 4}),
        ("c3l-paper", {"positives": "singles", "directional_negatives": True, "window": 4}),
        ("rank", {"map": "mlp", "temperature": 0.2, "score": "maxsim"}),
        ("rank", {"score": "average:b2"}),
        ("weighted", {"window": 6}),
    ],
)
def test_loss_matches_formula(name, changes):
    module, arrays = make_module(name, **changes), make_dialogues()
    settings = module.settings
    positions = windows(arrays.starts, settings.window, 2)
    used, rows = distinct_utterances(np.append(arrays.turns, -1)[positions])
    x = normalize(arrays.utterances[used].astype(np.float64))
    generator = RecordingGenerator(3)
    loss = module.loss(torch.from_numpy(x), torch.from_numpy(rows), generator)
    expected = compute_loss(module, x, rows, generator.draws)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    loss.backward()
    without_gradient = {
        key for key, parameter in module.named_parameters() if parameter.grad is None
    }
    is_untrained = name == "ccl" or changes.get("score") == "average:b2"
    assert without_gradient == ({"b1", "b1_bias"} if is_untrained else set())
    # Distributed training waits for the gradients of all other parameters.
    frozen = {key for key, value in module.named_parameters() if not value.requires_grad}
    assert frozen == without_gradient


@pytest.mark.parametrize("name", ["ccl", "c3l-released", "rank"])
def test_windows_of_one_dialogue_are_not_negatives_of_each_other(name):
    module = make_module(name, window=3)
    x = torch.from_numpy(normalize(np.random.default_rng(0).normal(size=(8, D))))
    windows_of_one = torch.tensor([[0, 1, 2], [4, 5, 6]])

    def compute_loss(dialogues, seed=0):
        rng = np.random.default_rng(seed)
        return module.loss(x, windows_of_one, rng, dialogues).item()

    same_dialogue, different = torch.tensor([0, 0]), torch.tensor([0, 1])
    assert compute_loss(different) == compute_loss(None) != compute_loss(same_dialogue)
    # The random utterances have no effect, and a single target has no entropy.
    assert compute_loss(same_dialogue) == compute_loss(same_dialogue, seed=1)
    assert (compute_loss(same_dialogue) == 0) == (name == "rank")


# -- fitting -----------------------------------------------------------------------------------


def test_loaded_head_gives_same_roles_and_scores(tmp_path):
    arrays = make_dialogues()
    head = fit_turns(make_recipe("weighted", window=6), arrays, None, 3, ignore_progress, "cpu")
    save_head(head, tmp_path / "head", {"made": "here"})
    loaded, record = load_fitted(tmp_path / "head", FittedRoleHead)
    assert record["made"] == "here"
    assert (record["kind"], loaded.seed, loaded.score.kind) == ("roles", 3, "weighted")
    x = arrays.utterances
    b1, b2 = head.before(x)
    after = head.after(x)
    np.testing.assert_array_equal(loaded.before(x), (b1, b2))
    np.testing.assert_array_equal(loaded.after(x), after)
    assert loaded.weights.singles.shape == (5,)
    with pytest.raises(UserError, match="a roles head; it ranks candidates and compares no pairs"):
        load_head(tmp_path / "head")


def fit_quickly(name, arrays, **changes):
    return fit_turns(make_recipe(name, **changes), arrays, None, 0, ignore_progress)


def test_invalid_settings_and_fits_are_rejected():
    short = make_dialogues(lengths=(2, 2, 1))
    assert fit_quickly("ccl", short).fit.record["n_windows"] == 2
    pairs = PairArrays(np.ones((3, D)), np.ones((3, D)), np.array([0, 0.5, 1]))
    for call, message in (
        (lambda: make_recipe("rank", score="weighted"), "set objective to weighted, or another"),
        (lambda: fit_quickly("rank", short), "no dialogue .* has more than 2 utterances"),
        (
            lambda: fit_recipe(make_recipe("rank"), pairs, None, 0, ignore_progress),
            "it cannot be fitted on rated pairs",
        ),
        (
            lambda: fit_quickly("none", short).with_score("weighted"),
            "needs a head with learned weights",
        ),
    ):
        with pytest.raises(UserError, match=message):
            call()


# -- scores of the next turn -------------------------------------------------------------------


def random_vectors(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(5)
    return DistanceWeights(rng.uniform(size=(4, 4)), rng.uniform(size=4))


def score_by_pairs(b1, b2, candidate, score, weights):
    """Compute equation 3 and its variants for one candidate, pair by pair, in float64."""
    n, (kind, _, option) = len(b1), score.partition(":")
    first, second = (b2 if option == "b2" else b1), (b1 if option == "b1" else b2)
    if kind == "bi" or (n == 1 and kind != "weighted"):
        roles = [b1, b2] if option == "both" else [second]
        return sum((normalize(role) @ candidate).sum() for role in roles)
    distances = [min(n - i, 4) - 1 for i in range(n)]
    singles = normalize(second) @ candidate
    total = {"weighted": weights.singles[distances] @ singles, "average+bi": singles.sum()}
    total = total.get(kind, 0.0)
    for i, j in list_pairs(range(n)):
        weight = {
            "last": j >= n - int(option or 0) if kind == "last" else 0,
            "neighbours": j - i == 1,
            "weighted": weights.pairs[distances[i], distances[j]],
        }.get(kind, 1)
        total += weight * (normalize(first[i] + second[j]) @ candidate)
    return total


@pytest.mark.parametrize("score", PAIR_SUMS)
def test_query_vector_gives_sum_over_pairs(score, weights):
    after = normalize(random_vectors(5, K, seed=2))
    for n in (1, 2, 3, 7):
        b1, b2 = random_vectors(3, n, K), 2 * random_vectors(3, n, K, seed=1)
        expected = [
            [score_by_pairs(b1[m], b2[m], a, score, weights) for a in after] for m in range(3)
        ]
        query = query_vectors(b1, b2, score, weights)
        assert query.dtype == np.float32
        np.testing.assert_allclose(query @ after.T, expected, atol=1e-5)


def run_algorithm_1(scores, n):
    """Compute MaxSim from one candidate's score of each pair, as in the paper's appendix A."""
    used, total, count = set(), 0.0, 0
    for pair in sorted(scores, key=scores.get, reverse=True):
        if not set(pair) <= used:
            used |= set(pair)
            total, count = total + scores[pair], count + 1
    assert len(used) == n
    return total / count


@pytest.mark.parametrize("block", [1, 2**22])
def test_maxsim_matches_algorithm_1(monkeypatch, block):
    monkeypatch.setattr("llmcond.kinds.dialogue.heads._MAXSIM_VALUES", block)
    after = normalize(random_vectors(7, K, seed=2))
    for n in (2, 3, 6):
        b1, b2 = random_vectors(3, n, K), random_vectors(3, n, K, seed=1)
        pairs = [(i, j) for j in range(n) for i in range(j)]
        expected = [
            [
                run_algorithm_1({(i, j): normalize(b1[m, i] + b2[m, j]) @ a for i, j in pairs}, n)
                for a in after
            ]
            for m in range(3)
        ]
        np.testing.assert_allclose(maxsim(b1, b2, after), expected, atol=1e-5)


def test_plan_scores_match_equation_4():
    b1, candidates = random_vectors(3, 4, K), random_vectors(3, 6, K, seed=1)
    goal = normalize(random_vectors(3, K, seed=2))
    alone = np.array([[normalize(c) @ goal[m] for c in candidates[m]] for m in range(3)])
    pairs = [[np.mean(normalize(b1[m] + c) @ goal[m]) for c in candidates[m]] for m in range(3)]
    expected = alone + pairs
    np.testing.assert_allclose(plan_scores(b1, candidates, goal), expected, atol=1e-5)
    np.testing.assert_allclose(plan_scores(b1[:, :0], candidates, goal), alone, atol=1e-5)
