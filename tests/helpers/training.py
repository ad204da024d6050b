"""Trainings that are stopped, and go on."""

from collections.abc import Callable

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from llmcond.finetune.loop import Trainer


def on_cpu() -> Accelerator:
    """Return what computes in float32, whatever precision an earlier training of a process had."""
    AcceleratorState._reset_state()
    return Accelerator(cpu=True)


class _Stopped(Exception):  # noqa: N818 - it stands for a kill
    pass


def stop_after(trainer: Trainer, step: int) -> None:
    """Train for so many steps, and stop as a kill does."""

    def interrupt(progress, steps, loss):
        if progress.step == step:
            raise _Stopped

    with pytest.raises(_Stopped):
        trainer.run(interrupt)


def resumed(make: Callable[[], Trainer], step: int) -> Trainer:
    """Return a trainer that goes on where another was stopped; both are made alike."""
    stop_after(make(), step)
    torch.rand(step)  # another process has other random numbers
    return make()
