"""Worker threads that encode concurrently.

While one of them tokenises, pools or writes, another computes. On a CPU, two that compute with half
of the cores each are faster than one with all: cores do not wait for each other at every product.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from llmcond.errors import LlmcondError
from llmcond.system import cpu_threads

if TYPE_CHECKING:
    from llmcond.encoders.resolve import ResolvedEncoder

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_MAX_THREADS = 8
_worker = threading.local()


class CancelledError(LlmcondError):
    """Work that was given up because its results are no longer wanted."""


def check_cancelled() -> None:
    """Raise a CancelledError if the work of the calling worker thread was cancelled."""
    cancelled: threading.Event | None = getattr(_worker, "cancelled", None)
    if cancelled is not None and cancelled.is_set():
        raise CancelledError("the extraction was stopped.")


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many threads run an encoder, and how many of PyTorch's threads each of them has."""

    threads: int
    cores: int

    @classmethod
    def of(cls, resolved: ResolvedEncoder) -> Concurrency:
        """Return what suits an encoder."""
        cores = cpu_threads()
        if resolved.device != "cpu" or resolved.runtime == "openvino":
            # One prepares and stores what the other computes. A GPU does one thing at a time, and
            # OpenVINO shares the cores among the batches of any thread.
            return cls(min(2, cores) if resolved.device == "cpu" else 2, cores)
        # bitsandbytes keeps what it is at in the layers themselves.
        threads = 1 if resolved.identity.quantize != "none" else min(cores, _MAX_THREADS)
        return cls(threads, cores // threads)


class WorkerThreads:
    """A fixed number of threads that share the cores; they start when they are first used."""

    def __init__(self, concurrency: Concurrency) -> None:
        self.concurrency = concurrency
        self._executor: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()

    def map(
        self, function: Callable[[_Item], _Result], items: Iterable[_Item]
    ) -> Iterator[_Result]:
        """Yield ``function`` of each item, in their order; few items ahead of the results.

        If a call raises, those that have begun are finished first. If the caller gives up, they
        are cancelled; see :func:`check_cancelled`.
        """
        executor = self._start()
        cancelled = threading.Event()

        def work(item: _Item) -> _Result:
            _worker.cancelled = cancelled
            return function(item)

        pending: deque[Future[_Result]] = deque()
        try:
            for item in items:
                pending.append(executor.submit(work, item))
                if len(pending) > self.concurrency.threads:
                    yield _first(pending)
            while pending:
                yield _first(pending)
        except BaseException as error:
            if not isinstance(error, Exception):
                cancelled.set()
            # Cancel all first: while one is waited for, a free thread would begin the next.
            for future in [future for future in pending if not future.cancel()]:
                future.exception()
            raise

    def close(self) -> None:
        """End the threads, once what they are at is done."""
        if self._executor is not None:
            self._executor.shutdown()

    def _start(self) -> ThreadPoolExecutor:
        count = self.concurrency.threads
        with self._starting:
            if self._executor is None:
                torch: Any = sys.modules.get("torch")
                if torch is None:  # then another library computes, which has threads of its own
                    self._executor = ThreadPoolExecutor(count, "llmcond-encode")
                    return self._executor
                cores = torch.get_num_threads()
                self._executor = ThreadPoolExecutor(count, "llmcond-encode", self._begin)
                # PyTorch also takes a thread's number of threads for that of threads to come:
                # wait until all workers have set theirs, and put it back.
                ready = threading.Barrier(count + 1)
                for _ in range(count):
                    self._executor.submit(ready.wait)
                ready.wait()
                torch.set_num_threads(cores)
            return self._executor

    def _begin(self) -> None:
        import torch

        # A thread takes PyTorch's number when it first computes, unless it has asked before.
        torch.get_num_threads()
        torch.set_num_threads(self.concurrency.cores)


def _first(pending: deque[Future[_Result]]) -> _Result:
    # Taken off only once it is there: an interrupt meanwhile must find it among those at work.
    result = pending[0].result()
    pending.popleft()
    return result
