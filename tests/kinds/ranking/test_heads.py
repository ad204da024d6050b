"""Heads that map queries and candidates: equations, fitting, saving and binding to graphs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.heads import ignore_progress
from helpers.heads import make_recipe as pair_recipe
from helpers.vectors import normalize

from llmcond.arrays import DenseMatrix
from llmcond.errors import LlmcondError, UserError
from llmcond.files import read_json, write_json
from llmcond.heads import fit_recipe, load_head, load_recipe, save_head
from llmcond.heads.module import members_of, seeded
from llmcond.heads.pairs import DevScore
from llmcond.kinds.ranking import heads as query_maps
from llmcond.kinds.ranking.graph import KnownTriples
from llmcond.kinds.ranking.heads import (
    Contrast,
    QueryArrays,
    QueryFeatures,
    fit_queries,
    load_query_head,
)
from llmcond.metrics import METRICS

pytestmark = pytest.mark.usefixtures("one_thread")

N, R, D = 30, 3, 6
JOINT = ["linear", "mlp"]
SEPARATE = ["hadamard", "concat", "hypernet", "hypernet-full", "matrices"]
FAST_SETTINGS = {"epochs": 2, "batch_size": 64, "patience": 9, "precision": "float32"}
SIZES = {
    "linear": {"dim": 4},
    "mlp": {"dim": 6, "hidden": 5},
    "hadamard": {},
    "concat": {"dim": 4},
    "hadamard-paper": {},
    "concat-paper": {"dim": 4},
    "hypernet": {"dim": 4, "rank": 2},
    "hypernet-full": {"dim": 4},
    "matrices": {"dim": 4},
}


def make_arrays(seed=0, m=40, joint=False):
    """Make a small graph with loops, an entity without links, and features of any norm."""
    rng = np.random.default_rng(seed)
    head, tail = rng.integers(N - 1, size=(2, m))
    triples = np.stack([head, rng.integers(R, size=m), tail], axis=1).astype(np.int32)
    triples[0] = (4, 1, 4)
    both = np.concatenate([triples, triples[:, ::-1] + [0, R, 0]])
    keys = np.unique(both[:, 0] * 2 * R + both[:, 1])
    return QueryArrays(
        entities=rng.normal(size=(N, D)).astype(np.float16),
        triples=triples,
        n_relations=R,
        known=KnownTriples(both, N),
        relations=rng.normal(size=(2 * R, 5)).astype(np.float16),
        joint=rng.normal(size=(len(keys), D)).astype(np.float16) if joint else None,
        joint_input_keys=keys if joint else None,
    )


def make_recipe(name, **changes):
    return load_recipe(name, "kgc").with_settings(
        {**FAST_SETTINGS, **SIZES[name], **changes}, "test"
    )


def fit(name, arrays, score_on_dev=None, seed=0, **changes):
    dev = score_on_dev and DevScore(METRICS["mrr"], score_on_dev)
    return fit_queries(make_recipe(name, **changes), arrays, dev, seed, ignore_progress, "cpu")


def make_mrr_scorer(arrays, rows=None):
    """Make a function that computes a head's filtered mean reciprocal rank by dense scores."""
    rows = arrays.queries() if rows is None else rows

    def score(head):
        scores = head.queries(rows[:, 0], rows[:, 1]) @ head.candidates()[:].T
        known = arrays.known.mask(rows[:, 0], rows[:, 1], np.arange(scores.shape[1]))
        answer_scores = scores[np.arange(len(rows)), rows[:, 2]][:, None]
        return float((1 / (1 + ((scores > answer_scores) & ~known).sum(axis=1))).mean())

    return score


# -- features of a graph ------------------------------------------------------------------------


def list_neighbours(arrays, entity, drop=None):
    """List the distinct other ends of an entity's triples."""
    ends = {int(t) for h, _, t in arrays.triples if h == entity}
    ends |= {int(h) for h, _, t in arrays.triples if t == entity}
    return sorted(ends - {entity, drop})


