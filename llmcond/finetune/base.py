"""What the training loop asks of a model, and of what it is trained on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmcond.arrays import Positions
from llmcond.encoders.engine.engine import Engine
from llmcond.encoders.engine.tokenizing import Tokens
from llmcond.heads import FittedHead
from llmcond.heads.base import Fitted, fitted_class
from llmcond.heads.module import HeadModule
from llmcond.heads.pairs import Fit
from llmcond.metrics import Metric

#: Computes (n, k) values of n things by a function of some positions: each process a share of them.
Shared = Callable[[int, Callable[[Positions], NDArray[np.float32]]], NDArray[np.float32]]


class _Rated(Protocol):
    @property
    def rating(self) -> NDArray[np.float64]: ...  # (n,) on 0 to 1
    @property
    def pair(self) -> NDArray[np.int64]: ...  # the sentence pair of each row, (n,)
    def __len__(self) -> int: ...


#: What a model is trained on: rated rows, or triples of a graph.
R = TypeVar("R", bound=Sized)
#: Rated rows, in the form that a model takes them.
P = TypeVar("P", bound=_Rated)
#: The class of a fitted head.
F = TypeVar("F", bound=Fitted)


class TrainedModel(nn.Module, Generic[R, F]):
    """An encoder's network, with its adapters, and a head behind it, which are trained together.

    A subclass says what the loss of some rows is, and what dev is scored by.

    Attributes:
        metric: what dev is scored by.
        head: behind the encoder; ``kind`` is what records call its family.
        seed: of first weights, of the order of rows and of dropout.
    """

    def __init__(
        self, engine: Engine, head: HeadModule, kind: str, seed: int, metric: Metric
    ) -> None:
        super().__init__()
        self.metric = metric
        self.encoder: nn.Module = engine.model.network
        self.head: HeadModule = head.to(engine.out)
        self.engine, self.kind, self.seed = engine, kind, seed

    @property
    def on_dev(self) -> str:
        """What records call the score on dev."""
        return f"dev_{self.metric.name}"

    def forward(self, inputs: R, rows: Positions, seed: list[int]) -> Tensor:
        """Return the mean loss of some rows, a scalar; ``seed`` is of all that is random in it."""
        raise NotImplementedError

    def score(self, inputs: R, shared: Shared) -> float | None:
        """Return the score on dev that chooses the weights; None where it is undefined."""
        raise NotImplementedError

    def groups(self, inputs: R) -> NDArray[np.int64]:
        """Return (n,) a number for each row; rows of one number stay together in a step."""
        return np.arange(len(inputs))

    def trained(self) -> dict[str, Tensor]:
        """Return what is trained, by name: parameters of the encoder and of the head."""
        return {name: value for name, value in self.named_parameters() if value.requires_grad}

    def fitted(self, record: Mapping[str, Any] | None = None) -> F:
        """Return a copy of the head as it is now, as one that was fitted."""
        # It is seeded again before each use, and not all generators can be copied.
        self.head.seed_dropout(None)
        module, family = copy.deepcopy(self.head).finished(), type(self.head)
        fitted: Any = fitted_class(family)
        head: F = fitted(self.kind, family, module, self.seed, Fit(record or {}))
        return head

    def seed_dropout(self, seed: list[int]) -> None:
        """Let the encoder's dropout and that of the head be drawn by a seed."""
        drawn = np.random.SeedSequence(seed).generate_state(2, np.uint64)
        torch.manual_seed(int(drawn[0] >> 1))
        self.head.seed_dropout(int(drawn[1]))

    def vectors(self, tokens: Sequence[Tokens]) -> NDArray[np.float32]:
        """Return the encoder's vectors of inputs, (n, dim), without dropout and gradients."""
        was = self.training
        self.eval()
        vectors = np.empty((len(tokens), self.engine.dim), dtype=np.float32)
        for done in self.engine.run(tokens):
            vectors[done.inputs] = done.vectors
        self.train(was)
        return vectors


class RatedModel(TrainedModel[P, FittedHead]):
    """A model that is trained on rated rows, and scored on dev by its predicted similarities."""

    def predict(self, inputs: P, shared: Shared) -> NDArray[np.float32]:
        """Return the predicted similarity of all rows, (n,), without dropout and gradients."""
        raise NotImplementedError

    def score(self, inputs: P, shared: Shared) -> float | None:
        """See :class:`TrainedModel`."""
        similarity = self.predict(inputs, shared)
        if not np.isfinite(similarity).all():
            return None
        value = self.metric(similarity.astype(np.float64), inputs.rating, inputs.pair)
        return None if math.isnan(value) else value
