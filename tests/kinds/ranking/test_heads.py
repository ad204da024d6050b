"""Heads that map queries and candidates: objective, equations, fitting, saving and binding."""

import numpy as np
import pytest
import torch
from helpers.heads import ignore_progress
from helpers.heads import make_recipe as pair_recipe
from helpers.vectors import normalize
from torch.nn.functional import cross_entropy

from llmcond.base.errors import UserError
from llmcond.base.metrics import METRICS
from llmcond.base.records import build
from llmcond.heads import load_head, load_recipe, save_head
from llmcond.heads.module import members_of, seeded
from llmcond.heads.numpy_heads import DevScore
from llmcond.heads.storage import load_fitted
from llmcond.kinds.ranking.graph import KnownTriples
from llmcond.kinds.ranking.heads import (
    ContrastSettings,
    FittedQueryHead,
    QueryArrays,
    contrastive,
    fit_queries,
)

pytestmark = pytest.mark.usefixtures("one_thread")

N, R, D = 30, 3, 6
JOINT = ["linear", "mlp"]
FAST_SETTINGS = {"epochs": 2, "batch_size": 64, "patience": 9, "precision": "float32"}
SIZES = {
    "linear": {"dim": 4},
    "mlp": {"dim": 6, "hidden": 5},
    "hadamard": {},
    "concat": {"dim": 4},
    "hypernet": {"dim": 4, "rank": 2},
    "hypernet-full": {"dim": 4},
    "matrices": {"dim": 4},
}


# -- the objective ------------------------------------------------------------------------------

#: Number of entities, so few that batches are full of false negatives.
N_DENSE = 12


def make_triples(rng, m=60):
    """Make triples in both directions, with loops."""
    head, tail = rng.integers(N_DENSE, size=(2, m))
    triples = np.stack([head, rng.integers(R, size=m), tail], axis=1)
    both = np.concatenate([triples, triples[:, ::-1] + [0, R, 0]])
    return np.unique(both, axis=0)


def random_vectors(generator, *shape):
    vectors = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return torch.nn.functional.normalize(vectors, dim=-1)


def make_simkgc_mask(rows, columns, known):
    """Follow construct_mask of triplet_mask.py: true for negatives and a row's own column."""
    mask = np.ones((len(rows), len(columns)), dtype=bool)
    for i, (head, relation, tail) in enumerate(rows):
        for j, other in enumerate(columns):
            if i == j and columns is rows:
                continue
            equal = other[2] == tail
            mask[i, j] = not equal and (head, relation, other[2]) not in known
    return torch.from_numpy(mask)


