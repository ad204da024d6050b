"""Schedules of learning rates, for heads and encoders; nothing heavy is imported for them."""

from __future__ import annotations

import math


def scheduled(step: int, steps: int, warmup: float, schedule: str) -> float:
    """Return what learning rates are multiplied by at a step, of which there are ``steps``.

    They rise from 0 in a share ``warmup`` of the steps, and then fall to 0, ``linear`` or as a
    ``cosine``, or stay ``constant``.
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    if schedule == "constant":
        return 1.0
    done = (step - rising) / max(1, steps - rising)
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
