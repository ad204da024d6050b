"""Training on the stand-in for a GPU: LoRA and QLoRA, interrupted and resumed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.standin import StandIn
from helpers.training import build_trainer, resume_training

from llmcond.encoders import EncoderOptions

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("dtype", "quantize"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "4bit")]
)
def test_resumed_training_is_bit_identical(
    gpu: StandIn,
    tiny_checkpoint: Callable[..., Path],
    write_rows: Any,
    small_rows: Any,
    tmp_path: Path,
    dtype: Any,
    quantize: Any,
) -> None:
    if quantize != "none":
        pytest.importorskip("bitsandbytes")
    options = EncoderOptions(dtype=dtype, quantize=quantize, device="cuda", pooling="mean")
    model, data = tiny_checkpoint("mistral"), write_rows(small_rows)
    make_trainer = partial(
        build_trainer, model, data, options=options, epochs=1, adapter_dropout=0.1
    )
    uninterrupted = make_trainer(tmp_path / "whole")
    uninterrupted.run(lambda *_: None)
    expected = {
        name: value.detach().cpu()
        for name, value in uninterrupted.model.trained_parameters().items()
    }

    continued = resume_training(partial(make_trainer, tmp_path / "again"), 4)
    assert continued.progress.step == 3
    continued.run(lambda *_: None)

    assert continued.progress.curve == uninterrupted.progress.curve
    for name, value in continued.model.trained_parameters().items():
        assert value.is_cuda
        assert torch.equal(value.detach().cpu(), expected[name]), name


def test_losses_match_cpu(
    tiny_checkpoint: Callable[..., Path], write_rows: Any, small_rows: Any, tmp_path: Path
) -> None:
    model, data, losses = tiny_checkpoint("mistral"), write_rows(small_rows), []
    for device in ("cpu", "cuda"):
        options = EncoderOptions(dtype="float32", device=device, pooling="mean")
        step_losses: list[float] = []
        with StandIn() as gpu:
            settings = {"dropout": 0.0, "encoder_dropout": False, "epochs": 1}
            trainer = build_trainer(model, data, tmp_path / device, options=options, **settings)
            trainer.run(
                lambda _, steps, entry, step_losses=step_losses: step_losses.append(entry["loss"])
            )
            assert bool(gpu.n_launches) == (device == "cuda")
            unpinned = [line for line in gpu.unpinned if line.split(", ")[1].startswith("heads/")]
            assert not unpinned, gpu.report()
        losses.append(step_losses)
    assert len(losses[0]) > 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
