"""Heads that map utterances to roles: windows, objectives, fitting and saving."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.heads import ignore_progress
from helpers.vectors import normalize

from llmcond.errors import UserError
from llmcond.heads import fit_recipe, load_head, load_recipe, save_head
from llmcond.heads.module import seeded
from llmcond.heads.pairs import DevScore, PairArrays
from llmcond.kinds.dialogue.heads import (
    FittedRoleHead,
    RoleHead,
    TurnArrays,
    c3l_targets,
    distinct_utterances,
    fit_turns,
    load_roles_head,
    query_vectors,
    windows,
)
from llmcond.metrics import METRICS

pytestmark = pytest.mark.usefixtures("one_thread")

D = 6
NAMES = ["ccl", "c3l-paper", "c3l-released", "rank", "weighted"]
FAST_SETTINGS = {"epochs": 2, "batch_size": 16, "precision": "float32"}


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


# -- windows -----------------------------------------------------------------------------------


def test_every_turn_with_enough_context_is_target():
    # Dialogues of 2, 3, 5 and 6 turns.
    starts = np.array([0, 2, 5, 10, 16])
    rows = windows(starts, 5, min_context=2)
    assert rows.tolist() == [
        [-1, -1, 2, 3, 4],
        [-1, -1, 5, 6, 7],
        [-1, 5, 6, 7, 8],
        [5, 6, 7, 8, 9],
        [-1, -1, 10, 11, 12],
        [-1, 10, 11, 12, 13],
        [10, 11, 12, 13, 14],
        [11, 12, 13, 14, 15],
    ]
    assert windows(starts, 3, min_context=1)[:3].tolist() == [[-1, 0, 1], [-1, 2, 3], [2, 3, 4]]
    assert windows(starts[:2], 5, min_context=2).shape == (0, 5)


def test_distinct_utterances_are_listed_once():
    used, rows = distinct_utterances(np.array([[-1, 7, 3], [7, 7, 9]]))
    assert used.tolist() == [3, 7, 9]
    assert rows.tolist() == [[-1, 1, 0], [1, 1, 2]]
    assert distinct_utterances(np.array([[4, 2]]))[1].tolist() == [[1, 0]]


# -- objectives --------------------------------------------------------------------------------


def test_pair_labels_match_released_code():
    def compute_labels(**changes):
        targets = c3l_targets(make_recipe("c3l-released", **changes).settings)
        return {(5 - 1 - i, 5 - 1 - j): float(targets[i, j]) for j in range(4) for i in range(j)}

    expected = {(2, 1): 1, (3, 1): 0.8, (4, 1): 0.6, (3, 2): 0.6, (4, 2): 0.4, (4, 3): 0.2}
    assert compute_labels() == pytest.approx(expected)
    paper = compute_labels(norm="paper")
    assert paper[2, 1] == pytest.approx(1)
    assert paper[4, 3] == pytest.approx(7 / 15)
    assert set(compute_labels(curved=False).values()) == {1.0}
    assert c3l_targets(make_recipe("c3l-released", window=3).settings)[0, 1] == 1


class RecordingGenerator:
    """A random generator that records its draws."""

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
        ("c3l-released", {}),
        ("c3l-released", {"curved": False, "map": "mlp", "hidden": 4}),
        ("c3l-released", {"hard_negatives": False, "window": 4}),
        ("c3l-released", {"directional_negatives": True}),
        ("c3l-paper", {"positives": "singles", "directional_negatives": True, "window": 4}),
        ("c3l-released", {"positives": "singles", "curved": False}),
        ("rank", {}),
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


def test_equal_texts_are_not_negatives():
    module = make_module("c3l-released")
    x = normalize(np.random.default_rng(0).normal(size=(3, D)))
    # With a single window, every random utterance comes from that window itself.
    window = torch.tensor([[-1, 0, 1, 0, 2]])
    loss = module.loss(torch.from_numpy(x), window, np.random.default_rng(0))
    plain = replace(module.settings, hard_negatives=False)
    module.settings = plain
    assert torch.equal(module.loss(torch.from_numpy(x), window, np.random.default_rng(0)), loss)
    # Both windows have the same target, so that there are no negatives.
    rank_module = make_module("rank")
    two_windows = torch.tensor([[-1, -1, 0, 1, 2], [-1, -1, 1, 0, 2]])
    assert rank_module.loss(torch.from_numpy(x), two_windows, np.random.default_rng(0)).item() == 0


@pytest.mark.parametrize("name", ["ccl", "c3l-released", "rank", "weighted"])
def test_windows_of_one_dialogue_are_not_negatives_of_each_other(name):
    module = make_module(name, window=3)
    x = torch.from_numpy(normalize(np.random.default_rng(0).normal(size=(8, D))))
    rows, groups = torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.tensor([0, 0])

    def get_loss(rows, groups):
        return module.loss(x, rows, np.random.default_rng(0), groups).item()

    if module.settings.objective in ("ccl", "c3l"):
        # The random utterances then have no effect, whichever they are.
        assert (
            get_loss(rows, groups) == module.loss(x, rows, np.random.default_rng(1), groups).item()
        )
    else:
        assert get_loss(rows, groups) == 0 < get_loss(rows, None)
    separate = torch.tensor([[0, 1, 2], [4, 5, 6]])
    assert get_loss(separate, torch.tensor([0, 1])) == get_loss(separate, None)
    assert get_loss(separate, torch.tensor([0, 0])) != get_loss(separate, None)


# -- fitting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("role_map", ["linear", "mlp"])
def test_roles_equal_features_at_start(name, role_map):
    module = seeded(lambda: RoleHead(make_recipe(name, map=role_map).settings, D), 0)[0]
    module.start_at_identity()
    head = FittedRoleHead("roles", RoleHead, module.freeze(), 0)
    x = make_dialogues().utterances
    for role in (*head.before(x), head.after(x)):
        np.testing.assert_allclose(role, normalize(x.astype(np.float32)), atol=1e-6)
        assert role.dtype == np.float32
    if head.weights is not None:
        np.testing.assert_allclose(head.weights.pairs, 1, atol=1e-4)
        assert (head.weights.singles < 0.05).all()


@pytest.mark.parametrize(("name", "role_map"), [("c3l-paper", "mlp"), ("weighted", "linear")])
def test_same_seed_gives_bit_identical_head(name, role_map):
    def fit(seed):
        recipe = make_recipe(name, map=role_map, dropout=0.2)
        return fit_turns(recipe, make_dialogues(), None, seed, ignore_progress, "cpu")

    first, repeated, other = fit(1), fit(1), fit(2)
    assert all((first.tensors[key] == repeated.tensors[key]).all() for key in first.tensors)
    assert any((first.tensors[key] != other.tensors[key]).any() for key in first.tensors)


def test_best_epoch_on_dev_is_selected():
    dev_scores, heads = iter([5.0, 3.0, 4.0, 6.0]), []

    def score_on_dev(head):
        heads.append(head)
        return next(dev_scores)

    recipe = make_recipe("rank", epochs=9, patience=2)
    head = fit_turns(
        recipe,
        make_dialogues(),
        DevScore(METRICS["average_rank"], score_on_dev),
        0,
        ignore_progress,
        "cpu",
    )
    assert head.fit.record["best_epoch"] == 2
    assert head.fit.record["selected_on"] == "dev"
    assert [entry["dev_score"] for entry in head.fit.record["curve"]] == [5.0, 3.0, 4.0, 6.0]
    for key, value in head.tensors.items():
        np.testing.assert_array_equal(value, heads[1].tensors[key])
    without_dev = fit_turns(recipe, make_dialogues(), None, 0, ignore_progress, "cpu")
    assert without_dev.fit.record["selected_on"] is None


def make_learnable_dialogues(seed, n=240):
    """Make dialogues whose last turn depends on the combination of the two turns before it."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(16, 16)))[0]
    first, second = np.unravel_index(rng.permutation(64)[np.arange(n) % 64], (8, 8))
    replies = normalize(np.random.default_rng(9).normal(size=(64, 16)))
    return TurnArrays(
        np.concatenate([basis, replies]),
        np.stack([first, 8 + second, 16 + 8 * first + second], axis=1).reshape(-1),
        np.arange(0, 3 * n + 1, 3),
    )


