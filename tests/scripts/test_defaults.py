"""Every script answers ``--help``, and runs as its docstring shows with tiny sizes."""

import csv
import json
import subprocess
import sys
from importlib import import_module
from multiprocessing.dummy import Pipe
from threading import Thread
from types import SimpleNamespace

import pytest
from helpers.paths import ROOT

from llmcond import extract, fit_head

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

#: The arguments of each script, with tiny sizes, and an excerpt of its output.
ARGUMENTS_AND_OUTPUT = {
    "bench_aspects": (
        "--model {tiny} --data {aspects} --average --change none ignore-each --json",
        "| mean of 2 |",
    ),
    "bench_extract": ("--model {tiny} --inputs 2 --rounds 1", "| llmcond, PyTorch, packed |"),
    "bench_first": ("--rounds 1", "| an empty program |"),
    "bench_fit": ("--rows 32 --epochs 1 --rounds 1", "| llmcond, rows in any order |"),
    "bench_search": (
        "--run {run} --head hypernet --sizes 40 --conditions 2 --queries 2",
        "| 40 | 64 | hypernet | llmcond |",
    ),
    "bench_serve": (
        "--model {tiny} --data {rows} --texts 4 --clients 2 --sizes 1",
        "| llmcond, one call |",
    ),
    "bench_store": ("{tmp}/store --rows 8 --part 3", "8 vectors of 384, 3 a commit: "),
    "bench_train": ("--batch-size 2 --steps 1 --rounds 1", "| llmcond |"),
    "demo": ("--data {rows} --run {tmp}/run", '"spearman_zero_shot"'),
    "golden": ("record {tmp}/golden --only prompts models", "models: exit 0"),
    "make_aspects": ("--out {tmp}/texts --texts 40", ".json: 40 texts"),
    "make_weights": ("--out {tmp}", "SHA-256"),
    "simulate_answers": (
        "{aspects}/crossed.json --condition who --users 3 --model {tiny}",
        "who: 3 users, 31% of all pairs",
    ),
}


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint):
    return str(tiny_checkpoint(hidden=64))  # the smallest size that all heads of the scripts allow


@pytest.fixture
def aspects(tmp_path):
    """A folder of texts with attributes, one set with crossed conditions and one without."""
    folder = tmp_path / "aspects"
    folder.mkdir()
    texts = [
        {"text": f"the {who} at the {where}, {n} of them", "attrs": {"who": who, "where": where}}
        for who in ("men", "women", "children")
        for where in ("beach", "park", "street")
        for n in range(3)
    ]
    conditions = {"who": {"text": "the people"}, "where": {"text": "the place"}}
    for name, keys in {"crossed": conditions, "single": ["who"]}.items():
        values = {"texts": texts, "conds": {key: conditions[key] for key in keys}}
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def run_with_head(tiny, small_rows, tmp_path_factory):
    """A run with a head on separate features."""
    folder = tmp_path_factory.mktemp("separate")
    with (folder / "rows.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("sentence1", "sentence2", "condition", "label")])
        csv.writer(stream).writerows(small_rows)
    run, data = folder / "run", str(folder / "rows.csv")
    extract(model=tiny, pooling="mean", run=run, data=data, prompt=["separate"])
    fit_head(run=run, head="hypernet", set={"epochs": "1", "dim": "8", "rank": "4"})
    return run


@pytest.fixture
def threads_for_processes(monkeypatch):
    """Replace processes, which would import everything again, by threads."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    threads = SimpleNamespace(get_context=lambda _: SimpleNamespace(Process=Thread, Pipe=Pipe))
    for name in ("bench", "bench_serve"):
        monkeypatch.setattr(import_module(name), "multiprocessing", threads)
    monkeypatch.setattr(import_module("bench"), "PRODUCT", 64)
    monkeypatch.setattr(import_module("bench_first"), "WAYS", {"an empty program": ["-c", ""]})
    for name, size in (("WIDE", 64), ("NARROW", 8), ("DIM", 64)):
        monkeypatch.setattr(import_module("bench_fit"), name, size)
    for name in ("bench", "bench_fit"):
        monkeypatch.setattr(import_module(name), "run_in_process", lambda work, *args: work(*args))


@pytest.mark.usefixtures("threads_for_processes")
@pytest.mark.parametrize("name", ARGUMENTS_AND_OUTPUT)
def test_script_runs(
    name, tiny, tmp_path, write_rows, small_rows, aspects, run_with_head, monkeypatch, capsys
):
    if name == "bench_serve":
        pytest.importorskip("sentence_transformers")
    sizes, expected = ARGUMENTS_AND_OUTPUT[name]
    rows = write_rows(small_rows[:24])
    arguments = sizes.format(tmp=tmp_path, tiny=tiny, rows=rows, aspects=aspects, run=run_with_head)
    monkeypatch.setattr("sys.argv", [name, *arguments.split()])
    assert import_module(name).main() in (None, 0)
    assert expected in capsys.readouterr().out


def test_every_script_answers_help():
    paths = sorted((ROOT / "scripts").glob("*.py"))
    for path in (path for path in paths if "__main__" in path.read_text(encoding="utf-8")):
        command = [sys.executable, path, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{path.name}: {done.stderr}"
