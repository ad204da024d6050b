"""Wait for an event, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds that a test waits for another thread or process. Only a failing test takes this long,
#: but on a busy machine starting a process can take minutes.
PATIENCE = 600.0


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds; fail after ``PATIENCE`` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.005)
