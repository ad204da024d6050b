r"""Measure how fast llmcond and other libraries encode texts.

A "way" is a library, or a mode of llmcond, that encodes the texts. Each way runs in a separate
process. All ways take turns on the same texts, so that a busy machine slows all of them down;
ratios are medians over rounds. Processor seconds cover all threads of a way's process. Before each
turn, the process measures the speed of a matrix product in the way's data type.

    python scripts/bench_extract.py --model minilm --threads 2
    python scripts/bench_extract.py --model xlm-r-base --tokens 512 --inputs 64 --threads 1
    python scripts/bench_extract.py --model Salesforce/SFR-Embedding-Mistral --conditions 2 8 32 \
        --set num_hidden_layers=8 hidden_size=1024 intermediate_size=3584 --dtype float32

A model is a known model, a shape (mpnet-base, xlm-r-base) or the folder of a checkpoint. Models
other than minilm and folders get random weights, because speed does not depend on the weights.
Commit 17f6c5ba can also measure OpenVINO and ONNX Runtime without llmcond.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench import (
    BenchOptions,
    find_checkpoint,
    join_inputs,
    machine_peak,
    make_branches,
    make_inputs,
    measure,
    median_of,
    median_ratio,
    set_threads,
    timed,
)
from common import format_table, print_json
from numpy.typing import NDArray

from llmcond.benchmark.speeds import linear_flops, peak_memory, synchronize
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.engine.batching import pack_shared
from llmcond.encoders.engine.engine import torch_engine
from llmcond.encoders.engine.tokenizing import InputTokenizer
from llmcond.encoders.loading.loading import load_config, load_model, load_tokenizer
from llmcond.encoders.loading.memory import TORCH_DTYPES
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import EncoderInput

Vectors = NDArray[np.float32]
#: Batch size of the other libraries.
BATCH = 32
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
#: Poolings that the other libraries support, and their names in sentence-transformers.
POOLINGS = {"mean": "mean", "last": "lasttoken", "cls": "cls"}


# -- the ways ----------------------------------------------------------------------------------


class Way(ABC):
    """An encoder, and one way to run it.

    Args:
        task: settings of the measurement, as built by ``main``.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        self.resolved = resolve(task["checkpoint"], encoder_options(task), identify=False)
        self.identity, self.device = self.resolved.identity, self.resolved.device
        self.config = load_config(self.resolved.checkpoint, self.identity.attention)
        tokenizer = load_tokenizer(self.resolved.checkpoint, self.config)
        self.tokenizer = InputTokenizer(tokenizer, self.identity, "the model")
        self.load()

    @abstractmethod
    def load(self) -> None:
        """Load the network."""

    @abstractmethod
    def encode(self, inputs: list[EncoderInput]) -> Vectors:
        """Return the (n, dim) unit vectors of inputs."""

    def count_computed(self, inputs: list[EncoderInput]) -> int:
        """Return the number of computed tokens, including padding."""
        lengths = [len(row.ids) for row in self.tokenizer(inputs)]
        return count_padded_tokens(
            lengths, sorted(range(len(inputs)), key=lambda i: -lengths[i]), BATCH
        )


class SentenceTransformersWay(Way):
    """sentence-transformers, which sorts texts by their number of characters and pads batches."""

    def load(self) -> None:
        """Load the network."""
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Pooling, Transformer

        folder = str(self.resolved.checkpoint.folder)
        arguments = {"dtype": TORCH_DTYPES[self.identity.dtype]}
        if (Path(folder) / "modules.json").is_file():
            self.peer = SentenceTransformer(folder, device=self.device, model_kwargs=arguments)
        else:
            transformer = Transformer(folder, model_kwargs=arguments)
            mode = POOLINGS[self.identity.pooling]
            pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode=mode)
            self.peer = SentenceTransformer(modules=[transformer, pooling], device=self.device)
        self.peer.max_seq_length = self.identity.max_length

    def encode(self, inputs: list[EncoderInput]) -> Vectors:
        """Return the (n, dim) unit vectors of inputs."""
        texts = [self.tokenizer.format(item) for item in inputs]
        vectors: Vectors = self.peer.encode(texts, batch_size=BATCH, normalize_embeddings=True)
        return vectors

    def count_computed(self, inputs: list[EncoderInput]) -> int:
        """Return the number of computed tokens, including padding."""
        texts = [self.tokenizer.format(item) for item in inputs]
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        tokenized = self.peer.tokenizer(texts, truncation=True, max_length=self.identity.max_length)
        return count_padded_tokens([len(ids) for ids in tokenized["input_ids"]], order, BATCH)


