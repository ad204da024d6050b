"""Run a measurement of a benchmark in a new process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_in_process(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a new process and return its result.

    The peak memory of that process is then the memory that this call alone needs.

    Raises:
        BrokenProcessPool: the process was killed, for example because memory ran out.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()
