"""Knowledge-graph completion by the commands, on a small graph and a small encoder."""

import shutil

import pytest
from helpers.commands import ok, refused
from helpers.graphs import write_graph

ENCODER = ("--dtype", "float32", "--device", "cpu", "--pooling", "mean", "--normalize")


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return write_graph(tmp_path_factory.mktemp("graph") / "graph")


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return str(tiny_checkpoint())


@pytest.fixture(scope="module")
def extracted(graph, model, tmp_path_factory):
    """A run with features of both kinds. Copy it before changing it."""
    from llmcond.cli import run

    folder = tmp_path_factory.mktemp("runs") / "run"
    command = ["extract", "--task", "kgc", "--data", graph, "--model", model, "--run", folder]
    command += [*ENCODER, "--prompt", "separate", "concat-sent-cond"]
    assert run([str(one) for one in command]) == 0
    return folder


@pytest.fixture
def own(extracted, tmp_path):
    return shutil.copytree(extracted, tmp_path / "own")


def test_each_text_is_encoded_once(capsys, graph, model, tmp_path):
    folder = tmp_path / "run"
    command = ("extract", "--data", graph, "--model", model, "--run", folder, *ENCODER)
    done = ok(capsys, *command, "--task", "kgc")["prompts"]
    # Entities are sentences and candidates at once; relations have two directions.
    assert list(done) == ["separate"]
    assert done["separate"]["n_inputs"] == done["separate"]["n_computed"] == 24 + 6
    joint = ok(capsys, *command, "--prompt", "concat-sent-cond")["prompts"]["concat-sent-cond"]
    assert joint["n_inputs"] - joint["n_computed"] == 24 + 6
    assert ok(capsys, *command)["prompts"]["separate"]["n_computed"] == 0


def test_a_run_is_of_one_task_and_one_graph(capsys, own, graph, model, tmp_path):
    command = ("extract", "--model", model, "--run", own, *ENCODER)
    assert "run of the task kgc, not csts" in refused(capsys, *command, "--task", "csts")
    other = write_graph(tmp_path / "other")
    (other / "relations.tsv").write_text("_is_at\there\n_does\tdoes\n_sits_with\twith\n")
    assert "has other examples" in refused(capsys, *command, "--data", other)
    assert "in another way" in refused(capsys, *command, "--columns", "label=x")
    named = refused(capsys, *command, "--data", graph, "--split-seed", "1")
    assert "--split-seed splits a single file" in named


@pytest.mark.parametrize(
    "command",
    [
        ("similarity", "a", "b", "--condition", "c"),
        ("analyse",),
        ("embed", "FILE", "--out", "x.npy"),
    ],
)
def test_commands_for_pairs_refuse_such_a_run(capsys, own, graph, command):
    command = [graph / "entities.tsv" if word == "FILE" else word for word in command]
    said = refused(capsys, *command, "--run", own)
    assert "ranks candidates" in said
