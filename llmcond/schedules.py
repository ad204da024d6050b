"""Learning rate schedules of heads and encoders; this module imports nothing heavy."""

from __future__ import annotations

import math


def learning_rate_factor(step: int, steps: int, warmup: float, schedule: str = "linear") -> float:
    """Return the factor of the learning rate at a step.

    Args:
        step: the step, from 0.
        steps: total number of steps.
        warmup: share of the steps in which the factor rises linearly from 0.
        schedule: course after the warm-up: ``linear`` decay to 0, or ``constant``.
    """
    warmup_steps = math.ceil(warmup * steps)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    return 1 - (step - warmup_steps) / max(1, steps - warmup_steps)
