r"""Measure extraction: llmcond's ways against sentence-transformers and a plain transformers loop.

Every way has a process of its own, and all take turns on the same texts, so that a busy machine is
busy for each of them; ratios are medians of rounds. Before each turn the way's process measures the
machine's matrix product in the type that the way computes in.

    python scripts/bench_extract.py --model minilm
    python scripts/bench_extract.py --model Salesforce/SFR-Embedding-Mistral --conditions 2 8 32 \
        --set num_hidden_layers=8 hidden_size=1024 intermediate_size=3584 --dtype float32

Models other than minilm get random weights: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_inputs import make_branches, make_inputs, random_checkpoint
from numpy.typing import NDArray

from llmcond.benchmark.speeds import linear_flops, peak_memory, product_peak, synchronize
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.engine.batching import pack_shared
from llmcond.encoders.engine.tokenizing import InputTokenizer
from llmcond.encoders.known import find_model, known_names
from llmcond.encoders.loading.architecture import load_config, load_tokenizer
from llmcond.encoders.loading.device import TORCH_DTYPES
from llmcond.encoders.loading.loading import load_model
from llmcond.encoders.spec import EncoderInput
from llmcond.system import choose_device

Vectors = NDArray[np.float32]
#: Rows of the matrices whose product is measured on a CPU; a GPU takes four times as many.
PRODUCT = 2_048
#: Ways by name: what runs, and the type that it computes in; None is that of --dtype.
WAYS: dict[str, tuple[str, str | None]] = {
    "sentence-transformers, float32": ("peer", "float32"),
    "sentence-transformers": ("peer", None),
    "plain transformers loop": ("loop", None),
    "llmcond, padded": ("padded", None),
    "llmcond, packed": ("packed", None),
    "llmcond, packed, shared prefixes": ("shared", None),
}


# -- the ways ----------------------------------------------------------------------------------


class Way:
    """An encoder, and one way through it."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.kind = task["kind"]
        self.device = choose_device(task["device"])
        self.options = EncoderOptions(
            dtype=task["dtype"],
            quantize=task["quantize"],
            device=self.device,
            like=task["like"],
            max_tokens_per_batch=task["max_tokens_per_batch"],
            share_prefixes=self.kind == "shared",
        )
        self.resolved = resolve(task["checkpoint"], self.options, identify=False)
        config = load_config(self.resolved.checkpoint, self.resolved.identity.attention)
        self.flops = linear_flops(self.resolved)
        tokenizer = load_tokenizer(self.resolved.checkpoint, config)
        self.tokenizer = InputTokenizer(tokenizer, self.resolved.identity, "the model")
        if self.kind == "peer":
            self.peer = self._peer(task)
        elif self.kind == "loop":
            self.network: Any = load_model(self.resolved, config).network
        else:
            self.encoder = Encoder(self.resolved)
            self.encoder.engine.packs &= self.kind != "padded"

    def _peer(self, task: dict[str, Any]) -> Any:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Pooling, Transformer

        folder = str(self.resolved.checkpoint.folder)
        arguments = {"dtype": TORCH_DTYPES[task["dtype"]]}
        if (Path(folder) / "modules.json").is_file():
            return SentenceTransformer(folder, device=self.device, model_kwargs=arguments)
        transformer = Transformer(folder, model_kwargs=arguments)
        mode = {"last": "lasttoken"}.get(self.resolved.identity.pooling, "mean")
        pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode=mode)
        return SentenceTransformer(modules=[transformer, pooling], device=self.device)

    def encode(self, inputs: list[EncoderInput]) -> Vectors:
        """Return the vectors of inputs."""
        if self.kind == "peer":
            texts = [self.tokenizer.format(item) for item in inputs]
            vectors: Vectors = self.peer.encode(texts, batch_size=32, normalize_embeddings=True)
            return vectors
        return self._loop(inputs) if self.kind == "loop" else self.encoder.encode(inputs)

    def computed(self, inputs: list[EncoderInput]) -> int:
        """Return the tokens that are computed for inputs, padding included."""
        if self.kind not in ("peer", "loop"):
            return self.encoder.encode_counted(inputs).n_computed
        order = list(range(len(inputs)))
        if self.kind == "peer":
            # It sorts by length in characters and pads batches of 32.
            texts = [self.tokenizer.format(item) for item in inputs]
            order.sort(key=lambda i: -len(texts[i]))
            lengths = [len(row) for row in self.peer.tokenizer(texts)["input_ids"]]
        else:
            lengths = [len(row.ids) for row in self.tokenizer(inputs)]
        return padded(lengths, order, 32)

    @torch.inference_mode()
    def _loop(self, inputs: list[EncoderInput]) -> Vectors:
        """Encode batches of 32 in their order, padded to the longest."""
        rows = self.tokenizer(inputs)
        vectors = []
        for start in range(0, len(rows), 32):
            batch = rows[start : start + 32]
            width = max(len(row.ids) for row in batch)
            ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in batch])
            ends = torch.tensor([len(row.ids) for row in batch])
            mask = (torch.arange(width) < ends[:, None]).long()
            hidden = self.network(
                input_ids=ids.to(self.device), attention_mask=mask.to(self.device)
            ).last_hidden_state.float()
            if self.resolved.identity.pooling == "last":
                pooled = hidden[torch.arange(len(batch)), ends.to(self.device) - 1]
            else:
                weights = mask.unsqueeze(-1).to(self.device)
                pooled = (hidden * weights).sum(1) / weights.sum(1)
            vectors.append(torch.nn.functional.normalize(pooled, dim=1).cpu())
        return torch.cat(vectors).numpy()


