"""Extraction by several processes: the same vectors as in one process, even if some are killed."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import lance
import numpy as np
import pytest
import torch
from filelock import FileLock
from helpers.commands import write_pairs
from helpers.processes import Command
from helpers.waiting import PATIENCE, wait_until
from safetensors.torch import load_file, save_file

from llmcond import extract
from llmcond.base.errors import UserError
from llmcond.cli import run
from llmcond.encoders import EncoderOptions, resolve
from llmcond.features.workers import ExtractionWorker
from llmcond.runs import open_any_run, open_run

OPTIONS = EncoderOptions(dtype="float32", device="cpu", pooling="mean", normalize=True)
FLAGS = ("--device", "cpu", "--dtype", "float32", "--pooling", "mean", "--normalize")
PROMPTS = FIRST, SECOND = "concat-cond-sent", "routed"
ON_RAY = {"scale": "ray", "actors": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A file of rows with 4,002 distinct inputs per prompt, which are extracted in four parts."""
    conditions = ("the number of people", "the place")
    texts = ("two men play number", "dogs walk on at park number")
    rows = [
        (*(f"{text} {i}" for text in texts), conditions[i % 2], 1 + i % 5) for i in range(2_000)
    ]
    return write_pairs(tmp_path_factory.mktemp("data") / "rows.csv", rows)


@pytest.fixture(scope="module")
def extract_into(model, data):
    """Return a function that extracts the data into a folder."""

    def extract_data(folder, **options):
        fixed = {"model": model, "data": str(data), "prompt": PROMPTS, **vars(OPTIONS)}
        return extract(run=folder, **{**fixed, **options})

    return extract_data


@pytest.fixture(scope="module")
def local_run(tmp_path_factory, extract_into, one_thread):
    """The run that one process with one thread extracts, as each worker does."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    extract_into(folder)
    return folder


def read_vectors(folder):
    """Return the vectors in a run's store by key, and check that each key occurs once."""
    store = open_any_run(folder).store()
    table = lance.dataset(str(store.folder / "vectors.lance")).to_table()
    keys = table["key"].to_pylist()
    assert len(keys) == len(set(keys)) == len(store)
    flat = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return dict(zip(keys, flat.reshape(len(keys), -1), strict=True))


def assert_same_vectors(folder, other):
    actual, expected = read_vectors(folder), read_vectors(other)
    assert actual.keys() == expected.keys()
    for key, vector in actual.items():
        np.testing.assert_array_equal(vector, expected[key])


# -- workers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "workers", [{"workers": 2}, pytest.param(ON_RAY, marks=pytest.mark.slow)], ids=["local", "ray"]
)
def test_workers_store_same_vectors_as_one_process(
    request, caplog, extract_into, local_run, two_threads, tmp_path, workers
):
    request.getfixturevalue("ray" if workers is ON_RAY else "two_threads")
    caplog.set_level("INFO")
    result = extract_into(tmp_path, **workers)
    assert_same_vectors(tmp_path, local_run)
    prompts, local_prompts = (
        open_any_run(folder).manifest["prompts"] for folder in (tmp_path, local_run)
    )
    for name in PROMPTS:
        record, local_record = prompts[name]["extraction"], local_prompts[name]["extraction"]
        assert {**record, "created": None} == {**local_record, "created": None}
    assert str(tmp_path) not in json.dumps(prompts)
    # The two conditions alone are inputs of both prompts.
    summary = result.prompts[SECOND]
    assert (summary.n_inputs, summary.n_computed) == (4_002, 4_000)
    assert "2 workers on " in caplog.text
    assert torch.get_num_threads() == 2
    caplog.clear()
    extract_into(tmp_path, **workers)
    assert "nothing is encoded" in caplog.text
    assert "2 workers" not in caplog.text  # no worker is started


@pytest.mark.parametrize("first_options", [{}, {"workers": 2}])
def test_extraction_resumes_with_or_without_workers(
    extract_into, local_run, two_threads, tmp_path, first_options
):
    second_options = {} if first_options else {"workers": 2}
    extract_into(tmp_path, prompt=[FIRST], **first_options)
    extract_into(tmp_path, **second_options)
    actual, expected = read_vectors(tmp_path), read_vectors(local_run)
    assert actual.keys() == expected.keys()
    for key, vector in actual.items():
        np.testing.assert_allclose(vector, expected[key], rtol=0, atol=1e-3)


@contextmanager
def block_commits_until(folder, ready):
    """Keep every process from storing vectors until a condition holds."""
    held, failed = threading.Event(), []

    def hold():
        with FileLock(open_run(folder).store().folder / "commit.lock"):
            held.set()
            try:
                wait_until(ready)
            except BaseException as error:
                failed.append(error)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(PATIENCE)
    yield
    thread.join()
    assert failed == []


