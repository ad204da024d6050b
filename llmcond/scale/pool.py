"""Ray actors that share the items of some work, on the cores of this machine or on a cluster."""

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
from llmcond.plugins import load, loaded_names

_I = TypeVar("_I")
_R = TypeVar("_R")

#: Number of items that an actor has at a time, so that the next one is ready when one is finished.
_QUEUE_LENGTH = 2
#: An item is given up after this number of actors have died while working on it.
_MAX_DEATHS = 5
#: Size in bytes of the object store of a local Ray. Results are small: vectors do not use it.
_OBJECT_STORE = 2**28
_SECONDS_UNTIL_LOGGED = 60
_CONNECT_SECONDS = 10
#: Prefix of the folders of local Rays; the id of the process follows.
_FOLDER = "llmcond-ray-"
#: First version of Ray whose programs reject clients without a token.
_OLDEST_RAY = (2, 52)
#: Number of attempts to start Ray, which fails if its start takes longer than it allows.
_STARTS = 3


@dataclass(frozen=True)
class RayCluster:
    """Where actors run, and how many.

    Attributes:
        address: address of a cluster, ``HOST:PORT``, or ``auto`` for the cluster that this machine
            belongs to; None: a local Ray is started, and stopped afterwards.
        actors: number of actors; None: one per core, or as many as share the GPUs.
        gpus_per_actor: number of GPUs per actor, possibly a fraction; 0: each actor computes on one
            CPU core.
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
def actor_pool(cluster: RayCluster, factory: Any, *args: Any) -> Iterator[ActorPool[Any, Any]]:
    """Yield a pool of actors, each with a worker ``factory(*args)`` whose ``work`` takes an item.

    Ray is started on this machine, or connected to, and left when the block ends.

    Raises:
        UserError: if Ray is not installed, there is no cluster at the address, or this machine has
            fewer cores or GPUs than requested.
    """
    # Ray reports workers that died on standard output, which must only contain results.
    with redirect_stdout(sys.stderr), connect_ray(cluster) as ray:
        count = _count_actors(cluster, ray)
        actor_args = (factory, args, loaded_names())
        with closing(ActorPool[Any, Any](ray, count, cluster.gpus_per_actor, actor_args)) as pool:
            yield pool


class ActorPool(Generic[_I, _R]):
    """A pool of identical actors.

    An actor that dies is replaced, and its items are given to the next actor that is free, also if
    the cluster has no room for a new one. So results must not depend on which actor computes them.
    """

    def __init__(self, ray: Any, count: int, gpus: float, actor_args: tuple[Any, ...]) -> None:
        self.size = count
        self._ray, self._actor_args = ray, actor_args
        self._class = ray.remote(_Actor).options(num_cpus=1, num_gpus=gpus)
        self._alive: set[Any] = set()
        #: Actors that are starting, by the reference of their call of `start`.
        self._starting: dict[Any, Any] = {}
        self._free: deque[Any] = deque()
        self._deaths_in_a_row = 0
        self._logged_waiting = False
        for _ in range(count):
            self._start()

    def _start(self) -> None:
        actor = self._class.remote(*self._actor_args)
        self._alive.add(actor)
        self._starting[actor.start.remote()] = actor

    def map(self, items: Iterable[_I]) -> Iterator[tuple[_I, _R]]:
        """Yield each item with its result, in order of completion.

        Items are read when actors are free.

        Raises:
            LlmcondError: if a worker raises it, or actors die repeatedly.
        """
        # Each item is paired with the number of actors that died while working on it.
        waiting, retries = ((item, 0) for item in items), deque[tuple[_I, int]]()
        running: dict[Any, tuple[Any, tuple[_I, int]]] = {}
        while True:
            exhausted = False
            while self._free and not exhausted:
                entry = retries.popleft() if retries else next(waiting, None)
                exhausted = entry is None
                if entry is not None:
                    actor = self._free.popleft()
                    running[actor.work.remote(entry[0])] = actor, entry
            if exhausted and not running:
                return
            for reference in self._wait(running):
                actor, (item, deaths) = running.pop(reference)
                answer = self._get_answer(actor, reference)
                if answer is None:
                    if deaths + 1 == _MAX_DEATHS:
                        raise LlmcondError(
                            f"{_MAX_DEATHS} actors died while working on the same part, so it was "
                            "given up. Earlier results are stored. See Ray's logs for the cause, "
                            "which is often a lack of memory."
                        )
                    retries.append((item, deaths + 1))
                    continue
                self._deaths_in_a_row = 0
                if actor in self._alive:
                    self._free.append(actor)
                yield item, answer.result

    def _wait(self, running: Mapping[Any, Any]) -> list[Any]:
        """Wait, and return calls that have ended; actors that have started become free."""
        calls = [*self._starting, *running]
        done, _ = self._ray.wait(calls, num_returns=1, timeout=_SECONDS_UNTIL_LOGGED)
        if not done:
            if not any(node["Alive"] for node in self._ray.nodes()):
                raise LlmcondError(
                    "Ray has died. Earlier results are stored: run the same command again."
                )
            if not (running or self._logged_waiting):
                log.info("the cluster has no room for an actor yet; waiting")
                self._logged_waiting = True
        for reference in done:
            actor = self._starting.pop(reference, None)
            if actor is not None and self._get_answer(actor, reference) is not None:
                self._free.extend([actor] * _QUEUE_LENGTH)
        return [reference for reference in done if reference in running]

    def _get_answer(self, actor: Any, reference: Any) -> _Answer | None:
        """Return the answer of a call; None if its actor died, which is then replaced.

        Raises:
            LlmcondError: if the call raised it, or actors die repeatedly.
        """
        try:
            answer: _Answer = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError:  # an error that the actor's code raised
            raise
        except self._ray.exceptions.RayError as error:
            if actor in self._alive:  # false if another call of the actor has failed before
                self._alive.remove(actor)
                self._free = deque(other for other in self._free if other != actor)
                self._deaths_in_a_row += 1
                if self._deaths_in_a_row > _MAX_DEATHS + self.size:
                    raise LlmcondError(
                        f"{self._deaths_in_a_row} actors died one after the other: "
                        f"{_find_cause(error)} Earlier results are stored."
                    ) from error
                log.warning(f"an actor died and is replaced: {_find_cause(error)}")
                self._start()
            return None
        if answer.error is not None:
            kind, message = answer.error
            raise kind(message)
        return answer

    def close(self) -> None:
        """End the actors at once, whatever they are working on."""
        for actor in self._alive:
            self._ray.kill(actor)


class _Answer(NamedTuple):
    """A result, or the type and message of an error that is meant for users."""

    result: Any = None
    error: tuple[type[LlmcondError], str] | None = None


class _Actor:
    """The code that runs in a Ray process; it loads the same plugins as the driver."""

    def __init__(self, factory: Any, args: tuple[Any, ...], plugins: Sequence[str]) -> None:
        self._factory, self._args, self._plugins = factory, args, plugins
        self._worker: Any = None

    def start(self) -> _Answer:
        """Create the worker."""

        def create() -> None:
            for name in self._plugins:
                load(name)
            self._worker = self._factory(*self._args)

        return _call_safely(create)

    def work(self, item: Any) -> _Answer:
        """Give an item to the worker."""
        return _call_safely(lambda: self._worker.work(item))


def _find_cause(error: Exception) -> str:
    """Return why an actor died: Ray reports it first, or last if code could not be loaded."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip() if "creation task" in lines[0] else lines[0]


