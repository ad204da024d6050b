"""Pools of processes and of Ray actors: results, and the replacement of dead workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ray import SquareWorker
from helpers.waiting import wait_until

from llmcond.errors import LlmcondError, UserError
from llmcond.scale import pool
from llmcond.scale.pool import Workers, worker_pool

ACTORS = Workers(2, "auto")


@pytest.fixture(params=[Workers(2), ACTORS], ids=["processes", "actors"])
def squares(request, tmp_path):
    request.getfixturevalue("actors_import_helpers" if request.param.is_local else "ray")
    with worker_pool(request.param, SquareWorker, tmp_path) as workers:
        yield workers


def test_each_item_comes_with_its_result(squares):
    results = dict(squares.map(range(30)))
    assert {item: square for item, (square, _) in results.items()} == {i: i * i for i in range(30)}
    assert squares.size == 2
    assert list(squares.map([])) == []


def test_items_are_read_when_actors_are_free(squares):
    read_items = []

    def items():
        for i in range(50):
            read_items.append(i)
            yield i

    results = squares.map(items())
    next(results)
    assert len(read_items) <= 5
    assert len(list(results)) == 49


def test_dead_actor_is_replaced_and_items_are_redone(squares, caplog):
    results = dict(squares.map([1, 2, "deadly once", 3, 4, 5]))
    assert [results[i][0] for i in (1, 2, 3, 4, 5)] == [1, 4, 9, 16, 25]
    assert "deadly once" in results
    assert "a worker died and is replaced" in caplog.text


def test_item_that_kills_every_actor_raises_error(squares):
    with pytest.raises(LlmcondError, match="5 workers died while working on the same part"):
        list(squares.map([1, "deadly", 2]))


def test_user_error_of_worker_is_raised_unchanged(squares, tmp_path):
    with pytest.raises(UserError, match=r"^the item is invalid$"):
        list(squares.map([1, "wrong"]))
    (tmp_path / "broken").touch()
    with (
        worker_pool(Workers(1), SquareWorker, tmp_path) as broken_actors,
        pytest.raises(UserError, match=r"^the model cannot be loaded$"),
    ):
        list(broken_actors.map([1]))


def test_cluster_without_gpus_is_reported(ray):
    workers = Workers(address="auto", gpus_each=0.5)
    message = "the cluster at auto has 0 GPUs, but each actor needs 0.5"
    with pytest.raises(UserError, match=message), worker_pool(workers, SquareWorker):
        pass


@pytest.mark.parametrize(
    ("installed", "message"),
    [("2.51.2", "needs Ray 2.52 or newer. The installed 2.51.2"), ("2.9.0", "needs Ray 2.52")],
)
def test_ray_without_authentication_is_rejected(monkeypatch, installed, message):
    monkeypatch.setattr(pool, "version", lambda _: installed)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=message), worker_pool(ACTORS, SquareWorker):
        pass


CLUSTER_SCRIPT = """
from helpers.ray import SquareWorker
from helpers.waiting import wait_until
from llmcond.errors import UserError
from llmcond.scale.pool import Workers, worker_pool
for address in ("127.0.0.1:1", "somewhere"):
    try:
        with worker_pool(Workers(address=address), SquareWorker):
            pass
    except UserError as error:
        print(error)
"""


@pytest.mark.usefixtures("actors_import_helpers")
def test_missing_cluster_is_reported(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    result = subprocess.run(
        [sys.executable, "-c", CLUSTER_SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"HOME": str(tmp_path)},
    )
    first, second = result.stdout.strip().splitlines()
    assert first.startswith("there is no usable Ray cluster at 127.0.0.1:1: ")
    assert "`ray start --head`" in first
    assert "expected HOST:PORT, or auto" in second
    assert result.returncode == 0


@pytest.mark.usefixtures("actors_import_helpers")
def test_processes_end_with_the_pool(tmp_path):
    with worker_pool(Workers(2), SquareWorker, tmp_path) as processes:
        pids = {pid for _, (_, pid) in processes.map(["slow", 1, "slow", 2])}
    assert os.getpid() not in pids
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
