"""Actors that share some work, and what becomes of it when they die."""

import os
import subprocess
import sys

import pytest
from helpers.ray import Squares

from llmcond.errors import LlmcondError, UserError
from llmcond.scale import pool
from llmcond.scale.pool import RayCluster, actor_pool


@pytest.fixture
def squares(ray, tmp_path):
    with actor_pool(RayCluster(actors=2), Squares, tmp_path) as found:
        yield found


def test_each_item_comes_with_its_result(squares):
    found = dict(squares.map(range(30)))
    assert {item: square for item, (square, _) in found.items()} == {i: i * i for i in range(30)}
    assert squares.size == 2
    assert list(squares.map([])) == []


def test_items_are_read_when_actors_are_free(squares):
    read = []

    def items():
        for i in range(50):
            read.append(i)
            yield i

    results = squares.map(items())
    next(results)
    assert len(read) <= 5
    assert len(list(results)) == 49


def test_an_actor_that_dies_is_replaced_and_its_items_are_done_by_another(squares, caplog):
    found = dict(squares.map([1, 2, "deadly once", 3, 4, 5]))
    assert [found[i][0] for i in (1, 2, 3, 4, 5)] == [1, 4, 9, 16, 25]
    assert "deadly once" in found
    assert "an actor died and is replaced" in caplog.text


def test_what_kills_every_actor_is_given_up(squares):
    with pytest.raises(LlmcondError, match="5 actors died while working on the same part"):
        list(squares.map([1, "deadly", 2]))


def test_an_error_for_people_arrives_as_it_was_raised(squares, ray, tmp_path):
    with pytest.raises(UserError, match=r"^this one is wrong$"):
        list(squares.map([1, "wrong"]))
    (tmp_path / "broken").touch()
    with (
        actor_pool(RayCluster(actors=1), Squares, tmp_path) as none,
        pytest.raises(UserError, match=r"^there is no model here$"),
    ):
        list(none.map([1]))


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"actors": 0}, "actors is 0; it must be at least 1"),
        ({"gpus_per_actor": -1.0}, "gpus_per_actor is -1.0"),
        ({"gpus_per_actor": 0.5}, "this machine has 0 GPUs, but each actor needs 0.5"),
    ],
)
def test_what_there_cannot_be_is_told(ray, cluster, words):
    with pytest.raises(UserError, match=words), actor_pool(RayCluster(**cluster), Squares):
        pass


STRANGER = """
import sys
from ray._raylet import GcsClient
GcsClient(sys.argv[1]).internal_kv_keys(b"", None, 60)
"""
ALONE = """
import os, pathlib, subprocess, sys
import psutil, ray
from helpers.ray import Squares
from llmcond.scale import pool
from llmcond.errors import LlmcondError, UserError
for address in ("127.0.0.1:1", "somewhere"):
    try:
        with pool.actor_pool(pool.RayCluster(address=address), Squares):
            pass
    except UserError as error:
        print(error)
size, pool._OBJECT_STORE = pool._OBJECT_STORE, 1
try:
    with pool.actor_pool(pool.RayCluster(actors=1), Squares):
        pass
except LlmcondError as error:
    print(error)
pool._OBJECT_STORE = size
folder = pathlib.Path(sys.argv[1])
with pool.actor_pool(pool.RayCluster(actors=1), Squares, folder) as squares:
    found = sum(square for _, (square, _) in squares.map(range(4)))
    (own,) = pathlib.Path("/tmp").glob(f"llmcond-ray-{os.getpid()}-*")
    mode = oct(own.stat().st_mode & 0o777)
    programs = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = [one for program in programs for one in program.net_connections("tcp")]
    listening = {one.laddr.ip.rpartition(":")[2] for one in sockets if one.status == "LISTEN"}
    address = ray.get_runtime_context().gcs_address
    answers = []
    own_token = os.environ["RAY_AUTH_TOKEN"]
    for given in (("disabled", ""), ("token", "0" * 64), ("token", own_token)):
        environment = {**os.environ, **dict(zip(("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"), given))}
        command = [sys.executable, "-c", sys.argv[2], address]
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        answers.append("in" if done.returncode == 0 else b"InvalidAuthToken" in done.stderr)
print(mode, *listening, *answers)
print(found)
"""


@pytest.mark.usefixtures("actors_import_helpers")
def test_ray_is_started_here_for_its_owner_alone_and_ended(tmp_path):
    command = [sys.executable, "-c", ALONE, str(tmp_path), STRANGER]
    environment = {name: own for name, own in os.environ.items() if not name.startswith("RAY_")}
    environment["HOME"] = str(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert not (tmp_path / ".ray").exists()  # where Ray would keep a token
    first, second, third, *others = done.stdout.strip().splitlines()
    assert first.startswith("there is no usable Ray cluster at 127.0.0.1:1: ")
    assert "`ray start --head`" in first
    assert "expected HOST:PORT, or auto" in second
    assert third.startswith("Ray cannot be started on this machine: ")
    assert others == ["0o700 127.0.0.1 True True in", "14"], done.stderr
    assert done.returncode == 0


class LateRay:
    """Ray's module, as it is on a machine that is too busy for the time that Ray gives itself."""

    class util:  # noqa: N801
        get_node_ip_address = staticmethod(lambda: "127.0.0.1")

    def __init__(self, late, said):
        self.late, self.said, self.starts = late, said, 0

    def init(self, **options):
        self.starts += 1
        if self.starts <= self.late:
            raise RuntimeError(self.said)


@pytest.mark.parametrize(
    ("late", "said", "starts"),
    [(2, "timed out during startup.", 3), (3, "timed out.", 3), (1, "no room.", 1)],
)
def test_a_ray_that_is_late_is_started_again(tmp_path, late, said, starts):
    ray = LateRay(late, said)
    if late < starts:
        pool._start(ray, 1, tmp_path)
    else:
        with pytest.raises(LlmcondError, match="Ray cannot be started on this machine: "):
            pool._start(ray, 1, tmp_path)
    assert ray.starts == starts


@pytest.mark.parametrize(
    ("installed", "mode", "said"),
    [
        ("2.51.2", None, "needs Ray 2.52 or newer. The installed 2.51.2"),
        ("2.9.0", None, "needs Ray 2.52 or newer"),
        ("2.52.0rc1", "disabled", "RAY_AUTH_MODE is 'disabled'"),
        ("3.0", "k8s", "RAY_AUTH_MODE is 'k8s'"),
    ],
)
def test_a_ray_that_lets_strangers_in_is_not_started(monkeypatch, installed, mode, said):
    monkeypatch.setattr(pool, "version", lambda _: installed)
    monkeypatch.setitem(sys.modules, "ray", None)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(UserError, match=said), actor_pool(RayCluster(actors=1), Squares):
        pass


def test_a_token_is_made_also_where_the_mode_is_set(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    pool._require_token()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
