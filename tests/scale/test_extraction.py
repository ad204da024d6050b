"""Extraction by actors of Ray stores what extraction in one process does, whoever dies."""

import json
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
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
from llmcond.scale.extraction import ActorEncoderSpec, FragmentWriter

OPTIONS = EncoderOptions(dtype="float32", device="cpu", pooling="mean", normalize=True)
PROMPTS = ("concat-cond-sent", "routed")
#: Each actor imports everything anew: one where nothing rests on there being several.
ONE, TWO = ({"scale": "ray", "actors": count} for count in (1, 2))


@pytest.fixture(scope="module")
def model(tiny_bert):
    return str(tiny_bert)


@pytest.fixture(scope="module")
def broken(tmp_path_factory, model):
    """A checkpoint that gives NaN for texts with the word `rain`."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("broken") / "model")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][vocabulary["rain"]].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(autouse=True)
def one_thread():
    """An actor on a CPU has one: so parts are the same, and vectors to the bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows of 4,002 distinct inputs under a prompt: four parts."""
    path = tmp_path_factory.mktemp("data") / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    for i in range(2_000):
        condition = ("the number of people", "the place")[i % 2]
        second = f"dogs walk on at park number {i}"
        lines.append(f"two men play number {i},{second},{condition},{1 + i % 5}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory, model, data):
    folder = tmp_path_factory.mktemp("alone") / "run"
    torch.set_num_threads(1)
    extract(model=model, **vars(OPTIONS), run=folder, data=str(data), prompt=PROMPTS)
    return folder


def vectors(folder):
    """Return what a run's store holds, by key; each key is there once."""
    store = open_any_run(folder).store()
    table = lance.dataset(str(store.folder / "vectors.lance")).to_table()
    keys = table["key"].to_pylist()
    assert len(keys) == len(set(keys)) == len(store)
    flat = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return dict(zip(keys, flat.reshape(len(keys), -1), strict=True))


def check_same(folder, other):
    found, wanted = vectors(folder), vectors(other)
    assert found.keys() == wanted.keys()
    for key, vector in found.items():
        np.testing.assert_array_equal(vector, wanted[key])


def test_actors_store_what_one_process_stores(ray, caplog, model, data, alone, tmp_path):
    caplog.set_level("INFO")
    done = extract(
        model=model, **vars(OPTIONS), run=tmp_path, data=str(data), prompt=PROMPTS, **TWO
    )
    check_same(tmp_path, alone)
    ours, plain = (open_any_run(own).manifest["prompts"] for own in (tmp_path, alone))
    for name in PROMPTS:
        first, second = ours[name]["extraction"], plain[name]["extraction"]
        assert {**first, "created": None} == {**second, "created": None}
    assert done.prompts["routed"].n_computed == 4_000
    assert "2 actors" in caplog.text
    caplog.clear()
    extract(model=model, **vars(OPTIONS), run=tmp_path, prompt=PROMPTS, **TWO)
    assert "nothing is encoded" in caplog.text
    assert "2 actors" not in caplog.text  # none is started


@pytest.mark.parametrize("task", ["dialogue", "kgc"])
def test_other_tasks_are_extracted_by_actors(ray, model, tmp_path, task):
    write = {"dialogue": write_dialogues, "kgc": write_graph}[task]
    source = str(write(tmp_path / "data"))
    extract(model=model, **vars(OPTIONS), run=tmp_path / "alone", data=source, task=task)
    extract(model=model, **vars(OPTIONS), run=tmp_path / "ray", data=source, task=task, **ONE)
    check_same(tmp_path / "ray", tmp_path / "alone")


@pytest.mark.parametrize("first", [{}, ONE])
def test_what_one_way_began_the_other_finishes(ray, model, data, alone, tmp_path, first):
    second = {} if first else ONE
    extract(model=model, **vars(OPTIONS), run=tmp_path, data=str(data), prompt=PROMPTS[:1], **first)
    extract(model=model, **vars(OPTIONS), run=tmp_path, prompt=PROMPTS, **second)
    check_same(tmp_path, alone)


