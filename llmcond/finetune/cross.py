"""A cross-encoder in training, which reads both sentences and the condition in one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.arrays import Positions
from llmcond.data.rows import Rows
from llmcond.encoders.engine.engine import Engine
from llmcond.encoders.engine.tokenizing import InputTokenizer, Tokens
from llmcond.encoders.spec import Orders
from llmcond.finetune.base import DistributedCompute, RatedModel
from llmcond.heads.dense import Regression, RegressionSettings
from llmcond.heads.module import seeded
from llmcond.metrics import Metric
from llmcond.runs.cross import KIND


@dataclass(frozen=True)
class CrossInputs:
    """Rated rows, (n,), each as one sequence per order of its sentences.

    Attributes:
        orders: token sequences of all rows: with the sentences in the given order and, if both
            orders are read, with the second sentence first.
        rating: (n,) ratings on 0 to 1.
        pair: (n,) sentence pair of each row.
    """

    orders: tuple[list[Tokens], ...]
    rating: NDArray[np.float64]
    pair: NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Rows, orders: Orders, tokenizer: InputTokenizer) -> CrossInputs:
        """Tokenise the rated rows of a split.

        Raises:
            UserError: as in ``InputTokenizer.joined``.
        """
        rated = rows.take(rows.rated)
        first, second = rated.sentence1, rated.sentence2
        sides = [(first, second), (second, first)][: 2 if orders == "both" else 1]
        tokens = [
            tokenizer.join_rows(list(zip(*side, rated.condition, strict=True))) for side in sides
        ]
        return cls(tuple(tokens), rated.rating, rated.pair)

    def __len__(self) -> int:
        return len(self.rating)

    @property
    def n_cut(self) -> int:
        """Number of rows whose sentences were cut."""
        return sum(row.n_tokens > len(row.ids) for row in self.orders[0])


class CrossModel(RatedModel[CrossInputs]):
    """A cross-encoder that is trained on the mean squared error of its predicted similarity."""

    def __init__(
        self, engine: Engine, settings: RegressionSettings, seed: int, start: float, metric: Metric
    ) -> None:
        """Add a linear layer to an engine; its bias starts at ``start``, the mean rating."""
        head, _ = seeded(lambda: Regression(settings, engine.dim), seed)
        with torch.no_grad():
            head.get_parameter("weight_bias").fill_(start)
        super().__init__(engine, head, KIND, seed, metric)

    def forward(self, inputs: CrossInputs, rows: Positions, seed: list[int]) -> Tensor:
        """Return the mean squared error of rows, a scalar; the order of sentences is random."""
        self.seed_dropout(seed)
        generator = np.random.Generator(np.random.SFC64(seed))
        order = generator.integers(len(inputs.orders), size=len(rows))
        tokens = [inputs.orders[choice][row] for choice, row in zip(order, rows, strict=True)]
        vectors = self.engine.embed(tokens)
        with torch.autocast(vectors.device.type, enabled=False):
            predicted: Tensor = self.head(vectors.float())[:, 0]
            rating = torch.from_numpy(inputs.rating[rows]).to(predicted)
            return (predicted - rating).square().mean()

    def predict(self, inputs: CrossInputs, shared: DistributedCompute) -> NDArray[np.float32]:
        """Predict the similarity of all rows, (n,): the mean over the orders of their sentences."""
        head = self.fitted_head()

        def compute(which: Positions) -> NDArray[np.float32]:
            mean = np.zeros((len(which), 1), dtype=np.float32)
            for order in inputs.orders:
                vectors = self.vectors([order[i] for i in which])
                with torch.autocast("cpu", enabled=False):
                    mean += head.transform(vectors) / len(inputs.orders)
            return mean

        return shared(len(inputs), compute)[:, 0]
