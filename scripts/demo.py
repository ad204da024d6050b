"""Demo of the main workflow: extract, fit-head and evaluate on the bundled sample with MiniLM.

    python scripts/demo.py [--run runs/demo] [--data my.csv]

The demo prints each step; its last line is one JSON object. A second call reuses the features, and
repeats only the fit and the evaluation.
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
    parser.add_argument(
        "--run", type=Path, default=Path("runs/demo"), help="run folder (default: runs/demo)"
    )
    parser.add_argument("--data", help="data to use (default: the bundled sample)")
    options = parser.parse_args()
    run = options.run
    log_to_terminal()
    began = time.monotonic()
    run_option = f"--run {run}"
    print(
        "1. Encode each sentence once under its condition: llmcond extract --model minilm "
        f"{run_option}"
    )
    llmcond.extract(model="minilm", data=options.data, run=run)
    print(f"2. Fit a small head on the frozen features: llmcond fit-head --head mlp {run_option}")
    llmcond.fit_head(head="mlp", run=run)
    print(f"3. Evaluate it on unseen sentences: llmcond evaluate --split test {run_option}")
    results = llmcond.evaluate(head=["mlp"], split="test", run=run)
    print_table(results_table(results, run))
    print(
        f"Use the head of this run: llmcond similarity 'A man rides a horse.' 'A girl cycles.' "
        f"--condition 'the activity' {run_option}"
    )
    zero_shot = next(
        result for result in results if result.head == "none" and result.subtract
    ).metrics
    fitted = next(result for result in results if result.head == "mlp").metrics
    summary = {
        "spearman_zero_shot": zero_shot["spearman"].value,
        "spearman": fitted["spearman"].value,
        "accuracy": fitted["accuracy"].value,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
