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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

from common import Options, markdown_table
from fuzz_texts import TEXT_INPUTS, Input, command, succeed, write_workbook

from llmcond.base.package import bundled_folder

#: Seconds after which an input counts as hanging; an input takes some seconds at most.
LIMIT_SECONDS: Final = 120
#: Bytes by which an input may increase the peak memory, also by importing modules.
GROWTH: Final = 600 * 2**20

VALUES: Final[Sequence[Any]] = (
    None, True, False, 0, -1, 1, 3, 10**9, 10**30, -0.5, 1e308, float("nan"), "", "x", "3", ".",
    "../..", "/", "\0", "\x1b[31m", "\u202e", "\ud800", "é" * 300, "{", "{sentence}", [], [[]],
    [None], ["x"], [1, 2], {}, {"x": {}}, {"": None},
)  # fmt: skip
TEXTS: Final = (
    "", " ", '"', "'", ",", "\t", "\r", "\n", "\r\n", "\0", "\x1b", "\ufeff", "\u202e", "{", "}",
    "{x}", "[", "]", "=", "nan", "inf", "-1", "1e999", "0", "6", "é" * 2_000, '"""', "#", "\\",
)  # fmt: skip


# -- changes ------------------------------------------------------------------------------------


def change_bytes(chance: Random, content: bytes) -> bytes:
    """Return bytes with some of them flipped, cut, doubled or inserted, or no bytes at all."""
    position, length = chance.randrange(len(content) + 1), chance.randrange(1, 64)
    changed = bytearray(content)
    match chance.randrange(6):
        case 0:
            return b""
        case 1:
            return content[:position]
        case 2:
            del changed[position : position + length]
        case 3:
            changed[position:position] = content[position : position + length]
        case 4:
            changed[position:position] = chance.choice(TEXTS).encode()
        case _:
            for _ in range(chance.choice((1, 8))):
                if changed:
                    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def change_line(chance: Random, text: str) -> str:
    """Return a text with a line removed, doubled or moved, or with one of its values changed."""
    lines = text.splitlines(keepends=True)
    index = chance.randrange(len(lines))
    key, equals, _ = lines[index].partition("=")
    match chance.randrange(4):
        case 0:
            del lines[index]
        case 1:
            lines.insert(chance.randrange(len(lines)), lines[index])
        case 2 if equals:
            lines[index] = f"{key}= {json.dumps(chance.choice(VALUES))}\n"
        case _:
            position = chance.randrange(len(lines[index]) + 1)
            lines[index] = lines[index][:position] + chance.choice(TEXTS) + lines[index][position:]
    return "".join(lines)


