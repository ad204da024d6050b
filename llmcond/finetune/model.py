"""An encoder of single texts and a head that compares them, trained as one module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.arrays import Positions
from llmcond.data.rows import Rows
from llmcond.encoders.engine.engine import Engine
from llmcond.encoders.engine.tokenizing import InputTokenizer
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError
from llmcond.features.view import FeaturePart, FeatureView
from llmcond.finetune.base import DistributedCompute, RatedModel
from llmcond.finetune.inputs import TokenizedInputs
from llmcond.heads import FittedHead, PairArrays, Recipe, SharedRows
from llmcond.heads.module import Batch, seeded
from llmcond.heads.objectives import Objective, RatedBatch, adjacent_pairs, contrast_groups
from llmcond.heads.settings import ObjectiveSettings
from llmcond.metrics import METRICS, Metric
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import render_rows
from llmcond.system import move_to_device

T = TypeVar("T")


@dataclass(frozen=True)
class RatedInputs:
    """Rated rows, (n,), as positions of distinct inputs.

    Attributes:
        view: features that the head reads.
        texts: the distinct inputs.
        columns: (n,) position of each row's input, by prompt, part and sentence (0 or 1).
        rating: (n,) ratings on 0 to 1.
        pair: (n,) sentence pair of each row.
        conditioned: whether the first and the second sentence have a condition.
    """

    view: FeatureView
    texts: TokenizedInputs
    columns: dict[tuple[str, FeaturePart, int], Positions]
    rating: NDArray[np.float64]
    pair: NDArray[np.int64]
    conditioned: tuple[bool, bool] = (True, True)

    @classmethod
    def from_rows(cls, rows: Rows, view: FeatureView, tokenizer: InputTokenizer) -> RatedInputs:
        """Tokenise the rated rows of a complete split."""
        view.check_sides(rows.conditioned)
        rated = rows.rated
        positions: dict[EncoderInput, int] = {}
        columns: dict[tuple[str, FeaturePart, int], Positions] = {}
        for prompt, part in view.required_parts():
            # Render the complete split, as a shuffled control samples from all its conditions.
            inputs = render_rows(rows, prompt)
            sides = (inputs.first_unconditional, inputs.second_unconditional)
            if part == "conditional":
                sides = (inputs.first, inputs.second)
            for side, texts in enumerate(sides):
                item_positions = [positions.setdefault(item, len(positions)) for item in texts]
                columns[prompt.name, part, side] = np.array(item_positions, dtype=np.int64)[rated]
        used_positions = np.unique(np.concatenate(list(columns.values())))
        all_items = list(positions)
        return cls(
            view=view,
            texts=TokenizedInputs.of([all_items[i] for i in used_positions], tokenizer),
            columns={
                key: np.searchsorted(used_positions, column) for key, column in columns.items()
            },
            rating=rows.rating[rated],
            pair=rows.pair[rated],
            conditioned=rows.conditioned,
        )

    def __len__(self) -> int:
        return len(self.rating)

    def _make_reader(
        self, side: int, take: Callable[[Positions], T]
    ) -> Callable[[Prompt, FeaturePart], T]:
        return lambda prompt, part: take(self.columns[prompt.name, part, side])

    def arrays(self, vectors: NDArray[np.float32]) -> PairArrays:
        """Return all rows as arrays for a head, given the vectors of distinct inputs, (u, dim)."""
        reader = partial(self._make_reader, take=partial(SharedRows, vectors))
        first, second = self.conditioned
        return PairArrays(
            first=self.view.sentence_features(reader(0), conditioned=first),
            second=self.view.sentence_features(reader(1), conditioned=second),
            rating=self.rating,
            condition=self.view.condition_features(reader(0)),
            pair=self.pair,
        )

    def distinct_inputs(self, rows: Positions) -> Positions:
        """Return the positions of the distinct inputs, (u,), of some rows (m,)."""
        return np.unique(np.concatenate([column[rows] for column in self.columns.values()]))

    def batch(self, rows: Positions, used: Positions, vectors: Tensor) -> Batch:
        """Return rows as a training batch of a head: first sentences, then second ones.

        ``distinct_inputs``, (u,), is the result of the method ``distinct_inputs`` for these rows;
        ``vectors``, (u, dim), are the vectors of those inputs.
        """

        def vectors_of(column: Positions) -> Tensor:
            positions = np.searchsorted(used, column)
            # Not vectors[positions], as the gradients of indexing are summed in varying order.
            return vectors.index_select(0, torch.from_numpy(positions).to(vectors.device))

        readers = [
            self._make_reader(side, lambda column: vectors_of(column[rows])) for side in (0, 1)
        ]
        sides = zip(readers, self.conditioned, strict=True)
        x = torch.cat(
            [self.view.sentence_features(r, torch.sub, torch.hstack, has) for r, has in sides]
        )
        prompt = self.view.condition_prompt()
        if prompt is None:
            return Batch(x)
        column = self.columns[prompt.name, "unconditional", 0][rows]
        distinct, which = np.unique(column, return_inverse=True)
        number = torch.from_numpy(which.reshape(-1)).to(vectors.device)
        return Batch(x, vectors_of(distinct), number.repeat(2))


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The head to train, and its features.

    Attributes:
        recipe: kind and settings of the head; kind ``none`` compares the encoder's vectors.
        objective: objective that is minimised.
        seed: random seed of initial weights, row order and dropout.
        prompts: prompts of the features; empty until those that suit encoder and head are resolved.
        subtract: whether unconditional features are subtracted.
        start: fitted head whose weights are the initial ones; None: random initial weights.
        metric: metric of the dev score.
    """

    recipe: Recipe
    objective: ObjectiveSettings
    seed: int
    prompts: tuple[Prompt, ...] = ()
    subtract: bool = False
    start: FittedHead | None = None
    metric: Metric = METRICS["spearman"]


