"""Record what the commands print on the bundled samples, and compare two records.

    python scripts/golden.py record FOLDER       run the commands below, write FOLDER/NAME.json
    python scripts/golden.py compare OLD NEW     list each value that differs

The exit code is 1 if a command fails, or a value differs.

Use it to check that a refactoring changes no results: record before and after each step. Both
records have to come from the same machine, because values are compared exactly. Values named in
``FREE``, such as times and paths, are ignored. To record another checkout, put it first on the
path: ``PYTHONPATH=CHECKOUT python scripts/golden.py record FOLDER``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: Keys whose values differ from one record to the next: times, paths and versions.
FREE = frozenset(
    "seconds run folder out report llmcond commit created fingerprint speed "
    "texts_per_second".split()
)

ENCODER, FAST = "--model minilm --dtype float32 --device cpu", "--set epochs=2"
#: Commands by the name of their record; all run in the same folder, in this order.
COMMANDS: dict[str, str] = {
    "extract": f"extract {ENCODER} --run csts --prompt pair-cond separate",
    "fit-linear": f"fit-head --run csts --head linear --prompt pair-cond {FAST}",
    "fit-mlp": (
        "fit-head --run csts --head mlp --prompt pair-cond --dim 64 --set epochs=2 members=2"
    ),
    "fit-hypernet": f"fit-head --run csts --head hypernet --prompt separate {FAST}",
    "fit-pca": "fit-head --run csts --head pca --prompt pair-cond",
    "evaluate": "evaluate --run csts",
    "analyse": "analyse --run csts --head linear",
    "sweep": (
        "sweep --run csts --head linear --prompt pair-cond --vary dim=16,32 "
        f"--seeds 2 --workers 1 {FAST}"
    ),
    "similarity": (
        "similarity 'Two men ride horses.' 'Three men ride bikes.' --run csts "
        "--condition 'the number of people' --condition 'the animal'"
    ),
    "compare-prompts": (
        f"compare-prompts {ENCODER} --run compared --prompts pair-cond concat-sent-cond "
        f"--heads linear --seeds 2 --workers 1 {FAST}"
    ),
    "train-lora": (
        f"train-lora {ENCODER} --run tuned --data small.csv --head linear --prompt pair-cond "
        "--epochs 1 --rank 4 --dim 16"
    ),
    "evaluate-tuned": "evaluate --run tuned",
    "extract-kgc": f"extract {ENCODER} --run graph --task kgc",
    "extract-kgc-separate": f"extract {ENCODER} --run graph --prompt separate",
    "fit-kgc": f"fit-head --run graph --head hadamard {FAST}",
    "fit-kgc-hypernet": f"fit-head --run graph --head hypernet {FAST}",
    "evaluate-kgc": "evaluate --run graph --by-relation",
    "evaluate-kgc-terms": "evaluate --run graph --rerank 5:0.05 --reverse",
    "sweep-kgc": (
        "sweep --run graph --head hadamard --vary learning_rate=1e-3,1e-4 --seeds 2 "
        f"--workers 1 {FAST}"
    ),
    "compare-prompts-kgc": (
        f"compare-prompts {ENCODER} --run compared-kgc --task kgc --heads hadamard "
        f"--prompts separate --seeds 2 --workers 1 {FAST}"
    ),
    "complete": "complete --run graph --head-entity HEAD --relation RELATION -k 5",
    "train-lora-kgc": (
        f"train-lora {ENCODER} --run tuned-kgc --task kgc --head hadamard --epochs 1 "
        "--rank 4 --batch-size 128"
    ),
    "extract-dialogue": f"extract {ENCODER} --run talk --task dialogue",
    "fit-dialogue": f"fit-head --run talk --head c3l-released {FAST}",
    "fit-dialogue-rank": f"fit-head --run talk --head rank {FAST}",
    "evaluate-dialogue": "evaluate --run talk",
    "plan-dialogue": "evaluate --run talk --plan same-depth --history 2 --distance 1",
    "sweep-dialogue": (
        f"sweep --run talk --head ccl --vary batch_size=32,64 --seeds 2 --workers 1 {FAST}"
    ),
    "compare-prompts-dialogue": (
        f"compare-prompts {ENCODER} --run compared-talk --task dialogue --heads ccl "
        f"--seeds 2 --workers 1 {FAST}"
    ),
    "reply": "reply 'Hi!' 'Hello, how are you?' --candidates texts.txt --run talk",
    "train-lora-dialogue": (
        f"train-lora {ENCODER} --run tuned-talk --task dialogue --head ccl "
        "--epochs 1 --rank 4 --data talk.jsonl"
    ),
    "index": "index texts.txt --out index --condition 'the place' --run csts",
    "search": "search index 'a man at the beach' --condition 'the place' -k 5",
    "cluster": (
        "cluster texts.txt --condition 'the place' --clusters 4 --out clusters.csv --run csts"
    ),
    "embed": "embed texts.txt --condition 'the place' --out vectors.npy --run csts",
    "bundled": (
        "similarity 'Two men ride horses.' 'Three men ride bikes.' --model minilm-conditions "
        "--condition 'the number of people'"
    ),
    "check-condition": "check-condition texts.txt --condition 'the place'",
    "heads": "heads --run csts",
    "prompts": "prompts",
    "models": "models",
}


def prepare(folder: Path) -> dict[str, str]:
    """Write the small files that the commands read; return the values of the placeholders."""
    import llmcond

    data = Path(llmcond.__file__).parent / "data"
    with (data / "sample" / "train.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.reader(stream))
    with (folder / "small.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(rows[:241])
    texts = dict.fromkeys(row[0] for row in rows[1:])
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in list(texts)[:200]))
    dialogues = (data / "sample_dialogues" / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "talk.jsonl").write_text("".join(dialogues[:160]))
    head, relation, _ = (data / "sample_graph" / "test.tsv").read_text().split("\n")[0].split("\t")
    return {"HEAD": head, "RELATION": relation}


def record(folder: Path, only: list[str]) -> int:
    """Run the commands, write the JSON that each prints, and return the number of failed ones.

    Args:
        folder: folder of the record.
        only: names of the commands to run; all if empty.
    """
    n_failed = 0
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    placeholders = prepare(work)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, command in COMMANDS.items():
        if only and name not in only:
            continue
        start = time.perf_counter()
        words = [placeholders.get(word, word) for word in shlex.split(command)]
        extra = ["--predictions", f"{name}.csv"] if words[0] == "evaluate" else []
        completed = subprocess.run(
            [sys.executable, "-m", "llmcond", *words, *extra, "--json"],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        failed = completed.returncode != 0
        output = json.dumps({"error": completed.stderr[-2000:]}) if failed else completed.stdout
        (folder / f"{name}.json").write_text(output)
        n_failed += failed
        seconds = time.perf_counter() - start
        print(f"{name}: exit {completed.returncode}, {seconds:.1f} s", flush=True)
        if extra and not failed:
            (folder / f"{name}.csv").write_bytes((work / f"{name}.csv").read_bytes())
    for path in sorted(work.glob("*/heads/*/head.json")):
        saved = json.loads(path.read_text())
        name = "-".join(path.relative_to(work).parts[:-1])
        (folder / f"{name}.json").write_text(json.dumps(saved))
    return n_failed


def differences(old: Any, new: Any, where: str) -> list[str]:
    """Return a line for each value that differs, with its path; new and missing keys count too.

    Args:
        old: a value of the old record.
        new: the value of the new record.
        where: path of the value, such as ``evaluate.results[0].mrr``.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        lines: list[str] = []
        for key in {**old, **new}:
            if key in FREE:
                continue
            if key not in old or key not in new:
                lines.append(f"{where}.{key}: only in the {'old' if key in old else 'new'} record")
            else:
                lines += differences(old[key], new[key], f"{where}.{key}")
        return lines
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [text for i, (a, b) in pairs for text in differences(a, b, f"{where}[{i}]")]
    same = repr(old) == repr(new)  # NaN differs from itself
    return [] if same else [f"{where}: {old!r} -> {new!r}"]