def own_actors():
    """Return the actors that Ray has started for this process; tests beside this have theirs."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    own = {os.getpid()}
    while more := {number for number, parent in parents.items() if parent in own} - own:
        own |= more
    found = set()
    for number in own:
        with suppress(OSError):
            if Path(f"/proc/{number}/cmdline").read_bytes().startswith(b"ray::_Actor"):
                found.add(number)
    return found


def test_actors_that_are_killed_cost_nothing(ray, caplog, model, data, alone, tmp_path):
    ended, killed = threading.Event(), set()

    def kill():
        while not ended.wait(0.05) and len(killed) < 3:
            for number in own_actors() - killed:
                os.kill(number, signal.SIGKILL)
                killed.add(number)
                break

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        extract(model=model, **vars(OPTIONS), run=tmp_path, data=str(data), prompt=PROMPTS, **TWO)
    finally:
        ended.set()
        thread.join()
    assert "an actor died and is replaced" in caplog.text
    check_same(tmp_path, alone)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_driver_that_is_ended_goes_on_where_it_committed(ray, model, data, alone, tmp_path, how):
    folder = tmp_path / "run"
    arguments = ("--model", model, "--dtype", "float32", "--pooling", "mean", "--normalize")
    given = ("--data", data, "--prompt", *PROMPTS, "--scale", "ray", "--actors", "1")
    command = Command(tmp_path / "out", ("extract", *arguments, *given, "--run", folder))
    versions = folder / "features"
    while command.process.is_alive() and not any(versions.glob("*/vectors.lance/_versions/*")):
        time.sleep(0.01)
    assert command.process.is_alive(), command.finish()
    os.kill(command.process.pid, how)
    status, _, said = command.finish()
    if how == signal.SIGTERM:
        assert status == 143, said
        assert said.splitlines()[-1].startswith("llmcond: error: terminated; stored results")
        assert not [*Path("/tmp").glob(f"llmcond-ray-{command.process.pid}-*")]
    assert len(vectors(folder)) <= len(vectors(alone))
    extract(model=model, **vars(OPTIONS), run=folder, prompt=PROMPTS, **ONE)
    check_same(folder, alone)


def test_an_input_that_the_encoder_cannot_take_is_named(ray, model, tmp_path):
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
            **ONE,
        )


def test_an_input_that_gives_nan_is_named(ray, broken, tmp_path):
    data = tmp_path / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    lines += [f"two men sit number {i},a dog,the place,{1 + i % 5}" for i in range(20)]
    data.write_text("\n".join([*lines, "rain,a dog,the place,3"]) + "\n", encoding="utf-8")
    source = str(data)
    with pytest.raises(UserError, match=r"row 21 of rows.csv.*returned NaN or infinity"):
        extract(
            model=broken,
            **vars(OPTIONS),
            run=tmp_path / "run",
            data=source,
            prompt=PROMPTS[:1],
            **ONE,
        )
    stored = vectors(tmp_path / "run")
    assert len(stored) == 22  # all other inputs
    assert all(np.isfinite(vector).all() for vector in stored.values())


def test_an_actor_refuses_another_encoder(model, tmp_path):
    resolved = resolve(model, OPTIONS)
    other = ActorEncoderSpec(
        model, replace(OPTIONS, pooling="cls"), resolved.identity.fingerprint, tmp_path, "float16"
    )
    with pytest.raises(UserError, match="is a different encoder on"):
        FragmentWriter(other)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--actors", "2"), "--actors needs --scale ray"),
        (("--address", "auto"), "--address needs --scale ray"),
        (("--scale", "ray", "--workers", "2"), "--workers and --scale are two ways"),
        (("--scale", "ray", "--actors", "0"), "actors is 0; it must be at least 1"),
        (("--scale", "ray", "--gpus-per-actor", "1"), "Add --dtype"),
        (("--scale", "ray", "--device", "cuda"), "Leave out --device"),
        (("--scale", "ray", "--gpus-per-actor", "1", "--device", "cpu"), "Leave out --device"),
    ],
)
def test_what_does_not_go_together_is_one_line(capsys, model, data, tmp_path, options, words):
    folder = tmp_path / "run"
    given = ["extract", "--model", model, "--pooling", "mean", "--data", str(data), *options]
    assert run([*given, "--run", str(folder)]) == 2
    (line,) = [own for own in capsys.readouterr().err.splitlines() if "error" in own]
    assert words in line
    assert not folder.exists()


def test_a_run_whose_name_holds_control_characters_is_refused_at_once(capsys, model, tmp_path):
    folder = tmp_path / "a\x1b[31mred"
    given = ["extract", "--model", model, "--pooling", "mean", "--run", str(folder)]
    assert run(given) == 2
    assert "x1b[31mred' contains control characters" in capsys.readouterr().err.splitlines()[-1]
    assert not folder.exists()


def test_the_python_call_has_the_same_options(ray, model, data, alone, tmp_path):
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
    check_same(tmp_path, alone)
    record = json.loads((tmp_path / "run.json").read_text())
    assert str(tmp_path) not in json.dumps(record["prompts"])
    shutil.rmtree(tmp_path)