class BiEncoderModel(RatedModel[RatedInputs]):
    """An encoder and a head on rated pairs: the vectors, the embeddings and the objective."""

    def __init__(self, engine: Engine, plan: HeadConfig, dims: tuple[int, int]) -> None:
        """Add a head to an engine; ``dims`` are the sizes of sentence and condition features.

        Raises:
            UserError: the head cannot read features of these sizes.
        """
        recipe = plan.recipe
        (head, objective), _ = seeded(
            lambda: (recipe.family(recipe.settings, *dims), Objective(plan.objective)), plan.seed
        )
        if plan.start is not None:
            start = plan.start.module.state_dict()
            shapes = {name: value.shape for name, value in head.state_dict().items()}
            if shapes != {name: value.shape for name, value in start.items()}:
                raise UserError(
                    "the head to start from was fitted on features of another size: this encoder "
                    f"and prompt give {dims[0]} dimensions. Start from a head of the same encoder "
                    "and prompt."
                )
            head.load_state_dict(start)
        super().__init__(engine, head, recipe.kind, plan.seed, plan.metric)
        self.objective = objective.to(engine.output_device)
        self.plan = plan

    def forward(self, inputs: RatedInputs, rows: Positions, seed: list[int]) -> Tensor:
        """Return the mean loss of some rows, a scalar; ``seed`` seeds dropout."""
        self.seed_dropout(seed)
        used = inputs.distinct_inputs(rows)
        vectors = inputs.texts.embed(self.engine, used)
        with torch.autocast(vectors.device.type, enabled=False):
            batch = inputs.batch(rows, used, vectors.float())
            first, second = self.head(*batch).chunk(2)
            device, contrastive = first.device, None
            pair = move_to_device(torch.from_numpy(inputs.pair[rows]), device)
            if self.plan.objective.contrasts:
                positions = adjacent_pairs(contrast_groups(inputs.pair)[rows])
                contrastive = move_to_device(torch.from_numpy(positions), device)
            info = RatedBatch(self.head.similarity, pair, contrastive)
            rating = move_to_device(torch.from_numpy(inputs.rating[rows]), device).to(first)
            loss: Tensor = self.objective(first, second, rating, info)
            return loss

    def groups(self, inputs: RatedInputs) -> NDArray[np.int64]:
        """Return (n,) group numbers, the same for both rows of a contrastive pair."""
        contrasts = self.plan.objective.contrasts
        return contrast_groups(inputs.pair) if contrasts else super().groups(inputs)

    def predict(self, inputs: RatedInputs, shared: DistributedCompute) -> NDArray[np.float32]:
        """Predict the similarity of all rows, (n,); each distinct input is encoded once."""
        vectors = shared(len(inputs.texts), lambda which: self.encode(inputs.texts, which))
        pairs = inputs.arrays(vectors)
        head: FittedHead = self.fitted_head()
        return head.similarity(pairs.first, pairs.second, pairs.condition)
