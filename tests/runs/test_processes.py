"""Several processes at one extraction: workers of ours, and those that a launcher starts."""

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
#: What is extracted into a run that has the features of another prompt already.
PROMPT = "concat-cond-sent"


@pytest.fixture(scope="module")
def model(tiny_bert):
    return str(tiny_bert)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows of 4,002 distinct inputs under a prompt: four parts of a single thread."""
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
def begun(tmp_path_factory, model, data):
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
def alone(tmp_path_factory, model, begun):
    """The run, and what one process alone makes of the other prompt."""
    folder = Path(shutil.copytree(begun, tmp_path_factory.mktemp("alone") / "run"))
    done = extract(model=model, **OPTIONS, run=folder, prompt=[PROMPT]).prompts[PROMPT]
    # The two conditions alone are inputs of both prompts.
    assert (done.n_inputs, done.n_computed) == (4_002, 4_000)
    return folder


@pytest.fixture
def own(begun, tmp_path):
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(begun, tmp_path / "run"))


def inputs_of(folder, prompt=PROMPT):
    opened = open_run(folder)
    rows = [opened.rows(name) for name in opened.splits]
    return list(dict.fromkeys(SplitInputs(rows, load_prompt(prompt))))


def vectors_of(folder, prompt=PROMPT):
    """Return the vectors of a prompt, after checking that the run has every input once."""
    store = open_run(folder).store()
    table = lance.dataset(str(store.folder / "vectors.lance")).to_table()
    keys = table["key"].to_pylist()
    assert len(set(keys)) == len(keys)
    return store.lookup(inputs_of(folder, prompt)).read()


@contextmanager
def nobody_commits_until(folder, ready):
    """Keep every process from storing its first part, until something is the case."""
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


def command(model, folder, *more):
    return [
        *("extract", "--model", model, "--run", folder, "--device", "cpu", "--dtype", "float32"),
        *("--pooling", "mean", "--normalize", "--json", *more),
    ]


def launch(rank, folder, arguments):
    """Start a command as torchrun starts each of two processes."""
    environment = {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    return Command(folder / f"printed-{rank}", arguments, environment)


# -- inputs ----------------------------------------------------------------------------------------


def test_inputs_of_splits_are_those_of_their_rows_and_can_be_gone_through_again(begun):
    opened, prompt = open_run(begun), load_prompt(PROMPT)
    splits = [opened.rows(name) for name in opened.splits]
    inputs = SplitInputs(splits, prompt)
    by_row = []
    for rows in splits:
        of = render_rows(rows, prompt)
        columns = (of.first, of.first_unconditional, of.second, of.second_unconditional)
        by_row += [item for row in zip(*columns, strict=True) for item in row]
    assert list(inputs) == list(inputs) == by_row
    assert len(inputs) == len(by_row) == 4 * 2_000
    assert by_row[-1] in inputs
    assert load_prompt("concat-sent-cond").conditional.render("two", "men") not in inputs


# -- workers ---------------------------------------------------------------------------------------


def test_two_workers_store_what_one_stores(caplog, two_threads, model, own, alone):
    caplog.set_level("INFO", "llmcond")
    # Each is at a part of its own before either has stored one.
    with nobody_commits_until(own, lambda claims: len(claims) >= 2):
        done = extract(model=model, **OPTIONS, run=own, prompt=[PROMPT], workers=2)
    n_computed = done.prompts[PROMPT].n_computed
    assert 0 < n_computed < 4_000
    assert f"{PROMPT}: 4,000 of 4,002 inputs encoded" in caplog.text
    assert f"by 2 processes ({n_computed:,} by this one)" in caplog.text
    np.testing.assert_allclose(vectors_of(own), vectors_of(alone), rtol=0, atol=1e-6)
    assert torch.get_num_threads() == 2
    assert multiprocessing.active_children() == []


def test_a_worker_that_is_killed_leaves_its_part_to_the_other(
    caplog, two_threads, model, own, alone
):
    def killed(claims):
        if len(claims) < 2:
            return False
        (worker,) = multiprocessing.active_children()
        worker.kill()
        worker.join()
        return True

    with nobody_commits_until(own, killed):
        done = extract(model=model, **OPTIONS, run=own, prompt=[PROMPT], workers=2)
    assert done.prompts[PROMPT].n_computed == 4_000
    assert "1 of 2 workers failed" in caplog.text
    np.testing.assert_allclose(vectors_of(own), vectors_of(alone), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ("0", "workers is 0; it must be at least 1"),
        ("-1", "workers is -1; it must be at least 1"),
        ("3", "workers is 3, but each worker needs one of the 2 cores"),
        ("two", "--workers"),
    ],
)
def test_wrong_numbers_of_workers_are_one_clear_line(
    capsys, two_threads, model, data, tmp_path, workers, expected
):
    arguments = command(model, tmp_path / "run", "--data", data, "--workers", workers)
    assert run([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if "error" in line]
    assert line.startswith("llmcond: error: ")
    assert expected in line
    assert not (tmp_path / "run").exists()


# -- launched processes ----------------------------------------------------------------------------


def test_a_launched_process_of_another_rank_joins_and_says_nothing(model, own, alone, tmp_path):
    process = launch(1, tmp_path, command(model, own, "--prompt", PROMPT))
    assert process.finish() == (0, "", "")
    assert PROMPT in open_run(own).prompts()
    np.testing.assert_allclose(vectors_of(own), vectors_of(alone), rtol=0, atol=1e-6)


def test_processes_that_are_launched_together_make_one_whole_run(model, data, tmp_path, alone):
    folder, options = tmp_path / "run", ("--prompt", PROMPT, "--store-dtype", "float32")
    arguments = command(model, folder, "--data", data, *options)
    started = [launch(rank, tmp_path, arguments) for rank in (0, 1)]
    (status, first, notes), (other, second, other_notes) = (one.finish() for one in started)
    assert (status, other) == (0, 0), notes + other_notes
    assert json.loads(first)["prompts"][PROMPT]["n_inputs"] == 4_002
    assert second == ""
    np.testing.assert_allclose(vectors_of(folder), vectors_of(alone), rtol=0, atol=1e-6)
    assert run(["fit-head", "--head", "pca", "--dim", "4", "--run", str(folder)]) == 0
