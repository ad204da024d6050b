"""Interrupt and resume training."""

import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from llmcond.data.datasets import read_dataset
from llmcond.encoders import EncoderOptions, resolve
from llmcond.features.view import recipe_view
from llmcond.finetune.encoder import load_trainable, prepare_accelerator
from llmcond.finetune.loop import Trainer, TrainingState
from llmcond.finetune.model import BiEncoderModel, RatedInputs
from llmcond.finetune.settings import TuneSettings
from llmcond.heads import load_recipe
from llmcond.heads.settings import ObjectiveSettings
from llmcond.prompts import load_prompt

ON_CPU = EncoderOptions(dtype="float32", device="cpu", pooling="mean")


def build_trainer(
    model: Path,
    data: Path,
    folder: Path,
    dropout: float = 0.1,
    options: EncoderOptions = ON_CPU,
    **settings: Any,
) -> Trainer:
    """Return a trainer of an encoder and a hypernetwork, with InfoNCE and dropout."""
    tuning = TuneSettings(rank=4, batch_size=16, checkpoint_steps=3, **settings)
    resolved = resolve(str(model), options)
    trainable = load_trainable(resolved, tuning, seed=5)
    recipe = load_recipe("hypernet").with_settings(
        {"dim": 8, "rank": 2, "info_nce": 1.0, "dropout": dropout, "learning_rate": 1e-2}, "test"
    )
    view = recipe_view(recipe, [load_prompt("separate")], False)
    splits = read_dataset(str(data)).splits
    train, dev = (
        RatedInputs.from_rows(splits[s], view, trainable.tokenizer) for s in ("train", "dev")
    )
    tuned = BiEncoderModel(
        trainable.engine, recipe, ObjectiveSettings(info_nce=1.0), (32, 32), seed=5
    )
    state = TrainingState(folder, {"settings": asdict(tuning)})
    return Trainer(tuned, train, dev, tuning, prepare_accelerator(resolved), state)


class Stopped(Exception):  # noqa: N818 - it simulates a kill
    pass


def stop_after(trainer: Trainer, step: int) -> None:
    """Train up to a step, and stop there as if the process was killed."""

    def interrupt(progress, steps, loss):
        if progress.step == step:
            raise Stopped

    with pytest.raises(Stopped):
        trainer.run(interrupt)


def kill_in_step(count: int) -> None:
    """Make the process kill itself before its ``count``-th training step."""
    step, steps = Trainer._try_step, []

    def step_or_die(self, parts, number):
        steps.append(number)
        if len(steps) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, parts, number)

    Trainer._try_step = step_or_die


def resume_training(make: Callable[[], Trainer], step: int) -> Trainer:
    """Return a trainer that resumes an interrupted one; ``make`` creates both."""
    stop_after(make(), step)
    torch.rand(step)  # a new process has a different random state
    return make()
