"""Measure whether extraction stays as fast and as small however many inputs there are.

    python scripts/bench_scale.py                       # tokens/s at 1,000, 10,000, 100,000 inputs
    python scripts/bench_scale.py stream --inputs 1000000   # killed at the half, and resumed

Inputs come from a generator. Each measurement is a process of its own.
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
from bench_process import alone

from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.features.extract import CHUNK, extract
from llmcond.features.store import FeatureStore

WORDS = "a the two three red blue man woman dog child plays reads rides runs in on park hat".split()


def short_inputs(n: int) -> Iterator[EncoderInput]:
    """Yield distinct inputs of a few words."""
    draw = random.Random(0)
    for number in range(n):
        yield EncoderInput("", f"{' '.join(draw.choices(WORDS, k=draw.randint(2, 6)))} {number}")


def csts_inputs(n: int) -> Iterator[EncoderInput]:
    """Yield distinct inputs of C-STS length."""
    texts = make_inputs(1_000, False)
    for number in range(n):
        yield EncoderInput("", f"{texts[number % len(texts)].text} {number}")


class Watch:
    """A progress that notes when what was stored, and the memory of the process."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stored = self.tokens = 0

    def start(self, inputs: int | None, characters: int | None) -> None:
        """Note that the encoder is about to be loaded."""

    def advance(self, inputs: int, characters: int, tokens: int, seconds: float) -> None:
        """Note that so many more are stored."""
        self.stored += inputs
        self.tokens += tokens
        with self.file.open("a") as stream:
            print(time.time(), self.stored, self.tokens, peak(), file=stream)


class Counting:
    """An encoder that notes how many inputs it was asked for."""

    def __init__(self, encoder: Encoder, file: Path) -> None:
        self.encoder, self.file = encoder, file
        self.concurrency = encoder.concurrency

    def encode_counted(self, inputs: Any, queries: Any = None) -> Any:
        """See :class:`Encoder`."""
        with self.file.open("a") as stream:
            print(len(inputs), file=stream)
        return self.encoder.encode_counted(inputs, queries)

    def queries(self, texts: Any) -> Any:
        """See :class:`Encoder`."""
        return self.encoder.queries(texts)


def peak() -> int:
    """Return the most memory that the process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def work(folder: str, kind: str, n: int, model: str) -> None:
    """Extract in a process of its own."""
    root = Path(folder)
    resolved = resolve(model, EncoderOptions(device="cpu"))
    store = FeatureStore(root / "store", resolved.identity, "float16")
    encoder = Counting(Encoder(resolved), root / "asked")
    encoder.encoder.encode(list(csts_inputs(min(n, 600))))
    (root / "ready").write_text(str(peak()))
    make = {"short": short_inputs, "csts": csts_inputs}[kind]
    loaded = cast("Encoder", encoder)
    done = extract(make(n), store, lambda: loaded, Watch(root / "watch"))
    (root / "done").write_text(json.dumps([done.n_inputs, done.n_tokens, done.seconds, peak()]))


def start(folder: Path, kind: str, n: int, model: str) -> Any:
    """Start a process that extracts."""
    process = multiprocessing.get_context("spawn").Process(
        target=work, args=(str(folder), kind, n, model)
    )
    process.start()
    return process


def sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Measure tokens per second at several sizes."""
    rows = []
    for n in options.sizes:
        rates = []
        for _ in range(options.rounds if n < 100_000 else 1):
            with tempfile.TemporaryDirectory() as folder:
                alone(work, folder, "csts", n, options.model)
                _, tokens, seconds, memory = json.loads((Path(folder) / "done").read_text())
                rates.append(tokens / seconds)
        rows.append({"inputs": n, "tokens_per_second": statistics.median(rates), "mib": memory})
        print(f"{n:>9,} inputs: {rows[-1]['tokens_per_second']:,.0f} tokens/s, {memory:,} MiB")
    return {"sizes": rows}


def stream(options: argparse.Namespace) -> dict[str, Any]:
    """Extract from a generator, kill the process at the half, and resume."""
    folder = Path(tempfile.mkdtemp())
    first = start(folder, "short", options.inputs, options.model)
    watch = folder / "watch"
    while first.is_alive() and last(watch)[0] < options.inputs // 2:
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    loaded, before = int((folder / "ready").read_text()), lines(watch)
    second = start(folder, "short", options.inputs, options.model)
    second.join()
    n_inputs, _, _, memory = json.loads((folder / "done").read_text())
    after = lines(watch)[len(before) :]
    asked = sum(int(line) for line in (folder / "asked").read_text().split())
    result = {
        "inputs": n_inputs,
        "mib_loaded": loaded,
        "mib_peak": max(memory, before[-1][3]),
        "computed_again": asked - n_inputs,
        "chunk": CHUNK,
        "tokens_per_second": [rate(part) for part in (*fifths(before), *fifths(after))],
    }
    shutil.rmtree(folder)
    rates = ", ".join(f"{value:,.0f}" for value in result["tokens_per_second"])
    print(
        f"{n_inputs:,} inputs, killed at the half and resumed. Tokens/s of the fifths before and "
        f"after: {rates}. Memory: {loaded:,} MiB with the model loaded and warm, "
        f"{result['mib_peak']:,} MiB at the peak. Computed again: {result['computed_again']:,} "
        f"inputs; a chunk is {CHUNK:,}."
    )
    return result


def lines(watch: Path) -> list[tuple[float, int, int, int]]:
    """Return what was noted."""
    if not watch.exists():
        return []
    rows = [line.split() for line in watch.read_text().splitlines() if line.count(" ") == 3]
    return [(float(a), int(b), int(c), int(d)) for a, b, c, d in rows]


def last(watch: Path) -> tuple[int, int]:
    """Return the inputs and tokens stored so far."""
    noted = lines(watch)[-1:]
    return (noted[0][1], noted[0][2]) if noted else (0, 0)


def fifths(rows: list[tuple[float, int, int, int]]) -> list[list[tuple[float, int, int, int]]]:
    """Cut notes into five parts."""
    size = max(2, len(rows) // 5)
    return [rows[i * size : (i + 1) * size + 1] for i in range(5)]


def rate(rows: list[tuple[float, int, int, int]]) -> float:
    """Return the tokens per second of some notes."""
    return (rows[-1][2] - rows[0][2]) / (rows[-1][0] - rows[0][0])


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="sizes", choices=("sizes", "stream"))
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of stream")
    parser.add_argument("--rounds", type=int, default=3, help="of sizes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.what == "stream" and options.inputs < 20 * CHUNK:
        parser.error(f"stream takes {20 * CHUNK:,} inputs at least: fifths of either half are told")
    result = {"sizes": sizes, "stream": stream}[options.what](options)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