def machine_peak(device: str, dtype: torch.dtype) -> float:
    """Return the machine's matrix product now, in FLOP/s."""
    return product_peak(device, dtype, PRODUCT if device == "cpu" else 4 * PRODUCT)


def padded(lengths: list[int], order: list[int], size: int) -> int:
    """Return the tokens of batches with padding."""
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)


# -- taking turns ------------------------------------------------------------------------------


def work(connection: Connection, task: dict[str, Any]) -> None:
    """Load a way, then take a turn whenever asked to."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    way = Way(task)
    inputs = [EncoderInput(*texts) for texts in task["inputs"]]
    began = time.perf_counter()
    way.encode(inputs[: max(32, len(inputs) // 16)])
    first = time.perf_counter() - began
    computed = way.computed(inputs)
    connection.send("ready")
    while connection.recv() == "go":
        peak = machine_peak(way.device, TORCH_DTYPES[way.resolved.identity.dtype])
        synchronize(way.device)
        began = time.perf_counter()
        vectors = way.encode(inputs)
        synchronize(way.device)
        seconds = time.perf_counter() - began
        np.save(task["vectors"], vectors)
        connection.send(
            {
                "seconds": seconds,
                "computed": computed,
                "peak": peak,
                "share": way.flops * computed / seconds / peak,
                "memory": peak_memory(way.device),
                "first": first,
            }
        )


def measure(
    tasks: dict[str, dict[str, Any]], rounds: int, target: Callable[..., None] = work
) -> dict[str, list[dict[str, Any]]]:
    """Let every way have a turn as often as there are rounds, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    workers = {}
    for name, task in tasks.items():
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, task), daemon=True)
        process.start()
        theirs.close()  # so that its end is seen
        try:
            ours.recv()
        except EOFError:
            raise SystemExit(f"{name} could not be loaded; see above.") from None
        workers[name] = ours
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, connection in workers.items():
            connection.send("go")
            found[name].append(connection.recv())
    for connection in workers.values():
        connection.send("stop")
    return found


# -- the table ---------------------------------------------------------------------------------


def compare(options: argparse.Namespace, inputs: list[EncoderInput], label: str) -> dict[str, Any]:
    """Measure all ways on some inputs; return figures and print them as a Markdown table."""
    checkpoint, like = find_checkpoint(options)
    token_ids = tokenize(options, checkpoint, like, inputs)
    useful = sum(map(len, token_ids))
    dtype = options.dtype
    left_out = set() if shares(options, checkpoint, like) else {"shared"}
    with tempfile.TemporaryDirectory() as scratch:
        tasks = {}
        for number, (name, (kind, own)) in enumerate(WAYS.items()):
            peer = kind in ("peer", "loop")
            if kind in left_out or own == dtype or (peer and options.skip_peers):
                continue
            tasks[name] = {
                "kind": kind,
                "dtype": own or dtype,
                "quantize": "none" if kind in ("peer",) else options.quantize,
                "checkpoint": str(checkpoint),
                "like": like,
                "device": options.device,
                "max_tokens_per_batch": options.max_tokens_per_batch,
                "inputs": [(item.instruction, item.text) for item in inputs],
                "vectors": f"{scratch}/{number}.npy",
            }
        found = measure(tasks, options.rounds)
        vectors = {name: np.load(task["vectors"]) for name, task in tasks.items()}
    rows = [row(name, found, vectors, useful) for name in tasks]
    result = {
        "model": options.model,
        "inputs": len(inputs),
        "what": label,
        "tokens": useful,
        "allowed_by_sharing": useful / sum(b.n_tokens for b in pack_shared(token_ids, 10**9)),
        "rounds": options.rounds,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rows": rows,
    }
    show(result)
    return result