def _call_safely(call: Callable[[], Any]) -> _Answer:
    """Call a function. Errors are returned as texts, because not all can be unpickled elsewhere."""
    try:
        return _Answer(call())
    except (LlmcondError, OSError) as error:
        is_user_error = isinstance(error, UserError | PermissionError)
        return _Answer(error=(UserError if is_user_error else LlmcondError, str(error)))


@contextmanager
def connect_ray(cluster: RayCluster) -> Iterator[Any]:
    """Yield the module ``ray``, connected. A connection of the caller is used, and kept open."""
    _check_version()
    loaded_ray = sys.modules.get("ray")
    if loaded_ray is not None and loaded_ray.is_initialized():
        yield loaded_ray
        return
    # Ray reads these when it is imported: actors without GPUs see none, and no usage is reported.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if cluster.address is None:
        _require_token()
    import ray

    folder = _create_folder() if cluster.address is None else None
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
        if address != "auto":  # Ray itself would retry for minutes
            host, _, port = address.rpartition("/")[2].rpartition(":")
            if not (host and port.isdecimal()):
                raise ValueError("expected HOST:PORT, or auto")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        _init(ray, address=address)
    except Exception as error:  # the types that Ray raises are not documented
        why = " ".join(str(error).split())  # a version mismatch is reported on several lines
        raise UserError(
            f"there is no usable Ray cluster at {address}: {why}. Start one with `ray start "
            "--head`, or omit --address. If the cluster requires a token, set "
            "RAY_AUTH_MODE=token."
        ) from error


