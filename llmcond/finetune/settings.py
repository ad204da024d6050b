"""How an encoder is trained."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from llmcond.config import STRICT

SCHEDULES = ("linear", "cosine", "constant")

#: Beyond any use.
_LARGEST = 1_000_000


def usual_rate(rank: int) -> float:
    """Return the learning rate that an encoder has by default: of LoRA, or for rank 0 of it all."""
    # All weights move at once, so each has less far to go.
    return 1e-3 if rank else 5e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """How an encoder is trained; the head's learning rate and dropout are those of its recipe.

    Attributes:
        rank: r of LoRA (arXiv 2106.09685, section 4.1); 0: every weight of the encoder is trained.
        alpha: its scale is alpha / rank.
        target: which projections get an adapter: ``auto`` (all of attention and MLP),
            ``attention``, ``mlp``, or names such as ``q_proj``.
        adapter_dropout: share of the adapters' inputs that is dropped.
        encoder_dropout: whether the encoder's own dropout is on, where its config has one. Packed
            rows have none on attention weights.
        learning_rate: of the encoder.
        weight_decay: of the encoder's matrices, decoupled, as AdamW has it.
        batch_size: rated rows a step, over all processes and accumulated parts.
        epochs: at most.
        warmup: share of the steps in which the learning rates rise from 0.
        schedule: how they fall then: ``linear`` or ``cosine`` to 0, or ``constant``.
        clip: largest norm of all gradients together; 0: they are not clipped, as in the released
            code of C-STS and Hyper-CL.
        accumulate: parts that a step's rows are computed in, one after the other. Objectives that
            compare rows compare those of a part.
        average: decay of a running average of the weights, which is what is scored and kept; 0: the
            weights themselves are.
        patience: evaluations without a better dev score before training stops.
        evaluations: on dev, in each epoch.
        checkpoint_steps: steps between two checkpoints; there is one at each evaluation too.
        gradient_checkpointing: whether activations are computed again for gradients, not kept.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    rank: int = 16
    alpha: float = 32.0
    target: tuple[str, ...] = ("auto",)
    adapter_dropout: float = 0.0
    encoder_dropout: bool = True
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    batch_size: int = 64
    epochs: int = 4
    warmup: float = 0.06
    schedule: str = "linear"
    clip: float = 1.0
    accumulate: int = 1
    average: float = 0.0
    patience: int = 3
    evaluations: int = 1
    checkpoint_steps: int = 200
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        """Refuse values that no training can have."""
        for name in (
            "batch_size",
            "epochs",
            "accumulate",
            "patience",
            "evaluations",
            "checkpoint_steps",
        ):
            _check(name, getattr(self, name), 1, _LARGEST)
        _check("rank", self.rank, 0, 65_536)
        _check("alpha", self.alpha, 0, _LARGEST, above=True)
        _check("learning_rate", self.learning_rate, 0, 100, above=True)
        for name in ("weight_decay", "clip"):
            _check(name, getattr(self, name), 0, _LARGEST)
        for name in ("adapter_dropout", "average", "warmup"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} is {value:g}; it must be at least 0 and below 1")
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule is {self.schedule!r}; it must be one of {', '.join(SCHEDULES)}"
            )
        if not self.target:
            raise ValueError("target names nothing; leave it out for all projections")

    @property
    def full(self) -> bool:
        """Tell whether every weight of the encoder is trained."""
        return self.rank == 0

    def rate(self, step: int, steps: int) -> float:
        """Return what learning rates are multiplied by at a step, of which there are ``steps``."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return (step + 1) / (rising + 1)
        if self.schedule == "constant":
            return 1.0
        done = (step - rising) / max(1, steps - rising)
        return 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2

    def to_json(self) -> dict[str, Any]:
        """Return the settings as records keep them."""
        return {**asdict(self), "target": list(self.target)}


def _check(name: str, value: float, least: float, most: float, *, above: bool = False) -> None:
    if not least <= value <= most or (above and value == least):  # NaN is refused too
        words = f"above {least:g}" if above else f"at least {least:g}"
        raise ValueError(f"{name} is {value:g}; it must be {words} and at most {most:,}")
