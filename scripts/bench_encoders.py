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
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_inputs import make_inputs, random_checkpoint
from bench_process import run_in_process

from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.engine.engine import torch_engine
from llmcond.encoders.engine.nv_embed import NVEmbedModel
from llmcond.encoders.known import find_model, known_names
from llmcond.encoders.loading.loading import load_config, load_tokenizer
from llmcond.encoders.spec import EncoderInput
from llmcond.system import choose_device

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
    began = time.perf_counter()
    resolved = resolve(task["checkpoint"], options, identify=False)
    encoder = Encoder(resolved)
    loaded = time.perf_counter() - began
    host = _peak_host_bytes()
    inputs = make_inputs(task["inputs"], bool(resolved.identity.instruction_format))
    if task["plain"]:
        run = PlainLoop(encoder)
        encode, tokens = run.encode, run.tokens(inputs)
    else:
        encode = encoder.encode
        tokens = sum(row.n_tokens for row in encoder._tokenizer(inputs))
    encode(inputs[:2])
    _synchronize(device)
    began = time.perf_counter()
    vectors = encode(inputs)
    _synchronize(device)
    seconds = time.perf_counter() - began
    np.save(task["vectors"], vectors)
    return {
        "load_seconds": loaded,
        "load_host_gib": host / 2**30,
        "weights_gib": _weight_bytes(encoder) / 2**30,
        "device_gib": None if device == "cpu" else torch.cuda.max_memory_allocated(device) / 2**30,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
    }


class PlainLoop:
    """The peer: the stock model on batches of 16 in their order, padded to the longest text."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        resolved = encoder.resolved
        config = load_config(resolved.checkpoint, resolved.identity.attention)
        self.tokenizer = load_tokenizer(resolved.checkpoint, config)
        self.network: Any = torch_engine(encoder).model.network

    def tokens(self, inputs: list[EncoderInput]) -> int:
        """Count the tokens of the inputs."""
        return sum(len(ids) for ids in self._ids(inputs))

    def _ids(self, inputs: list[EncoderInput]) -> list[list[int]]:
        ids: list[list[int]] = self.tokenizer([self.encoder.format(item) for item in inputs])[
            "input_ids"
        ]
        return ids

    @torch.inference_mode()
    def encode(self, inputs: list[EncoderInput]) -> np.ndarray[Any, Any]:
        """Return normalised means over all tokens, whatever the pooling of the model is."""
        device = self.encoder.resolved.device
        rows = self._ids(inputs)
        vectors = []
        for start in range(0, len(rows), 16):
            batch = rows[start : start + 16]
            width = max(len(row) for row in batch)
            ids = torch.tensor([row + [0] * (width - len(row)) for row in batch])
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch])
            ids, mask = ids.to(device), mask.to(device)
            if isinstance(self.network, NVEmbedModel):
                hidden = self.network.embedding_model(input_ids=ids, attention_mask=mask)
                block = self.network.latent_attention_model
                # One text at a time, because the original computes keys and values for each text.
                hidden = torch.cat([block(row[None]) for row in hidden.last_hidden_state])
            else:
                hidden = self.network(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1)
            vectors.append(((hidden * weights).sum(1) / weights.sum(1)).float().cpu())
        return torch.nn.functional.normalize(torch.cat(vectors), dim=1).numpy()


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


def _peak_host_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


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


def print_table(result: dict[str, Any]) -> None:
    """Print the figures as a Markdown table."""
    print(f"{result['model']}, torch {result['torch']}\n")
    print("| what | precision | weights GiB | host peak, loading GiB | device peak GiB | load s "
          "| tokens/s | against the plain loop | least (mean) cosine to the first |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for row in result["rows"]:
        device = "" if row["device_gib"] is None else f"{row['device_gib']:.2f}"
        cosine = (
            f"{row['min_cosine']:.4f} ({row['mean_cosine']:.4f})" if "min_cosine" in row else ""
        )
        print(
            f"| {row['what']} | {row['precision']} | {row['weights_gib']:.2f} "
            f"| {row['load_host_gib']:.2f} | {device} | {row['load_seconds']:.0f} "
            f"| {row['tokens_per_second']:,.0f} | {row['speed_ratio']:.2f} | {cosine} |"
        )


def main() -> None:
    """Parse the command line, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--model",
        choices=known_names(),
        help="known encoder, built with random weights (default: minilm)",
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="folder of an existing checkpoint, instead of --model"
    )
    parser.add_argument(
        "--like",
        choices=known_names(),
        help="with --checkpoint: known encoder that the checkpoint is a copy of",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder that random checkpoints are saved in and read from (default: "
        "llmcond-bench in the temporary folder)",
    )
    parser.add_argument("--layers", type=int, help="number of layers (default: as the model has)")
    parser.add_argument(
        "--precision",
        nargs="+",
        default=["bfloat16", "8bit", "4bit"],
        help="data types or quantisations to measure (default: bfloat16 8bit 4bit)",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        help="data type of computation with 8bit and 4bit (default: bfloat16)",
    )
    parser.add_argument(
        "--device", default="auto", help="device, such as cpu or cuda (default: auto)"
    )
    parser.add_argument("--inputs", type=int, default=64, help="number of inputs (default: 64)")
    parser.add_argument(
        "--max-tokens-per-batch",
        type=int,
        help="token budget of a batch (default: chosen by llmcond)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on the last line"
    )
    options = parser.parse_args()
    checkpoint, like = options.checkpoint, options.like
    if checkpoint is None:
        known = find_model(options.model or "minilm")
        assert known is not None
        like = known.repo
        parent = options.folder or Path(tempfile.gettempdir()) / "llmcond-bench"
        sizes = {"num_hidden_layers": options.layers} if options.layers else {}
        checkpoint = random_checkpoint(known, parent, sizes)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    result = run_tasks(options, checkpoint, like)
    print_table(result)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
