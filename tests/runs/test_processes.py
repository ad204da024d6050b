"""Extraction by several processes: workers, and processes that a launcher starts."""

import json
import multiprocessing
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import lance
import numpy as np
import pytest
import torch
from filelock import FileLock
from helpers.processes import Command
from helpers.waiting import PATIENCE, wait_until

from llmcond import extract
from llmcond.cli import run
from llmcond.prompts import load_prompt
from llmcond.prompts.inputs import SplitInputs, render_rows
from llmcond.runs import open_run

OPTIONS = {"dtype": "float32", "device": "cpu", "pooling": "mean", "normalize": True}
#: The prompt to extract into a run that has the features of another prompt already.
PROMPT = "concat-cond-sent"


@pytest.fixture(scope="module")
def model(tiny_bert):
    return str(tiny_bert)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows with 4,002 distinct inputs under a prompt, which are four work units for one thread."""
    path = tmp_path_factory.mktemp("data") / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    for i in range(2_000):
        words = " ".join(("play", "sit", "read")[(i + k) % 3] for k in range(i % 7))
        second = f"dogs walk on at park number {i}"
        condition = ("the number of people", "the place")[i % 2]
        lines.append(f"two men {words} number {i},{second},{condition},{1 + i % 5}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def partial_run(tmp_path_factory, model, data):
    """A run with the features of one prompt. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    data = str(data)
    extract(
        model=model,
        **OPTIONS,
        run=folder,
        data=data,
        prompt=["concat-sent-cond"],
        store_dtype="float32",
    )
    return folder


@pytest.fixture(scope="module")
def single_process_run(tmp_path_factory, model, partial_run):
    """The run, with features of the other prompt that one process extracted."""
    folder = Path(shutil.copytree(partial_run, tmp_path_factory.mktemp("alone") / "run"))
    summary = extract(model=model, **OPTIONS, run=folder, prompt=[PROMPT]).prompts[PROMPT]
    # The two conditions alone are inputs of both prompts, so they have features already.
    assert (summary.n_inputs, summary.n_computed) == (4_002, 4_000)
    return folder


@pytest.fixture
def run_copy(partial_run, tmp_path):
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(partial_run, tmp_path / "run"))


def list_inputs(folder, prompt=PROMPT):
    opened = open_run(folder)
    rows = [opened.rows(name) for name in opened.splits]
    return list(dict.fromkeys(SplitInputs(rows, load_prompt(prompt))))


def read_vectors(folder, prompt=PROMPT):
    """Return the vectors of a prompt, after checking that the run has every input once."""
    store = open_run(folder).store()
    table = lance.dataset(str(store.folder / "vectors.lance")).to_table()
    keys = table["key"].to_pylist()
    assert len(set(keys)) == len(keys)
    return store.lookup(list_inputs(folder, prompt)).read()


@contextmanager
def block_commits_until(folder, ready):
    """Keep every process from storing its first work unit until a condition holds."""
    store = open_run(folder).store().folder
    held, failed = threading.Event(), []

    def hold():
        with FileLock(store / "commit.lock"):
            held.set()
            try:
                wait_until(lambda: ready(list((store / "claims").glob("*.lock"))))
            except BaseException as error:
                failed.append(error)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(PATIENCE)
    yield
    thread.join()
    assert failed == []


def extract_arguments(model, folder, *more):
    return [
        *("extract", "--model", model, "--run", folder, "--device", "cpu", "--dtype", "float32"),
        *("--pooling", "mean", "--normalize", "--json", *more),
    ]


