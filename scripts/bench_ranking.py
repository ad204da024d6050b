"""How long the filtered ranking of a test set takes, beside PyKEEN's evaluator, in one run.

    python scripts/bench_ranking.py [--json]
    python scripts/bench_ranking.py --golden tests/golden/pykeen_ranks.json    # with PyKEEN

As large as WN18RR (6,268 queries of 40,943 entities with 384 dimensions), with random vectors and
triples: time does not depend on what they say. Beside it stand a sort of all scores for each query,
as SimKGC ranks, and PyKEEN's filter and evaluator, where it is installed (pip install pykeen).
``--golden`` writes PyKEEN's ranks of small random scores, which our tests are held to.
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
    """Return distinct random triples, as many as the sizes together."""
    rng = np.random.default_rng(seed)
    total = sum(sizes)
    triples = rng.integers(0, [entities, relations, entities], size=(2 * total, 3))
    distinct = triples[np.sort(np.unique(triples, axis=0, return_index=True)[1])]
    return np.asarray(distinct[:total], dtype=np.int32)


def pykeen_ranks(scores: Scores, test: Triples, positives: Triples) -> Ranks:
    """Return the (2n,) ranks that PyKEEN gives to the queries of n triples, by its three ways.

    Args:
        scores: from a slice of the 2n queries to their scores (m, entities).
        test: (n, 3) triples.
        positives: (p, 3) all known triples, the test's among them.
    """
    from pykeen.evaluation import RankBasedEvaluator
    from pykeen.evaluation.evaluator import create_sparse_positive_filter_, filter_scores_

    evaluator = RankBasedEvaluator(clear_on_finalize=False)
    known = torch.from_numpy(positives.astype(np.int64))
    for place, (target, column) in enumerate(zip(SIDES, (2, 0), strict=True)):
        for begin in range(0, len(test), BLOCK):
            batch = torch.from_numpy(test[begin : begin + BLOCK].astype(np.int64))
            own = place * len(test) + begin
            found = scores(slice(own, own + len(batch)))
            left_out, _ = create_sparse_positive_filter_(batch, known, filter_col=column)
            answer = batch[:, column : column + 1]
            right = found.gather(1, answer)
            found = filter_scores_(found, left_out).scatter_(1, answer, right)
            evaluator.process_scores_(batch, target, found, right)
    return {
        ties: np.concatenate([np.concatenate(evaluator.ranks[side, ties]) for side in SIDES])
        for ties in ("realistic", "optimistic", "pessimistic")
    }


def sorted_ranks(scores: Scores, queries: Triples, known: KnownTriples) -> NDArray[Any]:
    """Return (m,) the places of answers in a full sort of the scores, as SimKGC finds them."""
    places = []
    for begin in range(0, len(queries), BLOCK):
        block = queries[begin : begin + BLOCK]
        found = scores(slice(begin, begin + BLOCK))
        answer = torch.from_numpy(block[:, 2:].astype(np.int64))
        right = found.gather(1, answer)
        row, tail = known.gather(block[:, 0], block[:, 1])
        found[torch.from_numpy(row), torch.from_numpy(tail)] = -torch.inf
        order = found.scatter_(1, answer, right).sort(dim=1, descending=True).indices
        places.append((order == answer).nonzero()[:, 1].numpy())
    return np.concatenate(places) + 1


def golden_case(decimals: int | None) -> tuple[NDArray[np.float32], Triples, Triples]:
    """Return scores (2n, entities), n test triples and all triples; rounded, scores have ties."""
    triples = random_graph(40, 3, (200, 60))
    scores = np.random.default_rng(1).standard_normal((120, 40)).astype(np.float32)
    return scores if decimals is None else scores.round(decimals), triples[-60:], triples


#: What the golden ranks are of: whether, and how, scores are rounded.
CASES: Mapping[str, int | None] = {"float32": None, "rounded": 0}


def golden() -> dict[str, dict[str, list[float]]]:
    """Return PyKEEN's ranks of each case."""
    found = {}
    for name, decimals in CASES.items():
        scores, test, triples = golden_case(decimals)
        table = torch.from_numpy(scores)

        def taken(rows: slice, table: torch.Tensor = table) -> torch.Tensor:
            return table[rows].clone()

        ranks = pykeen_ranks(taken, test, triples)
        found[name] = {ties: own.astype(float).tolist() for ties, own in ranks.items()}
    return found


def timed(function: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Return seconds by the clock and of the processor, and the result."""
    clock, processor = time.perf_counter(), time.process_time()
    result = function()
    now = time.perf_counter() - clock, time.process_time() - processor
    return {"seconds": now[0], "cpu_seconds": now[1]}, result


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entities", type=int, default=40_943)
    parser.add_argument("--triples", type=int, default=3_134, help="of test; two queries each")
    parser.add_argument("--train", type=int, default=89_869, help="other known triples")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--golden", type=Path, help="write PyKEEN's ranks to this file instead")
    parser.add_argument("--json", action="store_true")
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
    asked, every = torch.from_numpy(vectors), torch.from_numpy(candidates)

    def scores(rows: slice) -> torch.Tensor:
        return asked[rows] @ every.T

    took, ours = timed(lambda: rank(vectors, candidates, queries, known))
    rows = [{"ranking": "llmcond", **took, "mrr": float((1 / ours.of()).mean())}]
    took, places = timed(lambda: sorted_ranks(scores, queries, known))
    rows.append({"ranking": "sort of all scores", **took, "mrr": float((1 / places).mean())})
    if find_spec("pykeen"):
        took, theirs = timed(lambda: pykeen_ranks(scores, test, triples))
        mrr = float((1 / theirs["realistic"].astype(float)).mean())
        rows.append({"ranking": "PyKEEN", **took, "mrr": mrr})
    print(f"{len(queries):,} queries, {options.entities:,} entities, {options.dim} dimensions")
    print("| ranking | seconds | CPU seconds | MRR |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['ranking']} | {row['seconds']:.2f} | {row['cpu_seconds']:.2f} "
              f"| {row['mrr']:.6f} |")  # fmt: skip
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
