"""Extraction by workers: the same vectors as in one process, even if processes are killed."""

import json
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import lance
import numpy as np
import pytest
import torch
from helpers.dialogues import write_dialogues
from helpers.graphs import write_graph
from helpers.processes import Command
from safetensors.torch import load_file, save_file

import llmcond
from llmcond import extract
from llmcond.cli import run
from llmcond.encoders import EncoderOptions, resolve
from llmcond.errors import UserError
from llmcond.runs import open_any_run
from llmcond.scale.extraction import EncoderSpec, ExtractionWorker

OPTIONS = EncoderOptions(dtype="float32", device="cpu", pooling="mean", normalize=True)
PROMPTS = ("concat-cond-sent", "routed")
#: Each actor imports everything again, so tests that do not need several actors use one.
ONE_ACTOR, TWO_ACTORS = ({"scale": "ray", "actors": count} for count in (1, 2))


@pytest.fixture(scope="module")
def model(tiny_bert):
    return str(tiny_bert)


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory, model):
    """A checkpoint that gives NaN for texts with the word "rain"."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("broken") / "model")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][vocabulary["rain"]].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, as an actor on a CPU does, so that parts and vectors are exactly equal."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A file of rows with 4,002 distinct inputs per prompt, which are extracted in four parts."""
    path = tmp_path_factory.mktemp("data") / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    for i in range(2_000):
        condition = ("the number of people", "the place")[i % 2]
        other = f"dogs walk on at park number {i}"
        lines.append(f"two men play number {i},{other},{condition},{1 + i % 5}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def local_run(tmp_path_factory, model, data):
    folder = tmp_path_factory.mktemp("alone") / "run"
    torch.set_num_threads(1)
    extract(model=model, **vars(OPTIONS), run=folder, data=str(data), prompt=PROMPTS)
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


def test_actors_store_same_vectors_as_one_process(ray, caplog, model, data, local_run, tmp_path):
    caplog.set_level("INFO")
    result = extract(
        model=model, **vars(OPTIONS), run=tmp_path, data=str(data), prompt=PROMPTS, **TWO_ACTORS
    )
    assert_same_vectors(tmp_path, local_run)
    prompts, local_prompts = (
        open_any_run(folder).manifest["prompts"] for folder in (tmp_path, local_run)
    )
    for name in PROMPTS:
        record, local_record = prompts[name]["extraction"], local_prompts[name]["extraction"]
        assert {**record, "created": None} == {**local_record, "created": None}
    assert result.prompts["routed"].n_computed == 4_000
    assert "2 workers on the cluster" in caplog.text
    caplog.clear()
    extract(model=model, **vars(OPTIONS), run=tmp_path, prompt=PROMPTS, **TWO_ACTORS)
    assert "nothing is encoded" in caplog.text
    assert "2 workers" not in caplog.text  # no actor is started


@pytest.mark.parametrize("task", ["dialogue", "kgc"])
def test_other_tasks_are_extracted_by_actors(ray, model, tmp_path, task):
    write = {"dialogue": write_dialogues, "kgc": write_graph}[task]
    source = str(write(tmp_path / "data"))
    extract(model=model, **vars(OPTIONS), run=tmp_path / "alone", data=source, task=task)
    extract(model=model, **vars(OPTIONS), run=tmp_path / "ray", data=source, task=task, **ONE_ACTOR)
    assert_same_vectors(tmp_path / "ray", tmp_path / "alone")


@pytest.mark.parametrize("first_options", [{}, ONE_ACTOR])
def test_extraction_resumes_with_or_without_actors(
    ray, model, data, local_run, tmp_path, first_options
):
    second_options = {} if first_options else ONE_ACTOR
    extract(
        model=model,
        **vars(OPTIONS),
        run=tmp_path,
        data=str(data),
        prompt=PROMPTS[:1],
        **first_options,
    )
    extract(model=model, **vars(OPTIONS), run=tmp_path, prompt=PROMPTS, **second_options)
    assert_same_vectors(tmp_path, local_run)


def find_child_actors():
    """Return the process ids of the actors of this process, not those of parallel tests."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    descendants = {os.getpid()}
    while (
        children := {pid for pid, parent in parents.items() if parent in descendants} - descendants
    ):
        descendants |= children
    actors = set()
    for pid in descendants:
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::_Worker"):
                actors.add(pid)
    return actors


def test_killed_actors_lose_no_vectors(ray, caplog, model, data, local_run, tmp_path):
    stopped, killed = threading.Event(), set()

    def kill_actors():
        while not stopped.wait(0.05) and len(killed) < 3:
            for pid in find_child_actors() - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                break

    thread = threading.Thread(target=kill_actors)
    thread.start()
    try:
        extract(
            model=model, **vars(OPTIONS), run=tmp_path, data=str(data), prompt=PROMPTS, **TWO_ACTORS
        )
    finally:
        stopped.set()
        thread.join()
    assert "a worker died and is replaced" in caplog.text
    assert_same_vectors(tmp_path, local_run)


@pytest.mark.matrix
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_driver_resumes_from_last_commit(model, data, local_run, tmp_path, signal_number):
    folder = tmp_path / "run"
    model_flags = ("--model", model, "--dtype", "float32", "--pooling", "mean", "--normalize")
    data_flags = ("--data", data, "--prompt", *PROMPTS, "--workers", "2")
    command = Command(
        tmp_path / "out",
        ("extract", *model_flags, *data_flags, "--run", folder),
        setup=partial(torch.set_num_threads, 2),
    )
    versions = folder / "features"
    while command.process.is_alive() and not any(versions.glob("*/vectors.lance/_versions/*")):
        time.sleep(0.01)
    assert command.process.is_alive(), command.finish()
    os.kill(command.process.pid, signal_number)
    status, _, stderr = command.finish()
    if signal_number == signal.SIGTERM:
        assert status == 143, stderr
        assert stderr.splitlines()[-1].startswith("llmcond: error: terminated; stored results")
    assert len(read_vectors(folder)) <= len(read_vectors(local_run))
    extract(model=model, **vars(OPTIONS), run=folder, prompt=PROMPTS)
    assert_same_vectors(folder, local_run)


def test_too_long_input_is_named_in_error(ray, model, tmp_path):
    data = tmp_path / "rows.csv"
    lines = [f"two men sit number {i},a dog,the place,{1 + i % 5}" for i in range(3_000)]
    lines[1_500] = f"two men,a dog,{'the number of people ' * 9},3"
    data.write_text("\n".join(["sentence1,sentence2,condition,label", *lines]), encoding="utf-8")
    options, source = replace(OPTIONS, max_length=32, long_texts="windows"), str(data)
    with pytest.raises(UserError, match=r"^row 1501 of rows.csv, prompt .* is too long without"):
        extract(
            model=model,
            **vars(options),
            run=tmp_path / "run",
            data=source,
            prompt=PROMPTS[:1],
            **ONE_ACTOR,
        )


def test_input_that_gives_nan_is_named_in_error(ray, broken_model, tmp_path):
    data = tmp_path / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    lines += [f"two men sit number {i},a dog,the place,{1 + i % 5}" for i in range(20)]
    data.write_text("\n".join([*lines, "rain,a dog,the place,3"]) + "\n", encoding="utf-8")
    source = str(data)
    with pytest.raises(UserError, match=r"row 21 of rows.csv.*returned NaN or infinity"):
        extract(
            model=broken_model,
            **vars(OPTIONS),
            run=tmp_path / "run",
            data=source,
            prompt=PROMPTS[:1],
            **ONE_ACTOR,
        )
    stored = read_vectors(tmp_path / "run")
    assert len(stored) == 22  # all other inputs
    assert all(np.isfinite(vector).all() for vector in stored.values())


def test_actor_rejects_different_encoder(model, tmp_path):
    resolved = resolve(model, OPTIONS)
    other = EncoderSpec(
        model, replace(OPTIONS, pooling="cls"), resolved.identity.fingerprint, tmp_path, "float16"
    )
    with pytest.raises(UserError, match="is a different encoder on"):
        ExtractionWorker(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--actors", "2"), "--actors needs --scale ray"),
        (("--address", "auto"), "--address needs --scale ray"),
        (("--scale", "ray", "--workers", "2"), "--workers cannot be given with --scale"),
        (("--scale", "ray", "--actors", "0"), "actors is 0; it must be at least 1"),
        (("--scale", "ray", "--gpus-per-actor", "1"), "Add --dtype"),
        (("--scale", "ray", "--device", "cuda"), "Leave out --device"),
        (("--scale", "ray", "--gpus-per-actor", "1", "--device", "cpu"), "Leave out --device"),
    ],
)
def test_conflicting_options_are_reported_in_one_line(
    capsys, model, data, tmp_path, options, message
):
    folder = tmp_path / "run"
    arguments = ["extract", "--model", model, "--pooling", "mean", "--data", str(data), *options]
    assert run([*arguments, "--run", str(folder)]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert message in error
    assert not folder.exists()


def test_run_name_with_control_characters_is_rejected(capsys, model, tmp_path):
    folder = tmp_path / "a\x1b[31mred"
    arguments = ["extract", "--model", model, "--pooling", "mean", "--run", str(folder)]
    assert run(arguments) == 2
    assert "x1b[31mred' contains a control character" in capsys.readouterr().err.splitlines()[-1]
    assert not folder.exists()


def test_python_function_has_same_options(ray, model, data, local_run, tmp_path):
    llmcond.extract(
        model=model,
        dtype="float32",
        pooling="mean",
        normalize=True,
        data=data,
        prompt=PROMPTS,
        run=tmp_path,
        scale="ray",
        actors=1,
    )
    assert_same_vectors(tmp_path, local_run)
    record = json.loads((tmp_path / "run.json").read_text())
    assert str(tmp_path) not in json.dumps(record["prompts"])
    shutil.rmtree(tmp_path)