def average_neighbours(arrays, entity, drop=None):
    vectors = normalize(arrays.entities.astype(np.float64))
    linked = list_neighbours(arrays, entity, drop)
    return vectors[linked].mean(axis=0) if linked else np.zeros(D)


@pytest.mark.parametrize("streamed", [False, True])
def test_neighbour_means_exclude_other_end(streamed, monkeypatch):
    if streamed:
        monkeypatch.setattr("llmcond.heads.fitted._DENSE_BYTES", 0)
    arrays = make_arrays()
    features, all_entities = QueryFeatures(arrays), np.arange(N)
    full = features.entities(all_entities, neighbours=True).numpy()
    expected = [average_neighbours(arrays, entity) for entity in range(N)]
    np.testing.assert_allclose(full[:, D:], expected, atol=1e-6)
    np.testing.assert_allclose(full[:, :D], normalize(arrays.entities.astype(float)), atol=1e-6)
    assert not full[N - 1, D:].any()  # it has no links

    head, _, tail = arrays.triples.astype(np.int64).T
    means = features.entities(head, neighbours=True, drop=tail).numpy()[:, D:]
    for row, h, t in zip(means, head, tail, strict=True):
        np.testing.assert_allclose(row, average_neighbours(arrays, h, t), atol=1e-6)
    ends = zip(head, tail, strict=True)
    isolated = [row for row, (h, t) in enumerate(ends) if not list_neighbours(arrays, h, t)]
    assert isolated, "every head has another neighbour in this graph"
    assert not means[isolated].any()


def test_features_on_disk_give_same_head(tmp_path, monkeypatch):
    arrays = make_arrays()
    np.save(tmp_path / "entities.npy", arrays.entities)
    stored = np.load(tmp_path / "entities.npy", mmap_mode="r")
    dense = fit("hypernet-full", arrays, neighbours=True)
    monkeypatch.setattr("llmcond.heads.fitted._DENSE_BYTES", 0)
    monkeypatch.setattr(query_maps, "_BLOCK", 7)
    on_disk = QueryArrays(
        DenseMatrix(stored), arrays.triples, R, arrays.known, relations=arrays.relations
    )
    streamed = fit("hypernet-full", on_disk, neighbours=True)
    for name, value in dense.tensors.items():
        np.testing.assert_allclose(streamed.tensors[name], value, atol=1e-6)
    np.testing.assert_allclose(streamed.candidates()[:], dense.candidates()[:], atol=1e-6)
    np.testing.assert_array_equal(streamed.candidates()[3:9], streamed.candidates()[:][3:9])


def test_missing_joint_features_are_counted():
    arrays = make_arrays(joint=True)
    head = fit("linear", arrays)
    missing = next(
        (h, r)
        for h in range(N)
        for r in range(2 * R)
        if h * 2 * R + r not in arrays.joint_input_keys
    )
    with pytest.raises(UserError, match="1 of 2 queries have no joint features"):
        head.queries([missing[0], arrays.triples[0, 0]], [missing[1], arrays.triples[0, 1]])
    with pytest.raises(UserError, match="reads joint features of head entities and relations"):
        fit("linear", make_arrays())


# -- the equations, row by row ------------------------------------------------------------------


def map_query(head, x, relation, arrays):
    """Map one query's features in float64, with every matrix formed."""
    weights = {name: value.astype(np.float64) for name, value in head.tensors.items()}
    settings, kind = head.settings, head.kind
    if "head" in weights:
        x = weights["head"] @ x + weights["head_bias"]
    if kind == "query-linear":
        return weights["map.weight"] @ x
    if kind == "query-mlp":
        hidden = torch.nn.functional.gelu(torch.from_numpy(weights["map.weight1"] @ x)).numpy()
        return weights["map.weight2"] @ hidden
    condition = np.eye(2 * R)[relation]
    if settings.relations == "features":
        condition = normalize(arrays.relations.astype(np.float64))[relation]
        condition = condition @ weights["basis"] if "basis" in weights else condition
    if kind == "query-hadamard":
        return x * (weights["map.transform"] @ condition + weights["map.transform_bias"])
    if kind == "query-concat":
        both = (
            weights["map.sentence"] @ x + weights["map.condition"] @ condition + weights["map.bias"]
        )
        return torch.nn.functional.gelu(torch.from_numpy(both)).numpy()
    matrix = np.eye(D)
    names = ("factor1", "factor2") if settings.rank else ("matrix",)
    for name in names:
        factor = weights[f"map.{name}"] @ condition + weights.get(f"map.{name}_bias", 0)
        matrix = matrix @ factor.reshape(matrix.shape[1], -1)
    return x @ matrix


