"""Feed commands with damaged input: no traceback, no hang, no wrong result.

    python scripts/fuzz.py                                   # 2,000 inputs, some minutes
    python scripts/fuzz.py --kind run --seed 137 --count 1   # one input again

An input is a small run, checkpoint, store or file in which a value, a line, some bytes or a whole
file was changed. Files and objects with texts in any form are undamaged, and their rows must come
out (``fuzz_texts.py``). The kind and the seed of an input determine it completely, so that each
input can be repeated. Commit 17f6c5ba can also try requests to a server, filters of a search,
damaged outputs of ``llmcond embed``, and answers of a chat server; tests cover these.

An input fails if there is a traceback, an exit code other than 0, 1 and 2, excessive memory use, or
rows that contradict the input. A table counts tries and failures, and every failure is printed with
its seed. The exit code is 1 if there are failures. If an input hangs, the script prints where, and
ends. The script requires Linux.
"""

from __future__ import annotations

import csv
import faulthandler
import io
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from common import Options, markdown_table
from fuzz_changes import (
    TEXTS,
    VALUES,
    Base,
    Input,
    change_below,
    change_bytes,
    change_file,
    command,
    succeed,
)
from fuzz_texts import TEXT_INPUTS

from llmcond.base.package import bundled_folder

#: Seconds after which an input counts as hanging; an input takes some seconds at most.
LIMIT_SECONDS: Final = 120
#: Bytes by which an input may increase the peak memory, also by importing modules.
GROWTH: Final = 600 * 2**20

# -- inputs, by kind ---------------------------------------------------------------------------

HEADER: Final = ("sentence1", "sentence2", "condition", "label")
ROWS: Final = [
    (f"two men play {i}", f"children read {i}", ("the place", "the mood")[k], 1 + (i + 2 * k) % 5)
    for i in range(12)
    for k in range(2)
]


def make_base(folder: Path) -> None:
    """Write a tiny checkpoint, and a run of it with heads, a sweep and a comparison."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from transformers import BertConfig, BertModel

    from llmcond.benchmark.shapes import make_tokenizer

    torch.manual_seed(0)
    size: Any = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = BertConfig(vocab_size=8_000, num_hidden_layers=2, max_position_embeddings=64, **size)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder / "bert")
    make_tokenizer(folder / "bert")
    parts = [modules.Transformer(str(folder / "bert")), modules.Pooling(32)]
    SentenceTransformer(modules=parts).save(str(folder / "model"), create_model_card=False)
    write_csv(folder / "rows.csv", [HEADER, *ROWS])
    for name in ("linear", "hypernet", "pca"):
        text = (bundled_folder("heads") / f"{name}.toml").read_text("utf-8")
        lines = ("epochs = 2" if s.startswith("epochs") else s for s in text.splitlines())
        (folder / f"{name}.toml").write_text("\n".join(lines) + "\n", "utf-8")
    run_options = ["--run", str(folder / "run")]
    model = ["--model", str(folder / "model")]
    data = ["--data", str(folder / "rows.csv"), "--prompt", "concat-sent-cond", "separate"]
    linear = ["--head", str(folder / "linear.toml")]
    prompt_and_run = ["--prompt", "concat-sent-cond", *run_options]
    succeed("extract", *model, *data, *run_options)
    succeed("fit-head", *linear, *prompt_and_run)
    succeed("fit-head", "--head", "pca", "--dim", "2", *prompt_and_run)
    succeed("sweep", *linear, "--seeds", "2", "--workers", "1", *prompt_and_run)


def write_csv(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    """Write rows as CSV."""
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    path.write_bytes(out.getvalue().encode("utf-8", "surrogatepass"))


def write_xlsx(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write rows as a workbook."""
    from openpyxl import Workbook
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

    workbook = Workbook()
    for row in rows:
        workbook.active.append([ILLEGAL_CHARACTERS_RE.sub("", value) for value in row])
    workbook.save(path)


def data_input(chance: Random, base: Base, work: Path) -> list[str]:
    """Return a command that reads a changed data file."""
    rows: list[list[Any]] = [list(HEADER), *(list(row) for row in ROWS)]
    for _ in range(chance.randrange(4)):
        row = chance.choice((rows[0], chance.choice(rows)))
        row[chance.randrange(4)] = chance.choice((*VALUES, *TEXTS))
    texts = [[str(value).encode("utf-8", "replace").decode() for value in row] for row in rows]
    path = work / f"rows{chance.choice(('.csv', '.tsv', '.jsonl', '.parquet', '.xlsx'))}"
    if path.suffix == ".jsonl":
        names = [str(name) for name in rows[0]]
        lines = (json.dumps(dict(zip(names, row, strict=True))) for row in rows[1:])
        path.write_text("\n".join(lines))
    elif path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = [pa.array(column) for column in zip(*texts[1:], strict=True)]
        pq.write_table(pa.table(columns, texts[0]), path)
    elif path.suffix == ".xlsx":
        write_xlsx(path, texts)
    else:
        write_csv(path, rows)
    if chance.random() < 0.5:
        path.write_bytes(change_bytes(chance, path.read_bytes()))
    run, embedded = str(base.folder / "run"), str(work / "v.npy")
    return chance.choice(
        [
            ["prompts", "show", "pair-cond", "--data", str(path)],
            ["extract", "--model", str(base.folder / "model"), "--data", str(path)],
            ["evaluate", "--data", str(path), "--run", str(base.copy("run", work))],
            ["embed", str(path), "--text", "sentence1", "--out", embedded, "--run", run],
        ]
    )