def compute_simkgc_loss(queries, tails, heads, rows, known, settings, earlier=()):
    """Follow compute_logits and trainer.py: hr -> t over all columns, t -> hr in the batch."""
    scale = 1 / settings.temperature
    logits = queries @ tails.T - settings.margin * torch.eye(len(rows), dtype=torch.float64)
    logits = (logits * scale).masked_fill(~make_simkgc_mask(rows, rows, known), -1e4)
    all_logits = logits
    for stored, candidates in earlier:
        block = queries @ candidates.T * scale * settings.queue_weight
        all_logits = torch.cat(
            [all_logits, block.masked_fill(~make_simkgc_mask(rows, stored, known), -1e4)], 1
        )
    if settings.self_negatives:
        self_scores = (queries * heads).sum(1) * scale
        loops = torch.tensor([(h, r, h) in known for h, r, _ in rows])
        all_logits = torch.cat([all_logits, self_scores.masked_fill(loops, -1e4)[:, None]], 1)
    labels = torch.arange(len(rows))
    total = cross_entropy(all_logits, labels)
    if settings.directions == "both":
        total = total + cross_entropy(logits.T, labels)
    return total


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"directions": "query"},
        {"self_negatives": False, "margin": 0.0},
        {"queue": 2, "queue_weight": 0.5, "temperature": 0.3},
    ],
    ids=lambda changes: "-".join(changes) or "defaults",
)
def test_loss_matches_released_simkgc(changes):
    settings = build(ContrastSettings, changes, "test")
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    all_triples = make_triples(rng)
    known = KnownTriples(all_triples, N_DENSE)
    triple_set = {tuple(row) for row in all_triples.tolist()}
    table, earlier = random_vectors(generator, N_DENSE, 5), []
    for _ in range(9):  # from the third round on, the queue holds two batches
        rows = all_triples[rng.integers(len(all_triples), size=10)]
        head, relation, tail = rows.T
        queries = random_vectors(generator, 10, 5).requires_grad_()
        queue = earlier[-settings.queue :] if settings.queue else []
        expected = compute_simkgc_loss(
            queries, table[tail], table[head], rows.tolist(), triple_set, settings, queue
        )
        extra_columns = []
        if settings.self_negatives:
            loops = known.contains(np.stack([head, relation, head], axis=1))
            self_scores = (queries * table[head]).sum(1, keepdim=True)
            extra_columns.append((self_scores, torch.from_numpy(loops[:, None])))
        for stored, candidates in queue:
            mask = torch.from_numpy(known.mask(head, relation, np.array(stored)[:, 2]))
            extra_columns.append((queries @ candidates.T * settings.queue_weight, mask))
        loss = contrastive(
            queries @ table[tail].T,
            torch.arange(10),
            torch.from_numpy(known.mask(head, relation, tail)),
            settings,
            1 / settings.temperature,
            extra_columns,
        )
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(value, queries)[0] for value in (loss, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
        earlier.append((rows.tolist(), table[tail]))


# -- the equations, row by row ------------------------------------------------------------------


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


def list_neighbours(arrays, entity, drop=None):
    """List the distinct other ends of an entity's triples."""
    ends = {int(t) for h, _, t in arrays.triples if h == entity}
    ends |= {int(h) for h, _, t in arrays.triples if t == entity}
    return sorted(ends - {entity, drop})


def average_neighbours(arrays, entity, drop=None):
    vectors = normalize(arrays.entities.astype(np.float64))
    linked = list_neighbours(arrays, entity, drop)
    return vectors[linked].mean(axis=0) if linked else np.zeros(D)


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


@pytest.mark.parametrize(
    ("name", "candidate", "with_neighbours", "score"),
    [
        ("linear", "linear", False, "cosine"),
        ("mlp", "same", True, "dot"),
        ("hadamard", "none", False, "dot"),
        ("concat", "linear", True, "cosine"),
        ("hypernet", "linear", False, "dot"),
        ("hypernet-full", "same", True, "cosine"),
        ("matrices", "none", False, "cosine"),
    ],
)
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


@pytest.mark.parametrize("name", ["mlp", "hadamard", "hypernet-full"])
def test_embeddings_equal_features_at_start(name):
    """The first epochs are therefore not spent on what the encoder already knows."""
    arrays = make_arrays(joint=True)
    changes = {"dim": D} if "dim" in SIZES[name] else {}
    changes |= {"hidden": 2 * D + 1} if name == "mlp" else {}
    recipe = make_recipe(name, neighbours=True, **changes)
    rows = arrays.queries()

    def build():
        module = recipe.family(recipe.settings, *arrays.dims)
        module.initialise(arrays.relation_vectors)
        return module

    module = seeded(build, 0)[0].freeze()
    x = arrays.read_heads(rows[:, 0], rows[:, 1], name in JOINT, True)
    queries = module.query(x, arrays.relation_vectors, torch.from_numpy(rows[:, 1]))
    torch.testing.assert_close(queries, x[:, :D], rtol=0, atol=1e-5)
    x = arrays.read_entities(np.arange(N), True)
    torch.testing.assert_close(module.candidate(x), x[:, :D], rtol=0, atol=1e-5)


@pytest.mark.parametrize("on_disk", [False, True])
def test_neighbour_means_exclude_other_end(on_disk, monkeypatch):
    if on_disk:
        monkeypatch.setattr("llmcond.heads.fitted._DENSE_BYTES", 0)
    arrays = make_arrays()
    head, _, tail = arrays.triples.astype(np.int64).T
    means = arrays.read_entities(head, neighbours=True, drop=tail).numpy()[:, D:]
    ends = list(zip(head, tail, strict=True))
    assert any(not list_neighbours(arrays, h, t) for h, t in ends)
    for row, (h, t) in zip(means, ends, strict=True):
        np.testing.assert_allclose(row, average_neighbours(arrays, h, t), atol=1e-6)


# -- fitting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"negatives": "entities", "neighbours": True, "random_candidates": 5, "queue": 1},
        {"self_negatives": False, "directions": "query"},
        {"learn_temperature": False, "start": "random"},
        {"candidate": "same", "score": "dot", "precision": "bfloat16"},
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
    scale = members_of(first.module)[0].scale
    assert (scale == pytest.approx(20)) == ("learn_temperature" in changes)


def test_head_is_no_candidate_among_entities_without_self_negatives():
    arrays, changes = make_arrays(), {"negatives": "entities", "dim": D}
    heads = [
        fit("hypernet-full", arrays, **changes, self_negatives=enabled) for enabled in (True, False)
    ]
    assert not np.array_equal(*(head.tensors["tail"] for head in heads))


# -- on disk, and on other graphs -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"),
    [("mlp", {"candidate": "same", "neighbours": True}), ("matrices", {"members": 2})],
)
def test_saved_head_is_loaded_unchanged(name, changes, tmp_path):
    arrays = make_arrays(joint=name in JOINT)
    head, rows = fit(name, arrays, lambda head: 0.5, **changes), arrays.queries()
    save_head(head, tmp_path, {"made_by": "a test"})
    loaded, record = load_fitted(tmp_path, FittedQueryHead)
    assert (loaded.kind, loaded.settings) == (head.kind, head.settings)
    scales = [[member.scale for member in members_of(h.module)] for h in (head, loaded)]
    assert scales[0] == scales[1]
    assert (record["made_by"], record["dim_out"], record["n_relations"]) == (
        "a test",
        head.dim_out,
        R,
    )
    with pytest.raises(UserError, match=r"this head has no graph yet"):
        loaded.candidates()
    bound = loaded.bind(arrays)
    queries = rows[:, 0], rows[:, 1]
    np.testing.assert_array_equal(bound.queries(*queries), head.queries(*queries))
    np.testing.assert_array_equal(bound.candidates()[:], head.candidates()[:])
    with pytest.raises(UserError, match="it ranks candidates and compares no pairs"):
        load_head(tmp_path)


def test_inconsistent_settings_and_features_are_rejected():
    arrays, joint_arrays = make_arrays(), make_arrays(joint=True)
    for name, changes, message in (
        ("hypernet", {"neighbours": True, "candidate": "none"}, "so candidates need a map"),
        ("concat", {"dim": 7}, "dim is 7, but the features have 6"),
        ("hypernet", {"features": "both"}, "and this recipe asks for both"),
    ):
        with pytest.raises(UserError, match=message):
            fit(name, joint_arrays, **changes)
    head = fit("linear", joint_arrays)
    first, relation, _ = joint_arrays.triples[0]
    # Entity N - 1 has no triples, and so no joint features.
    for call, message in (
        (lambda: head.queries([N - 1, first], [0, relation]), "1 of 2 queries have no joint feat"),
        (lambda: fit("linear", arrays), "reads joint features of head entities and relations"),
        (
            lambda: fit_queries(pair_recipe("mlp"), arrays, None, 0, ignore_progress),
            "the head mlp compares rated pairs and cannot rank candidates",
        ),
    ):
        with pytest.raises(UserError, match=message):
            call()
