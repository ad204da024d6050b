"""Measure the time from a new process to its first answer, and the memory that it takes.

    python scripts/bench_first.py
    python scripts/bench_first.py --imports --json

Every way is a program of its own, which embeds or compares two sentences and ends. All take turns
after a round whose times do not count, which brings files into memory. Times are medians over
rounds: by the clock, and of the processor (user and system time of all threads). Memory is the
largest of all rounds. The programs that use OpenVINO and ONNX Runtime alone read a graph of MiniLM
that PyTorch exported before; for that they need the package onnx.

``--imports`` profiles the imports of ``llmcond similarity`` and prints the packages that take
longest, each with the time of its own modules.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmcond.encoders import EncoderOptions, resolve

FIRST, SECOND = "Two women read a book at the beach.", "Two women cook at night."
CONDITION = "the place"
COMMAND = ["-m", "llmcond", "similarity", FIRST, SECOND, "--condition", CONDITION]
#: Packages that the table of imports has.
PACKAGES = 15
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
_TOKENIZE = f"""
{_TEXTS}
import numpy as np
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(FOLDER + "/tokenizer.json")
tokenizer.enable_padding()
encoded = tokenizer.encode_batch(texts)
ids = np.array([one.ids for one in encoded], dtype=np.int64)
mask = np.array([one.attention_mask for one in encoded], dtype=np.int64)
inputs = {{"input_ids": ids, "attention_mask": mask}}
"""
_POOL = """
weights = mask[:, :, None].astype(np.float32)
vectors = (states * weights).sum(axis=1) / weights.sum(axis=1)
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
"""
_OPENVINO = f"""
import sys
sys.modules["openvino_telemetry"] = None  # the import of OpenVINO is not reported
import openvino
{_TOKENIZE}
states = openvino.Core().compile_model(GRAPHS + "/minilm.xml", "CPU")(inputs)[0]
{_POOL}
"""
_ONNX = f"""
import onnxruntime
{_TOKENIZE}
session = onnxruntime.InferenceSession(GRAPHS + "/optimized.onnx")
states = session.run(None, inputs)[0]
{_POOL}
"""
_SIMILARITY = f"""
import llmcond
llmcond.load_embedder().similarity([{FIRST!r}], [{SECOND!r}], {CONDITION!r})
"""
#: Writes the graphs that the other libraries read.
_EXPORT = """
from pathlib import Path
from bench_inputs import export_onnx, optimize_onnx
from llmcond.encoders.openvino.library import import_openvino
folder = Path(GRAPHS)
export_onnx(FOLDER, folder / "minilm.onnx")
optimize_onnx(folder / "minilm.onnx", folder / "optimized.onnx", FOLDER)
openvino = import_openvino()
network = openvino.Core().read_model(folder / "minilm.onnx")
openvino.save_model(network, folder / "minilm.xml", compress_to_fp16=False)
"""
#: Programs by the names of ways; None is the command line.
WAYS: dict[str, str | None] = {
    "llmcond similarity (command line)": None,
    "llmcond.load_embedder().similarity": _SIMILARITY,
    "llmcond.load_encoder('minilm').encode": _ENCODE.replace("RUNTIME", "'auto'"),
    "llmcond.load_encoder('minilm', runtime='torch').encode": _ENCODE.replace("RUNTIME", "'torch'"),
    "sentence-transformers": _PEER,
    "OpenVINO and tokenizers": _OPENVINO,
    "ONNX Runtime and tokenizers": _ONNX,
}
#: What ways need beside llmcond.
MODULES = {
    "sentence-transformers": ("sentence_transformers",),
    "OpenVINO and tokenizers": ("onnx", "openvino", "onnxruntime"),
    "ONNX Runtime and tokenizers": ("onnx", "openvino", "onnxruntime"),
}


def environment() -> dict[str, str]:
    """Return the environment of the programs, which find the modules of this folder."""
    folders = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    # Compiled modules are kept, as they are where a package is installed.
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": path}


def make_arguments(program: str | None, folder: str, graphs: str) -> list[str]:
    """Return the arguments of Python that run a way's program."""
    if program is None:
        return COMMAND
    return ["-c", f"FOLDER, GRAPHS = {folder!r}, {graphs!r}\n{program}"]


