"""Actors of Ray that share some work: on the cores of this machine, or on a cluster."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
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
from contextlib import closing, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import psutil

from llmcond.errors import LlmcondError, UserError, first_line, install_command
from llmcond.log import log
from llmcond.plugins import load, loaded

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
#: The first Ray whose programs refuse clients without a token.
_OLDEST_RAY = (2, 52)
#: How often a Ray is started at most that needs longer than it allows.
_STARTS = 3


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
    """Yield actors, each with what ``factory(*args)`` gives it, whose ``work`` takes an item.

    Ray is started on this machine, or connected to, and left when the block ends.

    Raises:
        UserError: Ray is not installed, there is no cluster at the address, or this machine has
            less than was asked for.
    """
    # Ray tells on standard output of workers that died, where only results belong.
    with redirect_stdout(sys.stderr), connected(cluster) as ray:
        count = _count(cluster, ray)
        made_of = (factory, args, loaded())
        with closing(Pool[Any, Any](ray, count, cluster.gpus_per_actor, made_of)) as pool:
            yield pool


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
        self._alive: set[Any] = set()
        #: Those that start, by the call that ends then.
        self._starting: dict[Any, Any] = {}
        self._free: deque[Any] = deque()
        self._deaths_in_a_row = 0
        self._told = False
        for _ in range(count):
            self._start()

    def _start(self) -> None:
        actor = self._class.remote(*self._made_of)
        self._alive.add(actor)
        self._starting[actor.start.remote()] = actor

    def map(self, items: Iterable[_I]) -> Iterator[tuple[_I, _R]]:
        """Yield each item with its result, as they come; items are read when actors are free.

        Raises:
            LlmcondError: what a worker raised, or actors died again and again.
        """
        # Each item with how many actors died over it.
        waiting, again = ((item, 0) for item in items), deque[tuple[_I, int]]()
        running: dict[Any, tuple[Any, tuple[_I, int]]] = {}
        while True:
            ended = False
            while self._free and not ended:
                found = again.popleft() if again else next(waiting, None)
                ended = found is None
                if found is not None:
                    actor = self._free.popleft()
                    running[actor.work.remote(found[0])] = actor, found
            if ended and not running:
                return
            for reference in self._wait(running):
                actor, (item, deaths) = running.pop(reference)
                answer = self._answer(actor, reference)
                if answer is None:
                    if deaths + 1 == _MOST_DEATHS:
                        raise LlmcondError(
                            f"{_MOST_DEATHS} actors died over one part of the work, so it was "
                            "given up; what was stored before is kept. Ray's logs say why they "
                            "died; often it is memory."
                        )
                    again.append((item, deaths + 1))
                    continue
                self._deaths_in_a_row = 0
                if actor in self._alive:
                    self._free.append(actor)
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
            actor = self._starting.pop(reference, None)
            if actor is not None and self._answer(actor, reference) is not None:
                self._free.extend([actor] * _AHEAD)
        return [reference for reference in done if reference in running]

    def _answer(self, actor: Any, reference: Any) -> _Answer | None:
        """Return what a call gave; None if its actor died, which is then replaced.

        Raises:
            LlmcondError: the call raised it, or actors die again and again.
        """
        try:
            answer: _Answer = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError:  # an error of the program
            raise
        except self._ray.exceptions.RayError as error:
            if actor in self._alive:  # its calls fail one by one
                self._alive.remove(actor)
                self._free = deque(own for own in self._free if own != actor)
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
        for actor in self._alive:
            self._ray.kill(actor)


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


def _answered(call: Callable[[], Any]) -> _Answer:
    """Return what a call gives. Errors travel as texts: not every one can be rebuilt elsewhere."""
    try:
        return _Answer(call())
    except (LlmcondError, OSError) as error:
        wrong = isinstance(error, UserError | PermissionError)
        return _Answer(error=(UserError if wrong else LlmcondError, str(error)))


@contextmanager
def connected(cluster: Cluster) -> Iterator[Any]:
    """Yield the module ``ray``, connected; a connection of the caller's own is taken, and left."""
    _check_version()
    loaded_ray = sys.modules.get("ray")
    if loaded_ray is not None and loaded_ray.is_initialized():
        yield loaded_ray
        return
    # Read when Ray is imported: actors without GPUs do not see any, and nothing is reported home.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if cluster.address is None:
        _require_token()
    import ray

    folder = _own_folder() if cluster.address is None else None
    try:
        if folder is None:
            _connect(ray, str(cluster.address))
        else:
            _start(ray, cluster.actors, folder)
        yield ray
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _connect(ray: Any, address: str) -> None:
    try:
        if address != "auto":  # Ray itself tries for minutes
            host, _, port = address.rpartition("/")[2].rpartition(":")
            if not (host and port.isdecimal()):
                raise ValueError("expected HOST:PORT, or auto")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        _init(ray, address=address)
    except Exception as error:  # of several kinds, none of them documented
        why = " ".join(str(error).split())  # of other versions it tells in several lines
        raise UserError(
            f"there is no Ray cluster to use at {address}: {why}. Start one with `ray start "
            "--head`, or leave out --address; for one that asks for a token, set "
            "RAY_AUTH_MODE=token."
        ) from error


