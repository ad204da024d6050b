"""Fitting a supervised head on arrays: Adam, dropout, and the best epoch on dev."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from llmcond.config import STRICT
from llmcond.errors import UserError
from llmcond.heads.base import Fit, OnEpoch, PairArrays
from llmcond.heads.objectives import cosine_mse

Weights = Mapping[str, Tensor]
Dropout = Callable[[Tensor], Tensor]
#: (weights, features, dropout) -> embeddings
Forward = Callable[[Weights, Tensor, Dropout], Tensor]


#: Beyond any use, and below what overflows.
_LARGEST = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """What the recipe of any head trained by gradient may say.

    Attributes:
        dim: size k of the embeddings; at most that of the features.
        dropout: share of units dropped in training.
        learning_rate: of Adam.
        batch_size: rows a step.
        epochs: at most.
        patience: epochs without a better dev score before fitting stops.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    dim: int
    dropout: float
    learning_rate: float
    batch_size: int
    epochs: int
    patience: int

    def __post_init__(self) -> None:
        """Refuse values that no fit can have."""
        for name in ("dim", "batch_size", "epochs", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError("dropout must be at least 0 and below 1")
        if max(self.dim, self.batch_size) > _LARGEST:
            raise ValueError(f"dim and batch_size must be at most {_LARGEST:,}")
        if not self.learning_rate > 0:
            raise ValueError("learning_rate must be above 0")


@dataclass(frozen=True, slots=True)
class _Epoch:
    """The state after an epoch, and how good it is on dev (NaN without dev)."""

    number: int
    score: float
    weights: Weights


def train(
    shapes: Mapping[str, tuple[int, int]],
    forward: Forward,
    pairs: PairArrays,
    dev: PairArrays | None,
    settings: TrainingSettings,
    seed: int,
    on_epoch: OnEpoch,
) -> Fit:
    """Fit a head's weights; keep those of the epoch with the best Spearman correlation on dev.

    Every random number comes from one generator of our own, so the same seed gives the same head
    on the same machine.

    Args:
        shapes: (out, in) of each weight matrix.
        forward: applies the weights to features.
        pairs: what to fit on.
        dev: what chooses the epoch; without it the last one is kept.
        settings: learning rate, epochs and so on.
        seed: of initialisation, dropout and order.
        on_epoch: told of each epoch.

    Raises:
        UserError: the loss became NaN or infinite.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _initial(shape, generator) for name, shape in shapes.items()}
    optimiser = torch.optim.Adam(list(weights.values()), lr=settings.learning_rate)

    def dropout(values: Tensor) -> Tensor:
        keep = 1 - settings.dropout
        return values * torch.empty_like(values).bernoulli_(keep, generator=generator) / keep

    best = _Epoch(0, math.nan, weights)
    curve: list[dict[str, float | None]] = []
    for number in range(1, settings.epochs + 1):
        loss = _run_epoch(weights, forward, dropout, pairs, settings, optimiser, generator)
        if not math.isfinite(loss):
            raise UserError(
                f"the loss became {loss} in epoch {number}. Lower the learning rate: "
                f"--set learning_rate={settings.learning_rate / 10:g}"
            )
        score = math.nan if dev is None else dev_spearman(weights, forward, dev)
        defined = None if math.isnan(score) else score
        curve.append({"epoch": number, "loss": loss, "dev_spearman": defined})
        on_epoch(number, settings.epochs, score)
        # An undefined score (all embeddings alike) is never better than what there is.
        if dev is None or math.isnan(best.score) or score > best.score:
            copies = {name: weight.detach().clone() for name, weight in weights.items()}
            best = _Epoch(number, score, copies)
        elif number - best.number >= settings.patience:
            break
    chosen = dev is not None and not math.isnan(best.score)
    record = {
        "best_epoch": best.number,
        "selected_on": "dev" if chosen else None,
        "curve": curve,
    }
    notes = () if chosen or dev is None else (_UNDEFINED,)
    return Fit({name: weight.numpy() for name, weight in best.weights.items()}, record, notes)


_UNDEFINED = (
    "the dev score is undefined (all ratings or all predictions there are equal), so it chose no "
    "epoch: the last one is kept"
)


def _initial(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw weights from U(-1/sqrt(fan_in), 1/sqrt(fan_in)); fixed here, whatever libraries do."""
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator).requires_grad_()


def _batches(n: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    yield from torch.randperm(n, generator=generator).split(size)  # type: ignore[no-untyped-call]


def _run_epoch(
    weights: Weights,
    forward: Forward,
    dropout: Dropout,
    pairs: PairArrays,
    settings: TrainingSettings,
    optimiser: torch.optim.Optimizer,
    generator: torch.Generator,
) -> float:
    first, second = torch.from_numpy(pairs.first), torch.from_numpy(pairs.second)
    rating = torch.from_numpy(pairs.rating.astype(np.float32))
    total = torch.zeros(())
    for batch in _batches(len(pairs), settings.batch_size, generator):
        embedded1 = forward(weights, first[batch], dropout)
        embedded2 = forward(weights, second[batch], dropout)
        loss = cosine_mse(embedded1, embedded2, rating[batch])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        total += loss.detach() * len(batch)
    return float(total) / len(pairs)


@torch.no_grad()
def dev_spearman(weights: Weights, forward: Forward, dev: PairArrays) -> float:
    """Return the Spearman correlation of cosine and rating; NaN where it is undefined."""
    first = forward(weights, torch.from_numpy(dev.first), _identity)
    second = forward(weights, torch.from_numpy(dev.second), _identity)
    scores = torch.cosine_similarity(first, second).numpy()
    if len(scores) < 2 or np.ptp(scores) == 0 or np.ptp(dev.rating) == 0:
        return math.nan
    return float(spearmanr(scores, dev.rating).statistic)


def _identity(values: Tensor) -> Tensor:
    return values