class LoopWay(Way):
    """A loop of transformers over padded batches in the order of the inputs."""

    def load(self) -> None:
        """Load the network."""
        self.network: Any = load_model(self.resolved, self.config).network

    @torch.inference_mode()
    def encode(self, inputs: list[EncoderInput]) -> Vectors:
        """Return the (n, dim) unit vectors of inputs."""
        rows = [row.ids for row in self.tokenizer(inputs)]
        vectors = []
        for start in range(0, len(rows), BATCH):
            batch = make_batch(rows[start : start + BATCH], self.identity.pooling)
            ids, mask, weights = (torch.from_numpy(part).to(self.device) for part in batch)
            hidden = self.network(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            vectors.append((weights[:, None] @ hidden)[:, 0].cpu().numpy())
        return normalize(np.concatenate(vectors))

    def count_computed(self, inputs: list[EncoderInput]) -> int:
        """Return the number of computed tokens, including padding."""
        lengths = [len(row.ids) for row in self.tokenizer(inputs)]
        return count_padded_tokens(lengths, list(range(len(inputs))), BATCH)


class LlmcondWay(Way):
    """One of the modes of llmcond."""

    def load(self) -> None:
        """Load the encoder."""
        self.encoder = Encoder(self.resolved)
        if self.task["kind"] == "padded":
            torch_engine(self.encoder).packs = False

    def encode(self, inputs: list[EncoderInput]) -> Vectors:
        """Return the (n, dim) unit vectors of inputs."""
        return self.encoder.encode(inputs)

    def count_computed(self, inputs: list[EncoderInput]) -> int:
        """Return the number of computed tokens, including padding."""
        return self.encoder.encode_with_counts(inputs).n_computed


#: Classes of the other libraries; every other kind is a mode of llmcond.
PEERS: dict[str, type[Way]] = {
    "sentence-transformers": SentenceTransformersWay,
    "loop": LoopWay,
}


def encoder_options(task: dict[str, Any]) -> EncoderOptions:
    """Return the options of the encoder for a task."""
    return EncoderOptions(
        dtype=task["dtype"],
        quantize=task["quantize"] if task["kind"] != "sentence-transformers" else "none",
        device=task["device"],
        runtime="auto" if task["kind"] == "llmcond" else "torch",
        like=task["like"],
        max_length=task["max_length"],
        max_tokens_per_batch=task["max_tokens_per_batch"],
        share_prefixes=task["kind"] in ("llmcond", "shared"),
    )


def make_batch(rows: list[list[int]], pooling: str) -> list[NDArray[Any]]:
    """Return the padded ids and the mask of a batch, and the pooling weights of its tokens."""
    ends = np.array([[len(row)] for row in rows])
    positions = np.arange(ends.max())
    real = positions < ends
    ids = np.zeros(real.shape, dtype=np.int64)
    ids[real] = np.concatenate(rows)
    pooled = {"mean": real, "last": positions == ends - 1, "cls": real & (positions == 0)}[pooling]
    weights = pooled / pooled.sum(axis=1, keepdims=True)
    return [ids, real.astype(np.int64), weights.astype(np.float32)]


def normalize(vectors: Vectors) -> Vectors:
    """Normalise each vector to length 1."""
    scaled: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled


def count_padded_tokens(lengths: list[int], order: list[int], size: int) -> int:
    """Return the number of tokens in padded batches.

    Args:
        lengths: number of tokens of each input.
        order: indices of the inputs in the order of the batches.
        size: batch size.
    """
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)


# -- taking turns ------------------------------------------------------------------------------


