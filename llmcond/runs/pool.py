"""A pool of processes that share the cores of this machine and end with their parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from llmcond import plugins
from llmcond.errors import LlmcondError
from llmcond.log import log
from llmcond.progress import EVERY_SECONDS
from llmcond.system import process_context

T = TypeVar("T")


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def run_in_pool(
    work: Callable[..., T],
    calls: Iterable[Sequence[Any]],
    n_processes: int,
    prepare: Callable[..., None],
    *arguments: Any,
    preload: str,
    noun: str = "fits",
) -> Generator[T]:
    """Call a function in processes, and yield the results when they are done.

    The processes end when the generator is closed, even in the middle of a call.

    Args:
        work: function of a module.
        calls: arguments of each call.
        n_processes: number of processes, each with its share of the cores.
        prepare: function that each process calls first.
        arguments: arguments of ``prepare``. A queue gives each process another item.
        preload: module that the server of the processes imports once for all of them.
        noun: what the calls are, in messages.

    Raises:
        LlmcondError: a process was killed.
    """
    with _processes(n_processes, preload, prepare, arguments) as executor:
        futures = [executor.submit(work, *call) for call in calls]
        try:
            for future in iterate_completed(futures, noun):
                yield future.result()
        except BrokenProcessPool as error:
            raise LlmcondError(
                f"a worker process was killed, perhaps because memory ran out. Completed {noun} "
                "are saved. Run the same command again with fewer --workers."
            ) from error


def iterate_completed(
    futures: Sequence[Future[T]], noun: str = "fits", seconds: float = EVERY_SECONDS
) -> Iterator[Future[T]]:
    """Yield futures when they are done. Log the count if none completes for ``seconds``."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, seconds, FIRST_COMPLETED)
        if not done:
            n_done = len(futures) - len(waiting)
            log.info(f"{n_done:,} of {len(futures):,} {noun} are done")
        yield from done


@contextmanager
def _processes(
    count: int, preload: str, prepare: Callable[..., None], arguments: Sequence[Any]
) -> Iterator[ProcessPoolExecutor]:
    """Start processes that end with the block, even in the middle of a call."""
    context = process_context(preload)
    receiver, sender = context.Pipe(duplex=False)
    # Two processes that share cores are both several times slower. Libraries read the number of
    # threads when they are loaded, hence the environment variable.
    before, threads = os.environ.get("OMP_NUM_THREADS"), max(1, count_cores() // count)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    executor = ProcessPoolExecutor(
        count,
        context,
        initializer=_initialise,
        initargs=(plugins.loaded_names(), threads, receiver, prepare, arguments),
    )
    try:
        yield executor
        executor.shutdown()
    finally:
        sender.close()
        executor.shutdown(wait=False, cancel_futures=True)
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _initialise(
    plugin_names: Sequence[str],
    threads: int,
    parent_pipe: Connection,
    prepare: Callable[..., None],
    arguments: Sequence[Any],
) -> None:
    import torch

    # Only the parent process handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(parent_pipe,), daemon=True).start()
    torch.set_num_threads(threads)
    for name in plugin_names:
        plugins.load(name)
    prepare(*arguments)


def _exit_with_parent(parent_pipe: Connection) -> None:
    """End this process when the parent closes its end of the pipe, or is killed."""
    parent_pipe.poll(None)
    os._exit(1)
