"""Actors of Ray that share some work: on the cores of this machine, or on a cluster."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from llmcond.errors import LlmcondError, UserError, first_line, install_command
from llmcond.log import log
from llmcond.plugins import load, loaded

_Item_contra = TypeVar("_Item_contra", contravariant=True)
_Result_co = TypeVar("_Result_co", covariant=True)
_I = TypeVar("_I")
_R = TypeVar("_R")

#: Items that an actor has at a time: the next one is there when one is done.
_AHEAD = 2
#: An item that so many actors died over is given up.
_MOST_DEATHS = 5
#: Of a Ray that is started here. Results are small: vectors do not pass through it.
_OBJECT_STORE = 2**28
_SECONDS_UNTIL_TOLD = 60
_CONNECT_SECONDS = 10
#: Beginning of the folders of Rays that were started here; the process's number follows.
_FOLDER = "llmcond-ray-"


class Worker(Protocol[_Item_contra, _Result_co]):
    """What an actor holds."""

    def work(self, item: _Item_contra) -> _Result_co:
        """Return what becomes of an item."""


@dataclass(frozen=True)
class Cluster:
    """Where actors run, and how many.

    Attributes:
        address: of a cluster, ``HOST:PORT``, or ``auto`` for the one that this machine is part of;
            None: Ray is started here, and ended afterwards.
        actors: how many; None: one a core, or as many as share the GPUs.
        gpus_per_actor: a part of one, or several; 0: actors compute on CPUs, on a core each.
    """

    address: str | None = None
    actors: int | None = None
    gpus_per_actor: float = 0.0

    def __post_init__(self) -> None:
        if self.actors is not None and self.actors < 1:
            raise UserError(f"actors is {self.actors}; it must be at least 1.")
        if self.gpus_per_actor < 0:
            raise UserError(f"gpus_per_actor is {self.gpus_per_actor}; it must be at least 0.")


@contextmanager
def actors(cluster: Cluster, factory: Any, *args: Any) -> Iterator[Pool[Any, Any]]:
    """Yield actors, each with what ``factory(*args)`` gives it: a :class:`Worker`.

    Ray is started on this machine, or connected to, and left when the block ends.

    Raises:
        UserError: Ray is not installed, there is no cluster at the address, or this machine has
            less than was asked for.
    """
    # Ray tells on standard output of workers that died, where only results belong.
    with redirect_stdout(sys.stderr), _connected(cluster) as ray:
        count = _count(cluster, ray)
        pool = Pool[Any, Any](ray, count, cluster.gpus_per_actor, (factory, args, loaded()))
        try:
            yield pool
        finally:
            pool.close()


class Pool(Generic[_I, _R]):
    """Actors that are alike.

    An actor that dies is replaced, and what it was at is given to another one: as soon as one is
    free, also where the cluster has no room for a new one. So results must not depend on which
    actor gave them.
    """

    def __init__(self, ray: Any, count: int, gpus: float, made_of: tuple[Any, ...]) -> None:
        self.size = count
        self._ray, self._made_of = ray, made_of
        self._class = ray.remote(_Actor).options(num_cpus=1, num_gpus=gpus)
        self._alive: set[_Hired] = set()
        #: Those that start, by the call that ends then.
        self._starting: dict[Any, _Hired] = {}
        self._free: deque[_Hired] = deque()
        self._deaths_in_a_row = 0
        self._told = False
        for _ in range(count):
            self._start()

    def _start(self) -> None:
        hired = _Hired(self._class.remote(*self._made_of))
        self._alive.add(hired)
        self._starting[hired.handle.start.remote()] = hired

    def map(self, items: Iterable[_I]) -> Iterator[tuple[_I, _R]]:
        """Yield each item with its result, as they come; items are read when actors are free.

        Raises:
            LlmcondError: what a worker raised, or actors died again and again.
        """
        # Each item with how many actors died over it.
        waiting, again = ((item, 0) for item in items), deque[tuple[_I, int]]()
        running: dict[Any, tuple[_Hired, tuple[_I, int]]] = {}
        while True:
            ended = False
            while self._free and not ended:
                found = again.popleft() if again else next(waiting, None)
                ended = found is None
                if found is not None:
                    hired = self._free.popleft()
                    running[hired.handle.work.remote(found[0])] = hired, found
            if ended and not running:
                return
            for reference in self._wait(running):
                hired, (item, deaths) = running.pop(reference)
                answer = self._answer(hired, reference)
                if answer is None:
                    again.append((item, _checked(deaths + 1)))
                    continue
                self._deaths_in_a_row = 0
                if hired in self._alive:
                    self._free.append(hired)
                yield item, answer.result

    def _wait(self, running: Mapping[Any, Any]) -> list[Any]:
        """Return calls that have ended; those who have started meanwhile are free then."""
        calls = [*self._starting, *running]
        done, _ = self._ray.wait(calls, num_returns=1, timeout=_SECONDS_UNTIL_TOLD)
        if not done:
            if not any(node["Alive"] for node in self._ray.nodes()):
                raise LlmcondError(
                    "Ray has died. What was stored before is kept: run the same command again."
                )
            if not (running or self._told):
                log.info("there is no room for an actor yet; waiting for it")
                self._told = True
        for reference in done:
            hired = self._starting.pop(reference, None)
            if hired is not None and self._answer(hired, reference) is not None:
                self._free.extend([hired] * _AHEAD)
        return [reference for reference in done if reference in running]

    def _answer(self, hired: _Hired, reference: Any) -> _Answer | None:
        """Return what a call gave; None if its actor died, which is then replaced.

        Raises:
            LlmcondError: the call raised it, or actors die again and again.
        """
        try:
            answer: _Answer = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError:  # an error of the program
            raise
        except self._ray.exceptions.RayError as error:
            if hired in self._alive:  # its calls fail one by one
                self._alive.remove(hired)
                self._free = deque(own for own in self._free if own is not hired)
                self._deaths_in_a_row += 1
                if self._deaths_in_a_row > _MOST_DEATHS + self.size:
                    raise LlmcondError(
                        f"{self._deaths_in_a_row} actors died one after the other: "
                        f"{_why(error)} What was stored before is kept."
                    ) from error
                log.warning(f"an actor died; another takes its place: {_why(error)}")
                self._start()
            return None
        if answer.error is not None:
            kind, message = answer.error
            raise kind(message)
        return answer

    def close(self) -> None:
        """End the actors, whatever they are at."""
        for hired in self._alive:
            self._ray.kill(hired.handle)


@dataclass(eq=False, frozen=True, slots=True)
class _Hired:
    """An actor of the pool."""

    handle: Any


class _Answer(NamedTuple):
    """A result, or the kind and message of an error that is meant for people."""

    result: Any = None
    error: tuple[type[LlmcondError], str] | None = None


class _Actor:
    """What runs in a process of Ray: code of the user's own is loaded as it was by the driver."""

    def __init__(self, factory: Any, args: tuple[Any, ...], plugins: Sequence[str]) -> None:
        self._factory, self._args, self._plugins = factory, args, plugins
        self._worker: Any = None

    def start(self) -> _Answer:
        """Make the worker."""

        def make() -> None:
            for name in self._plugins:
                load(name)
            self._worker = self._factory(*self._args)

        return _answered(make)

    def work(self, item: Any) -> _Answer:
        """Give an item to the worker."""
        return _answered(lambda: self._worker.work(item))


