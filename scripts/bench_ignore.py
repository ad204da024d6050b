"""Measure what ignoring another condition costs: processor time and memory, next to encoding.

    python scripts/bench_ignore.py --data docs/tickets.csv
    python scripts/bench_ignore.py --data TEXTS --n 1000000 --ignore "the product" "the mood" --json

The texts are those of the table, each with a number, so that none repeats. The bundled model
embeds them under a condition, finds the conditions to ignore, and removes them from all embeddings.
Times are processor seconds of this process, which other processes affect less than wall time.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import BenchOptions
from common import format_table, print_json

from llmcond import Condition, load_embedder
from llmcond.data.datasets import read_collection


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return a result, its processor seconds, and how much it raised the peak memory, in MiB."""
    memory, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    result = call()
    raised = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    return result, time.process_time() - start, raised / 1024


def main() -> None:
    """Run the benchmark."""
    options = BenchOptions(__doc__)
    options.option("--data", Path, "table of texts", required=True)
    options.option("--n", 100_000, "number of texts")
    options.option("--condition", "the problem", "condition of the embeddings")
    options.option("--ignore", ["the product"], "conditions that are ignored")
    args = options.parse_args()
    originals = read_collection(args.data).texts
    texts = [f"{originals[i % len(originals)]} ({i})" for i in range(args.n)]
    embedder, condition = load_embedder(), Condition(args.condition, ignore=args.ignore)
    vectors, *encoding = timed(lambda: embedder.encode(texts, args.condition))
    ignoring, *finding = timed(lambda: embedder.ignoring(texts, condition))
    guide = ignoring.guides[condition]
    mapping = timed(lambda: guide.transform(vectors))[1:]
    steps = {"encode all texts": encoding, "find what to ignore": finding, "remove it": mapping}
    rows = [{"step": step, "seconds": s, "MiB": m} for step, (s, m) in steps.items()]
    share = (finding[0] + mapping[0]) / encoding[0]
    print(format_table(rows, {"step": "step", "seconds": "seconds:.1f", "MiB": "MiB:.0f"}))
    print(f"\n{args.n:,} texts: ignoring takes {share:.1%} of the time of encoding")
    print_json(args, {"directions": len(guide.directions.T), "share": share, "steps": rows})


if __name__ == "__main__":
    main()
