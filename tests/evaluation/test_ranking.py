"""Ranking: equal to loops and to PyKEEN, whatever the blocks, and told by parts."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from helpers.graphs import small_graph
from helpers.paths import ROOT

from llmcond.errors import UserError
from llmcond.evaluation import ranking
from llmcond.evaluation.paired import bootstrap_metrics, paired_differences
from llmcond.evaluation.ranking import (
    CandidatePool,
    Ranks,
    rank,
    rank_each,
    ranks_among,
    score_rankings,
    top_entities,
)
from llmcond.kinds.ranking.graph import Graph, KnownTriples, both_directions
from llmcond.kinds.ranking.rules import TrainGraph
from llmcond.metrics import RANKING_METRICS, choose_metrics, mean_over_strata

TIES = ("realistic", "optimistic", "pessimistic")


def loop(scores, triples, known, exclude_head=False):
    """Return the optimistic and pessimistic ranks that plain loops find, with (m, n) scores."""
    found = []
    for own, (head, relation, answer) in zip(scores, triples.tolist(), strict=True):
        others = [
            own[entity]
            for entity in range(len(own))
            if entity != answer
            and (known is None or not known.contains(np.array([[head, relation, entity]]))[0])
            and not (exclude_head and entity == head)
        ]
        above = sum(score > own[answer] for score in others)
        level = sum(score == own[answer] for score in others)
        found.append((1 + above, 1 + above + level))
    return Ranks(*np.array(found, dtype=float).T)


def equal(one: Ranks, other: Ranks) -> bool:
    return all(np.array_equal(one.resolve_ties(ties), other.resolve_ties(ties)) for ties in TIES)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return small_graph()


@pytest.fixture(scope="module")
def vectors(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """Queries and candidates of few distinct whole numbers: products are exact, ties are many."""
    rng = np.random.default_rng(5)
    queries, candidates = rng.integers(-2, 3, size=(2, len(graph.queries("test")), 4))
    return queries.astype(np.float32), candidates[: graph.n_entities].astype(np.float32)


# -- ranks -------------------------------------------------------------------------------------


def test_three_entities_by_hand():
    triples = np.array([[0, 0, 1], [0, 0, 2], [1, 0, 1]])
    known = KnownTriples(triples, 3)
    candidates = np.array([[3.0], [1.0], [2.0]])
    ranks = rank(np.ones((3, 1)), candidates, triples, known)

    # Of the first query the second's answer is left out, so that only the head is before it.
    assert ranks.resolve_ties().tolist() == [2, 2, 3]
    without = rank(np.ones((3, 1)), candidates, triples, known, exclude_head=True)
    # A self-loop's answer is its head, which stays.
    assert without.resolve_ties().tolist() == [1, 1, 3]
    assert rank(np.ones((3, 1)), candidates, triples, None).resolve_ties().tolist() == [3, 2, 3]


def test_a_query_whose_answers_are_all_known_has_rank_one():
    triples = np.array([[0, 0, 0], [0, 0, 1], [0, 0, 2]])
    ranks = rank(
        np.ones((3, 1)), np.array([[1.0], [2.0], [3.0]]), triples, KnownTriples(triples, 3)
    )
    assert all(ranks.resolve_ties(ties).tolist() == [1, 1, 1] for ties in TIES)


def test_equal_scores_are_the_middle_the_first_or_the_last():
    ranks = rank(np.ones((1, 1)), np.ones((5, 1)), np.array([[0, 0, 3]]), None)
    assert [ranks.resolve_ties(ties).item() for ties in TIES] == [3, 1, 5]


@pytest.mark.parametrize("exclude_head", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
def test_ranks_are_those_of_loops(graph, vectors, filtered, exclude_head):
    queries, candidates = vectors
    triples = graph.queries("test")
    known = KnownTriples(graph) if filtered else None
    expected = loop(queries @ candidates.T, triples, known, exclude_head)

    assert equal(rank(queries, candidates, triples, known, (), exclude_head), expected)


@pytest.mark.parametrize(("block", "tile"), [(1, 64), (7, 64), (64, 1), (64, 7), (5, 29)])
def test_ranks_do_not_depend_on_blocks(graph, vectors, block, tile):
    triples, known = graph.queries("test"), KnownTriples(graph)
    terms = [
        TrainGraph.from_graph(graph).create_hops_term(2, 0.5),
        TrainGraph.from_graph(graph).create_reverse_term(1.0),
    ]
    whole = rank(*vectors, triples, known, terms, exclude_head=True)

    queries, candidates = vectors
    pool = CandidatePool(candidates, known, terms, exclude_head=True, tile=tile)
    assert equal(rank_each(queries, pool, triples, (), block)[0], whole)


def test_candidates_on_disk_rank_as_those_in_memory(graph, vectors, tmp_path: Path):
    queries, candidates = vectors
    np.save(tmp_path / "c.npy", candidates.astype(np.float16))
    mapped = np.load(tmp_path / "c.npy", mmap_mode="r")
    triples, known = graph.queries("test"), KnownTriples(graph)

    streamed = rank(queries, mapped, triples, known, tile=8)
    assert equal(streamed, rank(queries, candidates, triples, known))


def test_the_other_direction_of_inverse_triples_is_the_first(graph, vectors):
    queries, candidates = vectors
    triples, known = graph.queries("test"), KnownTriples(graph)
    half = len(triples) // 2
    turned = np.concatenate([triples[half:], triples[:half]])
    ranks = rank(np.roll(queries, half, axis=0), candidates, turned, known)
    assert np.array_equal(
        np.roll(ranks.resolve_ties(), half), rank(*vectors, triples, known).resolve_ties()
    )


@pytest.mark.parametrize("tile", [7, 64])
def test_variants_are_ranked_as_if_each_were_a_term(graph, vectors, tile):
    """Weights push answers that have the edge up and down, and others past answers without it."""
    triples, known, context = (
        graph.queries("test"),
        KnownTriples(graph),
        TrainGraph.from_graph(graph),
    )
    # Reversed edges of the answers as well, so that some of them move.
    context.known = KnownTriples(graph)
    terms = [context.create_hops_term(1, 0.5)]
    variants = [context.create_reverse_term(weight) for weight in (0, 1, -2.5, 40)]
    queries, candidates = vectors
    pool = CandidatePool(candidates, known, terms, exclude_head=True, tile=tile)
    found = rank_each(queries, pool, triples, variants, block=7)

    assert equal(found[0], rank(*vectors, triples, known, terms, True))
    for one, variant in zip(found[1:], variants, strict=True):
        assert equal(one, rank(*vectors, triples, known, [*terms, variant], True))
    assert not equal(found[0], found[2])


def test_scores_of_any_kind_are_ranked_among_what_counts():
    scores = np.array([[3.0, 1, 2, 2], [5, 5, np.nan, 5]])
    left_out = np.array([[True, False, False, False], [True, False, True, False]])
    answer = np.array([2, 0])
    found = ranks_among(scores, answer, left_out)
    # The answer counts though it is among those left out.
    assert found.optimistic.tolist() == [1, 1]
    assert found.pessimistic.tolist() == [2, 3]
    with pytest.raises(UserError, match="1 in total, the first of query 1"):
        ranks_among(scores, answer)


def test_scores_are_ranked_as_vectors_are(graph, vectors):
    queries, candidates = vectors
    triples = graph.queries("test")
    assert equal(
        ranks_among(queries @ candidates.T, triples[:, 2].astype(int)),
        rank(queries, candidates, triples, None),
    )


@pytest.mark.parametrize("which", ["query", "candidate"])
def test_vectors_that_are_not_finite_are_refused(graph, vectors, which):
    queries, candidates = (own.copy() for own in vectors)
    (queries if which == "query" else candidates)[3, 1] = np.nan
    with pytest.raises(UserError, match=f"1 in total, the first of {which} 3"):
        rank(queries, candidates, graph.queries("test"), None)


def scores_as_vectors(scores):
    """Return queries and candidates whose products are exactly these scores."""
    return scores, np.eye(scores.shape[1], dtype=np.float32)


@pytest.mark.parametrize("case", ["float32", "rounded"])
def test_ranks_are_pykeens(case, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    bench = import_module("bench_ranking")
    recorded = json.loads((ROOT / "tests" / "golden" / "pykeen_ranks.json").read_text())[case]
    scores, test, triples = bench.golden_case(bench.CASES[case])
    known = KnownTriples(both_directions(triples, 3), 40)

    ranks = rank(*scores_as_vectors(scores), both_directions(test, 3), known)
    assert {ties: ranks.resolve_ties(ties).tolist() for ties in TIES} == recorded
    # Rounded scores have ties, without which the three ways are one.
    assert (recorded["optimistic"] == recorded["pessimistic"]) == (case == "float32")


def test_what_is_recorded_of_pykeen_is_what_it_does(monkeypatch):
    pytest.importorskip("pykeen")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    recorded = json.loads((ROOT / "tests" / "golden" / "pykeen_ranks.json").read_text())
    assert import_module("bench_ranking").golden() == recorded


# -- the best candidates -----------------------------------------------------------------------


@pytest.mark.parametrize("tile", [3, 64])
def test_the_best_are_those_of_a_sort(graph, vectors, tile):
    queries, candidates = vectors
    head, relation, _ = graph.queries("test").T
    known, context = KnownTriples(graph), TrainGraph.from_graph(graph)
    scores = queries @ candidates.T
    row, entity = context.find_neighbourhood(head, 1)
    scores[row, entity] += 0.5
    scores[known.gather(head, relation)] = -np.inf
    scores[np.arange(len(head)), head] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")[:, :7]

    terms = [context.create_hops_term(1, 0.5)]
    pool = CandidatePool(candidates, known, terms, exclude_head=True, tile=tile)
    entities, best = top_entities(queries, pool, head, relation, 7)
    np.testing.assert_array_equal(entities, order)
    np.testing.assert_array_equal(best, np.take_along_axis(scores, order, axis=1))


def test_where_few_are_left_the_last_scores_are_minus_infinity():
    known = KnownTriples(np.array([[0, 0, 1], [0, 0, 2]]), 3)
    pool = CandidatePool(np.ones((3, 1)), known)
    entities, scores = top_entities(np.ones((1, 1)), pool, np.array([0]), np.array([0]), 5)
    assert entities[0, 0] == 0
    assert scores.tolist() == [[1, -np.inf, -np.inf]]


# -- figures -----------------------------------------------------------------------------------


def test_both_directions_of_a_triple_are_resampled_together(monkeypatch):
    seen = []
    monkeypatch.setattr(
        ranking, "bootstrap_metrics", lambda *given: seen.append(given) or bootstrap_metrics(*given)
    )
    ranks = np.arange(1, 11, dtype=float)[None]
    chosen = np.array([1, 1, 0, 0, 1, 1, 1, 1, 0, 0], dtype=bool)
    (found,) = score_rankings([ranks], np.tile(np.arange(5), 2), resamples=9, mask=chosen)

    (systems, _, triple, _, _) = seen[0]
    assert triple.tolist() == [0, 1, 4, 0, 1, 2]
    assert systems[0].tolist() == [[1, 2, 5, 6, 7, 8]]
    assert found.metrics["mrr"].value == np.mean(1 / ranks[0, chosen])


def test_means_over_rows_are_resampled_as_any_metric_is():
    rng = np.random.default_rng(0)
    systems = [rng.integers(1, 30, size=(seeds, 80)).astype(float) for seeds in (1, 3)]
    pair = np.tile(np.arange(40), 2)
    quick = bootstrap_metrics(systems, np.zeros(80), pair, RANKING_METRICS, 50)
    slow = bootstrap_metrics(
        systems,
        np.zeros(80),
        pair,
        [replace(metric, by_row=None) for metric in RANKING_METRICS],
        50,
    )

    np.testing.assert_allclose(quick.values, slow.values)
    np.testing.assert_allclose(quick.sampled, slow.sampled)
    lower = paired_differences(quick, {0: [1]})[1]["mean_rank"]
    assert (lower.verdict == "better") == (lower.p_holm <= 0.05 and lower.value < 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("mrr", (1 + 1 / 1.5 + 1 / 4 + 1 / 10) / 4), ("hits@1", 0.25), ("hits@3", 0.5),
     ("hits@5", 0.75), ("hits@10", 1), ("mean_rank", 16.5 / 4), ("average_rank", 16.5 / 4),
     ("average_rank_micro", 16.5 / 4)],
)  # fmt: skip
def test_metrics_of_ranks(name: str, value: float):
    (metric,) = choose_metrics([name])
    nothing = np.zeros(0)
    assert metric(np.array([1, 1.5, 4, 10]), np.zeros(4), np.zeros(4, dtype=int)) == value
    assert np.isnan(metric(nothing, nothing, nothing.astype(int)))


def test_the_average_rank_is_of_strata_not_of_queries():
    rank = np.array([1.0, 3, 10, 20, 30])
    stratum, nothing = np.array([2.0, 2, 3, 3, 3]), np.zeros(5, dtype=int)
    average, micro = choose_metrics(["average_rank", "average_rank_micro"])
    assert average(rank, stratum, nothing) == (2 + 20) / 2
    assert micro(rank, stratum, nothing) == 64 / 5
    hits = mean_over_strata(choose_metrics(["hits@10"])[0])
    assert hits(rank, stratum, nothing) == (1 + 1 / 3) / 2


def test_means_over_strata_are_resampled_as_any_metric_is():
    """Some draws miss a stratum, which then does not count."""
    rng = np.random.default_rng(1)
    systems = [rng.integers(1, 30, size=(seeds, 40)).astype(float) for seeds in (1, 2)]
    dialogue, stratum = rng.integers(6, size=40), rng.integers(5, size=40) * 2.0
    metrics = choose_metrics(["average_rank"])
    quick = bootstrap_metrics(systems, stratum, dialogue, metrics, 60)
    slow = bootstrap_metrics(systems, stratum, dialogue, [replace(metrics[0], by_row=None)], 60)

    np.testing.assert_allclose(quick.values, slow.values)
    np.testing.assert_allclose(quick.sampled, slow.sampled)
    assert not np.allclose(quick.sampled, quick.sampled[..., :1])
