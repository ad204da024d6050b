"""Workers that share the items of some work: processes of this machine, or actors of a cluster."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from llmcond.base.errors import LlmcondError, UserError, install_command
from llmcond.base.output import log
from llmcond.base.package import load, loaded_names
from llmcond.base.system import cpu_threads, follow_parent, limit_cpu_threads, process_context

if TYPE_CHECKING:
    from llmcond.encoders import ResolvedEncoder

_I = TypeVar("_I")
_R = TypeVar("_R")

#: Number of items that a worker has at a time, so that the next one is ready when one is finished.
_QUEUE_LENGTH = 2
#: An item is given up after this number of workers have died while working on it.
_MAX_DEATHS = 5
_SECONDS_UNTIL_LOGGED = 60
_CONNECT_SECONDS = 10
#: First version of Ray whose programs reject clients without a token.
_OLDEST_RAY = (2, 52)


@dataclass(frozen=True)
class Workers:
    """Where workers run, and how many.

    Attributes:
        count: number of workers; None, on a cluster: one per core, or as many as share the GPUs.
        address: address of a Ray cluster, ``HOST:PORT``, or ``auto`` for the cluster that this
            machine belongs to; None: the workers are processes of this machine.
        gpus_each: number of GPUs per worker, on a cluster possibly a fraction; 0: on this machine,
            each worker computes on its share of the cores, and on a cluster on one core.
    """

    count: int | None = None
    address: str | None = None
    gpus_each: float = 0.0

    @property
    def is_local(self) -> bool:
        """Whether the workers are processes of this machine."""
        return self.address is None


def assign_devices(workers: Workers | None, resolved: ResolvedEncoder) -> Workers | None:
    """Return workers with a GPU each, if they run on this machine and the encoder does on a GPU.

    Raises:
        UserError: this machine has fewer devices than workers.
    """
    if workers is None or not workers.is_local:
        return workers
    import torch

    gpus = resolved.device != "cpu"
    count = torch.cuda.device_count() if gpus else torch.get_num_threads()
    if (workers.count or 1) > count:
        raise UserError(
            f"workers is {workers.count}, but each worker needs one of the {count} "
            f"{'GPUs' if gpus else 'cores'} that PyTorch finds. Lower --workers."
        )
    return replace(workers, gpus_each=float(gpus))


@contextmanager
def worker_pool(workers: Workers, factory: Any, *args: Any) -> Iterator[WorkerPool[Any, Any]]:
    """Yield a pool of workers, each an object ``factory(*args)`` whose ``work`` takes an item.

    Raises:
        UserError: if Ray is not installed, there is no cluster at the address, or it has too few
            cores or GPUs.
    """
    setup = (factory, args, loaded_names())
    if workers.is_local:
        count = workers.count or 1
        threads = None if workers.gpus_each else max(1, cpu_threads() // count)
        context = process_context("llmcond.encoders.encoder")
        gpus = list_gpus() if workers.gpus_each else [None]

        def start_process(number: int) -> _Process:
            return _Process(context, gpus[number % len(gpus)], (*setup, threads))

        with closing(WorkerPool[Any, Any](start_process, count)) as pool:
            yield pool
        return
    # Ray reports workers that died on standard output, which must only contain results.
    with redirect_stdout(sys.stderr), connect_ray(str(workers.address)) as ray:
        one_core = None if workers.gpus_each else 1

        def start_actor(number: int) -> _Actor:
            return _Actor(ray, workers.gpus_each, (*setup, one_core))

        with closing(WorkerPool[Any, Any](start_actor, _count_actors(workers, ray))) as pool:
            yield pool


class _Process:
    """A worker in a process of this machine, which ends with this process."""

    def __init__(self, context: Any, gpu: str | None, setup: tuple[Any, ...]) -> None:
        receiver, self._sender = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(
            1, context, initializer=_start_process, initargs=(receiver, gpu, setup)
        )

    def call(self, method: str, *args: Any) -> Future[_Answer]:
        return self._executor.submit(_call_in_process, method, *args)

    def kill(self) -> None:
        self._sender.close()
        self._executor.shutdown(cancel_futures=True)

    def find_death(self, error: Exception) -> str | None:
        """Return why the process died; None if the error has another cause."""
        is_death = isinstance(error, BrokenProcessPool)
        return "its process was killed, perhaps because memory ran out." if is_death else None

    def check_alive(self) -> None:
        """Do nothing: this machine is alive."""


_worker_of_process: _Worker | None = None


def _start_process(parent: Connection, gpu: str | None, setup: tuple[Any, ...]) -> None:
    global _worker_of_process  # noqa: PLW0603 - it belongs to the process
    follow_parent(parent)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    _worker_of_process = _Worker(*setup)


def _call_in_process(method: str, *args: Any) -> _Answer:
    answer: _Answer = getattr(_worker_of_process, method)(*args)
    return answer


def list_gpus() -> list[str]:
    """Return the names of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES has them."""
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return names.split(",") if names else [str(n) for n in range(torch.cuda.device_count())]


class _Actor:
    """A worker in an actor of a Ray cluster."""

    def __init__(self, ray: Any, gpus: float, setup: tuple[Any, ...]) -> None:
        self._ray = ray
        self._actor = ray.remote(_Worker).options(num_cpus=1, num_gpus=gpus).remote(*setup)

    def call(self, method: str, *args: Any) -> Future[_Answer]:
        future: Future[_Answer] = getattr(self._actor, method).remote(*args).future()
        return future

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def find_death(self, error: Exception) -> str | None:
        """Return why the actor died: Ray reports it first, or last if code could not be loaded."""
        errors = self._ray.exceptions
        if not isinstance(error, errors.RayError) or isinstance(error, errors.RayTaskError):
            return None
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[-1].strip() if "creation task" in lines[0] else lines[0]

    def check_alive(self) -> None:
        if not any(node["Alive"] for node in self._ray.nodes()):
            raise LlmcondError(
                "Ray has died. Earlier results are stored: run the same command again."
            )


class WorkerPool(Generic[_I, _R]):
    """A pool of identical workers.

    A worker that dies is replaced, and its items are given to the next worker that is free, also if
    the cluster has no room for a new one. So results must not depend on which worker computes them.
    """

    def __init__(self, start: Callable[[int], _Process | _Actor], count: int) -> None:
        self.size = count
        self._start_worker = start
        #: The number of each worker that is alive.
        self._alive: dict[Any, int] = {}
        #: Workers that are starting, by their call of `start`.
        self._starting: dict[Future[_Answer], Any] = {}
        self._free: deque[Any] = deque()
        self._deaths_in_a_row = 0
        self._logged_waiting = False
        for number in range(count):
            self._start(number)

    def _start(self, number: int) -> None:
        worker = self._start_worker(number)
        self._alive[worker] = number
        self._starting[worker.call("start")] = worker

    def map(self, items: Iterable[_I]) -> Iterator[tuple[_I, _R]]:
        """Yield each item with its result, in order of completion.

        Items are read when workers are free.

        Raises:
            LlmcondError: if a worker raises it, or workers die repeatedly.
        """
        # Each item is paired with the number of workers that died while working on it.
        waiting, retries = ((item, 0) for item in items), deque[tuple[_I, int]]()
        running: dict[Future[_Answer], tuple[Any, tuple[_I, int]]] = {}
        while True:
            exhausted = False
            while self._free and not exhausted:
                entry = retries.popleft() if retries else next(waiting, None)
                exhausted = entry is None
                if entry is not None:
                    worker = self._free.popleft()
                    try:
                        running[worker.call("work", entry[0])] = worker, entry
                    except BrokenProcessPool as error:  # it has died since its last item
                        retries.append(entry)
                        self._replace(worker, error)
            if exhausted and not running:
                return
            for future in self._wait(running):
                worker, (item, deaths) = running.pop(future)
                answer = self._get_answer(worker, future)
                if answer is None:
                    if deaths + 1 == _MAX_DEATHS:
                        raise LlmcondError(
                            f"{_MAX_DEATHS} workers died while working on the same part, so it was "
                            "given up, perhaps for a lack of memory. Earlier results are stored."
                        )
                    retries.append((item, deaths + 1))
                    continue
                self._deaths_in_a_row = 0
                if worker in self._alive:
                    self._free.append(worker)
                yield item, answer.result

    def _wait(self, running: Mapping[Future[_Answer], Any]) -> list[Future[_Answer]]:
        """Wait, and return calls that have ended; workers that have started become free."""
        calls = [*self._starting, *running]
        done, _ = wait(calls, _SECONDS_UNTIL_LOGGED, FIRST_COMPLETED)
        if not done:
            next(iter(self._alive)).check_alive()
            if not (running or self._logged_waiting):
                log.info("no worker has started yet; waiting")
                self._logged_waiting = True
        for future in done:
            worker = self._starting.pop(future, None)
            if worker is not None and self._get_answer(worker, future) is not None:
                self._free.extend([worker] * _QUEUE_LENGTH)
        return [future for future in done if future in running]

    def _get_answer(self, worker: Any, future: Future[_Answer]) -> _Answer | None:
        """Return the answer of a call; None if its worker died, which is then replaced.

        Raises:
            LlmcondError: if the call raised it, or workers die repeatedly.
        """
        try:
            answer = future.result()
        except Exception as error:  # the types that Ray raises are not documented
            self._replace(worker, error)
            return None
        if answer.error is not None:
            kind, message = answer.error
            raise kind(message)
        return answer

    def _replace(self, worker: Any, error: Exception) -> None:
        """Replace a worker that died; raise an error that has another cause."""
        cause = worker.find_death(error)
        if cause is None:
            raise error
        if worker not in self._alive:  # another call of the worker has failed before
            return
        number = self._alive.pop(worker)
        self._free = deque(other for other in self._free if other != worker)
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > _MAX_DEATHS + self.size:
            raise LlmcondError(
                f"{self._deaths_in_a_row} workers died one after the other: {cause} Earlier "
                "results are stored."
            ) from error
        log.warning(f"a worker died and is replaced: {cause}")
        self._start(number)

    def close(self) -> None:
        """End the workers at once, whatever they are working on."""
        for worker in self._alive:
            worker.kill()


class _Answer(NamedTuple):
    """A result, or the type and message of an error that is meant for users."""

    result: Any = None
    error: tuple[type[LlmcondError], str] | None = None


class _Worker:
    """The code that runs in another process; it loads the same plugins as the driver."""

    def __init__(
        self, factory: Any, args: tuple[Any, ...], plugins: Sequence[str], threads: int | None
    ) -> None:
        self._factory, self._args = factory, args
        self._plugins, self._threads = plugins, threads
        self._worker: Any = None

    def start(self) -> _Answer:
        """Create the worker."""

        def create() -> None:
            if self._threads is not None:
                limit_cpu_threads(self._threads)
            for name in self._plugins:
                load(name)
            self._worker = self._factory(*self._args)

        return _call_safely(create)

    def work(self, item: Any) -> _Answer:
        """Give an item to the worker."""
        return _call_safely(lambda: self._worker.work(item))


def _call_safely(call: Callable[[], Any]) -> _Answer:
    """Call a function. Errors are returned as texts, because not all can be unpickled elsewhere."""
    try:
        return _Answer(call())
    except (LlmcondError, OSError) as error:
        is_user_error = isinstance(error, UserError | PermissionError)
        return _Answer(error=(UserError if is_user_error else LlmcondError, str(error)))


# -- Ray ---------------------------------------------------------------------------------------


@contextmanager
def connect_ray(address: str) -> Iterator[Any]:
    """Yield the module ``ray``, connected. A connection of the caller is used, and kept open."""
    _check_version()
    loaded_ray = sys.modules.get("ray")
    if loaded_ray is not None and loaded_ray.is_initialized():
        yield loaded_ray
        return
    # Ray reads these when it is imported: actors without GPUs see none, and no usage is reported.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    try:
        _connect(ray, address)
        yield ray
    finally:
        ray.shutdown()


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


def _connect(ray: Any, address: str) -> None:
    """Connect to a cluster, and restore the SIGTERM handler: Ray's prints a C++ trace."""
    before = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()

    def restore() -> None:
        if main and before is not None:
            signal.signal(signal.SIGTERM, before)

    try:
        if address != "auto":  # Ray itself would retry for minutes
            host, _, port = address.rpartition("/")[2].rpartition(":")
            if not (host and port.isdecimal()):
                raise ValueError("expected HOST:PORT, or auto")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        with warnings.catch_warnings():
            # Ray forks to start its programs, but those do not use Lance.
            warnings.filterwarnings("ignore", "lance is not fork-safe")
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except SystemExit:  # Ray's handler raises it for a signal that arrives before `restore`
        restore()
        signal.raise_signal(signal.SIGTERM)
    except Exception as error:  # the types that Ray raises are not documented
        why = " ".join(str(error).split())  # a version mismatch is reported on several lines
        raise UserError(
            f"there is no usable Ray cluster at {address}: {why}. Start one with `ray start "
            "--head`, or share the work of this machine with --workers N. If the cluster requires "
            "a token, set RAY_AUTH_MODE=token."
        ) from error
    finally:
        restore()


def _count_actors(workers: Workers, ray: Any) -> int:
    """Return the number of actors; raise a UserError if there is no room for any."""
    if workers.count is not None:
        return workers.count  # a cluster may grow, so its capacity at present does not matter
    resources, kind = ray.cluster_resources(), "GPU" if workers.gpus_each else "CPU"
    capacity = int(resources.get(kind, 0) / (workers.gpus_each or 1))
    if not capacity:
        raise UserError(
            f"the cluster at {workers.address} has {resources.get(kind, 0):g} {kind}s, but each "
            f"actor needs {workers.gpus_each or 1:g}."
        )
    return capacity