def change_json(chance: Random, text: str) -> str:
    """Return JSON with a value at any depth changed or removed."""
    try:
        record = json.loads(text)
    except ValueError:  # an earlier change made it invalid
        return text[: len(text) // 2]
    keys = list(_iterate_keys(record))
    if not keys:
        return json.dumps(chance.choice(VALUES))
    # Usually among the first keys only: most keys belong to a vocabulary or a curve.
    parent, key = chance.choice(keys[:40] if chance.random() < 0.7 else keys)
    if chance.random() < 0.3:
        del parent[key]
    else:
        parent[key] = chance.choice(VALUES)
    return json.dumps(record)


def _iterate_keys(value: Any) -> Iterator[tuple[Any, Any]]:
    level = [value]
    while level:
        keys = [
            (container, k)
            for container in level
            for k in (container if isinstance(container, dict) else range(len(container)))
        ]
        yield from keys
        level = [container[k] for container, k in keys if isinstance(container[k], dict | list)]


def change_file(chance: Random, path: Path) -> None:
    """Change a file, or replace it by nothing, a folder or a broken link."""
    random_number = chance.random()
    if random_number < 0.08:
        path.unlink()
        replacements: Sequence[Callable[[], Any]] = (
            lambda: None,
            path.mkdir,
            lambda: path.symlink_to(path.name),
            lambda: path.symlink_to("nowhere"),
        )
        chance.choice(replacements)()
    elif path.suffix == ".json" and random_number < 0.8:
        path.write_text(change_json(chance, path.read_text("utf-8", "replace")), "utf-8")
    elif path.suffix == ".toml" and random_number < 0.8:
        text = change_line(chance, path.read_text("utf-8", "replace"))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        path.write_bytes(change_bytes(chance, path.read_bytes()))


def change_below(chance: Random, folder: Path, pattern: str = "*") -> None:
    """Change one or two files below a folder, choosing each file type with equal probability."""
    for _ in range(chance.choice((1, 1, 2))):
        paths = sorted(path for path in folder.rglob(pattern) if path.is_file())
        kinds = sorted({path.suffix for path in paths})
        if kinds:
            kind = chance.choice(kinds)
            change_file(chance, chance.choice([path for path in paths if path.suffix == kind]))


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


def copy_base(source: Path, into: Path) -> Path:
    """Copy a file or a folder into a folder, and return the path of the copy."""
    target = into / source.name
    if source.is_dir():  # without temporary files of processes that use it
        ignore = shutil.ignore_patterns(".tmp*")
        return shutil.copytree(source, target, ignore=ignore)
    return Path(shutil.copyfile(source, target))


def data_input(chance: Random, base: Path, work: Path) -> list[str]:
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
        from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

        write_workbook(path, [[ILLEGAL_CHARACTERS_RE.sub("", v) for v in row] for row in texts])
    else:
        write_csv(path, rows)
    if chance.random() < 0.5:
        path.write_bytes(change_bytes(chance, path.read_bytes()))
    run, embedded = str(base / "run"), str(work / "v.npy")
    return chance.choice(
        [
            ["prompts", "show", "pair-cond", "--data", str(path)],
            ["extract", "--model", str(base / "model"), "--data", str(path)],
            ["evaluate", "--data", str(path), "--run", str(copy_base(base / "run", work))],
            ["embed", str(path), "--text", "sentence1", "--out", embedded, "--run", run],
        ]
    )


def template_input(chance: Random, base: Path, work: Path) -> list[str]:
    """Return a command that reads a changed template."""
    path = work / "mine.toml"
    shutil.copyfile(chance.choice(sorted(bundled_folder("prompts").glob("*.toml"))), path)
    change_file(chance, path)
    data = ["--data", str(base / "rows.csv")]
    if chance.random() < 0.7:
        return ["prompts", "show", str(path), *data]
    return ["extract", "--model", str(base / "model"), "--prompt", str(path), *data]


def recipe_input(chance: Random, base: Path, work: Path) -> list[str]:
    """Return a command that fits a changed recipe."""
    path = copy_base(base / chance.choice(("linear.toml", "hypernet.toml", "pca.toml")), work)
    change_file(chance, path)
    prompts = ["--prompt", chance.choice(("concat-sent-cond", "concat-sent-cond+separate"))]
    return ["fit-head", "--head", str(path), *prompts, "--run", str(copy_base(base / "run", work))]


def run_commands(base: Path, run: Path) -> list[list[str]]:
    """Return commands that use a run."""
    linear = ["--head", str(base / "linear.toml"), "--prompt", "concat-sent-cond"]
    run_options = ["--run", str(run)]
    return [
        ["evaluate", *run_options],
        ["evaluate", "--head", "linear", "--predictions", str(run / "p.csv"), *run_options],
        ["fit-head", *linear, *run_options],
        ["sweep", *linear, "--seeds", "2", "--workers", "1", *run_options],
        ["analyse", "--what", "isotropy", "conditions", "examples", *run_options],
        ["similarity", "two men", "children", "--condition", "the mood", *run_options],
        ["extract", "--model", str(base / "model"), *run_options],
    ]


def run_input(chance: Random, base: Path, work: Path, part: str = "") -> list[str]:
    """Return a command on a run whose records, or whose files in a folder, were changed."""
    run = copy_base(base / "run", work)
    folder = run / (part or chance.choice(("", "heads", "sweep")))
    change_below(chance, folder, "*" if part else chance.choice(("*.json", "*")))
    return chance.choice(run_commands(base, run))


def checkpoint_input(chance: Random, base: Path, work: Path) -> list[str]:
    """Return a command on a changed checkpoint."""
    model = copy_base(base / "model", work)
    change_below(chance, model)
    if chance.random() < 0.4:
        return ["models", "--check", str(model)]
    return ["extract", "--model", str(model), "--data", str(base / "rows.csv")]


FILES: Final[dict[str, Callable[[Random, Path, Path], list[str]]]] = {
    "data": data_input,
    "template": template_input,
    "recipe": recipe_input,
    "run": run_input,
    "checkpoint": checkpoint_input,
    "store": partial(run_input, part="features"),
}


def make_input(kind: str, chance: Random, base: Path, work: Path) -> Input:
    """Return an input of a kind."""
    if kind in TEXT_INPUTS:
        return TEXT_INPUTS[kind](chance, base, work)
    return command(FILES[kind](chance, base, work))


KINDS: Final = (*FILES, *TEXT_INPUTS)


# -- running them ------------------------------------------------------------------------------


def try_input(kind: str, seed: int, base: Path) -> str:
    """Generate an input and try it; return its failure, empty if it passes."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(dir=base) as work:
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
        failure = try_input(kind, seed, folder)
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