def map_candidate(head, x, arrays):
    """Map one candidate's features in float64."""
    weights = {name: value.astype(np.float64) for name, value in head.tensors.items()}
    if head.settings.candidate == "linear":
        return weights["tail"] @ x + weights["tail_bias"]
    if head.settings.candidate == "none":
        return x
    if head.features == "joint":
        return map_query(head, x, None, arrays)
    return weights["head"] @ x + weights["head_bias"]


@pytest.mark.parametrize("name", ["hadamard-paper", "concat-paper"])
def test_recipes_as_in_paper_have_neither_layer_nor_bias_nor_activation(name):
    generator = np.random.default_rng(1)
    arrays = replace(make_arrays(), relations=generator.normal(size=(2 * R, D)).astype(np.float32))
    head = fit(name, arrays)
    x = normalize(arrays.entities.astype(np.float64))
    c = normalize(arrays.relations.astype(np.float64))
    expected = x[3] * c[1]
    if name == "concat-paper":
        weights = {name: value.astype(np.float64) for name, value in head.tensors.items()}
        expected = weights["map.sentence"] @ x[3] + weights["map.condition"] @ c[1]
    np.testing.assert_allclose(head.queries([3], [1])[0], normalize(expected[None])[0], atol=1e-5)
    map_tensors = {"map.sentence", "map.condition"} if name == "concat-paper" else set()
    assert set(head.tensors) - {"tail", "tail_bias", "contrast.log_scale"} == map_tensors


@pytest.mark.matrix
@pytest.mark.parametrize("score", ["cosine", "dot"])
@pytest.mark.parametrize(
    ("candidate", "with_neighbours"),
    [("none", False), ("linear", False), ("linear", True), ("same", False), ("same", True)],
)
@pytest.mark.parametrize("name", [*JOINT, *SEPARATE])
def test_fitted_head_matches_equation(name, candidate, with_neighbours, score):
    arrays = make_arrays(joint=name in JOINT)
    changes = {"candidate": candidate, "neighbours": with_neighbours, "score": score}
    if candidate != "linear" and (name not in JOINT or candidate == "none"):
        changes |= {"dim": D} if "dim" in SIZES[name] else {}
    head = fit(name, arrays, **changes)
    rows = arrays.queries()
    vectors = normalize(arrays.entities.astype(np.float64))

    def add_neighbours(vector, entity):
        return (
            np.concatenate([vector, average_neighbours(arrays, entity)])
            if with_neighbours
            else vector
        )

    def scale_for_score(embedded):
        return normalize(embedded) if score == "cosine" else embedded

    queries = head.queries(rows[:, 0], rows[:, 1])
    assert queries.dtype == np.float32
    for actual, (h, r, _) in zip(queries, rows, strict=True):
        vector = vectors[h]
        if name in JOINT:
            position = np.searchsorted(arrays.joint_input_keys, h * 2 * R + r)
            vector = normalize(arrays.joint.astype(np.float64))[position]
        expected = scale_for_score(map_query(head, add_neighbours(vector, h), r, arrays))
        np.testing.assert_allclose(actual, expected, atol=2e-5)
    for entity, actual in enumerate(head.candidates()[:]):
        expected = scale_for_score(
            map_candidate(head, add_neighbours(vectors[entity], entity), arrays)
        )
        np.testing.assert_allclose(actual, expected, atol=2e-5)


