"""Measure whether the speed and memory of extraction depend on the number of inputs.

    python scripts/bench_scale.py                       # tokens/s at 1,000, 10,000, 100,000 inputs
    python scripts/bench_scale.py stream --inputs 1000000   # killed halfway, and resumed

Inputs come from a generator. Each measurement runs in a new process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from bench_inputs import make_inputs
from bench_process import run_in_process

from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.features.extract import CHUNK, extract
from llmcond.features.store import FeatureStore

#: Words of the random texts.
WORDS = "a the two three red blue man woman dog child plays reads rides runs in on park hat".split()


def short_inputs(n: int) -> Iterator[EncoderInput]:
    """Yield distinct inputs of a few words."""
    rng = random.Random(0)
    for number in range(n):
        yield EncoderInput("", f"{' '.join(rng.choices(WORDS, k=rng.randint(2, 6)))} {number}")


def csts_inputs(n: int) -> Iterator[EncoderInput]:
    """Yield distinct inputs of C-STS length."""
    texts = make_inputs(1_000, False)
    for number in range(n):
        yield EncoderInput("", f"{texts[number % len(texts)].text} {number}")


class CommitLog:
    """A progress that logs a line per commit to a file.

    A line has the time, the inputs and tokens stored so far, and the peak memory in MiB.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stored = self.tokens = 0

    def start(self, inputs: int | None, characters: int | None) -> None:
        """Do nothing."""

    def advance(self, inputs: int, characters: int, tokens: int, seconds: float) -> None:
        """Log that ``inputs`` more inputs are stored."""
        self.stored += inputs
        self.tokens += tokens
        with self.file.open("a") as stream:
            print(time.time(), self.stored, self.tokens, peak(), file=stream)


class CountingEncoder:
    """An encoder that logs the number of inputs of each call to a file."""

    def __init__(self, encoder: Encoder, file: Path) -> None:
        self.encoder, self.file = encoder, file
        self.concurrency = encoder.concurrency

    def encode_with_counts(self, inputs: Any, queries: Any = None) -> Any:
        """Encode inputs as ``Encoder.encode_with_counts`` does, and log their number."""
        with self.file.open("a") as stream:
            print(len(inputs), file=stream)
        return self.encoder.encode_with_counts(inputs, queries)

    def queries(self, texts: Any) -> Any:
        """Return the queries of texts as ``Encoder.queries`` does."""
        return self.encoder.queries(texts)


def peak() -> int:
    """Return the peak memory of the process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def work(folder: str, kind: str, n: int, model: str) -> None:
    """Extract in this process; write progress and results to files in the folder."""
    root = Path(folder)
    resolved = resolve(model, EncoderOptions(device="cpu"))
    store = FeatureStore(root / "store", resolved.identity, "float16")
    encoder = CountingEncoder(Encoder(resolved), root / "encoded")
    encoder.encoder.encode(list(csts_inputs(min(n, 600))))
    (root / "ready").write_text(str(peak()))
    make = {"short": short_inputs, "csts": csts_inputs}[kind]
    loaded = cast("Encoder", encoder)
    done = extract(make(n), store, lambda: loaded, CommitLog(root / "watch"))
    (root / "done").write_text(json.dumps([done.n_inputs, done.n_tokens, done.seconds, peak()]))


def start_process(folder: Path, kind: str, n: int, model: str) -> Any:
    """Start a process that extracts."""
    process = multiprocessing.get_context("spawn").Process(
        target=work, args=(str(folder), kind, n, model)
    )
    process.start()
    return process


def measure_sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the tokens per second for several numbers of inputs."""
    rows = []
    for n in options.sizes:
        rates = []
        for _ in range(options.rounds if n < 100_000 else 1):
            with tempfile.TemporaryDirectory() as folder:
                run_in_process(work, folder, "csts", n, options.model)
                _, tokens, seconds, memory = json.loads((Path(folder) / "done").read_text())
                rates.append(tokens / seconds)
        rows.append({"inputs": n, "tokens_per_second": statistics.median(rates), "mib": memory})
        print(f"{n:>9,} inputs: {rows[-1]['tokens_per_second']:,.0f} tokens/s, {memory:,} MiB")
    return {"sizes": rows}


