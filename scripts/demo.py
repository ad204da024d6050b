"""The main job, end to end: extract, fit-head, evaluate on the bundled sample with MiniLM.

    python scripts/demo.py [--run runs/demo] [--data my.csv]

Prints what it does; the last line is one JSON object. A second call finds the features and only
fits and scores again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import llmcond
from llmcond.log import log_to_terminal
from llmcond.report.terminal import print_table, results_table


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--data", help="other data (default: the bundled sample)")
    options = parser.parse_args()
    run = options.run
    log_to_terminal()
    began = time.monotonic()
    own = f"--run {run}"
    print(
        f"1. Encode each sentence under its condition, once: llmcond extract --model minilm {own}"
    )
    llmcond.extract(model="minilm", data=options.data, run=run)
    print(f"2. Fit a small head on the frozen features: llmcond fit-head --head mlp {own}")
    llmcond.fit_head(head="mlp", run=run)
    print(f"3. Score it on sentences it has never seen: llmcond evaluate --split test {own}")
    results = llmcond.evaluate(head=["mlp"], split="test", run=run)
    print_table(results_table(results, run))
    print(
        f"Use it, naming the run: llmcond similarity 'A man rides a horse.' 'A girl cycles.' "
        f"--condition 'the activity' {own}"
    )
    zero_shot = next(one for one in results if one.head == "none" and one.subtract).metrics
    fitted = next(one for one in results if one.head == "mlp").metrics
    summary = {
        "spearman_zero_shot": zero_shot["spearman"].value,
        "spearman": fitted["spearman"].value,
        "accuracy": fitted["accuracy"].value,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
