"""Demo of the main workflow: extract, fit-head, evaluate, similarity and cluster with MiniLM.

    python scripts/demo.py [--run runs/demo] [--data my.csv]

The demo prints each command and what it prints; its last line is one JSON object. A second call
reuses the features, and repeats the other steps.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

from common import Options

import llmcond
from llmcond.base.output import log_to_terminal
from llmcond.cli import run
from llmcond.report.tables import results_table

TICKETS = Path(__file__).resolve().parent.parent / "docs" / "tickets.csv"


def run_step(what: str, *arguments: str) -> None:
    """Print a command and what it is for, and run it; end the program if it fails."""
    print(f"\n{what}:\n  llmcond {shlex.join(arguments)}", flush=True)
    if code := run(arguments):
        sys.exit(code)


def main() -> None:
    """Run the demo."""
    parser = Options(__doc__)
    parser.option("--run", Path("runs/demo"), "run folder")
    parser.option("--data", str, "data to use", "the bundled sample")
    options = parser.parse_args()
    log_to_terminal()
    began = time.monotonic()
    run_options = ["--run", str(options.run)]
    data = [] if options.data is None else ["--data", options.data]
    extract = ["extract", "--model", "minilm", *data, *run_options]
    run_step("1. Encode each sentence once under its condition", *extract)
    run_step(
        "2. Fit a small head on the frozen features", "fit-head", "--head", "mlp", *run_options
    )
    evaluate = ["evaluate", "--head", "mlp", "--split", "test", *run_options]
    print(f"\n3. Evaluate it on unseen sentences:\n  llmcond {shlex.join(evaluate)}", flush=True)
    results = llmcond.evaluate(head=["mlp"], split="test", run=options.run)
    results_table(results, options.run).print()
    sentences = ["Two women read a book at the beach.", "Two women cook at night."]
    conditions = ["--condition", "the number of people", "--condition", "the activity"]
    similarity = ["similarity", *sentences, *conditions, *run_options]
    run_step("4. Compare two sentences under conditions with this head", *similarity)
    cluster = ["cluster", str(TICKETS), "--condition", "the sentiment", "--clusters", "3"]
    cluster += ["--labels", "sentiment", "--out", str(options.run / "sentiments.csv")]
    run_step("5. Group support tickets by their sentiment with the bundled model", *cluster)
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
    print(f"\n{json.dumps(summary)}")


if __name__ == "__main__":
    main()
