"""What a graph tells: hops and reversed edges by walks and sets, parts that cover the queries."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.graphs import small_graph

from llmcond.evaluation.ranking import rank, score_rankings
from llmcond.kinds.ranking.graph import Graph, KnownTriples, both_directions, read_graph
from llmcond.kinds.ranking.rules import (
    TrainGraph,
    fit_reverse_weights,
    query_subsets,
    rank_rule,
    relation_categories,
    relation_subsets,
)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return small_graph()


def slow_within(graph: Graph, head: int, hops: int) -> set[int]:
    reached = {head}
    for _ in range(hops):
        links = [(h, t) for h, _, t in graph.splits["train"].tolist()]
        reached |= {b for h, t in links for a, b in ((h, t), (t, h)) if a in reached}
    return reached


@pytest.mark.parametrize("hops", [0, 1, 2, 3])
def test_hops_are_those_of_a_walk(hops):
    graph = small_graph(sizes=(18, 5, 5))
    heads = np.array([4, 0, 4, 29])
    row, entity = TrainGraph.from_graph(graph).find_neighbourhood(heads, hops)
    for place, head in enumerate(heads.tolist()):
        assert set(entity[row == place].tolist()) == slow_within(graph, head, hops)
    assert len(np.unique(np.stack([row, entity]), axis=1).T) == len(row)


def test_hops_may_leave_the_head_alone(graph):
    heads, nothing = np.array([3, 5]), np.zeros(2, dtype=int)
    context = TrainGraph.from_graph(graph)
    with_head, without = (
        context.create_hops_term(1, 0.2, head)(heads, nothing) for head in (True, False)
    )
    assert len(with_head[0]) == len(without[0]) + 2
    assert not (without[1] == heads[without[0]]).any()
    assert set(without[2].tolist()) == {np.float32(0.2)}


def test_the_reversed_edge_is_weighted_by_relation(graph):
    context, queries = TrainGraph.from_graph(graph), graph.queries("test")
    weights = np.arange(6) / 10
    row, entity, value = context.create_reverse_term(weights)(queries[:, 0], queries[:, 1])
    train = {tuple(own) for own in graph.queries("train").tolist()}
    turned = {(h, (r + 3) % 6): set() for h, r, _ in queries.tolist()}
    for head, relation, tail in train:
        if (head, relation) in turned:
            turned[head, relation].add(tail)
    for place, (head, relation, _) in enumerate(queries.tolist()):
        own = row == place
        assert set(entity[own].tolist()) == turned[head, (relation + 3) % 6]
        np.testing.assert_allclose(value[own], weights[relation])


def test_the_rule_puts_the_reversed_edge_first():
    triples = {
        "train": np.array([[0, 0, 1], [2, 0, 3], [4, 1, 5]], dtype=np.int32),
        "dev": np.array([[3, 0, 2]], dtype=np.int32),
        "test": np.array([[1, 0, 0], [5, 0, 4]], dtype=np.int32),
    }
    graph = replace(small_graph(6, 2, (1, 1, 1)), splits=triples)
    ranks = rank_rule(TrainGraph.from_graph(graph), graph.queries("test"), KnownTriples(graph))

    # The second is linked by another relation, which is not the rule: all six are equal.
    assert ranks.resolve_ties().tolist() == [1, 3.5, 1, 3.5]
    assert query_subsets(graph, "test")["reversible"].tolist() == [True, False, True, False]


def test_weights_of_the_reversed_edge_are_found_by_relation():
    """Of three relations, the first is symmetric, the second never goes both ways."""
    rng = np.random.default_rng(0)
    n = 80
    first, second, third = (rng.permutation(n * n)[:60] for _ in range(3))
    ends = [np.stack([own // n, own % n], axis=1) for own in (first, second, third)]

    def made(kind, pairs):
        return np.insert(pairs, 1, kind, axis=1).astype(np.int32)

    train = np.concatenate([made(kind, own) for kind, own in enumerate(ends)])
    # Of the second, entities with an edge of theirs in train have one to another entity in dev.
    moved = np.stack([ends[1][:, 1], rng.integers(0, n, 60)], axis=1)
    dev = np.concatenate([made(0, ends[0][:, ::-1]), made(1, moved)])
    known = KnownTriples(both_directions(np.concatenate([train, dev]), 3), n)
    context, queries = TrainGraph(train, n, 3), both_directions(dev, 3)
    # The reversed edge already scores well, so that it has to be pushed down for the second.
    candidates = rng.standard_normal((n, 8)).astype(np.float32)
    asked = rng.standard_normal((len(queries), 8)).astype(np.float32)
    row, entity = context.reversed_edges(queries[:, 0], queries[:, 1])
    np.add.at(asked, row, 0.5 * candidates[entity])
    weights = fit_reverse_weights(asked, candidates, queries, known, context)

    assert weights.shape == (6,)
    np.testing.assert_array_equal(weights[:3], weights[3:])
    assert weights[0] > 0 > weights[1]
    assert weights[2] == 0
    # Where another term does it already, nothing is gained.
    done = [context.create_reverse_term(np.tile([50, -50, 0], 2))]
    assert fit_reverse_weights(asked, candidates, queries, known, context, done).tolist() == [0] * 6
    before = rank(asked, candidates, queries, known)
    after = rank(asked, candidates, queries, known, [context.create_reverse_term(weights)])
    assert (1 / after.resolve_ties()).mean() > (1 / before.resolve_ties()).mean() + 0.2


def test_without_reversed_edges_no_weight_is_fitted(graph):
    context = TrainGraph(np.array([[0, 0, 1]]), graph.n_entities, 3)
    triples = np.array([[5, 0, 6]])
    one, many = np.ones((1, 2)), np.ones((graph.n_entities, 2))
    assert fit_reverse_weights(one, many, triples, None, context).tolist() == [0] * 6


def test_parts_cover_the_queries():
    graph = small_graph(sizes=(18, 5, 5))
    found = query_subsets(graph, "test")
    n = len(graph.queries("test"))
    train = set(graph.splits["train"][:, [0, 2]].reshape(-1).tolist())
    unseen = [h not in train or t not in train for h, _, t in graph.queries("test").tolist()]
    assert found["unseen"].tolist() == unseen
    assert any(unseen)
    for one, other in (("forward", "backward"), ("reversible", "rest")):
        assert (found[one] ^ found[other]).all()
    kinds = dict(relation_subsets(graph, "test"))
    assert sum(kinds[name].sum() for name in graph.relations.ids) == n
    assert sum(kinds[name].sum() for name in set(relation_categories(graph))) == n
    ranks = np.random.default_rng(0).integers(1, 9, size=(2, n)).astype(float)
    triple = np.tile(np.arange(n // 2), 2)
    (part,) = score_rankings([ranks], triple, resamples=20, mask=found["forward"])
    assert part.n == n / 2
    assert part.metrics["mrr"].value == np.mean(1 / ranks[:, : n // 2])
    (part,) = score_rankings([ranks], triple, mask=np.zeros(n, dtype=bool))
    assert part.to_json()["mrr"] is None


def test_categories_go_by_answers_of_each_side():
    train = [
        *((i, 0, i + 10) for i in range(4)),
        *((0, 1, i) for i in range(4)),
        *((i, 2, 0) for i in range(4)),
        *((i, 3, j) for i in range(3) for j in range(3)),
    ]
    own = {"train": np.array(train, dtype=np.int32)}
    assert relation_categories(replace(small_graph(20, 4), splits=own)) == [
        "1-1",
        "1-N",
        "N-1",
        "N-N",
    ]


def test_the_sample_has_all_categories_and_both_parts():
    graph = read_graph()
    assert set(relation_categories(graph)) == {"1-1", "1-N", "N-1", "N-N"}
    found = query_subsets(graph, "test")
    assert all(own.any() for own in found.values())
    rule = rank_rule(TrainGraph.from_graph(graph), graph.queries("test"), KnownTriples(graph))
    assert (rule.resolve_ties()[found["reversible"]] == 1).all()
