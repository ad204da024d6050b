"""Measure the cost of routed pooling against joint prompts and tri-encoders.

    python scripts/bench_routed.py
    python scripts/bench_routed.py --sentences 50 --data CSTS_FOLDER --rows 13326 --rounds 1
    python scripts/bench_routed.py --dtype bfloat16 --sentences 1000 --conditions 1 8

The script prints two tables. ``grid``: sentences under 1, 10 and 100 conditions each. ``rows``:
rated rows, extracted into a store. The systems take turns. Ratios are medians over rounds, and
compare with encoding the sentences alone. On a CPU, seconds are this process's processor time,
because other processes on the machine affect it less than the wall time.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench import BenchOptions, find_checkpoint, fit_random_head, median_of, median_ratio, timed
from common import format_table, print_json
from sentence_transformers import SentenceTransformer

from llmcond.data.datasets import read_dataset
from llmcond.encoders.encoder import Encoder, load_encoder
from llmcond.encoders.spec import EncoderInput
from llmcond.features.extract import extract
from llmcond.features.store import FeatureStore
from llmcond.prompts import load_prompt
from llmcond.prompts.inputs import render_rows

#: The system that the others are compared with.
ALONE = "sentences alone"
HEAD = "hypernet-mse"


def measure_in_turn(
    ways: Mapping[str, Callable[[], object]], encoder: Encoder, rounds: int
) -> list[dict[str, Any]]:
    """Run systems in turn; return the median seconds, and the median ratio to the first system."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(rounds + (rounds > 1)):
        for name, way in ways.items():
            _, wall, processor = timed(way)
            if number or rounds == 1:  # the first round is a warm-up
                on_cpu = encoder.resolved.device == "cpu"
                turns[name].append({"seconds": processor if on_cpu else wall})
    first = next(iter(turns.values()))
    return [
        {
            "what": name,
            "seconds": median_of(times, "seconds"),
            "ratio": median_ratio(times, first, "seconds"),
        }
        for name, times in turns.items()
    ]


def measure_grid(encoder: Encoder, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Embed every sentence under every condition, without a store."""
    every = read_dataset(None).splits["train"]
    sentences = list(dict.fromkeys(every.sentence1))[: options.sentences]
    # The sample has too few conditions, so numbered copies of about the same length are added.
    known = list(dict.fromkeys(every.condition))
    conditions = [f"{known[i % len(known)]} {i}" for i in range(max(options.conditions))]
    head = fit_random_head(HEAD, encoder.dim)
    alone = load_prompt("control-no-condition").conditional
    peer = SentenceTransformer(
        str(encoder.resolved.checkpoint.folder),
        device=encoder.resolved.device,
        model_kwargs={"dtype": encoder.identity.dtype},
    )

    def encode_sentences() -> Any:
        return encoder.encode([alone.render(s, "") for s in sentences])

    def apply_head(k: int) -> None:
        vectors = encode_sentences()
        prompt = load_prompt("separate").unconditional
        for vector in encoder.encode([prompt.render("", c) for c in conditions[:k]]):
            head.transform(vectors, vector[None])

    def make_grid(name: str, k: int) -> list[EncoderInput]:
        prompt, first = load_prompt(name), conditions[:k]
        inputs = [prompt.conditional.render(s, c) for s in sentences for c in first]
        return [*inputs, *(prompt.unconditional.render("", c) for c in first)]

    def encode_grid(name: str, k: int) -> None:
        encoder.encode(make_grid(name, k))

    def encode_with_peer(k: int) -> None:
        texts = [encoder.format(item) for item in make_grid("concat-cond-sent", k)]
        peer.encode(texts, batch_size=32, show_progress_bar=False)

    rows = []
    for k in options.conditions:
        ways: dict[str, Callable[[], object]] = {
            ALONE: encode_sentences,
            f"separate, {HEAD} head": partial(apply_head, k),
            "routed": partial(encode_grid, "routed", k),
            "concat-cond-sent": partial(encode_grid, "concat-cond-sent", k),
            "concat-cond-sent, sentence-transformers": partial(encode_with_peer, k),
        }
        rows += [{"conditions": k, **row} for row in measure_in_turn(ways, encoder, options.rounds)]
    return rows


def measure_rows(encoder: Encoder, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Extract the inputs of rated rows, each time into a new store."""
    splits = read_dataset(options.data).splits.values()

    def extract_rows(name: str) -> None:
        prompt, inputs = load_prompt(name), []
        for rows in splits:
            pairs = render_rows(rows, prompt)
            sides = pairs.first, pairs.second, pairs.first_unconditional, pairs.second_unconditional
            inputs += [item for row in zip(*sides, strict=True) for item in row]
        with tempfile.TemporaryDirectory() as folder:
            store = FeatureStore(Path(folder), encoder.identity, "float16")
            extract(inputs[: 4 * options.rows], store, lambda: encoder)

    names = {ALONE: "control-no-condition", "routed": "routed"}
    ways: dict[str, Callable[[], object]] = {
        what: partial(extract_rows, name) for what, name in names.items()
    }
    return measure_in_turn(ways, encoder, options.rounds)


def main() -> None:
    """Parse the command line, measure, and print tables."""
    parser = BenchOptions(__doc__)
    add = parser.option
    add("--model", "minilm", "encoder")
    parser.sizes()
    add("--dtype", "float32", "data type of the encoder")
    add("--sentences", 20, "number of sentences in the grid")
    add("--conditions", [1, 10, 100], "numbers of conditions in the grid")
    add("--data", str, "rated rows to extract", "the bundled sample")
    add("--rows", 500, "maximum number of rated rows to extract")
    parser.rounds()
    options = parser.parse_args()
    checkpoint, like = find_checkpoint(options)
    encoder = load_encoder(str(checkpoint), dtype=options.dtype, like=like)
    print(f"{encoder.name}, {encoder.identity.dtype}, torch {torch.__version__}")
    results = {"grid": measure_grid(encoder, options)}
    print(f"\n{options.sentences} sentences under conditions\n\n{format_table(results['grid'])}")
    results["rows"] = measure_rows(encoder, options)
    print(f"\n{options.rows} rated rows at most\n\n{format_table(results['rows'])}")
    print_json(options, results)


if __name__ == "__main__":
    main()
