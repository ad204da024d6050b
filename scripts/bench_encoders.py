"""Measure the memory, speed and precision of an encoder of full size with random weights.

Speed and memory do not depend on the values of the weights. The peer, measured in the same run, is
a plain loop of transformers over batches of 16 in the order of the inputs. For NV-Embed-v2 it uses
the original latent block, which computes keys and values anew for every text.

    python scripts/bench_encoders.py --model nvidia/NV-Embed-v2 --precision 4bit bfloat16
    python scripts/bench_encoders.py --checkpoint FOLDER --precision float32 8bit 4bit
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench import (
    BenchOptions,
    checkpoint_folder,
    random_checkpoint,
    run_in_process,
    timed,
)
from common import format_table, print_json

from llmcond.base.system import choose_device
from llmcond.benchmark.shapes import csts_inputs
from llmcond.benchmark.speeds import PlainLoop, peak_memory
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.settings import find_model, known_names
from llmcond.encoders.spec import EncoderInput
from llmcond.encoders.torch.engine import torch_engine

#: Texts in a batch of the plain loop.
BATCH = 16

# -- one measurement, in a separate process ----------------------------------------------------


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Load the encoder of a task, time it, save its vectors, and return the figures."""
    device = choose_device(task["device"])
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    precision = task["precision"]
    quantized = precision in ("8bit", "4bit")
    options = EncoderOptions(
        dtype=task["dtype"] if quantized else precision,
        quantize=precision if quantized else "none",
        device=device,
        like=task["like"],
        max_tokens_per_batch=task["tokens_per_batch"],
        fold_latents=task["fold"],
        runtime="torch",
    )
    resolved = resolve(task["checkpoint"], options, identify=False)
    encoder, loaded, _ = timed(Encoder, resolved)
    host = peak_memory("cpu")
    inputs = csts_inputs(task["inputs"], bool(resolved.identity.instruction_format))
    tokens = sum(row.n_tokens for row in encoder._tokenizer(inputs))
    loop = PlainLoop(encoder, torch_engine(encoder).model.network)

    def encode(inputs: list[EncoderInput]) -> Any:
        if not task["plain"]:
            return encoder.encode(inputs)
        starts = range(0, len(inputs), BATCH)
        return np.concatenate([loop.encode(inputs[start : start + BATCH]) for start in starts])

    encode(inputs[:2])
    # The vectors are on the CPU, so the device has finished.
    vectors, seconds, _ = timed(encode, inputs)
    np.save(task["vectors"], vectors)
    return {
        "load_seconds": loaded,
        "load_host_gib": host,
        "weights_gib": _weight_bytes(encoder) / 2**30,
        "device_gib": None if device == "cpu" else peak_memory(device),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
    }


def _weight_bytes(encoder: Encoder) -> int:
    network = torch_engine(encoder).model.network
    tensors = [*network.parameters(), *network.buffers()]
    extra = [
        value
        for tensor in tensors
        for state in (getattr(tensor, "quant_state", None),)
        if state is not None
        for value in (state.absmax, getattr(getattr(state, "state2", None), "absmax", None))
        if value is not None
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*tensors, *extra))


# -- the table ---------------------------------------------------------------------------------


def run_tasks(options: argparse.Namespace, checkpoint: Path, like: str | None) -> dict[str, Any]:
    """Measure each precision and the peer, each in a new process."""
    nv_embed = json.loads((checkpoint / "config.json").read_text())["model_type"] == "nvembed"
    plans = [(precision, True, False) for precision in options.precision]
    if nv_embed:
        plans += [(options.precision[0], False, False)]
    plans += [(options.precision[0], False, True)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (precision, fold, plain) in enumerate(plans):
            task = {
                "checkpoint": str(checkpoint),
                "like": like,
                "precision": precision,
                "dtype": options.dtype,
                "device": options.device,
                "fold": fold,
                "plain": plain,
                "inputs": options.inputs,
                "tokens_per_batch": options.max_tokens_per_batch,
                "vectors": f"{scratch}/{number}.npy",
            }
            figures = run_in_process(measure, task)
            name = "plain loop" if plain else "llmcond"
            name += "" if fold or not nv_embed else ", not folded"
            row = {"what": name, "precision": precision, **figures}
            if not plain:
                row |= _compare_vectors(f"{scratch}/0.npy", task["vectors"])
            rows.append(row)
    peer = rows[-1]["tokens_per_second"]
    for row in rows:
        row["speed_ratio"] = row["tokens_per_second"] / peer
    return {"model": str(options.model or checkpoint), "torch": torch.__version__, "rows": rows}


def _compare_vectors(first: str, second: str) -> dict[str, float]:
    cosine = (np.load(first) * np.load(second)).sum(axis=1)
    return {"min_cosine": float(cosine.min()), "mean_cosine": float(cosine.mean())}


COLUMNS = {
    "what": "what",
    "precision": "precision",
    "weights GiB": "weights_gib:.2f",
    "host peak, loading GiB": "load_host_gib:.2f",
    "device peak GiB": "device_gib:.2f",
    "load s": "load_seconds:.0f",
    "tokens/s": "tokens_per_second:,.0f",
    "against the plain loop": "speed_ratio:.2f",
    "least cosine to the first": "min_cosine:.4f",
    "mean cosine": "mean_cosine:.4f",
}


def main() -> None:
    """Parse the command line, measure, and print a table."""
    parser = BenchOptions(__doc__)
    add = parser.option
    known_encoder = "known encoder, built with random weights"
    add("--model", str, known_encoder, "minilm", choices=known_names())
    add("--checkpoint", Path, "folder of an existing checkpoint, instead of --model")
    like_help = "with --checkpoint: known encoder that the checkpoint is a copy of"
    add("--like", str, like_help, choices=known_names())
    parser.folder()
    add("--layers", int, "number of layers", "as the model has")
    precisions = "data types or quantisations to measure"
    add("--precision", ["bfloat16", "8bit", "4bit"], precisions)
    parser.compute("bfloat16")
    add("--inputs", 64, "number of inputs")
    options = parser.parse_args()
    checkpoint, like = options.checkpoint, options.like
    if checkpoint is None:
        known = find_model(options.model or "minilm")
        assert known is not None
        like = known.repo
        sizes = {"num_hidden_layers": options.layers} if options.layers else {}
        checkpoint = random_checkpoint(known, checkpoint_folder(options), sizes)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    result = run_tasks(options, checkpoint, like)
    print(f"{result['model']}, torch {result['torch']}\n\n{format_table(result['rows'], COLUMNS)}")
    print_json(options, result)


if __name__ == "__main__":
    main()