@pytest.mark.parametrize("name", ["c3l-released", "rank", "weighted"])
def test_fitting_reduces_loss(name):
    arrays = make_learnable_dialogues(0)
    recipe = make_recipe(name, epochs=8, batch_size=64, learning_rate=1e-2, dropout=0.0, window=3)
    head = fit_turns(recipe, arrays, None, 0, ignore_progress, "cpu")
    curve = [entry["loss"] for entry in head.fit.record["curve"]]
    assert curve[-1] < 0.6 * curve[0]


def test_loaded_head_gives_same_roles(tmp_path):
    arrays = make_dialogues()
    head = fit_turns(make_recipe("weighted", window=6), arrays, None, 3, ignore_progress, "cpu")
    save_head(head, tmp_path / "head", {"made": "here"})
    loaded, record = load_roles_head(tmp_path / "head")
    assert record["made"] == "here"
    assert (record["kind"], loaded.seed, loaded.score.kind) == ("roles", 3, "weighted")
    x = arrays.utterances
    for expected, actual in zip(head.before(x), loaded.before(x), strict=True):
        np.testing.assert_array_equal(expected, actual)
    np.testing.assert_array_equal(head.after(x), loaded.after(x))
    for expected, actual in zip(head.weights, loaded.weights, strict=True):
        assert expected.shape[0] == 5
        np.testing.assert_array_equal(expected, actual)
    with pytest.raises(UserError, match="a roles head; it ranks candidates and compares no pairs"):
        load_head(tmp_path / "head")