def launch(rank, folder, arguments):
    """Start a command as torchrun starts each of two processes."""
    environment = {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    return Command(folder / f"printed-{rank}", arguments, environment)


# -- inputs ----------------------------------------------------------------------------------------


def test_split_inputs_are_inputs_of_rows_and_can_be_iterated_again(partial_run):
    opened, prompt = open_run(partial_run), load_prompt(PROMPT)
    splits = [opened.rows(name) for name in opened.splits]
    inputs = SplitInputs(splits, prompt)
    by_row = []
    for rows in splits:
        rendered = render_rows(rows, prompt)
        columns = (
            rendered.first,
            rendered.first_unconditional,
            rendered.second,
            rendered.second_unconditional,
        )
        by_row += [item for row in zip(*columns, strict=True) for item in row]
    assert list(inputs) == list(inputs) == by_row
    assert len(inputs) == len(by_row) == 4 * 2_000
    assert by_row[-1] in inputs
    assert load_prompt("concat-sent-cond").conditional.render("two", "men") not in inputs


# -- workers ---------------------------------------------------------------------------------------


def test_two_workers_store_same_vectors_as_one(
    caplog, two_threads, model, run_copy, single_process_run
):
    caplog.set_level("INFO", "llmcond")
    summary = extract(model=model, **OPTIONS, run=run_copy, prompt=[PROMPT], workers=2)
    assert summary.prompts[PROMPT].n_computed == 4_000
    assert "2 workers on this machine" in caplog.text
    assert f"{PROMPT}: 4,000 of 4,002 inputs encoded" in caplog.text
    np.testing.assert_allclose(
        read_vectors(run_copy), read_vectors(single_process_run), rtol=0, atol=1e-6
    )
    assert torch.get_num_threads() == 2


def test_killed_worker_is_replaced(caplog, two_threads, model, run_copy, single_process_run):
    workers = []

    def kill_worker(_):
        workers.extend(multiprocessing.active_children())
        if len(workers) < 2:
            return False
        workers[0].kill()
        workers[0].join()
        return True

    with block_commits_until(run_copy, kill_worker):
        summary = extract(model=model, **OPTIONS, run=run_copy, prompt=[PROMPT], workers=2)
    assert summary.prompts[PROMPT].n_computed == 4_000
    assert "a worker died and is replaced" in caplog.text
    np.testing.assert_allclose(
        read_vectors(run_copy), read_vectors(single_process_run), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ("0", "workers is 0; it must be at least 1"),
        ("-1", "workers is -1; it must be at least 1"),
        ("3", "workers is 3, but each worker needs one of the 2 cores"),
        ("two", "--workers"),
    ],
)
def test_invalid_number_of_workers_is_reported_in_one_line(
    capsys, two_threads, model, data, tmp_path, workers, expected
):
    arguments = extract_arguments(model, tmp_path / "run", "--data", data, "--workers", workers)
    assert run([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if "error" in line]
    assert line.startswith("llmcond: error: ")
    assert expected in line
    assert not (tmp_path / "run").exists()


# -- launched processes ----------------------------------------------------------------------------


def test_launched_process_of_other_rank_prints_nothing(
    model, run_copy, single_process_run, tmp_path
):
    process = launch(1, tmp_path, extract_arguments(model, run_copy, "--prompt", PROMPT))
    assert process.finish() == (0, "", "")
    assert PROMPT in open_run(run_copy).prompts()
    np.testing.assert_allclose(
        read_vectors(run_copy), read_vectors(single_process_run), rtol=0, atol=1e-6
    )


def test_processes_launched_together_create_one_complete_run(
    model, data, tmp_path, single_process_run
):
    folder, options = tmp_path / "run", ("--prompt", PROMPT, "--store-dtype", "float32")
    arguments = extract_arguments(model, folder, "--data", data, *options)
    started = [launch(rank, tmp_path, arguments) for rank in (0, 1)]
    (status, first, notes), (other, second, other_notes) = (process.finish() for process in started)
    assert (status, other) == (0, 0), notes + other_notes
    assert json.loads(first)["prompts"][PROMPT]["n_inputs"] == 4_002
    assert second == ""
    np.testing.assert_allclose(
        read_vectors(folder), read_vectors(single_process_run), rtol=0, atol=1e-6
    )
    assert run(["fit-head", "--head", "pca", "--dim", "4", "--run", str(folder)]) == 0
