"""Actors that share some work, and what becomes of it when they die."""

import os
import subprocess
import sys

import pytest
from helpers.ray import Squares

from llmcond.errors import LlmcondError, UserError
from llmcond.scale.pool import Cluster, actors


@pytest.fixture
def pool(ray, tmp_path):
    with actors(Cluster(actors=2), Squares, tmp_path) as found:
        yield found


def test_each_item_comes_with_its_result(pool):
    found = dict(pool.map(range(30)))
    assert {item: square for item, (square, _) in found.items()} == {i: i * i for i in range(30)}
    assert pool.size == 2
    assert list(pool.map([])) == []


def test_items_are_read_when_actors_are_free(pool):
    read = []

    def items():
        for i in range(50):
            read.append(i)
            yield i

    results = pool.map(items())
    next(results)
    assert len(read) <= 5
    assert len(list(results)) == 49


def test_an_actor_that_dies_is_replaced_and_its_items_are_done_by_another(pool, caplog):
    found = dict(pool.map([1, 2, "deadly once", 3, 4, 5]))
    assert [found[i][0] for i in (1, 2, 3, 4, 5)] == [1, 4, 9, 16, 25]
    assert "deadly once" in found
    assert "an actor died; another takes its place" in caplog.text


def test_what_kills_every_actor_is_given_up(pool):
    with pytest.raises(LlmcondError, match="5 actors died over one part"):
        list(pool.map([1, "deadly", 2]))


def test_an_error_for_people_arrives_as_it_was_raised(pool, ray, tmp_path):
    with pytest.raises(UserError, match=r"^this one is wrong$"):
        list(pool.map([1, "wrong"]))
    (tmp_path / "broken").touch()
    with (
        actors(Cluster(actors=1), Squares, tmp_path) as none,
        pytest.raises(UserError, match=r"^there is no model here$"),
    ):
        list(none.map([1]))


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"actors": 0}, "actors is 0; it must be at least 1"),
        ({"gpus_per_actor": -1.0}, "gpus_per_actor is -1.0"),
        ({"gpus_per_actor": 0.5}, "this machine has 0 GPUs, and each actor needs 0.5"),
    ],
)
def test_what_there_cannot_be_is_told(ray, cluster, words):
    with pytest.raises(UserError, match=words), actors(Cluster(**cluster), Squares):
        pass


ALONE = """
import os, sys, pathlib
from helpers.ray import Squares
from llmcond.scale.pool import Cluster, actors
from llmcond.errors import LlmcondError, UserError
for address in ("127.0.0.1:1", "somewhere"):
    try:
        with actors(Cluster(address=address), Squares):
            pass
    except UserError as error:
        print(error)
taken = pathlib.Path(f"/tmp/llmcond-ray-{os.getpid()}")
taken.touch()
try:
    with actors(Cluster(actors=1), Squares):
        pass
except LlmcondError as error:
    print(error)
taken.unlink()
with actors(Cluster(actors=1), Squares, pathlib.Path(sys.argv[1])) as pool:
    found = sum(square for _, (square, _) in pool.map(range(4)))
print(found)
"""


def test_ray_is_started_here_and_ended(tmp_path):
    command = [sys.executable, "-c", ALONE, str(tmp_path)]
    environment = {name: own for name, own in os.environ.items() if "RAY_AUTH" not in name}
    environment["HOME"] = str(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert not (tmp_path / ".ray").exists()  # where Ray would keep a token
    first, second, third, last = done.stdout.strip().splitlines()
    assert first.startswith("there is no Ray cluster to use at 127.0.0.1:1: ")
    assert "`ray start --head`" in first
    assert "expected HOST:PORT, or auto" in second
    assert third.startswith("Ray cannot be started here: ")
    assert (last, done.returncode) == ("14", 0), done.stderr