def test_dialogue_state_uses_score_of_head():
    arrays = make_dialogues()
    head = fit_turns(make_recipe("weighted"), arrays, None, 0, ignore_progress, "cpu")
    x = arrays.utterances[:4]
    b1, b2 = (role[None] for role in head.before(x))
    after = head.after(arrays.utterances)
    for scored_head in (head, head.with_score("last:2")):
        expected = query_vectors(b1, b2, scored_head.score, scored_head.weights)[0]
        np.testing.assert_allclose(scored_head.start(x).query, expected, atol=1e-5)
        np.testing.assert_allclose(scored_head.start(x).scores(after), after @ expected, atol=1e-5)
    with pytest.raises(UserError, match="the score weighted needs a head with learned weights"):
        fit_turns(make_recipe("none"), arrays, None, 0, ignore_progress).with_score("weighted")


def test_identity_head_returns_features(tmp_path):
    arrays = make_dialogues()
    head = fit_turns(make_recipe("none"), arrays, None, 0, ignore_progress)
    assert head.is_identity
    assert head.fit.notes == ("the head has no parameters, so nothing is fitted",)
    x = normalize(arrays.utterances.astype(np.float32))
    np.testing.assert_allclose(head.before(arrays.utterances)[0], x, atol=1e-6)
    save_head(head, tmp_path, {})
    assert load_roles_head(tmp_path)[0].is_identity


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("rank", {"score": "last:x"}, "unknown score 'last:x'"),
        ("rank", {"score": "weighted"}, "set objective to weighted, or another score"),
        ("rank", {"window": 2}, "'window' is 2: it must be at least 3"),
        ("rank", {"members": 2}, "set members to 1"),
        ("ccl", {"objective": "mse"}, "'objective' is 'mse'"),
    ],
)
def test_inconsistent_settings_are_rejected(name, changes, message):
    with pytest.raises(UserError, match=message):
        make_recipe(name, **changes)


def test_unsupported_fits_are_rejected():
    short = make_dialogues(lengths=(2, 2, 1))
    with pytest.raises(UserError, match="no dialogue of the training split has more than 2 utter"):
        fit_turns(make_recipe("rank"), short, None, 0, ignore_progress)
    assert (
        fit_turns(make_recipe("ccl"), short, None, 0, ignore_progress).fit.record["n_windows"] == 2
    )
    with pytest.raises(UserError, match="the head linear does not map utterances to roles"):
        fit_turns(load_recipe("linear"), short, None, 0, ignore_progress)
    pairs = PairArrays(np.ones((3, D)), np.ones((3, D)), np.array([0, 0.5, 1]))
    with pytest.raises(UserError, match="it cannot be fitted on rated pairs"):
        fit_recipe(make_recipe("rank"), pairs, None, 0, ignore_progress)
    with pytest.raises(UserError, match="no parameters, but the objective weighted"):
        fit_turns(
            make_recipe("none", objective="weighted"), make_dialogues(), None, 0, ignore_progress
        )
    head = fit_turns(make_recipe("rank"), make_dialogues(), None, 0, ignore_progress)
    with pytest.raises(UserError, match="have 4 dimensions, but this roles head was fitted on 6"):
        head.after(np.ones((2, 4)))


def test_progress_is_reported_after_every_step():
    calls, recipe = [], make_recipe("rank", batch_size=4)
    head = fit_turns(recipe, make_dialogues(), None, 0, lambda *args: calls.append(args), "cpu")
    steps = head.fit.record["steps_per_epoch"]
    assert steps > 1
    expected = [step / steps for step in range(1, 2 * steps + 1)]
    assert [args[0] for args in calls] == pytest.approx(expected)