def _why(error: Exception) -> str:
    """Return what an actor died of: the end of Ray's report, where its code could not be loaded."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip() if "creation task" in lines[0] else lines[0]


def _checked(deaths: int) -> int:
    if deaths == _MOST_DEATHS:
        raise LlmcondError(
            f"{deaths} actors died over one part of the work, so it was given up; what was stored "
            "before is kept. Ray's logs say why they died; often it is memory."
        )
    return deaths


def _answered(call: Callable[[], Any]) -> _Answer:
    """Return what a call gives. Errors travel as texts: not every one can be rebuilt elsewhere."""
    try:
        return _Answer(call())
    except (LlmcondError, OSError) as error:
        wrong = isinstance(error, UserError | PermissionError)
        return _Answer(error=(UserError if wrong else LlmcondError, str(error)))


@contextmanager
def _connected(cluster: Cluster) -> Iterator[Any]:
    """Yield the module ``ray``, connected; a connection of the caller's own is taken, and left."""
    # Read when Ray is imported: actors without GPUs do not see any, and nothing is reported home.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(f"--scale ray needs Ray: {install_command('ray')}.") from error
    if ray.is_initialized():
        yield ray
        return
    folder = _own_folder() if cluster.address is None else None
    try:
        if cluster.address is not None:
            _connect(ray, cluster.address)
        if folder is not None:
            _start(ray, cluster.actors, folder)
        yield ray
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _connect(ray: Any, address: str) -> None:
    try:
        _check_reachable(address)
        _init(ray, address=address)
    except Exception as error:  # of several kinds, none of them documented
        why = " ".join(str(error).split())  # of other versions it tells in several lines
        raise UserError(
            f"there is no Ray cluster to use at {address}: {why}. Start one with `ray start "
            "--head`, or leave out --address; for one that asks for a token, set "
            "RAY_AUTH_MODE=token."
        ) from error


