"""Ranking: compared with plain loops and with PyKEEN, for several block sizes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.graphs import random_graph

from llmcond.base.errors import UserError
from llmcond.base.metrics import RANKING_METRICS, choose_metrics
from llmcond.evaluation.paired import bootstrap_metrics
from llmcond.evaluation.results import (
    CandidatePool,
    RankedQueries,
    Ranks,
    Result,
    rank,
    rank_each,
    ranks_among,
    top_entities,
)
from llmcond.kinds.ranking.examples import TrainGraph
from llmcond.kinds.ranking.graph import Graph, KnownTriples
from llmcond.runs.examples import score_ranks

TIES = ("realistic", "optimistic", "pessimistic")


def rank_by_loops(scores, triples, known, exclude_head=False):
    """Return optimistic and pessimistic ranks, computed from (m, n) scores by plain loops."""
    ranks = []
    for row, (head, relation, answer) in zip(scores, triples.tolist(), strict=True):
        others = [
            row[entity]
            for entity in range(len(row))
            if entity != answer
            and (known is None or not known.contains(np.array([[head, relation, entity]]))[0])
            and not (exclude_head and entity == head)
        ]
        above = sum(score > row[answer] for score in others)
        tied = sum(score == row[answer] for score in others)
        ranks.append((1 + above, 1 + above + tied))
    return Ranks(*np.array(ranks, dtype=float).T)


def have_equal_ranks(first: Ranks, second: Ranks) -> bool:
    return all(np.array_equal(first.resolve_ties(ties), second.resolve_ties(ties)) for ties in TIES)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return random_graph()


@pytest.fixture(scope="module")
def vectors(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """Queries and candidates of small integers, so products are exact and ties are frequent."""
    rng = np.random.default_rng(5)
    queries, candidates = rng.integers(-2, 3, size=(2, len(graph.queries("test")), 4))
    return queries.astype(np.float32), candidates[: graph.n_entities].astype(np.float32)


# -- ranks -------------------------------------------------------------------------------------


def test_ranks_of_three_entities():
    triples = np.array([[0, 0, 1], [0, 0, 2], [1, 0, 1]])
    known = KnownTriples(triples, 3)
    candidates = np.array([[3.0], [1.0], [2.0]])
    ranks = rank(np.ones((3, 1)), candidates, triples, known)

    # The second query's answer is filtered out of the first, so only the head ranks before it.
    assert ranks.resolve_ties().tolist() == [2, 2, 3]
    without = rank(np.ones((3, 1)), candidates, triples, known, exclude_head=True)
    # The answer of a self-loop is its head, which is not excluded.
    assert without.resolve_ties().tolist() == [1, 1, 3]
    assert rank(np.ones((3, 1)), candidates, triples, None).resolve_ties().tolist() == [3, 2, 3]


def test_ranks_equal_those_of_plain_loops(graph, vectors):
    queries, candidates = vectors
    triples, scores = graph.queries("test"), queries @ candidates.T
    for known in (None, graph.known):
        for exclude_head in (False, True):
            expected = rank_by_loops(scores, triples, known, exclude_head)
            ranks = rank(queries, candidates, triples, known, (), exclude_head)
            assert have_equal_ranks(ranks, expected)
    ranks = ranks_among(scores, triples[:, 2].astype(int))
    assert have_equal_ranks(ranks, rank(queries, candidates, triples, None))


def test_ranks_do_not_depend_on_block_sizes(graph, vectors, tmp_path: Path):
    triples, known = graph.queries("test"), graph.known
    context = TrainGraph(graph)
    terms = [context.create_hops_term(2, 0.5), context.create_reverse_term(1.0)]
    whole = rank(*vectors, triples, known, terms, exclude_head=True)
    queries, candidates = vectors
    np.save(tmp_path / "c.npy", candidates.astype(np.float16))
    mapped = np.load(tmp_path / "c.npy", mmap_mode="r")
    for block, tile in ((1, 64), (7, 64), (64, 1), (5, 29)):
        pool = CandidatePool(mapped, known, terms, exclude_head=True, tile=tile)
        assert have_equal_ranks(rank_each(queries, pool, triples, (), block)[0], whole)


@pytest.mark.parametrize("tile", [7, 64])
def test_variants_rank_like_additional_terms(graph, vectors, tile):
    """Weights move answers that have the edge, and move others past answers without it."""
    triples, known = graph.queries("test"), graph.known
    context = TrainGraph(graph)
    context.known = known  # The answers have reversed edges too, so that some of them move.
    terms = [context.create_hops_term(1, 0.5)]
    variants = [context.create_reverse_term(weight) for weight in (0, 1, -2.5, 40)]
    queries, candidates = vectors
    pool = CandidatePool(candidates, known, terms, exclude_head=True, tile=tile)
    variant_ranks = rank_each(queries, pool, triples, variants, block=7)

    assert have_equal_ranks(variant_ranks[0], rank(*vectors, triples, known, terms, True))
    for ranks, variant in zip(variant_ranks[1:], variants, strict=True):
        assert have_equal_ranks(ranks, rank(*vectors, triples, known, [*terms, variant], True))
    assert not have_equal_ranks(variant_ranks[0], variant_ranks[2])


def test_ranks_among_ignores_candidates_left_out():
    scores = np.array([[3.0, 1, 2, 2], [5, 5, np.nan, 5]])
    left_out = np.array([[True, False, False, False], [True, False, True, False]])
    answer = np.array([2, 0])
    ranks = ranks_among(scores, answer, left_out)
    # The answer counts although it is marked as left out.
    assert ranks.optimistic.tolist() == [1, 1]
    assert ranks.pessimistic.tolist() == [2, 3]
    with pytest.raises(UserError, match="1 in total, the first of query 1"):
        ranks_among(scores, answer)


def test_non_finite_vectors_are_rejected(graph, vectors):
    for which in ("query", "candidate"):
        queries, candidates = (array.copy() for array in vectors)
        (queries if which == "query" else candidates)[3, 1] = np.nan
        with pytest.raises(UserError, match=f"1 in total, the first of {which} 3"):
            rank(queries, candidates, graph.queries("test"), None)


@pytest.mark.parametrize("tile", [3, 64])
def test_top_entities_equal_sorted_scores(graph, vectors, tile):
    queries, candidates = vectors
    head, relation, _ = graph.queries("test").T
    known, context = graph.known, TrainGraph(graph)
    scores = queries @ candidates.T
    row, entity = context.find_neighbourhood(head, 1)
    scores[row, entity] += 0.5
    scores[known.gather(head, relation)] = -np.inf
    scores[np.arange(len(head)), head] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")[:, :7]

    terms = [context.create_hops_term(1, 0.5)]
    pool = CandidatePool(candidates, known, terms, exclude_head=True, tile=tile)
    entities, top_scores = top_entities(queries, pool, head, relation, 7)
    np.testing.assert_array_equal(entities, order)
    np.testing.assert_array_equal(top_scores, np.take_along_axis(scores, order, axis=1))


# -- metrics -----------------------------------------------------------------------------------


def test_figures_are_those_of_selected_queries_and_resampled_triples():
    ranks, strata = np.arange(1.0, 11), np.repeat([0, 1], 5)
    queries = RankedQueries(np.tile(np.arange(5), 2), stratum=strata)
    mask = np.array([1, 1, 0, 0, 1, 1, 1, 1, 0, 0], dtype=bool)
    masks = {"parts": {"some": mask, "none": np.zeros(10, dtype=bool)}}
    metrics = choose_metrics(["mrr", "average_rank"])
    result = Result(name="x", head="x", prompts=(), subtract=False, split="test")
    (result,) = score_ranks([result], [ranks], queries, metrics, masks)
    some, none = result.subsets["parts"].values()
    expected = bootstrap_metrics(
        [ranks[None, mask]], strata[mask].astype(float), queries.pair[mask], metrics
    )
    assert (some.n, some.metrics) == (6, expected.estimates(0))
    assert some.metrics["mrr"].value == np.mean(1 / ranks[mask])
    assert none.to_json()["mrr"] is None


def test_fast_means_equal_general_resampling():
    """A stratum that a bootstrap sample lacks does not count in it."""
    rng = np.random.default_rng(1)
    systems = [rng.integers(1, 30, size=(seeds, 40)).astype(float) for seeds in (1, 2)]
    group, stratum = rng.integers(6, size=40), rng.integers(5, size=40) * 2.0
    metrics = [*RANKING_METRICS, *choose_metrics(["average_rank"])]
    general_metrics = [replace(metric, by_row=None) for metric in metrics]
    fast = bootstrap_metrics(systems, stratum, group, metrics, 60)
    general = bootstrap_metrics(systems, stratum, group, general_metrics, 60)
    np.testing.assert_allclose(fast.values, general.values)
    np.testing.assert_allclose(fast.sampled, general.sampled)
    assert not np.allclose(fast.sampled, fast.sampled[..., :1])