@pytest.mark.parametrize("with_neighbours", [False, True])
@pytest.mark.parametrize("name", ["linear", "mlp", "hadamard", "hypernet-full", "matrices"])
def test_embeddings_equal_features_at_start(name, with_neighbours):
    """The first epochs are therefore not spent on what the encoder already knows."""
    arrays = make_arrays(joint=True)
    changes = {"dim": D} if "dim" in SIZES[name] else {}
    changes |= {"hidden": 2 * D + 1} if name == "mlp" else {}
    recipe = make_recipe(name, neighbours=with_neighbours, **changes)
    features, rows = QueryFeatures(arrays), arrays.queries()

    def build():
        module = recipe.family(recipe.settings, *arrays.dims)
        module.initialise(features.relations)
        return module

    module = seeded(build, 0)[0].freeze()
    x = features.heads(rows[:, 0], rows[:, 1], name in JOINT, with_neighbours)
    queries = module.query(x, features.relations, torch.from_numpy(rows[:, 1]))
    torch.testing.assert_close(queries, x[:, :D], rtol=0, atol=1e-5)
    x = features.entities(np.arange(N), with_neighbours)
    torch.testing.assert_close(module.candidate(x), x[:, :D], rtol=0, atol=1e-5)


def test_low_rank_map_starts_as_projection():
    arrays, features = make_arrays(), QueryFeatures(make_arrays())
    recipe = make_recipe("hypernet", dim=D)
    module = recipe.family(recipe.settings, *arrays.dims)
    module.initialise(features.relations)
    x = features.entities(np.arange(N))
    relation_indices = torch.zeros(N, dtype=torch.int64)
    projected = module.map(x, features.relations @ module.basis, relation_indices).detach()
    torch.testing.assert_close(
        module.map(projected, features.relations @ module.basis, relation_indices).detach(),
        projected,
    )
    assert torch.linalg.matrix_rank(projected, rtol=1e-4) == 2


def test_relation_coordinates_give_same_hypernetwork():
    """Weights of the coordinates, multiplied by the basis, are weights of the features."""
    arrays = make_arrays()
    arrays = QueryArrays(
        arrays.entities,
        arrays.triples,
        R,
        arrays.known,
        relations=np.random.default_rng(0).normal(size=(2 * R, 40)),
    )
    head = fit("hypernet-full", arrays)
    basis, small = head.tensors["basis"], head.tensors["map.matrix"]
    assert (basis.shape, small.shape) == ((40, 2 * R), (D * 4, 2 * R))
    np.testing.assert_allclose(basis.T @ basis, np.eye(2 * R), atol=1e-5)
    features = normalize(arrays.relations)
    np.testing.assert_allclose(
        features @ (small @ basis.T).T, (features @ basis) @ small.T, atol=1e-6
    )
    # Coordinates lose nothing, because the basis spans the features of all relations.
    np.testing.assert_allclose(features @ basis @ basis.T, features, atol=1e-5)


# -- fitting ------------------------------------------------------------------------------------


def make_ring(n=24, d=8):
    """Make entities in a ring, where the relation sets how many steps away the tail is."""
    rng = np.random.default_rng(1)
    steps = [1, 5, 11]
    triples = np.array([(i, r, (i + s) % n) for i in range(n) for r, s in enumerate(steps)])
    angle = 2 * np.pi * np.arange(n)[:, None] * np.array([1, 2, 3, 5]) / n
    entities = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    both = np.concatenate([triples, triples[:, ::-1] + [0, 3, 0]])
    relations = rng.normal(size=(6, d))
    return QueryArrays(entities, triples, 3, KnownTriples(both, n), relations=relations)


LONG_FIT = {"epochs": 40, "batch_size": 48, "learning_rate": 0.02, "patience": 40}