def _check_version() -> None:
    try:
        installed = version("ray")
    except PackageNotFoundError as error:
        raise UserError(f"--scale ray needs Ray: {install_command('ray')}.") from error
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < _OLDEST_RAY:
        raise UserError(
            f"--scale ray needs Ray {'.'.join(map(str, _OLDEST_RAY))} or newer, and {installed} is "
            "installed, which runs the code of anybody who reaches its ports. Upgrade it: "
            "pip install --upgrade ray"
        )


def _require_token() -> None:
    """Let the Ray that is started here refuse who does not have its token.

    Raises:
        UserError: the environment switches the token off.
    """
    mode = os.environ.get("RAY_AUTH_MODE") or "token"
    if mode.lower() != "token":
        raise UserError(
            f"RAY_AUTH_MODE is {mode!r}, so anybody who reaches a port of the Ray that is started "
            "here could run code. Unset it, or set it to token."
        )
    os.environ["RAY_AUTH_MODE"] = mode
    if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
        # Ray would keep a token in the home folder, which clusters started later then ask for.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _start(ray: Any, cores: int | None, folder: Path) -> None:
    if config := getattr(ray, "_raylet", None) and getattr(ray._raylet, "Config", None):
        config.initialize("")  # where Ray was imported before the token was asked for
    # Ray gives its helper programs 15 seconds, and has no setting for that. Where the machine is
    # busy, or reads their files for the first time, they need longer, and less once they ran.
    for left in reversed(range(_STARTS)):
        try:
            with _loopback_only():
                _init(
                    ray,
                    address="local",
                    num_cpus=cores,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE,
                    # A folder within, as Ray lets every user of the machine write to its own.
                    _temp_dir=str(folder / "ray"),
                )
            break
        except Exception as error:  # of several kinds, none of them documented
            _end_programs(folder)
            if left and "timed out" in str(error):
                log.info("Ray did not start in time; it is started again")
                continue
            reason = first_line(error).rstrip(".")
            raise LlmcondError(
                f"Ray cannot be started here: {reason}. Run the same command again; without "
                "--scale it needs no Ray."
            ) from error
    if not ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        log.warning(
            "this Ray listens on all network interfaces, where only its token keeps others out"
        )


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Let Ray listen on 127.0.0.1 alone, as it does by itself on macOS and Windows.

    A node that is given this address as its own replaces it by that of the network.
    """
    from ray._private import ray_constants

    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before, value = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(name)
    ray_constants.ENABLE_RAY_CLUSTER, os.environ[name] = False, "0"  # for this process, for others
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


def _end_programs(folder: Path) -> None:
    """End the programs of a Ray that did not start, which it leaves to the end of this process."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if str(folder) in " ".join(process.cmdline()):
                process.kill()


def _init(ray: Any, **options: Any) -> None:
    """Start Ray or connect to it, and give SIGTERM back, which it answers by a trace of its C++."""
    before = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()

    def restore() -> None:
        if main and before is not None:
            signal.signal(signal.SIGTERM, before)

    try:
        try:
            with warnings.catch_warnings():
                # Ray forks to start its programs, which do not use Lance.
                warnings.filterwarnings("ignore", "lance is not fork-safe")
                ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
        finally:
            restore()
    except SystemExit:  # what Ray makes of the signal, at the latest just before it is given back
        restore()
        signal.raise_signal(signal.SIGTERM)


def _own_folder() -> Path:
    """Return a new folder for a Ray that is started here, without those that kills have left.

    Only its owner can enter it: Ray's sockets within ask for no token.
    """
    # Paths of sockets are short: below the folder that TMPDIR names they may be too long.
    short = Path("/tmp")  # noqa: S108
    home = short if short.is_dir() else Path(tempfile.gettempdir())
    for old in home.glob(f"{_FOLDER}*"):
        with suppress(ValueError, PermissionError):
            process = int(old.name.removeprefix(_FOLDER).partition("-")[0])
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=home))


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