def _start(ray: Any, cores: int | None, folder: Path) -> None:
    if not any(name.startswith("RAY_AUTH_") for name in os.environ):
        # Ray would keep a token in the home folder, which clusters started later then ask for.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    with warnings.catch_warnings():
        # Ray forks to start its programs, which do not use Lance.
        warnings.filterwarnings("ignore", "lance is not fork-safe")
        try:
            _init(
                ray,
                address="local",
                num_cpus=cores,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE,
                _temp_dir=str(folder),
            )
        except Exception as error:  # likewise
            raise LlmcondError(
                f"Ray cannot be started here: {first_line(error)}. Run the same command again; "
                "without --scale it needs no Ray."
            ) from error


def _init(ray: Any, **options: Any) -> None:
    """Start Ray or connect to it, and give SIGTERM back, which it answers by a trace of its C++."""
    before, terminated = signal.getsignal(signal.SIGTERM), False
    try:
        ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
    except SystemExit:  # by what Ray makes of the signal
        terminated = True
    finally:
        main = threading.current_thread() is threading.main_thread()
        if main and before is not None:
            signal.signal(signal.SIGTERM, before)
    if terminated:
        signal.raise_signal(signal.SIGTERM)


def _check_reachable(address: str) -> None:
    """Raise an OSError, or ValueError, unless someone listens; Ray itself tries for minutes."""
    if address != "auto":
        host, _, port = address.rpartition("/")[2].rpartition(":")
        if not (host and port.isdecimal()):
            raise ValueError("expected HOST:PORT, or auto")
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def _own_folder() -> Path:
    """Return a new folder for a Ray that is started here, without those that kills have left."""
    # Paths of sockets are short: below the folder that TMPDIR names they may be too long.
    short = Path("/tmp")  # noqa: S108
    home = short if short.is_dir() else Path(tempfile.gettempdir())
    for old in home.glob(f"{_FOLDER}*"):
        with suppress(ValueError, PermissionError):
            process = int(old.name.removeprefix(_FOLDER))
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                shutil.rmtree(old, ignore_errors=True)
    return home / f"{_FOLDER}{os.getpid()}"


def _count(cluster: Cluster, ray: Any) -> int:
    """Return how many actors there will be; a UserError where there can be none."""
    has, kind = ray.cluster_resources(), "GPU" if cluster.gpus_per_actor else "CPU"
    room = int(has.get(kind, 0) / (cluster.gpus_per_actor or 1))
    if cluster.actors is not None and (room or cluster.address):
        # A cluster may grow.
        return cluster.actors
    if not room:
        where = f"the cluster at {cluster.address}" if cluster.address else "this machine"
        raise UserError(
            f"{where} has {has.get(kind, 0):g} {kind}s, and each actor needs "
            f"{cluster.gpus_per_actor or 1:g}."
        )
    return room
