r"""Measure how fast llmcond and other libraries encode texts.

A "way" is a library, or a mode of llmcond, that encodes the texts. Each way runs in a separate
process. All ways take turns on the same texts, so that a busy machine slows all of them down;
ratios are medians over rounds. Processor seconds cover all threads of a way's process. Before each
turn, the process measures the speed of a matrix product in the way's data type.

    python scripts/bench_extract.py --model minilm --threads 2
    python scripts/bench_extract.py --model Salesforce/SFR-Embedding-Mistral --conditions 2 8 32 \
        --set num_hidden_layers=8 hidden_size=1024 intermediate_size=3584 --dtype float32

A model is a known model or the folder of a checkpoint. Models other than minilm and folders get
random weights, because speed does not depend on the weights. Commit 17f6c5ba can also measure
OpenVINO and ONNX Runtime without llmcond, long inputs, and the shapes of mpnet-base and XLM-R-base.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from bench import (
    BenchOptions,
    find_checkpoint,
    machine_peak,
    measure,
    median_ratio,
    set_threads,
    summarize,
    timed,
)
from common import format_table, print_json
from numpy.typing import NDArray

from llmcond.benchmark.shapes import branching_inputs, csts_inputs
from llmcond.benchmark.speeds import (
    BATCH,
    PlainLoop,
    linear_flops,
    peak_memory,
    sentence_transformers,
    synchronize,
)
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.loading import TORCH_DTYPES, load_config, load_tokenizer
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import EncoderInput
from llmcond.encoders.tokenizing import InputTokenizer
from llmcond.encoders.torch.batching import pack_shared
from llmcond.encoders.torch.engine import torch_engine

Vectors = NDArray[np.float32]
#: Ways by name: the kind of way, and its data type; None stands for --dtype.
WAYS: dict[str, tuple[str, str | None]] = {
    "sentence-transformers, float32": ("sentence-transformers", "float32"),
    "sentence-transformers": ("sentence-transformers", None),
    "plain transformers loop": ("loop", None),
    "llmcond": ("llmcond", None),
    "llmcond, PyTorch, packed": ("packed", None),
    "llmcond, PyTorch, padded": ("padded", None),
    "llmcond, PyTorch, shared prefixes": ("shared", None),
}
#: The kinds of ways of other libraries, and the poolings that they support.
PEERS, POOLINGS = ("sentence-transformers", "loop"), ("mean", "last")


# -- the ways ----------------------------------------------------------------------------------


def encoder_options(task: dict[str, Any]) -> EncoderOptions:
    """Return the options of the encoder for a task."""
    return EncoderOptions(
        dtype=task["dtype"],
        device=task["device"],
        runtime="auto" if task["kind"] == "llmcond" else "torch",
        like=task["like"],
        max_tokens_per_batch=task["max_tokens_per_batch"],
        share_prefixes=task["kind"] in ("llmcond", "shared"),
    )


def load_way(task: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Load a way; return a function that encodes the inputs and returns the figures of a turn."""
    resolved = resolve(task["checkpoint"], encoder_options(task), identify=False)
    inputs = [EncoderInput(*texts) for texts in task["inputs"]]
    encoder, kind, device = Encoder(resolved), task["kind"], resolved.device
    run: Callable[[list[EncoderInput]], Vectors] = encoder.encode
    if kind == "padded":
        torch_engine(encoder).packs = False
    elif kind in PEERS:
        loop = PlainLoop(encoder, torch_engine(encoder).model.network)
        run = loop.encode if kind == "loop" else sentence_transformers(loop, encoder)
    _, first, _ = timed(run, inputs[: max(BATCH, len(inputs) // 16)])
    if kind in PEERS:
        computed = loop.computed(inputs, by_length=kind != "loop")
    else:
        computed = encoder.encode_with_counts(inputs).n_computed
    flops = linear_flops(resolved)

    def encode() -> Vectors:
        vectors = run(inputs)
        synchronize(device)
        return vectors

    def turn() -> dict[str, Any]:
        peak = machine_peak(device, TORCH_DTYPES[resolved.identity.dtype])
        synchronize(device)
        vectors, seconds, processor = timed(encode)
        np.save(task["vectors"], vectors)
        return {
            "seconds": seconds,
            "processor": processor,
            "computed": computed,
            "peak": peak,
            "share": flops * computed / seconds / peak,
            "memory": peak_memory(device),
            "first": first,
        }

    return turn


# -- choosing the ways -------------------------------------------------------------------------


def choose_ways(
    options: argparse.Namespace, resolved: ResolvedEncoder
) -> dict[str, tuple[str, str]]:
    """Return the kind and data type of each way to measure; print why others are left out.

    ``resolved`` is the encoder with the runtime that llmcond chooses automatically.
    """
    pooling, peer = resolved.identity.pooling, "sentence-transformers"
    in_torch = resolved.runtime == "torch"
    ways: dict[str, tuple[str, str]] = {}
    for name in options.ways:
        kind, dtype = WAYS[name][0], WAYS[name][1] or options.dtype
        if (kind, dtype) in ways.values() or (options.skip_peers and kind in PEERS):
            continue
        obstacles = {
            f"{peer} is not installed": kind == peer and find_spec("sentence_transformers") is None,
            f"the model pools by {pooling}": kind in PEERS and pooling not in POOLINGS,
            "it is the same as the ways with PyTorch below": kind == "llmcond" and in_torch,
            "the model shares no prefixes": kind == "shared" and not resolved.shares_prefixes,
        }
        if reason := next((reason for reason, holds in obstacles.items() if holds), None):
            print(f"{name} is left out: {reason}.", file=sys.stderr)
        else:
            ways[name] = kind, dtype
    return ways


# -- the table ---------------------------------------------------------------------------------


def compare(
    options: argparse.Namespace, task: dict[str, Any], inputs: list[EncoderInput], label: str
) -> dict[str, Any]:
    """Measure the ways of ``task`` on inputs; print a table and return the figures.

    Args:
        options: the command line.
        task: settings that all ways share; ``ways`` has their kinds and data types.
        inputs: the inputs to encode.
        label: description of the inputs in the table.
    """
    token_ids = tokenize(task, inputs)
    useful = sum(map(len, token_ids))
    with tempfile.TemporaryDirectory() as scratch:
        tasks = {
            name: {
                **task,
                "kind": kind,
                "dtype": dtype,
                "inputs": [(item.instruction, item.text) for item in inputs],
                "vectors": f"{scratch}/{kind}-{dtype}.npy",
            }
            for name, (kind, dtype) in task["ways"].items()
        }
        turns = measure(tasks, options.rounds, load_way)
        vectors = {name: np.load(way["vectors"]) for name, way in tasks.items()}
    result = {
        "model": options.model,
        "inputs": len(inputs),
        "what": label,
        "tokens": useful,
        "allowed_by_sharing": useful / sum(b.n_tokens for b in pack_shared(token_ids, 10**9)),
        "rounds": options.rounds,
        "torch": torch.__version__,
        "threads": task["threads"],
        "dtype": options.dtype,
        "rows": [add_ratios(row, turns, vectors, useful) for row in summarize(turns)],
    }
    print(
        f"\n{options.model}, {options.dtype}, {label}: {len(inputs):,} inputs of {useful:,} "
        f"tokens, {options.rounds} rounds, {task['threads']} threads, torch {torch.__version__}. "
        f"Sharing prefixes allows {result['allowed_by_sharing']:.2f}x.\n"
    )
    print(format_table(result["rows"], COLUMNS), flush=True)
    return result


def add_ratios(
    row: dict[str, Any],
    turns: dict[str, list[dict[str, Any]]],
    vectors: dict[str, Vectors],
    useful: int,
) -> dict[str, Any]:
    """Return the figures of one way, with its ratios to all others.

    Args:
        row: the medians of the way.
        turns: the figures of each turn, by way.
        vectors: the vectors of each way.
        useful: number of tokens of the inputs, without padding.
    """
    name, first = row["way"], next(iter(turns))
    return {
        **row,
        "tokens_per_second": useful / row["seconds"],
        "ratios": {k: median_ratio(v, turns[name], "seconds") for k, v in turns.items()},
        "ratios_by_processor": {
            k: median_ratio(v, turns[name], "processor") for k, v in turns.items()
        },
        "useful_share": useful / row["computed"],
        "largest_difference": float(np.abs(vectors[name] - vectors[first]).max()),
        "least_cosine": float((vectors[name] * vectors[first]).sum(axis=1).min()),
    }


COLUMNS = {
    "way": "way",
    "tokens/s": "tokens_per_second:,.0f",
    "wall s": "seconds:.2f",
    "processor s": "processor:.2f",
    "against the first": "ratio:.2f",
    "useful of computed tokens": "useful_share:.0%",
    "of the product's peak": "share:.0%",
    "peak memory GiB": "memory:.2f",
    "first batches s": "first:.1f",
    "largest difference": "largest_difference:.1e",
    "least cosine": "least_cosine:.5f",
}


def tokenize(task: dict[str, Any], inputs: Sequence[EncoderInput]) -> list[list[int]]:
    """Return the token ids of each input."""
    resolved = resolve(task["checkpoint"], encoder_options(task), identify=False)
    tokenizer = load_tokenizer(resolved.checkpoint, load_config(resolved.checkpoint))
    return [row.ids for row in InputTokenizer(tokenizer, resolved.identity, "it")(inputs)]


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = BenchOptions(__doc__)
    add = parser.option
    add("--model", "minilm", "known model or folder of a checkpoint")
    parser.sizes()
    parser.compute("bfloat16", choices=tuple(TORCH_DTYPES))
    add("--threads", int, "threads of each way", "as PyTorch chooses")
    add("--inputs", 2_000, "number of inputs, without --conditions")
    add("--conditions", [], "numbers of conditions per sentence", type=int, metavar="K")
    add("--sentences", 24, "number of sentences, with --conditions")
    parser.rounds()
    ways = f"ways to measure: {'; '.join(WAYS)}"
    add("--ways", [*WAYS], ways, "all", choices=WAYS, metavar="WAY")
    add("--skip-peers", False, "measure the modes of llmcond only")
    return parser.parse_args()


def main() -> None:
    """Parse the command line, measure, and print tables."""
    options = parse_options()
    if options.threads:
        set_threads(options.threads)
    checkpoint, like = find_checkpoint(options)
    task: dict[str, Any] = {
        "kind": "llmcond",
        "checkpoint": str(checkpoint),
        "like": like,
        "dtype": options.dtype,
        "device": options.device,
        "max_tokens_per_batch": options.max_tokens_per_batch,
        "threads": options.threads or torch.get_num_threads(),
    }
    resolved = resolve(task["checkpoint"], encoder_options(task), identify=False)
    instruct = bool(resolved.identity.instruction_format)
    task["ways"] = choose_ways(options, resolved)
    cases = [
        (branching_inputs(k * options.sentences, k, instruct), f"{k} conditions a sentence")
        for k in options.conditions
    ] or [(csts_inputs(options.inputs, instruct), "C-STS inputs")]
    results = [compare(options, task, inputs, label) for inputs, label in cases]
    print_json(options, {"results": results})


if __name__ == "__main__":
    main()
