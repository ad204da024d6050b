"""What routed pooling costs, beside joint prompts and tri-encoders, in one run and in turn.

    python scripts/bench_routed.py
    python scripts/bench_routed.py --sentences 50 --data CSTS_FOLDER --rows 13326 --rounds 1

``grid``: sentences under 1, 10 and 100 conditions each. ``rows``: rated rows, extracted into a
store. Ratios are medians of rounds, against encoding the sentences alone. On a CPU seconds are
those that this process had of it, which others on the machine change less than the clock's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmcond.data.datasets import read_dataset
from llmcond.encoders.encoder import Encoder, load_encoder
from llmcond.features.extract import extract
from llmcond.features.store import FeatureStore
from llmcond.heads import PairArrays, SharedRows, fit_recipe, load_recipe
from llmcond.heads.base import FittedHead
from llmcond.prompts import load_prompt
from llmcond.prompts.inputs import render_rows

#: The first is what others are compared with.
ALONE = "sentences alone"
HEAD = "hypernet-mse"


def in_turn(
    ways: Mapping[str, Callable[[], object]], encoder: Encoder, rounds: int
) -> list[dict[str, Any]]:
    """Return the median seconds of each way, and the median of its ratios to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    clock = time.process_time if encoder.resolved.device == "cpu" else time.perf_counter
    for number in range(rounds + (rounds > 1)):
        for name, way in ways.items():
            began = clock()
            way()
            if number or rounds == 1:  # the first round is for warming up
                seconds[name].append(clock() - began)
    first = next(iter(seconds.values()))
    return [
        {
            "what": name,
            "seconds": statistics.median(own),
            "ratio": statistics.median(a / b for a, b in zip(own, first, strict=True)),
        }
        for name, own in seconds.items()
    ]


def small_head(dim: int) -> FittedHead:
    """Return a head on e(s) and e(c), fitted on a few random pairs: its speed is that of any."""
    rng = np.random.default_rng(0)
    first, second, conditions = rng.standard_normal((3, 64, dim)).astype(np.float32)
    of = SharedRows(conditions, rng.integers(64, size=64))
    recipe = load_recipe(HEAD).with_settings({"dim": dim, "epochs": 1}, "")
    pairs = PairArrays(first, second, rng.uniform(size=64), of)
    return fit_recipe(recipe, pairs, None, 0, lambda epoch, epochs, score: None)


def grid(encoder: Encoder, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Embed every sentence under every condition, without a store."""
    every = read_dataset(None).splits["train"]
    sentences = list(dict.fromkeys(every.sentence1))[: options.sentences]
    # More than the sample has, as long as its own.
    known = list(dict.fromkeys(every.condition))
    conditions = [f"{known[i % len(known)]} {i}" for i in range(max(options.conditions))]
    head = small_head(encoder.dim)
    alone = load_prompt("control-no-condition").conditional

    def sentence_vectors() -> Any:
        return encoder.encode([alone.render(s, "") for s in sentences])

    def separate(k: int) -> None:
        of_sentences = sentence_vectors()
        prompt = load_prompt("separate").unconditional
        for vector in encoder.encode([prompt.render("", c) for c in conditions[:k]]):
            head.transform(of_sentences, vector[None])

    def prompted(name: str, k: int) -> None:
        prompt, used = load_prompt(name), conditions[:k]
        inputs = [prompt.conditional.render(s, c) for s in sentences for c in used]
        encoder.encode([*inputs, *(prompt.unconditional.render("", c) for c in used)])

    rows = []
    for k in options.conditions:
        ways: dict[str, Callable[[], object]] = {
            ALONE: sentence_vectors,
            f"separate, {HEAD} head": partial(separate, k),
            "routed": partial(prompted, "routed", k),
            "concat-cond-sent": partial(prompted, "concat-cond-sent", k),
        }
        rows += [{"conditions": k, **row} for row in in_turn(ways, encoder, options.rounds)]
    return rows


def rated(encoder: Encoder, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Extract what rated rows need, each time into a store of its own."""
    splits = read_dataset(options.data).splits.values()

    def extracted(name: str) -> None:
        prompt, inputs = load_prompt(name), []
        for rows in splits:
            found = render_rows(rows, prompt)
            sides = found.first, found.second, found.first_unconditional, found.second_unconditional
            inputs += [item for row in zip(*sides, strict=True) for item in row]
        with tempfile.TemporaryDirectory() as folder:
            store = FeatureStore(Path(folder), encoder.identity, "float16")
            extract(inputs[: 4 * options.rows], store, lambda: encoder)

    names = {ALONE: "control-no-condition", "routed": "routed"}
    ways: dict[str, Callable[[], object]] = {
        what: partial(extracted, name) for what, name in names.items()
    }
    return in_turn(ways, encoder, options.rounds)


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows as a Markdown table."""
    print(f"\n{title}\n")
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        cells = (
            f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()
        )
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sentences", type=int, default=20, help="of the grid")
    parser.add_argument("--conditions", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--data", help="rated rows (default: the bundled sample)")
    parser.add_argument("--rows", type=int, default=500, help="of them at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    encoder = load_encoder(options.model, dtype=options.dtype)
    print(f"{encoder.name}, {encoder.identity.dtype}, torch {torch.__version__}")
    found = {"grid": grid(encoder, options)}
    show(f"{options.sentences} sentences under conditions", found["grid"])
    found["rows"] = rated(encoder, options)
    show(f"{options.rows} rated rows at most", found["rows"])
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