def measure_stream(options: argparse.Namespace) -> dict[str, Any]:
    """Extract from a generator, kill the process halfway, and resume."""
    folder = Path(tempfile.mkdtemp())
    first = start_process(folder, "short", options.inputs, options.model)
    watch = folder / "watch"
    while first.is_alive() and read_progress(watch)[0] < options.inputs // 2:
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    loaded, before = int((folder / "ready").read_text()), read_log(watch)
    second = start_process(folder, "short", options.inputs, options.model)
    second.join()
    n_inputs, _, _, memory = json.loads((folder / "done").read_text())
    after = read_log(watch)[len(before) :]
    n_encoded = sum(int(line) for line in (folder / "encoded").read_text().split())
    result = {
        "inputs": n_inputs,
        "mib_loaded": loaded,
        "mib_peak": max(memory, before[-1][3]),
        "computed_again": n_encoded - n_inputs,
        "chunk": CHUNK,
        "tokens_per_second": [
            token_rate(part) for part in (*split_in_fifths(before), *split_in_fifths(after))
        ],
    }
    shutil.rmtree(folder)
    rates = ", ".join(f"{value:,.0f}" for value in result["tokens_per_second"])
    print(
        f"{n_inputs:,} inputs, killed halfway and resumed. Tokens/s in each fifth before and "
        f"after the kill: {rates}. Memory: {loaded:,} MiB with the loaded model after a warm-up, "
        f"{result['mib_peak']:,} MiB at the peak. Encoded twice: {result['computed_again']:,} "
        f"inputs; a chunk has {CHUNK:,}."
    )
    return result


def read_log(watch: Path) -> list[tuple[float, int, int, int]]:
    """Return the complete lines of a log: time, inputs, tokens, and peak memory in MiB."""
    if not watch.exists():
        return []
    rows = [line.split() for line in watch.read_text().splitlines() if line.count(" ") == 3]
    return [(float(a), int(b), int(c), int(d)) for a, b, c, d in rows]


def read_progress(watch: Path) -> tuple[int, int]:
    """Return the numbers of inputs and tokens stored so far."""
    final = read_log(watch)[-1:]
    return (final[0][1], final[0][2]) if final else (0, 0)


def split_in_fifths(
    rows: list[tuple[float, int, int, int]],
) -> list[list[tuple[float, int, int, int]]]:
    """Split the lines of a log into five parts."""
    size = max(2, len(rows) // 5)
    return [rows[i * size : (i + 1) * size + 1] for i in range(5)]


def token_rate(rows: list[tuple[float, int, int, int]]) -> float:
    """Return the tokens per second between the first and the last line."""
    return (rows[-1][2] - rows[0][2]) / (rows[-1][0] - rows[0][0])


def main() -> None:
    """Parse the command line, measure, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what",
        nargs="?",
        default="sizes",
        choices=("sizes", "stream"),
        help="part to run (default: sizes)",
    )
    parser.add_argument("--model", default="minilm", help="encoder (default: minilm)")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[1_000, 10_000, 100_000],
        help="sizes: numbers of inputs (default: 1000 10000 100000)",
    )
    parser.add_argument(
        "--inputs", type=int, default=1_000_000, help="stream: number of inputs (default: 1000000)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="sizes: number of runs below 100,000 inputs, whose median counts (default: 3)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on the last line"
    )
    options = parser.parse_args()
    if options.what == "stream" and options.inputs < 20 * CHUNK:
        parser.error(f"--inputs is {options.inputs:,}, but stream needs at least {20 * CHUNK:,}")
    result = {"sizes": measure_sizes, "stream": measure_stream}[options.what](options)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