def run_program(arguments: Sequence[str], folder: str) -> dict[str, float]:
    """Run Python in a folder to its end; return its seconds and its largest memory in MiB.

    Raises:
        SystemExit: it failed; what it said is printed.
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
            raise SystemExit("bench_first: a program failed; see above.")
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes on macOS, KiB elsewhere
    return {
        "seconds": seconds,
        "processor": usage.ru_utime + usage.ru_stime,
        "memory": usage.ru_maxrss / unit,
    }


def choose_ways() -> dict[str, str | None]:
    """Return the ways whose libraries are installed; say which are not."""
    ways = {}
    for name, program in WAYS.items():
        missing = [module for module in MODULES.get(name, ()) if find_spec(module) is None]
        if missing:
            print(f"{name} is left out: {', '.join(missing)} is not installed.", file=sys.stderr)
        else:
            ways[name] = program
    return ways


def measure(rounds: int, scratch: str) -> list[dict[str, Any]]:
    """Run the program of every way in turn, and return the figures of each."""
    checkpoint = resolve("minilm", EncoderOptions(), identify=False).checkpoint
    ways, folder = choose_ways(), str(checkpoint.folder)
    if any("GRAPHS" in (program or "") for program in ways.values()):
        run_program(make_arguments(_EXPORT, folder, scratch), scratch)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, program in ways.items():
            turns[name].append(run_program(make_arguments(program, folder, scratch), scratch))
    return [summarize(name, counted[1:]) for name, counted in turns.items()]


def summarize(name: str, turns: list[dict[str, float]]) -> dict[str, Any]:
    """Return the figures of a way."""
    return {
        "way": name,
        "seconds": statistics.median(turn["seconds"] for turn in turns),
        "least_seconds": min(turn["seconds"] for turn in turns),
        "processor_seconds": statistics.median(turn["processor"] for turn in turns),
        "memory_mib": max(turn["memory"] for turn in turns),
    }


def profile_imports(scratch: str) -> list[dict[str, Any]]:
    """Return the packages that ``llmcond similarity`` imports, those that take longest first."""
    process = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMAND],
        cwd=scratch,
        env=environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    return add_up_imports(process.stderr)


def add_up_imports(log: str) -> list[dict[str, Any]]:
    """Return the milliseconds and the number of modules of each package in a log of imports.

    A line of the log has the microseconds of a module, those with what it imports, and its name.
    """
    microseconds: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for line in log.splitlines():
        own, _, name = line.removeprefix("import time:").partition("|")
        if line.startswith("import time:") and own.strip().isdecimal():
            package = name.rpartition("|")[2].strip().partition(".")[0]
            microseconds[package] += int(own)
            modules[package] += 1
    return [
        {"package": package, "milliseconds": time_taken / 1_000, "modules": modules[package]}
        for package, time_taken in microseconds.most_common()
    ]


def show(rows: list[dict[str, Any]], imports: list[dict[str, Any]]) -> None:
    """Print the figures as Markdown tables."""
    print("| way | wall s | least wall s | processor s | peak memory MiB |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['way']} | {row['seconds']:.2f} | {row['least_seconds']:.2f} "
            f"| {row['processor_seconds']:.2f} | {row['memory_mib']:,.0f} |"
        )
    if imports:
        total = sum(package["milliseconds"] for package in imports)
        print(f"\nImports of llmcond similarity: {total:,.0f} ms in all.\n")
        print("| package | ms of its own modules | modules |\n|---|---|---|")
    for package in imports[:PACKAGES]:
        print(f"| {package['package']} | {package['milliseconds']:.1f} | {package['modules']} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--imports", action="store_true", help="profile the imports as well")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory() as scratch
    ):  # without a run, so that the bundled model is used
        rows = measure(options.rounds, scratch)
        imports = profile_imports(scratch) if options.imports else []
    show(rows, imports)
    if options.json:
        print(json.dumps({"rounds": options.rounds, "rows": rows, "imports": imports}))


if __name__ == "__main__":
    main()
