"""Hops and reversed edges of a graph, checked by walks and sets, and subsets of its queries."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.graphs import random_graph

from llmcond.evaluation.ranking import rank, score_rankings
from llmcond.kinds.ranking.examples import (
    TrainGraph,
    fit_reverse_weights,
    query_subsets,
    rank_rule,
    relation_categories,
    relation_subsets,
)
from llmcond.kinds.ranking.graph import Graph, KnownTriples, both_directions, read_graph


@pytest.fixture(scope="module")
def graph() -> Graph:
    return random_graph()


def find_within(graph: Graph, head: int, hops: int) -> set[int]:
    reached = {head}
    for _ in range(hops):
        links = [(h, t) for h, _, t in graph.splits["train"].tolist()]
        reached |= {b for h, t in links for a, b in ((h, t), (t, h)) if a in reached}
    return reached


@pytest.mark.parametrize("hops", [0, 1, 2, 3])
def test_neighbourhood_matches_walk(hops):
    graph = random_graph(sizes=(18, 5, 5))
    heads = np.array([4, 0, 4, 29])
    row, entity = TrainGraph.from_graph(graph).find_neighbourhood(heads, hops)
    for position, head in enumerate(heads.tolist()):
        assert set(entity[row == position].tolist()) == find_within(graph, head, hops)
    assert len(np.unique(np.stack([row, entity]), axis=1).T) == len(row)


def test_hops_term_can_leave_out_head(graph):
    heads, relations = np.array([3, 5]), np.zeros(2, dtype=int)
    context = TrainGraph.from_graph(graph)
    including, excluding = (
        context.create_hops_term(1, 0.2, head)(heads, relations) for head in (True, False)
    )
    assert len(including[0]) == len(excluding[0]) + 2
    assert not (excluding[1] == heads[excluding[0]]).any()
    assert set(excluding[2].tolist()) == {np.float32(0.2)}


def test_reversed_edge_is_weighted_by_relation(graph):
    context, queries = TrainGraph.from_graph(graph), graph.queries("test")
    weights = np.arange(6) / 10
    row, entity, value = context.create_reverse_term(weights)(queries[:, 0], queries[:, 1])
    train = {tuple(triple) for triple in graph.queries("train").tolist()}
    reversed_tails = {(h, (r + 3) % 6): set() for h, r, _ in queries.tolist()}
    for head, relation, tail in train:
        if (head, relation) in reversed_tails:
            reversed_tails[head, relation].add(tail)
    for position, (head, relation, _) in enumerate(queries.tolist()):
        selected = row == position
        assert set(entity[selected].tolist()) == reversed_tails[head, (relation + 3) % 6]
        np.testing.assert_allclose(value[selected], weights[relation])


def test_rule_ranks_reversed_edge_first():
    triples = {
        "train": np.array([[0, 0, 1], [2, 0, 3], [4, 1, 5]], dtype=np.int32),
        "dev": np.array([[3, 0, 2]], dtype=np.int32),
        "test": np.array([[1, 0, 0], [5, 0, 4]], dtype=np.int32),
    }
    graph = replace(random_graph(6, 2, (1, 1, 1)), splits=triples)
    ranks = rank_rule(TrainGraph.from_graph(graph), graph.queries("test"), KnownTriples(graph))

    # Another relation links the second pair, which the rule ignores: all six entities are tied.
    assert ranks.resolve_ties().tolist() == [1, 3.5, 1, 3.5]
    assert query_subsets(graph, "test")["reversible"].tolist() == [True, False, True, False]


def test_reverse_weights_are_fitted_by_relation():
    """The first of three relations is symmetric, and the second never goes both ways."""
    rng = np.random.default_rng(0)
    n = 80
    first, second, third = (rng.permutation(n * n)[:60] for _ in range(3))
    ends = [np.stack([numbers // n, numbers % n], axis=1) for numbers in (first, second, third)]

    def insert_relation(kind, pairs):
        return np.insert(pairs, 1, kind, axis=1).astype(np.int32)

    train = np.concatenate([insert_relation(kind, entities) for kind, entities in enumerate(ends)])
    # For the second relation, tails of edges in train have edges to other entities in dev.
    moved = np.stack([ends[1][:, 1], rng.integers(0, n, 60)], axis=1)
    dev = np.concatenate([insert_relation(0, ends[0][:, ::-1]), insert_relation(1, moved)])
    known = KnownTriples(both_directions(np.concatenate([train, dev]), 3), n)
    context, queries = TrainGraph(train, n, 3), both_directions(dev, 3)
    # The reversed edge already scores well, so that it has to be pushed down for the second.
    candidates = rng.standard_normal((n, 8)).astype(np.float32)
    query_vectors = rng.standard_normal((len(queries), 8)).astype(np.float32)
    row, entity = context.reversed_edges(queries[:, 0], queries[:, 1])
    np.add.at(query_vectors, row, 0.5 * candidates[entity])
    weights = fit_reverse_weights(query_vectors, candidates, queries, known, context)

    assert weights.shape == (6,)
    np.testing.assert_array_equal(weights[:3], weights[3:])
    assert weights[0] > 0 > weights[1]
    assert weights[2] == 0
    # No weight is gained if another term already has the same effect.
    terms = [context.create_reverse_term(np.tile([50, -50, 0], 2))]
    assert (
        fit_reverse_weights(query_vectors, candidates, queries, known, context, terms).tolist()
        == [0] * 6
    )
    before = rank(query_vectors, candidates, queries, known)
    after = rank(query_vectors, candidates, queries, known, [context.create_reverse_term(weights)])
    assert (1 / after.resolve_ties()).mean() > (1 / before.resolve_ties()).mean() + 0.2


def test_reverse_weights_are_zero_without_reversed_edges(graph):
    context = TrainGraph(np.array([[0, 0, 1]]), graph.n_entities, 3)
    triples = np.array([[5, 0, 6]])
    query_vectors, candidates = np.ones((1, 2)), np.ones((graph.n_entities, 2))
    assert (
        fit_reverse_weights(query_vectors, candidates, triples, None, context).tolist() == [0] * 6
    )


def test_subsets_cover_queries():
    graph = random_graph(sizes=(18, 5, 5))
    subsets = query_subsets(graph, "test")
    n = len(graph.queries("test"))
    train = set(graph.splits["train"][:, [0, 2]].reshape(-1).tolist())
    unseen = [h not in train or t not in train for h, _, t in graph.queries("test").tolist()]
    assert subsets["unseen"].tolist() == unseen
    assert any(unseen)
    for first, second in (("forward", "backward"), ("reversible", "rest")):
        assert (subsets[first] ^ subsets[second]).all()
    relation_masks = dict(relation_subsets(graph, "test"))
    assert sum(relation_masks[name].sum() for name in graph.relations.ids) == n
    assert sum(relation_masks[name].sum() for name in set(relation_categories(graph))) == n
    ranks = np.random.default_rng(0).integers(1, 9, size=(2, n)).astype(float)
    triple = np.tile(np.arange(n // 2), 2)
    (result,) = score_rankings([ranks], triple, resamples=20, mask=subsets["forward"])
    assert result.n == n / 2
    assert result.metrics["mrr"].value == np.mean(1 / ranks[:, : n // 2])
    (result,) = score_rankings([ranks], triple, mask=np.zeros(n, dtype=bool))
    assert result.to_json()["mrr"] is None


def test_categories_depend_on_answers_of_each_side():
    train = [
        *((i, 0, i + 10) for i in range(4)),
        *((0, 1, i) for i in range(4)),
        *((i, 2, 0) for i in range(4)),
        *((i, 3, j) for i in range(3) for j in range(3)),
    ]
    splits = {"train": np.array(train, dtype=np.int32)}
    assert relation_categories(replace(random_graph(20, 4), splits=splits)) == [
        "1-1",
        "1-N",
        "N-1",
        "N-N",
    ]


def test_sample_has_all_categories_and_subsets():
    graph = read_graph()
    assert set(relation_categories(graph)) == {"1-1", "1-N", "N-1", "N-N"}
    subsets = query_subsets(graph, "test")
    assert all(mask.any() for mask in subsets.values())
    rule = rank_rule(TrainGraph.from_graph(graph), graph.queries("test"), KnownTriples(graph))
    assert (rule.resolve_ties()[subsets["reversible"]] == 1).all()
