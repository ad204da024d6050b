"""The interface of models that the training loop trains."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from llmcond.arrays import Positions
from llmcond.encoders.engine.engine import Engine
from llmcond.encoders.engine.tokenizing import Tokens
from llmcond.finetune.inputs import TokenizedInputs
from llmcond.heads import FittedHead
from llmcond.heads.base import FittedModule, fitted_class
from llmcond.heads.module import HeadModule
from llmcond.heads.pairs import FitReport
from llmcond.metrics import Metric

#: Computes (n, k) values of n items with a function of positions; each process computes a share.
DistributedCompute = Callable[
    [int, Callable[[Positions], NDArray[np.float32]]], NDArray[np.float32]
]


class _RatedData(Protocol):
    @property
    def rating(self) -> NDArray[np.float64]: ...  # (n,) on 0 to 1
    @property
    def pair(self) -> NDArray[np.int64]: ...  # the sentence pair of each row, (n,)
    def __len__(self) -> int: ...


#: Number of inputs with routers that are encoded at a time without gradients.
_ROUTED_BATCH = 1_024

#: Training data of a model: rated rows, or triples of a graph.
R = TypeVar("R", bound=Sized)
#: Rated rows in a model's input format.
P = TypeVar("P", bound=_RatedData)
#: The class of a fitted head.
F = TypeVar("F", bound=FittedModule)


class TrainedModel(nn.Module, Generic[R, F]):
    """An encoder's network, with its adapters, and a head, which are trained together.

    A subclass defines the loss of rows and the score on dev.

    Attributes:
        metric: metric of the dev score.
        encoder: network of the encoder.
        head: head behind the encoder.
        engine: engine that runs the encoder.
        kind: name of the head's family in records.
        seed: random seed of initial weights, row order and dropout.
    """

    def __init__(
        self, engine: Engine, head: HeadModule, kind: str, seed: int, metric: Metric
    ) -> None:
        super().__init__()
        self.metric = metric
        self.encoder: nn.Module = engine.model.network
        self.head: HeadModule = head.to(engine.output_device)
        self.engine, self.kind, self.seed = engine, kind, seed

    @property
    def dev_score_name(self) -> str:
        """Name of the dev score in records."""
        return f"dev_{self.metric.name}"

    def forward(self, inputs: R, rows: Positions, seed: list[int]) -> Tensor:
        """Return the mean loss of some rows, a scalar; ``seed`` seeds everything random in it."""
        raise NotImplementedError

    def score(self, inputs: R, shared: DistributedCompute) -> float | None:
        """Return the dev score that selects the weights; None if it is undefined."""
        raise NotImplementedError

    def groups(self, inputs: R) -> NDArray[np.int64]:
        """Return (n,) group numbers; rows of the same group stay together in a step."""
        return np.arange(len(inputs))

    def trained_parameters(self) -> dict[str, Tensor]:
        """Return the trained parameters of the encoder and the head, by name."""
        return {name: value for name, value in self.named_parameters() if value.requires_grad}

    def fitted_head(self, record: Mapping[str, Any] | None = None) -> F:
        """Return a copy of the current head as a fitted head."""
        # Dropout is seeded again before each use, and some generators cannot be copied.
        self.head.seed_dropout(None)
        module, family = copy.deepcopy(self.head).freeze(), type(self.head)
        fitted: Any = fitted_class(family)
        head: F = fitted(self.kind, family, module, self.seed, FitReport(record or {}))
        return head

    def seed_dropout(self, seed: list[int]) -> None:
        """Seed the dropout of the encoder and of the head."""
        seeds = np.random.SeedSequence(seed).generate_state(2, np.uint64)
        torch.manual_seed(int(seeds[0] >> 1))
        self.head.seed_dropout(int(seeds[1]))

    def encode(self, inputs: TokenizedInputs, which: Positions) -> NDArray[np.float32]:
        """Compute vectors of some inputs (u,), (u, dim), without dropout and gradients."""
        if not inputs.queries:
            return self.vectors([inputs.tokens[i] for i in which])
        was_training = self.training
        self.eval()
        vectors = np.empty((len(which), self.engine.dim), dtype=np.float32)
        with torch.inference_mode():
            for start in range(0, len(which), _ROUTED_BATCH):
                part = inputs.embed(self.engine, which[start : start + _ROUTED_BATCH])
                vectors[start : start + _ROUTED_BATCH] = part.float().cpu().numpy()
        self.train(was_training)
        return vectors

    def vectors(self, tokens: Sequence[Tokens]) -> NDArray[np.float32]:
        """Compute the encoder's vectors of inputs, (n, dim), without dropout and gradients."""
        was_training = self.training
        self.eval()
        vectors = np.empty((len(tokens), self.engine.dim), dtype=np.float32)
        for batch in self.engine.run(tokens):
            vectors[batch.inputs] = batch.vectors
        self.train(was_training)
        return vectors


class RatedModel(TrainedModel[P, FittedHead]):
    """A model that is trained on rated rows, and scored on dev by its predicted similarities."""

    def predict(self, inputs: P, shared: DistributedCompute) -> NDArray[np.float32]:
        """Predict the similarity of all rows, (n,), without dropout and gradients."""
        raise NotImplementedError

    @override
    def score(self, inputs: P, shared: DistributedCompute) -> float | None:
        similarity = self.predict(inputs, shared)
        if not np.isfinite(similarity).all():
            return None
        value = self.metric(similarity.astype(np.float64), inputs.rating, inputs.pair)
        return None if math.isnan(value) else value