def compare(old: Path, new: Path) -> int:
    """Print each difference between two records, and return the number of differences."""
    lines = []
    for path in sorted(old.glob("*.json")):
        if (new / path.name).is_file():
            first, second = (json.loads((at / path.name).read_text()) for at in (old, new))
            lines += differences(first, second, path.stem)
        else:
            lines.append(f"{path.stem}: missing")
    for path in sorted(old.glob("*.csv")):
        if path.read_bytes() != (new / path.name).read_bytes():
            lines.append(f"{path.name}: differs")
    for text in [*lines, f"{len(lines)} differences"]:
        print(text[:300])
    return len(lines)


def main() -> None:
    """Record the commands' output, or compare two records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="run the commands")
    recording.add_argument("folder", type=Path, help="folder to write the record to")
    recording.add_argument(
        "--only", nargs="+", default=[], choices=COMMANDS, help="commands to run (default: all)"
    )
    comparing = actions.add_parser("compare", help="list the differences")
    comparing.add_argument("old", type=Path, help="folder of the old record")
    comparing.add_argument("new", type=Path, help="folder of the new record")
    options = parser.parse_args()
    if options.action == "record":
        n = record(options.folder.resolve(), options.only)
    else:
        n = compare(options.old, options.new)
    if n:
        sys.exit(1)


if __name__ == "__main__":
    main()