@pytest.mark.parametrize("name", ["hypernet-full", "matrices"])
def test_matrix_per_relation_learns_relation(name):
    arrays = make_ring()
    score = make_mrr_scorer(arrays)
    head = fit(name, arrays, score, dim=8, **LONG_FIT)
    assert score(head) > 0.95
    assert head.fit.record["selected_on"] == "dev"
    curve = head.fit.record["curve"]
    assert max(entry["dev_score"] for entry in curve) == score(head)
    assert curve[-1]["loss"] < curve[0]["loss"] / 2
    joint = np.repeat(arrays.entities, 6, axis=0)  # features without the relation
    without_relations = QueryArrays(
        arrays.entities, arrays.triples, 3, arrays.known, None, joint, np.arange(len(joint))
    )
    assert score(fit("linear", without_relations, dim=8, **LONG_FIT)) < 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"queue": 2},
        {"random_candidates": 5},
        {"relation_negatives": 2},
        {"negatives": "entities"},
        {"negatives": "entities", "neighbours": True, "random_candidates": 5, "queue": 1},
        {"self_negatives": False, "directions": "query"},
        {"learn_temperature": False},
        {"schedule": "constant", "dropout": 0.2, "weight_decay": 0.1},
        {"start": "random"},
        {"candidate": "same", "score": "dot"},
        {"precision": "bfloat16"},
        {"members": 2},
    ],
    ids="-".join,
)
def test_each_setting_changes_fit_and_seed_reproduces_it(changes):
    arrays = make_arrays()
    shared = {"dim": D, "batch_size": 32}
    default, first, second = (
        fit("hypernet-full", arrays, seed=3, **shared, **settings)
        for settings in ({}, changes, changes)
    )
    for name, value in first.tensors.items():
        np.testing.assert_array_equal(value, second.tensors[name])
    assert any(
        name not in default.tensors or not np.array_equal(value, default.tensors[name])
        for name, value in first.tensors.items()
    )
    assert (members_of(first.module)[0].scale == pytest.approx(20)) == (
        "learn_temperature" in changes
    )
    rows = arrays.queries()
    scores = first.queries(rows[:, 0], rows[:, 1]) @ first.candidates()[:].T
    assert np.isfinite(scores).all()
    if first.settings.score == "cosine":
        assert np.abs(scores).max() <= 1 + 1e-5


def test_members_are_separate_heads_with_averaged_scores():
    arrays = make_arrays()
    ensemble = fit("hadamard", arrays, members=2)
    heads = [fit("hadamard", arrays, seed=seed) for seed in (0, 2**20)]
    rows = arrays.queries()
    scores = [head.queries(rows[:, 0], rows[:, 1]) @ head.candidates()[:].T for head in heads]
    actual = ensemble.queries(rows[:, 0], rows[:, 1]) @ ensemble.candidates()[:].T
    np.testing.assert_allclose(actual, np.mean(scores, axis=0), atol=1e-5)
    assert len(ensemble.fit.record["members"]) == 2


def test_best_epoch_is_restored_and_patience_stops_fitting():
    arrays, tensors = make_arrays(), []

    def score(head):
        tensors.append(head.tensors)
        return [0.1, 0.3, 0.2, 0.25][len(tensors) - 1]

    head = fit("hadamard", arrays, score, epochs=9, patience=2)
    assert (len(tensors), head.fit.record["best_epoch"]) == (4, 2)
    for name, value in head.tensors.items():
        np.testing.assert_array_equal(value, tensors[1][name])
    # Scoring leaves the random state alone, so that dropout is the same without it.
    changes = {"epochs": 2, "dropout": 0.3}
    scored = fit("concat", arrays, lambda head: float(len(head.kind)), **changes)
    plain = fit("concat", arrays, **changes)
    assert scored.fit.record["best_epoch"] == 1  # the first of equal scores
    assert plain.fit.record["best_epoch"] == 2
    assert plain.fit.record["selected_on"] is None
    curves = [[entry["loss"] for entry in fitted.fit.record["curve"]] for fitted in (scored, plain)]
    assert curves[0] == curves[1]