def _check_version() -> None:
    try:
        installed = version("ray")
    except PackageNotFoundError as error:
        raise UserError(f"--scale ray needs Ray: {install_command('ray')}.") from error
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < _OLDEST_RAY:
        raise UserError(
            f"--scale ray needs Ray {'.'.join(map(str, _OLDEST_RAY))} or newer. The installed "
            f"{installed} runs code of anybody who can reach its ports. Upgrade it: "
            "pip install --upgrade ray"
        )


def _require_token() -> None:
    """Make the local Ray reject clients without its token.

    Raises:
        UserError: if the environment disables the token.
    """
    mode = os.environ.get("RAY_AUTH_MODE") or "token"
    if mode.lower() != "token":
        raise UserError(
            f"RAY_AUTH_MODE is {mode!r}, so anybody who can reach a port of the local Ray could "
            "run code. Unset it, or set it to token."
        )
    os.environ["RAY_AUTH_MODE"] = mode
    if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
        # Otherwise Ray would save a token in the home folder, and clusters that are started later
        # would require it.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _start(ray: Any, cores: int | None, folder: Path) -> None:
    if config := getattr(ray, "_raylet", None) and getattr(ray._raylet, "Config", None):
        config.initialize("")  # Ray may have been imported before the token was set
    # Ray gives its helper programs 15 seconds to start, and has no setting for that. On a busy
    # machine, or when their files are read for the first time, they need longer; a second attempt
    # is faster.
    for attempts_left in reversed(range(_STARTS)):
        try:
            with _loopback_only():
                _init(
                    ray,
                    address="local",
                    num_cpus=cores,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE,
                    # A subfolder, because Ray makes its folder writable for every user.
                    _temp_dir=str(folder / "ray"),
                )
            break
        except Exception as error:  # the types that Ray raises are not documented
            _kill_programs(folder)
            if attempts_left and "timed out" in str(error):
                log.info("Ray did not start in time; trying again")
                continue
            reason = first_line(error).rstrip(".")
            raise LlmcondError(
                f"Ray cannot be started on this machine: {reason}. Run the same command again, or "
                "omit --scale to work without Ray."
            ) from error
    if not ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        log.warning("the local Ray listens on all network interfaces, protected only by its token")


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Make Ray listen on 127.0.0.1 only, as it does by default on macOS and Windows.

    If a node is merely given this address, Ray replaces it by the address of the network.
    """
    from ray._private import ray_constants

    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before, value = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(name)
    ray_constants.ENABLE_RAY_CLUSTER, os.environ[name] = False, "0"  # this process; child processes
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


def _kill_programs(folder: Path) -> None:
    """End the programs of a Ray that failed to start, which would run until this process ends."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if str(folder) in " ".join(process.cmdline()):
                process.kill()


def _init(ray: Any, **options: Any) -> None:
    """Start Ray or connect to it, and restore the SIGTERM handler: Ray's prints a C++ trace."""
    before = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()

    def restore() -> None:
        if main and before is not None:
            signal.signal(signal.SIGTERM, before)

    try:
        try:
            with warnings.catch_warnings():
                # Ray forks to start its programs, but those do not use Lance.
                warnings.filterwarnings("ignore", "lance is not fork-safe")
                ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
        finally:
            restore()
    except SystemExit:  # Ray's handler raises it for a signal that arrives before `restore`
        restore()
        signal.raise_signal(signal.SIGTERM)


def _create_folder() -> Path:
    """Create a folder for a local Ray, and remove folders that killed processes have left.

    Only its owner can enter it, because Ray's sockets inside require no token.
    """
    # Socket paths have a small maximal length, and TMPDIR may name a long path.
    system_temp = Path("/tmp")  # noqa: S108
    parent = system_temp if system_temp.is_dir() else Path(tempfile.gettempdir())
    for leftover in parent.glob(f"{_FOLDER}*"):
        with suppress(ValueError, PermissionError):
            process = int(leftover.name.removeprefix(_FOLDER).partition("-")[0])
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                shutil.rmtree(leftover, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=parent))


def _count_actors(cluster: RayCluster, ray: Any) -> int:
    """Return the number of actors; raise a UserError if there is no room for any."""
    resources, kind = ray.cluster_resources(), "GPU" if cluster.gpus_per_actor else "CPU"
    capacity = int(resources.get(kind, 0) / (cluster.gpus_per_actor or 1))
    if cluster.actors is not None and (capacity or cluster.address):
        # A cluster may grow, so the capacity at present does not matter.
        return cluster.actors
    if not capacity:
        where = f"the cluster at {cluster.address}" if cluster.address else "this machine"
        raise UserError(
            f"{where} has {resources.get(kind, 0):g} {kind}s, but each actor needs "
            f"{cluster.gpus_per_actor or 1:g}."
        )
    return capacity
