"""Threads that encode side by side, so that nothing waits for anything else.

While one of them tokenises, pools or writes, another computes. On a CPU, two that compute with half
of the cores each are faster than one with all: cores do not wait for each other at every product.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from llmcond.errors import LlmcondError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_MOST = 8


class StoppedError(LlmcondError):
    """Work that was given up because it is no longer wanted."""


class Lanes:
    """A fixed number of threads that share the cores.

    Attributes:
        count: how many.
    """

    def __init__(self, count: int, threads: int) -> None:
        """Prepare lanes; their threads start when they are first used.

        Args:
            count: lanes.
            threads: cores that each computes with.
        """
        self.count = count
        self._threads = threads
        self._executor: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()
        self._mine = threading.local()

    @classmethod
    def of(cls, device: str, *, alone: bool = False) -> Lanes:
        """Return lanes for a device.

        Args:
            device: ``cpu`` or ``cuda:N``.
            alone: whether the network stands one forward pass at a time only.
        """
        cores = torch.get_num_threads()
        if device != "cpu":
            # One prepares and stores what the other computes; the device does one thing at a time.
            return cls(2, cores)
        count = 1 if alone else min(cores, _MOST)
        return cls(count, cores // count)

    @property
    def inside(self) -> bool:
        """Tell whether the calling thread is one of them."""
        return getattr(self._mine, "inside", False)

    def map(
        self, function: Callable[[_Item], _Result], items: Iterable[_Item]
    ) -> Iterator[_Result]:
        """Yield ``function`` of each item, in their order; few items ahead of the results.

        If a call raises, those that have begun are finished first. If the caller gives up, they
        are told to stop; see :meth:`check`.
        """
        executor = self._start()
        stopping = threading.Event()

        def work(item: _Item) -> _Result:
            self._mine.stopping = stopping
            return function(item)

        waiting: deque[Future[_Result]] = deque()
        try:
            for item in items:
                waiting.append(executor.submit(work, item))
                if len(waiting) > self.count:
                    yield _first(waiting)
            while waiting:
                yield _first(waiting)
        except Exception:
            _finish(waiting)
            raise
        except BaseException:
            stopping.set()
            _finish(waiting)
            raise

    def check(self) -> None:
        """Raise if work was told to stop; called between batches.

        Raises:
            StoppedError: it was.
        """
        stopping: threading.Event | None = getattr(self._mine, "stopping", None)
        if stopping is not None and stopping.is_set():
            raise StoppedError("the extraction was stopped.")

    def _start(self) -> ThreadPoolExecutor:
        with self._starting:
            if self._executor is None:
                threads = torch.get_num_threads()
                self._executor = ThreadPoolExecutor(
                    self.count, "llmcond-lane", initializer=self._begin
                )
                # PyTorch also takes a thread's number of threads for that of threads to come:
                # wait until all lanes have set theirs, and put it back.
                ready = threading.Barrier(self.count + 1)
                for _ in range(self.count):
                    self._executor.submit(ready.wait)
                ready.wait()
                torch.set_num_threads(threads)
            return self._executor

    def _begin(self) -> None:
        self._mine.inside = True
        # A thread takes PyTorch's number when it first computes, unless it has asked before.
        torch.get_num_threads()
        torch.set_num_threads(self._threads)


def _first(waiting: deque[Future[_Result]]) -> _Result:
    # Taken off only once it is there: an interrupt meanwhile must find it among those at work.
    result = waiting[0].result()
    waiting.popleft()
    return result


def _finish(futures: Iterable[Future[Any]]) -> None:
    # All first: while one is waited for, a lane that is free would begin the next.
    running = [future for future in futures if not future.cancel()]
    for future in running:
        future.exception()
