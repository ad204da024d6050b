"""Measure the filtered ranking of a test set against PyKEEN's evaluator.

    python scripts/bench_ranking.py [--json]
    python scripts/bench_ranking.py --golden tests/golden/pykeen_ranks.json    # with PyKEEN

The graph is as large as WN18RR: 6,268 queries, 40,943 entities, 384 dimensions. Vectors and triples
are random, because time does not depend on their meaning. The peers are a full sort of the scores
of each query, as in SimKGC, and PyKEEN's filter and evaluator, if installed (pip install pykeen).
``--golden`` writes PyKEEN's ranks of small random scores, which the tests compare with llmcond's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmcond.evaluation.ranking import BLOCK, rank
from llmcond.files import write_json
from llmcond.kinds.ranking.graph import KnownTriples, Triples, both_directions

Ranks = Mapping[str, NDArray[Any]]
Scores = Callable[[slice], torch.Tensor]
SIDES = ("tail", "head")


def random_graph(entities: int, relations: int, sizes: tuple[int, ...], seed: int = 0) -> Triples:
    """Return sum(sizes) distinct random triples."""
    rng = np.random.default_rng(seed)
    total = sum(sizes)
    triples = rng.integers(0, [entities, relations, entities], size=(2 * total, 3))
    distinct = triples[np.sort(np.unique(triples, axis=0, return_index=True)[1])]
    return np.asarray(distinct[:total], dtype=np.int32)


def pykeen_ranks(scores: Scores, test: Triples, positives: Triples) -> Ranks:
    """Return PyKEEN's (2n,) ranks of the queries of n triples, for three treatments of ties.

    Args:
        scores: maps a slice of the 2n queries to their (m, entities) scores.
        test: (n, 3) triples.
        positives: (p, 3) all known triples, including those of test.
    """
    from pykeen.evaluation import RankBasedEvaluator
    from pykeen.evaluation.evaluator import create_sparse_positive_filter_, filter_scores_

    evaluator = RankBasedEvaluator(clear_on_finalize=False)
    known = torch.from_numpy(positives.astype(np.int64))
    for side, (target, column) in enumerate(zip(SIDES, (2, 0), strict=True)):
        for begin in range(0, len(test), BLOCK):
            batch = torch.from_numpy(test[begin : begin + BLOCK].astype(np.int64))
            first = side * len(test) + begin
            predicted = scores(slice(first, first + len(batch)))
            known_positions, _ = create_sparse_positive_filter_(batch, known, filter_col=column)
            answer = batch[:, column : column + 1]
            answer_scores = predicted.gather(1, answer)
            filtered = filter_scores_(predicted, known_positions)
            filtered = filtered.scatter_(1, answer, answer_scores)
            evaluator.process_scores_(batch, target, filtered, answer_scores)
    return {
        ties: np.concatenate([np.concatenate(evaluator.ranks[side, ties]) for side in SIDES])
        for ties in ("realistic", "optimistic", "pessimistic")
    }


def sorted_ranks(scores: Scores, queries: Triples, known: KnownTriples) -> NDArray[Any]:
    """Return the (m,) ranks of the answers by a full sort of the scores, as in SimKGC."""
    ranks = []
    for begin in range(0, len(queries), BLOCK):
        block = queries[begin : begin + BLOCK]
        predicted = scores(slice(begin, begin + BLOCK))
        answer = torch.from_numpy(block[:, 2:].astype(np.int64))
        answer_scores = predicted.gather(1, answer)
        row, tail = known.gather(block[:, 0], block[:, 1])
        predicted[torch.from_numpy(row), torch.from_numpy(tail)] = -torch.inf
        order = predicted.scatter_(1, answer, answer_scores).sort(dim=1, descending=True).indices
        ranks.append((order == answer).nonzero()[:, 1].numpy())
    return np.concatenate(ranks) + 1


def golden_case(decimals: int | None) -> tuple[NDArray[np.float32], Triples, Triples]:
    """Return (2n, entities) scores, n test triples and all triples.

    Args:
        decimals: rounds the scores, so that they have ties; None does not round.
    """
    triples = random_graph(40, 3, (200, 60))
    scores = np.random.default_rng(1).standard_normal((120, 40)).astype(np.float32)
    return scores if decimals is None else scores.round(decimals), triples[-60:], triples


#: The cases of the golden ranks: the number of decimals that scores are rounded to.
CASES: Mapping[str, int | None] = {"float32": None, "rounded": 0}


def golden() -> dict[str, dict[str, list[float]]]:
    """Return PyKEEN's ranks in each case, by treatment of ties."""
    golden_ranks = {}
    for name, decimals in CASES.items():
        scores, test, triples = golden_case(decimals)
        table = torch.from_numpy(scores)

        def take(rows: slice, table: torch.Tensor = table) -> torch.Tensor:
            return table[rows].clone()

        ranks = pykeen_ranks(take, test, triples)
        golden_ranks[name] = {ties: values.astype(float).tolist() for ties, values in ranks.items()}
    return golden_ranks