def test_killed_worker_is_replaced(caplog, extract_into, local_run, two_threads, tmp_path):
    extract_into(tmp_path, prompt=[FIRST])

    def kill_worker():
        workers = multiprocessing.active_children()
        if len(workers) < 2:
            return False
        workers[0].kill()
        workers[0].join()
        return True

    with block_commits_until(tmp_path, kill_worker):
        result = extract_into(tmp_path, prompt=[SECOND], workers=2)
    assert result.prompts[SECOND].n_computed == 4_000
    assert "a worker died and is replaced" in caplog.text
    assert read_vectors(tmp_path).keys() == read_vectors(local_run).keys()


@pytest.mark.parametrize(
    "signal_number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_killed_driver_resumes_from_last_commit(
    extract_into, model, data, local_run, tmp_path, signal_number
):
    folder = tmp_path / "run"
    options = ("--data", data, "--prompt", *PROMPTS, "--workers", "2", "--run", folder)
    arguments = ("extract", "--model", model, *FLAGS, *options)
    command = Command(tmp_path / "out", arguments, setup=partial(torch.set_num_threads, 2))
    commits = folder / "features"
    wait_until(lambda: [*commits.glob("*/vectors.lance/_versions/*")])
    os.kill(command.process.pid, signal_number)
    status, _, stderr = command.finish()
    assert status == (143 if signal_number == signal.SIGTERM else -signal_number), stderr
    if signal_number == signal.SIGTERM:
        assert stderr.splitlines()[-1].startswith("llmcond: error: terminated; stored results")
    assert 0 < len(read_vectors(folder)) <= len(read_vectors(local_run))
    extract_into(folder)
    assert_same_vectors(folder, local_run)


# -- errors ------------------------------------------------------------------------------------


def test_input_that_cannot_be_encoded_is_named_in_error(model, tmp_path):
    broken = shutil.copytree(model, tmp_path / "broken")
    vocabulary = json.loads((broken / "tokenizer.json").read_text())["model"]["vocab"]
    weights = load_file(broken / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][vocabulary["rain"]].fill_(float("nan"))
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    options = {"run": tmp_path / "run", "prompt": [FIRST], "workers": 1}
    rows = [(f"two men sit number {i}", "a dog", "the place", 1 + i % 5) for i in range(20)]
    data = str(write_pairs(tmp_path / "nan.csv", [*rows, ("rain", "a dog", "the place", 3)]))
    with pytest.raises(UserError, match=r"row 21 of nan.csv.*returned NaN or infinity"):
        extract(model=str(broken), **vars(OPTIONS), data=data, **options)
    stored = read_vectors(tmp_path / "run")
    assert len(stored) == 22  # all other inputs
    assert all(np.isfinite(vector).all() for vector in stored.values())
    long = ("two men", "a dog", "the number of people " * 9, 3)
    data = str(write_pairs(tmp_path / "long.csv", [*rows, long]))
    settings = vars(replace(OPTIONS, max_length=32, long_texts="windows"))
    with pytest.raises(UserError, match=r"^row 21 of long.csv, prompt .* is too long without"):
        extract(model=model, **settings, data=data, **{**options, "run": tmp_path / "long"})


def test_worker_rejects_different_encoder(model, tmp_path):
    fingerprint = resolve(model, OPTIONS).identity.fingerprint
    options = replace(OPTIONS, pooling="cls")
    with pytest.raises(UserError, match="is a different encoder on"):
        ExtractionWorker(model, options, fingerprint, tmp_path, "float16")


def test_invalid_options_are_reported_in_one_line(capsys, two_threads, model, data, tmp_path):
    on_ray = ("--scale", "ray")
    for options, message in (
        (("--workers", "3"), "workers is 3, but each worker needs one of the 2 cores"),
        (("--actors", "2"), "--actors needs --scale ray"),
        ((*on_ray, "--workers", "2"), "--workers cannot be given with --scale"),
        ((*on_ray, "--gpus-per-actor", "1"), "Add --dtype"),
    ):
        arguments = ("extract", "--model", model, "--pooling", "mean", "--data", str(data))
        assert run([*arguments, "--run", str(tmp_path / "run"), *options]) == 2
        (error,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert message in error
    assert list(tmp_path.iterdir()) == []


# -- launched processes ------------------------------------------------------------------------


def test_processes_launched_together_create_one_complete_run(model, data, tmp_path, local_run):
    """Each of two processes is started as torchrun does it."""
    folder = tmp_path / "run"
    options = ("--data", data, "--prompt", *PROMPTS, "--run", folder, "--json")
    processes = []
    for rank in (0, 1):
        environment = {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
        arguments = ("extract", "--model", model, *FLAGS, *options)
        processes.append(Command(tmp_path / str(rank), arguments, environment))
    (status, first, notes), (other, second, other_notes) = (each.finish() for each in processes)
    assert (status, other) == (0, 0), notes + other_notes
    assert json.loads(first)["prompts"][FIRST]["n_inputs"] == 4_002
    assert (second, other_notes) == ("", "")
    assert_same_vectors(folder, local_run)
