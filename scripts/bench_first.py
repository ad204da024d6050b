"""Measure how long a new process takes to its first result, and how much memory it needs.

    python scripts/bench_first.py --rounds 5 --json

Each program embeds or compares two sentences and exits. The programs take turns, after a warm-up
round that reads their files into memory and is not counted. Times are medians over rounds: wall
time, and processor time (user and system time of all threads). Memory is the peak over all rounds.
This script must not import PyTorch, because a program's peak includes that of its parent process.
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
from statistics import median
from typing import Any

from common import Options, format_table, print_json

from llmcond.encoders import EncoderOptions, resolve

FIRST, SECOND = "Two women read a book at the beach.", "Two women cook at night."
CONDITION = "the place"
COMMAND = ["-m", "llmcond", "similarity", FIRST, SECOND, "--condition", CONDITION]
SIMILARITY = f"""
import llmcond
llmcond.load_embedder().similarity([{FIRST!r}], [{SECOND!r}], {CONDITION!r})
"""
ENCODE = f"""
import llmcond
inputs = [llmcond.EncoderInput("", text) for text in ({FIRST!r}, {SECOND!r})]
llmcond.load_encoder("minilm", runtime=RUNTIME).encode(inputs)
"""
PEER = f"""
from sentence_transformers import SentenceTransformer
SentenceTransformer(FOLDER, device="cpu").encode([{FIRST!r}, {SECOND!r}])
"""
#: Arguments of Python by the names of the programs in the table.
WAYS = {
    "llmcond similarity (command line)": COMMAND,
    "llmcond.load_embedder().similarity": ["-c", SIMILARITY],
    "llmcond.load_encoder('minilm').encode": ["-c", ENCODE.replace("RUNTIME", "'auto'")],
    "llmcond.load_encoder('minilm', runtime='torch').encode": [
        *("-c", ENCODE.replace("RUNTIME", "'torch'")),
    ],
    "sentence-transformers": ["-c", PEER],
}


def run_program(arguments: Sequence[str], folder: str) -> dict[str, float]:
    """Run Python in a folder; return seconds, processor seconds, and peak memory in MiB.

    Raises:
        SystemExit: the program failed; its output is printed first.
    """
    # Let Python cache compiled modules, as it does for installed packages.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
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
    folder = resolve("minilm", EncoderOptions(), identify=False).checkpoint.folder
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for _ in range(rounds + 1):
        for name, arguments in WAYS.items():
            program = [text.replace("FOLDER", repr(str(folder))) for text in arguments]
            turns[name].append(run_program(program, scratch))
    return [
        {
            "way": name,
            "seconds": median(turn["seconds"] for turn in counted[1:]),
            "processor_seconds": median(turn["processor"] for turn in counted[1:]),
            "memory_mib": max(turn["memory"] for turn in counted[1:]),
        }
        for name, counted in turns.items()
    ]


COLUMNS = {
    "way": "way",
    "wall s": "seconds:.2f",
    "processor s": "processor_seconds:.2f",
    "peak memory MiB": "memory_mib:,.0f",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, and print tables."""
    parser = Options(__doc__)
    parser.option("--json", False, "print one JSON value on the last line")
    parser.option("--rounds", 5, "number of rounds, whose medians are printed")
    options = parser.parse_args(arguments)
    # The folder contains no run, so that the command uses the bundled model.
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(options.rounds, scratch)
    print(format_table(rows, COLUMNS))
    print_json(options, {"rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
