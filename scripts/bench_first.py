"""Measure how long a new process takes to its first result, and how much memory it needs.

    python scripts/bench_first.py --rounds 5 --json

Each program embeds or compares two sentences and exits. The programs take turns, after a warm-up
round that reads their files into memory and is not counted. Times are medians over rounds: wall
time, and processor time (user and system time of all threads). Memory is the peak over all rounds.
Commit 17f6c5ba can also measure programs that use only OpenVINO or ONNX Runtime.

``python -X importtime -m llmcond similarity ...`` profiles the imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import BenchOptions, median_of
from common import format_table, print_json

from llmcond.encoders import EncoderOptions, resolve

FIRST, SECOND = "Two women read a book at the beach.", "Two women cook at night."
CONDITION = "the place"
COMMAND = ["-m", "llmcond", "similarity", FIRST, SECOND, "--condition", CONDITION]
_TEXTS = f"texts = [{FIRST!r}, {SECOND!r}]\n"
_ENCODE = f"""
import llmcond
inputs = [llmcond.EncoderInput("", text) for text in ({FIRST!r}, {SECOND!r})]
llmcond.load_encoder("minilm", runtime=RUNTIME).encode(inputs)
"""
_PEER = f"""
{_TEXTS}
from sentence_transformers import SentenceTransformer
SentenceTransformer(FOLDER, device="cpu").encode(texts)
"""
_SIMILARITY = f"""
import llmcond
llmcond.load_embedder().similarity([{FIRST!r}], [{SECOND!r}], {CONDITION!r})
"""
#: Programs by their names in the table; None is the command line.
WAYS: dict[str, str | None] = {
    "llmcond similarity (command line)": None,
    "llmcond.load_embedder().similarity": _SIMILARITY,
    "llmcond.load_encoder('minilm').encode": _ENCODE.replace("RUNTIME", "'auto'"),
    "llmcond.load_encoder('minilm', runtime='torch').encode": _ENCODE.replace("RUNTIME", "'torch'"),
    "sentence-transformers": _PEER,
}


def environment() -> dict[str, str]:
    """Return the environment of the programs, in which they can import modules of this folder."""
    folders = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    # Let Python cache compiled modules, as it does for installed packages.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, "PYTHONPATH": path}


def make_arguments(program: str | None, folder: str) -> list[str]:
    """Return the arguments with which Python runs a program."""
    if program is None:
        return COMMAND
    return ["-c", f"FOLDER = {folder!r}\n{program}"]


def run_program(arguments: Sequence[str], folder: str) -> dict[str, float]:
    """Run Python in a folder; return seconds, processor seconds, and peak memory in MiB.

    Raises:
        SystemExit: the program failed; its output is printed first.
    """
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace"))
            raise SystemExit("bench_first: a program failed; see its output above.")
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes on macOS, KiB elsewhere
    return {
        "seconds": seconds,
        "processor": usage.ru_utime + usage.ru_stime,
        "memory": usage.ru_maxrss / unit,
    }


def measure(rounds: int, scratch: str) -> list[dict[str, Any]]:
    """Run the programs in turn, and return the figures of each."""
    checkpoint = resolve("minilm", EncoderOptions(), identify=False).checkpoint
    folder = str(checkpoint.folder)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for _ in range(rounds + 1):
        for name, program in WAYS.items():
            turns[name].append(run_program(make_arguments(program, folder), scratch))
    return [summarize(name, counted[1:]) for name, counted in turns.items()]


def summarize(name: str, turns: list[dict[str, float]]) -> dict[str, Any]:
    """Return the figures of one program."""
    return {
        "way": name,
        "seconds": median_of(turns, "seconds"),
        "least_seconds": min(turn["seconds"] for turn in turns),
        "processor_seconds": median_of(turns, "processor"),
        "memory_mib": max(turn["memory"] for turn in turns),
    }


COLUMNS = {
    "way": "way",
    "wall s": "seconds:.2f",
    "least wall s": "least_seconds:.2f",
    "processor s": "processor_seconds:.2f",
    "peak memory MiB": "memory_mib:,.0f",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, and print tables."""
    parser = BenchOptions(__doc__)
    parser.rounds(5)
    options = parser.parse_args(arguments)
    # The folder contains no run, so that the command uses the bundled model.
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(options.rounds, scratch)
    print(format_table(rows, COLUMNS))
    print_json(options, {"rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