def row(
    name: str,
    found: dict[str, list[dict[str, Any]]],
    vectors: dict[str, Vectors],
    useful: int,
) -> dict[str, Any]:
    """Return the figures of one way; ratios are medians over rounds."""
    mine, first = found[name], next(iter(found))

    def median(key: str) -> float:
        return float(statistics.median(turn[key] for turn in mine))

    ratios = {
        other: statistics.median(
            theirs["seconds"] / turn["seconds"] for theirs, turn in zip(turns, mine, strict=True)
        )
        for other, turns in found.items()
    }
    return {
        "way": name,
        "tokens_per_second": useful / median("seconds"),
        "ratio_to_first": ratios[first],
        "ratios": ratios,
        "useful_share": useful / median("computed"),
        "peak_share": median("share"),
        "peak_gflops": median("peak") / 1e9,
        "memory_gib": median("memory"),
        "first_seconds": median("first"),
        "largest_difference": float(np.abs(vectors[name] - vectors[first]).max()),
        "least_cosine": float((vectors[name] * vectors[first]).sum(axis=1).min()),
    }


def show(result: dict[str, Any]) -> None:
    """Print the figures as a Markdown table."""
    print(
        f"\n{result['model']}, {result['what']}: {result['inputs']:,} inputs of "
        f"{result['tokens']:,} tokens, {result['rounds']} rounds, {result['threads']} threads, "
        f"torch {result['torch']}. Sharing prefixes allows {result['allowed_by_sharing']:.2f}x.\n"
    )
    print(
        "| way | tokens/s | against the first | useful of computed tokens "
        "| of the product's peak | peak memory GiB | first batches s | largest difference "
        "| least cosine |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for line in result["rows"]:
        print(
            f"| {line['way']} | {line['tokens_per_second']:,.0f} | {line['ratio_to_first']:.2f} "
            f"| {line['useful_share']:.0%} | {line['peak_share']:.0%} | {line['memory_gib']:.2f} "
            f"| {line['first_seconds']:.1f} | {line['largest_difference']:.1e} "
            f"| {line['least_cosine']:.5f} |"
        )


def find_checkpoint(options: argparse.Namespace) -> tuple[Path | str, str | None]:
    """Return the model to measure, made if it must be, and what it is like."""
    known = find_model(options.model)
    assert known is not None
    if known.alias == "minilm" and not options.set:
        return "minilm", None
    parent = options.folder or Path(tempfile.gettempdir()) / "llmcond-bench"
    sizes = {key: int(value) for key, _, value in (pair.partition("=") for pair in options.set)}
    return random_checkpoint(known, parent, sizes), known.repo


def tokenize(
    options: argparse.Namespace, checkpoint: Path | str, like: str | None, inputs: Any
) -> list[list[int]]:
    """Return the ids of each input."""
    resolved = resolve(str(checkpoint), EncoderOptions(like=like), identify=False)
    tokenizer = load_tokenizer(resolved.checkpoint, load_config(resolved.checkpoint))
    return [row.ids for row in InputTokenizer(tokenizer, resolved.identity, "it")(inputs)]


def shares(options: argparse.Namespace, checkpoint: Path | str, like: str | None) -> bool:
    """Tell whether the encoder can share prefixes."""
    return resolve(str(checkpoint), EncoderOptions(like=like), identify=False).shares_prefixes


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=known_names(), default="minilm")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=N", help="other sizes")
    parser.add_argument("--folder", type=Path, help="where random checkpoints are kept")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(TORCH_DTYPES))
    parser.add_argument("--quantize", default="none", choices=("none", "8bit", "4bit"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--inputs", type=int, default=2_000, help="of C-STS, without --conditions")
    parser.add_argument(
        "--conditions", type=int, nargs="+", default=[], metavar="K", help="of each sentence"
    )
    parser.add_argument("--sentences", type=int, default=24, help="with --conditions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens-per-batch", type=int)
    parser.add_argument("--skip-peers", action="store_true", help="llmcond's own ways only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    checkpoint, like = find_checkpoint(options)
    resolved = resolve(str(checkpoint), EncoderOptions(like=like), identify=False)
    instruct = bool(resolved.identity.instruction_format)
    cases = [
        (make_branches(options.sentences, k, instruct), f"{k} conditions a sentence")
        for k in options.conditions
    ] or [(make_inputs(options.inputs, instruct), "C-STS inputs")]
    results = [compare(options, inputs, label) for inputs, label in cases]
    if options.json:
        print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