def test_head_without_parameters_returns_features():
    arrays = make_arrays(joint=True)
    head = fit_queries(load_recipe("none", "kgc"), arrays, None, 0, ignore_progress)
    rows = arrays.queries()
    positions = np.searchsorted(arrays.joint_input_keys, rows[:, 0] * 2 * R + rows[:, 1])
    expected = normalize(arrays.joint.astype(np.float64))[positions]
    np.testing.assert_allclose(head.queries(rows[:, 0], rows[:, 1]), expected, atol=1e-5)
    np.testing.assert_allclose(
        head.candidates()[:], normalize(arrays.entities.astype(float)), atol=1e-5
    )
    assert head.is_identity
    assert head.fit.notes == ("the head has no parameters, so nothing is fitted",)


def test_diverging_loss_is_reported():
    with pytest.raises(UserError, match=r"the loss became \w+ in epoch \d. Lower learning_rate"):
        fit("hypernet-full", make_arrays(), learning_rate=1e30, epochs=3, schedule="constant")


# -- on disk, and on other graphs -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("linear", {}),
        ("mlp", {"candidate": "same", "neighbours": True}),
        ("hypernet", {"neighbours": True}),
        ("matrices", {"members": 2}),
        ("hadamard", {"score": "dot"}),
    ],
)
def test_saved_head_is_loaded_unchanged(name, changes, tmp_path):
    arrays = make_arrays(joint=name in JOINT)
    head, rows = fit(name, arrays, lambda head: 0.5, **changes), arrays.queries()
    save_head(head, tmp_path, {"made_by": "a test"})
    loaded, record = load_query_head(tmp_path)
    assert (loaded.kind, loaded.settings) == (head.kind, head.settings)
    assert [member.scale for member in members_of(loaded.module)] == [
        member.scale for member in members_of(head.module)
    ]
    assert record["made_by"] == "a test"
    assert (record["dim_out"], record["n_relations"]) == (head.dim_out, R)
    assert record["fit"]["curve"][0]["dev_score"] == 0.5
    with pytest.raises(
        UserError, match=r"this head has no graph yet. Call head.on\(arrays\) first"
    ):
        loaded.candidates()
    bound = loaded.bind(arrays)
    for method in ("queries", "candidates"):
        arguments = rows.T[:2] if method == "queries" else ()
        actual = getattr(bound, method)(*arguments)[:]
        np.testing.assert_array_equal(actual, getattr(head, method)(*arguments)[:])
    with pytest.raises(UserError, match="it ranks candidates and compares no pairs"):
        load_head(tmp_path)


def test_damaged_head_is_rejected(tmp_path):
    save_head(fit("matrices", make_arrays()), tmp_path, {})
    record = read_json(tmp_path / "head.json")
    write_json(tmp_path / "head.json", {**record, "n_relations": R + 1})
    with pytest.raises(LlmcondError, match="does not hold the parameters of a query-hypernet head"):
        load_query_head(tmp_path)


@pytest.mark.parametrize("n_relations", ["3", -1, 2**25])
def test_damaged_relation_count_is_rejected(n_relations, tmp_path):
    save_head(fit("matrices", make_arrays()), tmp_path, {})
    record = read_json(tmp_path / "head.json")
    write_json(tmp_path / "head.json", {**record, "n_relations": n_relations})
    with pytest.raises(LlmcondError, match=r"was damaged: 'n_relations' is .*Fit the head again"):
        load_query_head(tmp_path)


def test_head_binds_to_graphs_of_its_sizes_only():
    arrays = make_arrays()
    head, other = fit("hypernet", arrays), make_arrays(seed=1)
    assert head.bind(other).queries([1], [2]).shape == (1, 4)  # other entities
    wider = QueryArrays(np.ones((4, D + 1)), arrays.triples, R, arrays.known, arrays.relations)
    with pytest.raises(UserError, match=r"7 dimensions of features of entities; .* fitted on 6"):
        head.bind(wider)
    larger = QueryArrays(arrays.entities, arrays.triples, R + 1, arrays.known, arrays.relations)
    with pytest.raises(UserError, match=r"the graph has 4 relations; .* was fitted on 3"):
        fit("matrices", arrays).bind(larger)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("hypernet", {"neighbours": True, "candidate": "none"}, "so candidates need a map"),
        (
            "hypernet",
            {"candidate": "none"},
            "candidates have 6 without a layer: set candidate to linear",
        ),
        ("concat", {"candidate": "same"}, "or dim to 6"),
        ("concat", {"dim": 7}, "dim is 7, but the features have 6"),
        (
            "hypernet",
            {"features": "both"},
            "either joint or separate features, and this recipe asks for both",
        ),
        ("hypernet", {"mse": 1.0}, "unknown key 'mse'"),
        ("hadamard", {"rank": 4}, "unknown key 'rank'"),
        ("mlp", {"hidden": -1}, "'hidden' is -1: it must be at least 0"),
    ],
)
def test_inconsistent_settings_are_rejected(name, changes, message):
    with pytest.raises(UserError, match=message):
        fit(name, make_arrays(joint=True), **changes)


