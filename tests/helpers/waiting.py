"""Waiting for what is bound to come, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds that a test waits for another thread or process. Only a test that fails takes so long: on
#: a busy machine, starting a process can take minutes.
PATIENCE = 600.0


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until something holds; fail if it never does."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)