def timed(function: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Call a function; return its wall time and processor time in seconds, and the result."""
    clock, processor = time.perf_counter(), time.process_time()
    result = function()
    elapsed = time.perf_counter() - clock, time.process_time() - processor
    return {"seconds": elapsed[0], "cpu_seconds": elapsed[1]}, result


def main() -> None:
    """Parse the command line, measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--entities", type=int, default=40_943, help="number of entities (default: 40943)"
    )
    parser.add_argument(
        "--triples",
        type=int,
        default=3_134,
        help="number of test triples, with two queries each (default: 3134)",
    )
    parser.add_argument(
        "--train", type=int, default=89_869, help="number of other known triples (default: 89869)"
    )
    parser.add_argument(
        "--dim", type=int, default=384, help="dimensions of a vector (default: 384)"
    )
    parser.add_argument(
        "--golden", type=Path, help="write PyKEEN's ranks to this file, and measure nothing"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on the last line"
    )
    options = parser.parse_args()
    if options.golden:
        write_json(options.golden, golden())
        return
    relations = 11
    triples = random_graph(options.entities, relations, (options.train, options.triples))
    test = triples[-options.triples :]
    queries = both_directions(test, relations)
    known = KnownTriples(both_directions(triples, relations), options.entities)
    rng = np.random.default_rng(1)
    vectors, candidates = (
        rng.standard_normal((n, options.dim), dtype=np.float32)
        for n in (len(queries), options.entities)
    )
    query_tensor, candidate_tensor = torch.from_numpy(vectors), torch.from_numpy(candidates)

    def scores(rows: slice) -> torch.Tensor:
        return query_tensor[rows] @ candidate_tensor.T

    seconds, ours = timed(lambda: rank(vectors, candidates, queries, known))
    rows = [{"ranking": "llmcond", **seconds, "mrr": float((1 / ours.resolve_ties()).mean())}]
    seconds, sorted_by_score = timed(lambda: sorted_ranks(scores, queries, known))
    rows.append(
        {"ranking": "sort of all scores", **seconds, "mrr": float((1 / sorted_by_score).mean())}
    )
    if find_spec("pykeen"):
        seconds, theirs = timed(lambda: pykeen_ranks(scores, test, triples))
        mrr = float((1 / theirs["realistic"].astype(float)).mean())
        rows.append({"ranking": "PyKEEN", **seconds, "mrr": mrr})
    print(f"{len(queries):,} queries, {options.entities:,} entities, {options.dim} dimensions")
    print("| ranking | seconds | CPU seconds | MRR |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['ranking']} | {row['seconds']:.2f} | {row['cpu_seconds']:.2f} "
              f"| {row['mrr']:.6f} |")  # fmt: skip
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
