"""Measure how long a dialogue turn takes against many candidates, and a whole test set.

    python scripts/bench_dialogue.py [--candidates 10000 100000 1000000] [--json]

The vectors are random and lie around centres, as texts lie around topics: the time does not depend
on their meaning. The peer is equation 3 of Triple-Encoders (ACL 2024), as in the paper and its
released code: each pair of turns has a separate vector, and each turn multiplies all these vectors
by all candidates. If faiss is installed (pip install faiss-cpu), an index of inner products is
searched for the ten best candidates with the same single vector. The table then also has the share
of the true ten best that the index finds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.kinds.dialogue.turns import ContextScore, ContextState, turn_scores

Vectors = NDArray[np.float32]
#: Number of queries in DailyDialog's test by history length; queries of a length rank each
#: other's answers.
POOLS = {2: 958, 3: 918, 4: 741, 5: 651, 6: 534, 7: 479, 8: 385, 9: 323, 10: 230}
SCORES = ("average", "last:2", "bi", "maxsim")
BEST = 10


def normalize(vectors: NDArray[Any]) -> Vectors:
    """Normalise each row to length 1."""
    normalized: Vectors = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return normalized


def around_centres(rng: np.random.Generator, n: int, dim: int) -> Vectors:
    """Return (n, dim) random unit vectors around 1,000 centres."""
    centres = rng.standard_normal((1_000, dim), dtype=np.float32)
    vectors = rng.standard_normal((n, dim), dtype=np.float32)
    for start in range(0, n, 65_536):
        block = vectors[start : start + 65_536]
        block += centres[rng.integers(len(centres), size=len(block))]
        block[:] = normalize(block)
    return vectors


def score_by_pairs(b1: Vectors, b2: Vectors, candidates: Vectors) -> Vectors:
    """Score candidates by equation 3, pair by pair.

    Args:
        b1: (n, dim) vectors of the turns as the first of a pair.
        b2: (n, dim) vectors of the turns as the second of a pair.
        candidates: (c, dim) vectors.

    Returns:
        (c,) scores.
    """
    first, second = np.triu_indices(len(b1), 1)
    pairs = normalize(b1[first] + b2[second])
    scores: Vectors = (candidates @ pairs.T).sum(axis=1)
    return scores


def milliseconds(function: Callable[[], Any], rounds: int) -> float:
    """Return the shortest time of several calls, in milliseconds."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def measure_turn(
    rng: np.random.Generator, n_candidates: int, turns: int, dim: int, rounds: int
) -> dict[str, Any]:
    """Measure the last turn of a dialogue against random candidates."""
    candidates = around_centres(rng, n_candidates, dim)
    b1, b2 = (normalize(rng.standard_normal((turns, dim), dtype=np.float32)) for _ in range(2))
    roles = iter([(b1[i : i + 1], b2[i : i + 1]) for i in range(turns)])
    state = ContextState(lambda _: next(roles), ContextScore.parse("average"))
    for _ in range(turns - 1):
        state = state.add(b1[0])
    last = next(roles)
    state = ContextState(lambda _: last, state.score, None, state.b1, state.b2, state.inverse)

    def score_turn() -> Vectors:
        scores: Vectors = state.add(b1[0]).scores(candidates)
        return scores

    ours, theirs = score_turn(), score_by_pairs(b1, b2, candidates)
    row = {
        "candidates": n_candidates,
        "turns": turns,
        "one_vector_ms": milliseconds(score_turn, rounds),
        "state_ms": milliseconds(lambda: state.add(b1[0]).query, rounds),
        "pairs_ms": milliseconds(lambda: score_by_pairs(b1, b2, candidates), rounds),
        "difference": float(np.abs(ours - theirs).max()),
    }
    if find_spec("faiss"):
        row |= measure_index(state.add(b1[0]).query, candidates, ours, rounds)
    return row


def measure_index(
    query: Vectors, candidates: Vectors, scores: Vectors, rounds: int
) -> dict[str, Any]:
    """Measure a faiss index: the time of a search, and its share of the ten best candidates."""
    import faiss

    dim, lists = candidates.shape[1], int(4 * np.sqrt(len(candidates)))
    inner = faiss.METRIC_INNER_PRODUCT
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, inner)
    index.train(candidates[: 40 * lists])
    index.add(candidates)
    index.nprobe = max(1, lists // 32)
    queries = normalize(query)[None]
    best = set(np.argsort(-scores)[:BEST].tolist())
    hits = set(index.search(queries, BEST)[1][0].tolist())
    return {
        "index_ms": milliseconds(lambda: index.search(queries, BEST), rounds),
        "index_finds": len(best & hits) / min(BEST, len(candidates)),
    }


def measure_test_set(
    rng: np.random.Generator, dim: int, share: float, rounds: int
) -> Mapping[str, float]:
    """Measure the seconds to score a test set as large as DailyDialog's, or a share of it."""
    sets = []
    for history, n in POOLS.items():
        shape = max(2, int(share * n)), history, dim
        b1, b2 = (normalize(rng.standard_normal(shape, dtype=np.float32)) for _ in range(2))
        sets.append((b1, b2, around_centres(rng, shape[0], dim)))

    def score_all(score: str) -> None:
        for b1, b2, candidates in sets:
            turn_scores(b1, b2, candidates, score)

    return {score: milliseconds(partial(score_all, score), rounds) / 1e3 for score in SCORES}


def main() -> None:
    """Measure, and print the tables or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--candidates",
        type=int,
        nargs="+",
        default=[10_000, 100_000, 1_000_000],
        help="numbers of candidates (default: 10000 100000 1000000)",
    )
    parser.add_argument(
        "--turns",
        type=int,
        nargs="+",
        default=[10, 50],
        help="numbers of turns in the dialogue (default: 10 50)",
    )
    parser.add_argument(
        "--dim", type=int, default=384, help="dimensions of a vector (default: 384)"
    )
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of the test set to score (default: 1.0)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="repetitions, of which the fastest counts (default: 7)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the tables"
    )
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    rows = [
        measure_turn(rng, n, turns, args.dim, args.rounds)
        for n in args.candidates
        for turns in args.turns
    ]
    test_seconds = measure_test_set(rng, args.dim, args.share, min(3, args.rounds))
    if args.json:
        print(json.dumps({"turn": rows, "test_seconds": test_seconds}))
        return
    indexed = "index_ms" in rows[0]
    titles = [
        "candidates",
        "turns",
        "one vector, ms",
        "of it the state",
        "pair by pair, ms",
        "times",
    ]
    titles += ["index, ms", "finds"] if indexed else []
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")
    for row in rows:
        ours, theirs = row["one_vector_ms"], row["pairs_ms"]
        print(
            f"| {row['candidates']:,} | {row['turns']} | {ours:.2f} | {row['state_ms']:.2f} "
            f"| {theirs:.1f} | {theirs / ours:.1f} |",
            end="",
        )
        print(f" {row['index_ms']:.2f} | {row['index_finds']:.0%} |" if indexed else "")
    print(f"\nlargest difference of a score: {max(row['difference'] for row in rows):.1e}\n")
    print("| score of the whole test set | seconds |\n|---|---|")
    for score, seconds in test_seconds.items():
        print(f"| {score} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
