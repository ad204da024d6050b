"""A process for each measurement, for the benchmarks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def alone(function: Callable[..., T], *arguments: object) -> T:
    """Return what a function gives in a process of its own, whose memory is only what it takes.

    Raises:
        BrokenProcessPool: the process was ended from outside, as where memory runs out.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()