def test_missing_features_and_triples_are_rejected():
    arrays = make_arrays()
    without_relations = QueryArrays(arrays.entities, arrays.triples, R, arrays.known)
    with pytest.raises(UserError, match="reads the features of relations, and the data has none"):
        fit("hypernet", without_relations)
    assert fit("matrices", without_relations).dim_out == 4
    empty = QueryArrays(arrays.entities, arrays.triples[:0], R, arrays.known, arrays.relations)
    with pytest.raises(UserError, match="no triples"):
        fit("hypernet", empty)
    with pytest.raises(
        UserError, match="the head mlp compares rated pairs and cannot rank candidates"
    ):
        fit_queries(pair_recipe("mlp"), arrays, None, 0, ignore_progress)
    with pytest.raises(
        UserError, match="the head hypernet ranks candidates; it cannot be fitted on rated"
    ):
        fit_recipe(make_recipe("hypernet"), None, None, 0, ignore_progress)


def test_recipes_depend_on_task():
    assert load_recipe("mlp", "kgc").kind == "query-mlp"
    assert load_recipe("mlp").kind == load_recipe("mlp", "csts").kind == "mlp"
    with pytest.raises(UserError, match="unknown head 'towers'"):
        load_recipe("towers", "kgc")
    recipe = load_recipe("hypernet", "kgc")
    parsed = recipe.parse_changes({"neighbours": "true", "margin": "0.1", "rank": "8"}, "--set")
    changed = recipe.with_settings(parsed, "--set").settings
    assert (changed.neighbours, changed.margin, changed.rank) == (True, 0.1, 8)
    assert math.isclose(Contrast(changed).scale, 1 / changed.temperature, rel_tol=1e-6)


def test_custom_head_maps_queries(tmp_path):
    (tmp_path / "own.py").write_text(
        "from llmcond.heads import HeadModule, SizedSettings\n"
        "class Own(HeadModule):\n"
        "    Settings = SizedSettings\n"
        "    def __init__(self, settings, dim_in, dim_condition=0):\n"
        "        super().__init__(settings, dim_in, dim_condition)\n"
        "        self.add_layer('weight', settings.dim, dim_in, bias=True)\n"
        "    def forward(self, x, condition=None, which=None):\n"
        "        return self.affine('weight', x)\n"
    )
    (tmp_path / "mine.toml").write_text(
        'kind = "query-own.py:Own"\ndescription = "d"\nsource = "s"\ndim = 4\ndropout = 0.0\n'
        "learning_rate = 1e-3\nbatch_size = 32\nepochs = 1\npatience = 1\n"
    )
    arrays = make_arrays(joint=True)
    head = fit_queries(
        load_recipe(str(tmp_path / "mine.toml"), "kgc"), arrays, None, 0, ignore_progress
    )
    save_head(head, tmp_path / "saved", {})
    assert load_query_head(tmp_path / "saved")[0].kind == "query-own.py:Own"


def test_progress_is_reported_after_every_step():
    calls, arrays = [], make_arrays()
    steps = -(-len(arrays.queries()) // 32)
    recipe = make_recipe("hadamard", batch_size=32)
    fit_queries(recipe, arrays, None, 0, lambda *args: calls.append(args), "cpu")
    expected = [step / steps for step in range(1, 2 * steps + 1)]
    assert [args[0] for args in calls] == pytest.approx(expected)
