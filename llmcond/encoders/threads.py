"""Worker threads that encode concurrently.

While one thread tokenises, pools or writes, another computes. On a CPU, two threads that use half
of the cores each are faster than one thread that uses all of them, because fewer cores wait for
each other at every matrix product.
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
    """Raised in a worker thread whose results are no longer needed."""


def check_cancelled() -> None:
    """Raise a ``CancelledError`` if the work of the calling worker thread was cancelled."""
    cancelled: threading.Event | None = getattr(_worker, "cancelled", None)
    if cancelled is not None and cancelled.is_set():
        raise CancelledError("the extraction was stopped.")


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Number of threads that run an encoder, and of cores for each of them.

    Attributes:
        threads: worker threads.
        cores: PyTorch threads of each worker thread.
    """

    threads: int
    cores: int

    @classmethod
    def for_encoder(cls, resolved: ResolvedEncoder) -> Concurrency:
        """Choose the numbers for an encoder."""
        cores = cpu_threads()
        if resolved.device != "cpu" or resolved.runtime == "openvino":
            # One thread prepares and stores what the other computes. More are not needed: a GPU
            # runs one batch at a time, and OpenVINO shares the cores among all batches.
            return cls(min(2, cores) if resolved.device == "cpu" else 2, cores)
        # bitsandbytes stores its current state in the layers, so they are not thread-safe.
        threads = 1 if resolved.identity.quantize != "none" else min(cores, _MAX_THREADS)
        return cls(threads, cores // threads)


class WorkerThreads:
    """A fixed number of threads that share the cores; they start at their first use."""

    def __init__(self, concurrency: Concurrency) -> None:
        self.concurrency = concurrency
        self._executor: ThreadPoolExecutor | None = None
        self._start_lock = threading.Lock()

    def map(
        self, function: Callable[[_Item], _Result], items: Iterable[_Item]
    ) -> Iterator[_Result]:
        """Yield ``function(item)`` for each item, in order.

        Only a few calls run ahead of the results. If a call raises, the calls that have begun are
        finished first. If the caller stops iterating, they are cancelled; see ``check_cancelled``.
        """
        executor = self._get_executor()
        cancelled = threading.Event()

        def work(item: _Item) -> _Result:
            _worker.cancelled = cancelled
            return function(item)

        pending: deque[Future[_Result]] = deque()
        try:
            for item in items:
                pending.append(executor.submit(work, item))
                if len(pending) > self.concurrency.threads:
                    yield _pop_first(pending)
            while pending:
                yield _pop_first(pending)
        except BaseException as error:
            if not isinstance(error, Exception):
                cancelled.set()
            # Cancel all futures before waiting for any: otherwise a free thread would begin the
            # next one meanwhile.
            for future in [future for future in pending if not future.cancel()]:
                future.exception()
            raise

    def close(self) -> None:
        """Stop the threads after their current calls."""
        if self._executor is not None:
            self._executor.shutdown()

    def _get_executor(self) -> ThreadPoolExecutor:
        count = self.concurrency.threads
        with self._start_lock:
            if self._executor is None:
                torch: Any = sys.modules.get("torch")
                if torch is None:  # another library computes, and manages its threads itself
                    self._executor = ThreadPoolExecutor(count, "llmcond-encode")
                    return self._executor
                cores = torch.get_num_threads()
                self._executor = ThreadPoolExecutor(count, "llmcond-encode", self._init_worker)
                # The number that a worker sets also becomes PyTorch's number for threads that
                # start later. Wait until all workers have set theirs, then restore it.
                ready = threading.Barrier(count + 1)
                for _ in range(count):
                    self._executor.submit(ready.wait)
                ready.wait()
                torch.set_num_threads(cores)
            return self._executor

    def _init_worker(self) -> None:
        import torch

        # A thread adopts PyTorch's global number when it first computes, unless it has read it
        # before.
        torch.get_num_threads()
        torch.set_num_threads(self.concurrency.cores)


def _pop_first(pending: deque[Future[_Result]]) -> _Result:
    # Remove the future only after its result has arrived: if an interrupt comes meanwhile, it must
    # still be among the pending ones.
    result = pending[0].result()
    pending.popleft()
    return result
