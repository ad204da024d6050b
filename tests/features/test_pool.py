"""Pools of processes and of Ray actors: results, and the replacement of dead workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ray import SquareWorker
from helpers.waiting import wait_until

from llmcond.base.errors import LlmcondError, UserError
from llmcond.features import pool
from llmcond.features.pool import Workers, worker_pool

ACTORS = Workers(2, "auto")
ON_RAY = pytest.param(ACTORS, id="actors", marks=pytest.mark.slow)


@pytest.fixture(params=[pytest.param(Workers(2), id="processes"), ON_RAY])
def squares(request, tmp_path):
    request.getfixturevalue("actors_import_helpers" if request.param.is_local else "ray")
    with worker_pool(request.param, SquareWorker, tmp_path) as workers:
        yield workers


def test_each_item_comes_with_its_result(squares):
    read_items = []

    def items():
        for i in range(30):
            read_items.append(i)
            yield i

    assert squares.size == 2
    assert list(squares.map([])) == []
    results = squares.map(items())
    first, (square, _) = next(results)
    assert len(read_items) <= 5  # items are read when workers are free
    others = {item: square for item, (square, _) in results}
    assert {first: square, **others} == {i: i * i for i in range(30)}


def test_dead_worker_is_replaced_and_items_are_redone(squares, caplog):
    results = [*squares.map([1, 2, "deadly once", 3, 4, 5])]
    squared = {(item, square) for item, (square, _) in results}
    assert squared == {(1, 1), (2, 4), (3, 9), (4, 16), (5, 25), ("deadly once", 0)}
    assert len(results) == 6
    assert "a worker died and is replaced" in caplog.text


def test_item_that_kills_every_worker_raises_error(squares):
    with pytest.raises(LlmcondError, match="5 workers died while working on the same part"):
        list(squares.map([1, "deadly", 2]))


def test_user_error_of_worker_is_raised_unchanged(squares, tmp_path):
    with pytest.raises(UserError, match=r"^the item is invalid$"):
        list(squares.map([1, "wrong"]))
    (tmp_path / "broken").touch()
    with (
        worker_pool(Workers(1), SquareWorker, tmp_path) as broken_workers,
        pytest.raises(UserError, match=r"^the model cannot be loaded$"),
    ):
        list(broken_workers.map([1]))


@pytest.mark.usefixtures("actors_import_helpers")
def test_processes_end_with_the_pool(tmp_path):
    with worker_pool(Workers(2), SquareWorker, tmp_path) as processes:
        pids = {pid for _, (_, pid) in processes.map(["slow", 1, "slow", 2])}
    assert os.getpid() not in pids
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


# -- clusters ----------------------------------------------------------------------------------


def test_ray_without_authentication_is_rejected(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for installed in ("2.51.2", "2.9.0"):
        monkeypatch.setattr(pool, "version", lambda _, installed=installed: installed)
        message = f"needs Ray 2.52 or newer. The installed {installed}"
        with pytest.raises(UserError, match=message), worker_pool(ACTORS, SquareWorker):
            pass


@pytest.mark.slow
def test_cluster_without_gpus_is_reported(ray):
    workers = Workers(address="auto", gpus_each=0.5)
    message = "the cluster at auto has 0 GPUs, but each actor needs 0.5"
    with pytest.raises(UserError, match=message), worker_pool(workers, SquareWorker):
        pass


CLUSTER_SCRIPT = """
from helpers.ray import SquareWorker
from llmcond.base.errors import UserError
from llmcond.features.pool import Workers, worker_pool
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
        check=True,
        env=environment | {"HOME": str(tmp_path)},
    )
    first, second = result.stdout.strip().splitlines()
    assert first.startswith("there is no usable Ray cluster at 127.0.0.1:1: ")
    assert "`ray start --head`" in first
    assert "expected HOST:PORT, or auto" in second
