"""This process's place among those that a launcher, such as torchrun or accelerate, has started."""

from __future__ import annotations

import os


def local_rank() -> int:
    """Return the number of this process on this machine, 0 where nothing launched several."""
    value = os.environ.get("LOCAL_RANK", "")
    return int(value) if value.isdecimal() else 0
