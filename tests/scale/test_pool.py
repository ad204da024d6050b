"""Pools of Ray actors: results, replacement of dead actors, and the start of Ray."""

import os
import subprocess
import sys

import pytest
from helpers.ray import SquareWorker

from llmcond.errors import LlmcondError, UserError
from llmcond.scale import pool
from llmcond.scale.pool import RayCluster, actor_pool


@pytest.fixture
def squares(ray, tmp_path):
    with actor_pool(RayCluster(actors=2), SquareWorker, tmp_path) as actors:
        yield actors


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
    assert "an actor died and is replaced" in caplog.text


def test_item_that_kills_every_actor_raises_error(squares):
    with pytest.raises(LlmcondError, match="5 actors died while working on the same part"):
        list(squares.map([1, "deadly", 2]))


def test_user_error_of_actor_is_raised_unchanged(squares, ray, tmp_path):
    with pytest.raises(UserError, match=r"^the item is invalid$"):
        list(squares.map([1, "wrong"]))
    (tmp_path / "broken").touch()
    with (
        actor_pool(RayCluster(actors=1), SquareWorker, tmp_path) as broken_actors,
        pytest.raises(UserError, match=r"^the model cannot be loaded$"),
    ):
        list(broken_actors.map([1]))


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"actors": 0}, "actors is 0; it must be at least 1"),
        ({"gpus_per_actor": -1.0}, "gpus_per_actor is -1.0"),
        ({"gpus_per_actor": 0.5}, "this machine has 0 GPUs, but each actor needs 0.5"),
    ],
)
def test_impossible_cluster_is_reported(ray, cluster, message):
    with pytest.raises(UserError, match=message), actor_pool(RayCluster(**cluster), SquareWorker):
        pass


CLIENT_SCRIPT = """
import sys
from ray._raylet import GcsClient
GcsClient(sys.argv[1]).internal_kv_keys(b"", None, 60)
"""
CLUSTER_SCRIPT = """
import os, pathlib, subprocess, sys
import psutil, ray
from helpers.ray import SquareWorker
from llmcond.scale import pool
from llmcond.errors import LlmcondError, UserError
for address in ("127.0.0.1:1", "somewhere"):
    try:
        with pool.actor_pool(pool.RayCluster(address=address), SquareWorker):
            pass
    except UserError as error:
        print(error)
size, pool._OBJECT_STORE = pool._OBJECT_STORE, 1
try:
    with pool.actor_pool(pool.RayCluster(actors=1), SquareWorker):
        pass
except LlmcondError as error:
    print(error)
pool._OBJECT_STORE = size
folder = pathlib.Path(sys.argv[1])
with pool.actor_pool(pool.RayCluster(actors=1), SquareWorker, folder) as squares:
    total = sum(square for _, (square, _) in squares.map(range(4)))
    (ray_folder,) = pathlib.Path("/tmp").glob(f"llmcond-ray-{os.getpid()}-*")
    mode = oct(ray_folder.stat().st_mode & 0o777)
    programs = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = [socket for program in programs for socket in program.net_connections("tcp")]
    listening = {s.laddr.ip.rpartition(":")[2] for s in sockets if s.status == "LISTEN"}
    address = ray.get_runtime_context().gcs_address
    answers = []
    token = os.environ["RAY_AUTH_TOKEN"]
    for login in (("disabled", ""), ("token", "0" * 64), ("token", token)):
        environment = {**os.environ, **dict(zip(("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"), login))}
        command = [sys.executable, "-c", sys.argv[2], address]
        client = subprocess.run(command, env=environment, capture_output=True, check=False)
        answers.append("in" if client.returncode == 0 else b"InvalidAuthToken" in client.stderr)
print(mode, *listening, *answers)
print(total)
"""


@pytest.mark.usefixtures("actors_import_helpers")
def test_local_ray_is_private_and_stopped_at_exit(tmp_path):
    command = [sys.executable, "-c", CLUSTER_SCRIPT, str(tmp_path), CLIENT_SCRIPT]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["HOME"] = str(tmp_path)
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert not (tmp_path / ".ray").exists()  # Ray would store a token there
    first, second, third, *others = result.stdout.strip().splitlines()
    assert first.startswith("there is no usable Ray cluster at 127.0.0.1:1: ")
    assert "`ray start --head`" in first
    assert "expected HOST:PORT, or auto" in second
    assert third.startswith("Ray cannot be started on this machine: ")
    assert others == ["0o700 127.0.0.1 True True in", "14"], result.stderr
    assert result.returncode == 0


class SlowRay:
    """The module of Ray on a busy machine, where the first starts fail."""

    class util:  # noqa: N801
        get_node_ip_address = staticmethod(lambda: "127.0.0.1")

    def __init__(self, n_failures, message):
        self.n_failures, self.message, self.n_starts = n_failures, message, 0

    def init(self, **options):
        self.n_starts += 1
        if self.n_starts <= self.n_failures:
            raise RuntimeError(self.message)


@pytest.mark.parametrize(
    ("n_failures", "message", "n_starts"),
    [(2, "timed out during startup.", 3), (3, "timed out.", 3), (1, "no room.", 1)],
)
def test_slow_ray_is_started_again(tmp_path, n_failures, message, n_starts):
    ray = SlowRay(n_failures, message)
    if n_failures < n_starts:
        pool._start(ray, 1, tmp_path)
    else:
        with pytest.raises(LlmcondError, match="Ray cannot be started on this machine: "):
            pool._start(ray, 1, tmp_path)
    assert ray.n_starts == n_starts


@pytest.mark.parametrize(
    ("installed", "mode", "message"),
    [
        ("2.51.2", None, "needs Ray 2.52 or newer. The installed 2.51.2"),
        ("2.9.0", None, "needs Ray 2.52 or newer"),
        ("2.52.0rc1", "disabled", "RAY_AUTH_MODE is 'disabled'"),
        ("3.0", "k8s", "RAY_AUTH_MODE is 'k8s'"),
    ],
)
def test_ray_without_authentication_is_rejected(monkeypatch, installed, mode, message):
    monkeypatch.setattr(pool, "version", lambda _: installed)
    monkeypatch.setitem(sys.modules, "ray", None)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(UserError, match=message), actor_pool(RayCluster(actors=1), SquareWorker):
        pass


def test_token_is_created_if_auth_mode_is_set(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    pool._require_token()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