def load_way(task: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Load a way; return a function that encodes the inputs and returns the figures of a turn."""
    way = PEERS.get(task["kind"], LlmcondWay)(task)
    inputs = [EncoderInput(*texts) for texts in task["inputs"]]
    _, first, _ = timed(way.encode, inputs[: max(BATCH, len(inputs) // 16)])
    computed, flops = way.count_computed(inputs), linear_flops(way.resolved)

    def encode() -> Vectors:
        vectors = way.encode(inputs)
        synchronize(way.device)
        return vectors

    def turn() -> dict[str, Any]:
        peak = machine_peak(way.device, TORCH_DTYPES[way.identity.dtype])
        synchronize(way.device)
        vectors, seconds, processor = timed(encode)
        np.save(task["vectors"], vectors)
        return {
            "seconds": seconds,
            "processor": processor,
            "computed": computed,
            "peak": peak,
            "share": flops * computed / seconds / peak,
            "memory": peak_memory(way.device),
            "first": first,
        }

    return turn


# -- choosing the ways -------------------------------------------------------------------------


def find_obstacle(kind: str, resolved: ResolvedEncoder) -> str | None:
    """Return why a way cannot be measured, or None if it can.

    ``resolved`` is the encoder with the runtime that llmcond chooses automatically.
    """
    pooling, peer = resolved.identity.pooling, "sentence-transformers"
    reasons = {
        f"{peer} is not installed": kind == peer and find_spec("sentence_transformers") is None,
        f"the model pools by {pooling}": kind in PEERS and pooling not in POOLINGS,
        "it is the same as the ways with PyTorch below": kind == "llmcond"
        and resolved.runtime == "torch",
        "the model shares no prefixes": kind == "shared" and not resolved.shares_prefixes,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def choose_ways(
    options: argparse.Namespace, resolved: ResolvedEncoder
) -> dict[str, tuple[str, str]]:
    """Return the kind and data type of each way to measure; print why others are left out."""
    ways: dict[str, tuple[str, str]] = {}
    for name in options.ways:
        kind, dtype = WAYS[name][0], WAYS[name][1] or options.dtype
        if (kind, dtype) in ways.values() or (options.skip_peers and kind in PEERS):
            continue
        reason = find_obstacle(kind, resolved)
        if reason is None:
            ways[name] = kind, dtype
        else:
            print(f"{name} is left out: {reason}.", file=sys.stderr)
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
        "rows": [summarize(name, turns, vectors, useful) for name in tasks],
    }
    print(
        f"\n{options.model}, {options.dtype}, {label}: {len(inputs):,} inputs of {useful:,} "
        f"tokens, {options.rounds} rounds, {task['threads']} threads, torch {torch.__version__}. "
        f"Sharing prefixes allows {result['allowed_by_sharing']:.2f}x.\n"
    )
    print(format_table(result["rows"], COLUMNS), flush=True)
    return result


def summarize(
    name: str,
    turns: dict[str, list[dict[str, Any]]],
    vectors: dict[str, Vectors],
    useful: int,
) -> dict[str, Any]:
    """Return the figures of one way; ratios are medians over rounds.

    Args:
        name: the way.
        turns: the figures of each turn, by way.
        vectors: the vectors of each way.
        useful: number of tokens of the inputs, without padding.
    """
    mine, first = turns[name], next(iter(turns))
    by_wall, by_processor = (
        {other: median_ratio(theirs, mine, key) for other, theirs in turns.items()}
        for key in ("seconds", "processor")
    )
    seconds = median_of(mine, "seconds")
    return {
        "way": name,
        "tokens_per_second": useful / seconds,
        "seconds": seconds,
        "processor_seconds": median_of(mine, "processor"),
        "ratio_to_first": by_wall[first],
        "ratios": by_wall,
        "ratios_by_processor": by_processor,
        "useful_share": useful / median_of(mine, "computed"),
        "peak_share": median_of(mine, "share"),
        "peak_gflops": median_of(mine, "peak") / 1e9,
        "memory_gib": median_of(mine, "memory"),
        "first_seconds": median_of(mine, "first"),
        "largest_difference": float(np.abs(vectors[name] - vectors[first]).max()),
        "least_cosine": float((vectors[name] * vectors[first]).sum(axis=1).min()),
    }


COLUMNS = {
    "way": "way",
    "tokens/s": "tokens_per_second:,.0f",
    "wall s": "seconds:.2f",
    "processor s": "processor_seconds:.2f",
    "against the first": "ratio_to_first:.2f",
    "useful of computed tokens": "useful_share:.0%",
    "of the product's peak": "peak_share:.0%",
    "peak memory GiB": "memory_gib:.2f",
    "first batches s": "first_seconds:.1f",
    "largest difference": "largest_difference:.1e",
    "least cosine": "least_cosine:.5f",
}


def tokenize(task: dict[str, Any], inputs: Sequence[EncoderInput]) -> list[list[int]]:
    """Return the token ids of each input."""
    resolved = resolve(task["checkpoint"], encoder_options(task), identify=False)
    tokenizer = load_tokenizer(resolved.checkpoint, load_config(resolved.checkpoint))
    return [row.ids for row in InputTokenizer(tokenizer, resolved.identity, "it")(inputs)]


def make_cases(
    options: argparse.Namespace, task: dict[str, Any], instruct: bool
) -> list[tuple[list[EncoderInput], str]]:
    """Return the lists of inputs to encode, each with its description in the table."""
    if options.tokens:
        short = make_inputs(2_000, instruct=False)
        lengths = [len(ids) for ids in tokenize(task, short)]
        copies = 2 * options.inputs * options.tokens // sum(lengths) + 1
        long = join_inputs(short * copies, lengths * copies, options.tokens)
        return [(long[: options.inputs], f"inputs of about {options.tokens} tokens")]
    return [
        (make_branches(options.sentences, k, instruct), f"{k} conditions a sentence")
        for k in options.conditions
    ] or [(make_inputs(options.inputs, instruct), "C-STS inputs")]


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = BenchOptions(__doc__)
    add = parser.option
    add("--model", "minilm", "known model, shape or folder of a checkpoint")
    parser.sizes()
    parser.compute("bfloat16", choices=tuple(TORCH_DTYPES))
    add("--quantize", "none", "quantisation of the weights", choices=("none", "8bit", "4bit"))
    add("--threads", int, "threads of each way", "as PyTorch chooses")
    add("--inputs", 2_000, "number of inputs, without --conditions")
    add("--tokens", int, "join texts to inputs of about N tokens", metavar="N")
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
        "quantize": options.quantize,
        "device": options.device,
        "max_length": options.tokens,
        "max_tokens_per_batch": options.max_tokens_per_batch,
        "threads": options.threads or torch.get_num_threads(),
    }
    resolved = resolve(task["checkpoint"], encoder_options(task), identify=False)
    instruct = bool(resolved.identity.instruction_format)
    task["ways"] = choose_ways(options, resolved)
    results = [
        compare(options, task, inputs, label)
        for inputs, label in make_cases(options, task, instruct)
    ]
    print_json(options, {"results": results})


if __name__ == "__main__":
    main()
