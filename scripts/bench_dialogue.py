"""How long a turn of a dialogue takes against many candidates, and a whole test set, in one run.

    python scripts/bench_dialogue.py [--candidates 10000 100000 1000000] [--json]

Vectors are random, around centres as texts are around topics: time does not depend on what they
say. The peer is equation 3 of Triple-Encoders (ACL 2024) as it stands there and in its released
code: each pair is a vector of its own, and all of them are multiplied by all candidates at each
turn. Where faiss is installed (pip install faiss-cpu), an index of inner products is asked for the
ten best by the same one vector, beside the share of the true ten that it finds.
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
#: Queries by history length of DailyDialog's test; each length ranks the answers of its own.
POOLS = {2: 958, 3: 918, 4: 741, 5: 651, 6: 534, 7: 479, 8: 385, 9: 323, 10: 230}
SCORES = ("average", "last:2", "bi", "maxsim")
BEST = 10


def unit(vectors: NDArray[Any]) -> Vectors:
    """Return rows of length 1."""
    found: Vectors = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return found


def around_centres(rng: np.random.Generator, n: int, dim: int) -> Vectors:
    """Return (n, dim) unit vectors around 1,000 centres."""
    centres = rng.standard_normal((1_000, dim), dtype=np.float32)
    found = rng.standard_normal((n, dim), dtype=np.float32)
    for start in range(0, n, 65_536):
        part = found[start : start + 65_536]
        part += centres[rng.integers(len(centres), size=len(part))]
        part[:] = unit(part)
    return found


def by_pairs(b1: Vectors, b2: Vectors, candidates: Vectors) -> Vectors:
    """Return equation 3 pair by pair: (c,) of roles (n, dim) and candidates (c, dim)."""
    first, second = np.triu_indices(len(b1), 1)
    pairs = unit(b1[first] + b2[second])
    scores: Vectors = (candidates @ pairs.T).sum(axis=1)
    return scores


def milliseconds(function: Callable[[], Any], rounds: int) -> float:
    """Return the least time of some calls."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def a_turn(
    rng: np.random.Generator, n_candidates: int, turns: int, dim: int, rounds: int
) -> dict[str, Any]:
    """Measure one more turn after some, against candidates."""
    candidates = around_centres(rng, n_candidates, dim)
    b1, b2 = (unit(rng.standard_normal((turns, dim), dtype=np.float32)) for _ in range(2))
    roles = iter([(b1[i : i + 1], b2[i : i + 1]) for i in range(turns)])
    state = ContextState(lambda _: next(roles), ContextScore.parse("average"))
    for _ in range(turns - 1):
        state = state.add(b1[0])
    last = next(roles)
    state = ContextState(lambda _: last, state.score, None, state.b1, state.b2, state.inverse)

    def turn() -> Vectors:
        found: Vectors = state.add(b1[0]).scores(candidates)
        return found

    ours, theirs = turn(), by_pairs(b1, b2, candidates)
    row = {
        "candidates": n_candidates,
        "turns": turns,
        "one_vector_ms": milliseconds(turn, rounds),
        "state_ms": milliseconds(lambda: state.add(b1[0]).query, rounds),
        "pairs_ms": milliseconds(lambda: by_pairs(b1, b2, candidates), rounds),
        "difference": float(np.abs(ours - theirs).max()),
    }
    if find_spec("faiss"):
        row |= by_index(state.add(b1[0]).query, candidates, ours, rounds)
    return row


def by_index(query: Vectors, candidates: Vectors, scores: Vectors, rounds: int) -> dict[str, Any]:
    """Measure the ten best by an index of inner products."""
    import faiss

    dim, lists = candidates.shape[1], int(4 * np.sqrt(len(candidates)))
    inner = faiss.METRIC_INNER_PRODUCT
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, inner)
    index.train(candidates[: 40 * lists])
    index.add(candidates)
    index.nprobe = max(1, lists // 32)
    asked = unit(query)[None]
    best = set(np.argsort(-scores)[:BEST].tolist())
    found = set(index.search(asked, BEST)[1][0].tolist())
    return {
        "index_ms": milliseconds(lambda: index.search(asked, BEST), rounds),
        "index_finds": len(best & found) / min(BEST, len(candidates)),
    }


def a_test_set(
    rng: np.random.Generator, dim: int, share: float, rounds: int
) -> Mapping[str, float]:
    """Measure the scores of a test set as large as DailyDialog's, or a share of it: seconds."""
    sets = []
    for history, n in POOLS.items():
        shape = max(2, int(share * n)), history, dim
        b1, b2 = (unit(rng.standard_normal(shape, dtype=np.float32)) for _ in range(2))
        sets.append((b1, b2, around_centres(rng, shape[0], dim)))

    def scored(score: str) -> None:
        for b1, b2, candidates in sets:
            turn_scores(b1, b2, candidates, score)

    return {score: milliseconds(partial(scored, score), rounds) / 1e3 for score in SCORES}


def main() -> None:
    """Print the tables, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--candidates", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--turns", type=int, nargs="+", default=[10, 50], help="of the dialogue")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--share", type=float, default=1.0, help="of the test set")
    parser.add_argument("--rounds", type=int, default=7, help="the fastest one counts")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    rows = [
        a_turn(rng, n, turns, args.dim, args.rounds)
        for n in args.candidates
        for turns in args.turns
    ]
    whole = a_test_set(rng, args.dim, args.share, min(3, args.rounds))
    if args.json:
        print(json.dumps({"turn": rows, "test_seconds": whole}))
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
    for score, seconds in whole.items():
        print(f"| {score} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