def template_input(chance: Random, base: Base, work: Path) -> list[str]:
    """Return a command that reads a changed template."""
    path = work / "mine.toml"
    shutil.copyfile(chance.choice(sorted(bundled_folder("prompts").glob("*.toml"))), path)
    change_file(chance, path)
    data = ["--data", str(base.folder / "rows.csv")]
    if chance.random() < 0.7:
        return ["prompts", "show", str(path), *data]
    return ["extract", "--model", str(base.folder / "model"), "--prompt", str(path), *data]


def recipe_input(chance: Random, base: Base, work: Path) -> list[str]:
    """Return a command that fits a changed recipe."""
    path = base.copy(chance.choice(("linear.toml", "hypernet.toml", "pca.toml")), work)
    change_file(chance, path)
    prompts = ["--prompt", chance.choice(("concat-sent-cond", "concat-sent-cond+separate"))]
    return ["fit-head", "--head", str(path), *prompts, "--run", str(base.copy("run", work))]


def run_commands(base: Base, run: Path) -> list[list[str]]:
    """Return commands that use a run."""
    linear = ["--head", str(base.folder / "linear.toml"), "--prompt", "concat-sent-cond"]
    run_options = ["--run", str(run)]
    return [
        ["evaluate", *run_options],
        ["evaluate", "--head", "linear", "--predictions", str(run / "p.csv"), *run_options],
        ["fit-head", *linear, *run_options],
        ["sweep", *linear, "--seeds", "2", "--workers", "1", *run_options],
        ["analyse", "--what", "isotropy", "conditions", "examples", *run_options],
        ["similarity", "two men", "children", "--condition", "the mood", *run_options],
        ["extract", "--model", str(base.folder / "model"), *run_options],
    ]


def run_input(chance: Random, base: Base, work: Path) -> list[str]:
    """Return a command on a run whose records were changed."""
    run = base.copy("run", work)
    part = chance.choice((run, run / "heads", run / "sweep"))
    change_below(chance, part, chance.choice(("*.json", "*")))
    return chance.choice(run_commands(base, run))


def store_input(chance: Random, base: Base, work: Path) -> list[str]:
    """Return a command on a run whose feature store was changed."""
    run = base.copy("run", work)
    change_below(chance, run / "features")
    return chance.choice(run_commands(base, run))


def checkpoint_input(chance: Random, base: Base, work: Path) -> list[str]:
    """Return a command on a changed checkpoint."""
    model = base.copy("model", work)
    change_below(chance, model)
    if chance.random() < 0.4:
        return ["models", "--check", str(model)]
    return ["extract", "--model", str(model), "--data", str(base.folder / "rows.csv")]


FILES: Final[dict[str, Callable[[Random, Base, Path], list[str]]]] = {
    "data": data_input,
    "template": template_input,
    "recipe": recipe_input,
    "run": run_input,
    "checkpoint": checkpoint_input,
    "store": store_input,
}


def make_input(kind: str, chance: Random, base: Base, work: Path) -> Input:
    """Return an input of a kind."""
    if kind in TEXT_INPUTS:
        return TEXT_INPUTS[kind](chance, base, work)
    return command(FILES[kind](chance, base, work))


KINDS: Final = (*FILES, *TEXT_INPUTS)


# -- running them ------------------------------------------------------------------------------


def try_input(kind: str, seed: int, base: Base) -> str:
    """Generate an input and try it; return its failure, empty if it passes."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(dir=base.folder) as work:
        os.chdir(work)
        try:
            return make_input(kind, Random(f"{kind} {seed}"), base, Path(work)).failure()
        finally:
            os.chdir(before)


def fuzz(inputs: Sequence[tuple[str, int]], folder: Path) -> list[tuple[str, int, str]]:
    """Try inputs, which are pairs of kind and seed; return kind, seed and failure of the failed."""
    make_base(folder)
    failed: list[tuple[str, int, str]] = []
    for kind, seed in inputs:
        # If the input hangs, this line remains, above the traceback.
        print(f"--kind {kind} --seed {seed}", end="\r", file=sys.stderr, flush=True)
        before = peak_memory()
        faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True, file=2)
        failure = try_input(kind, seed, Base(folder))
        faulthandler.cancel_dump_traceback_later()
        if not failure and (growth := peak_memory() - before) > GROWTH:
            failure = f"memory has grown by {growth / 2**20:,.0f} MiB"
        if failure:
            failed.append((kind, seed, failure))
    return failed


def peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(arguments: Sequence[str] | None = None) -> int:
    """Try inputs, print the table and the failures, and return the exit code."""
    parser = Options(__doc__)
    parser.option("--count", 2_000, "number of inputs of all kinds")
    parser.option("--seed", 0, "seed of the first input of each kind")
    parser.option("--kind", str, "kind of all inputs", "all kinds", choices=KINDS)
    options = parser.parse_args(arguments)
    kinds = [options.kind] if options.kind else list(KINDS)
    inputs = [(kinds[i % len(kinds)], options.seed + i // len(kinds)) for i in range(options.count)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="llmcond-fuzz-") as folder:
        failed = fuzz(inputs, Path(folder))
    tries, failures = Counter(k for k, _ in inputs), Counter(k for k, *_ in failed)
    counts = ([kind, f"{tries[kind]:,}", f"{failures[kind]:,}"] for kind in kinds)
    print(markdown_table(("kind", "tries", "failures"), counts))
    print(f"\n{len(inputs):,} inputs in {time.monotonic() - began:.0f} s")
    for kind, seed, failure in failed:
        print(f"--kind {kind} --seed {seed} --count 1: {' '.join(failure.split())}")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main())
