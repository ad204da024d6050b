"""The main job, end to end: extract, fit-head, evaluate on the bundled sample with MiniLM.

    python scripts/demo.py [--run runs/demo]

Prints what it does; the last line is one JSON object. A second call finds the features and only
fits and scores again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from llmcond.encoders import EncoderOptions
from llmcond.metrics import finite
from llmcond.report.terminal import results_table, show
from llmcond.workflows import DataOptions, evaluate, extract, fit_head


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    run = parser.parse_args().run
    began = time.monotonic()
    print("1. Encode every sentence under its condition, once: llmcond extract --model minilm")
    extract("minilm", EncoderOptions(), run, DataOptions())
    print("2. Fit a small head on the frozen features: llmcond fit-head --head mlp")
    fit_head(run, "mlp")
    print("3. Score it on sentences it has never seen: llmcond evaluate")
    results = evaluate(run, ["mlp"], "test")
    show(results_table(results, run))
    zero_shot = next(row for row in results if row.head == "none" and row.subtract)
    fitted = next(row for row in results if row.head == "mlp")
    summary = {
        "spearman_zero_shot": finite(zero_shot.metrics["spearman"].value),
        "spearman": finite(fitted.metrics["spearman"].value),
        "accuracy": finite(fitted.metrics["accuracy"].value),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
