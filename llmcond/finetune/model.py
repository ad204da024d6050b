"""An encoder of each text and a head that compares them, as one module that is trained."""

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
from llmcond.encoders.engine.routing import embed_routed, router_inputs
from llmcond.encoders.engine.tokenizing import InputTokenizer, Tokens
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError
from llmcond.features.view import Part, View
from llmcond.finetune.base import RatedModel, Shared
from llmcond.heads import FittedHead, Gathered, PairArrays, Recipe
from llmcond.heads.module import Batch, seeded
from llmcond.heads.objectives import Objective, RatedBatch, adjacent_pairs, contrast_groups
from llmcond.heads.settings import ObjectiveSettings
from llmcond.metrics import METRICS, Metric
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import row_inputs
from llmcond.system import to_device

T = TypeVar("T")

#: Inputs with routers that are encoded at a time where there are no gradients.
_ROUTED = 1_024


@dataclass(frozen=True)
class RatedInputs:
    """Rated rows, (n,), as positions among distinct inputs.

    Attributes:
        queries: the tokens of the inputs' routers, by their texts.
        columns: (n,) position of a row's input, by prompt, part and sentence (0 or 1).
        conditioned: whether the first and the second sentence have a condition.
    """

    view: View
    items: list[EncoderInput]
    tokens: list[Tokens]
    queries: dict[str, Tokens]
    columns: dict[tuple[str, Part, int], Positions]
    rating: NDArray[np.float64]
    pair: NDArray[np.int64]
    conditioned: tuple[bool, bool] = (True, True)

    @classmethod
    def of(cls, rows: Rows, view: View, tokenizer: InputTokenizer) -> RatedInputs:
        """Take the rated rows of a whole split."""
        view.check_sides(rows.conditioned)
        rated = rows.rated
        place: dict[EncoderInput, int] = {}
        columns: dict[tuple[str, Part, int], Positions] = {}
        for prompt, part in view.needed():
            # Of the whole split: a shuffled control draws among all of its conditions.
            inputs = row_inputs(rows, prompt)
            sides = (inputs.first_unconditional, inputs.second_unconditional)
            if part == "conditional":
                sides = (inputs.first, inputs.second)
            for side, texts in enumerate(sides):
                found = [place.setdefault(item, len(place)) for item in texts]
                columns[prompt.name, part, side] = np.array(found, dtype=np.int64)[rated]
        used = np.unique(np.concatenate(list(columns.values())))
        every = list(place)
        items = [every[own] for own in used]
        routers = router_inputs(items)
        return cls(
            view=view,
            items=items,
            tokens=tokenizer(items),
            queries=dict(zip(routers, tokenizer(list(routers.values())), strict=True)),
            columns={key: np.searchsorted(used, column) for key, column in columns.items()},
            rating=rows.rating[rated],
            pair=rows.pair[rated],
            conditioned=rows.conditioned,
        )

    def __len__(self) -> int:
        return len(self.rating)

    def _reader(self, side: int, take: Callable[[Positions], T]) -> Callable[[Prompt, Part], T]:
        return lambda prompt, part: take(self.columns[prompt.name, part, side])

    def arrays(self, vectors: NDArray[np.float32]) -> PairArrays:
        """Return all rows as a head takes them, given each distinct input's vector, (u, dim)."""
        reader = partial(self._reader, take=partial(Gathered, vectors))
        first, second = self.conditioned
        return PairArrays(
            first=self.view.sentence(reader(0), conditioned=first),
            second=self.view.sentence(reader(1), conditioned=second),
            rating=self.rating,
            condition=self.view.condition(reader(0)),
            pair=self.pair,
        )

    def embed(self, engine: Engine, which: Positions) -> Tensor:
        """Return the vectors of some distinct inputs, (u, dim), with gradients."""
        tokens = [self.tokens[i] for i in which]
        if not self.queries:
            return engine.embed(tokens)
        return embed_routed(engine, [self.items[i] for i in which], tokens, self.queries)

    def used(self, rows: Positions) -> Positions:
        """Return the distinct inputs, (u,), of some rows (m,)."""
        return np.unique(np.concatenate([column[rows] for column in self.columns.values()]))

    def batch(self, rows: Positions, used: Positions, vectors: Tensor) -> Batch:
        """Return rows as heads are trained on them: first sentences, then second ones.

        ``used``, (u,), is what :meth:`used` gives for them; vectors, (u, dim), are of those inputs.
        """

        def vectors_of(column: Positions) -> Tensor:
            positions = np.searchsorted(used, column)
            # Not vectors[positions]: gradients of an index are added in any order.
            return vectors.index_select(0, torch.from_numpy(positions).to(vectors.device))

        readers = [self._reader(side, lambda column: vectors_of(column[rows])) for side in (0, 1)]
        sides = zip(readers, self.conditioned, strict=True)
        x = torch.cat([self.view.sentence(r, torch.sub, torch.hstack, has) for r, has in sides])
        prompt = self.view.of_condition()
        if prompt is None:
            return Batch(x)
        column = self.columns[prompt.name, "unconditional", 0][rows]
        distinct, which = np.unique(column, return_inverse=True)
        number = torch.from_numpy(which.reshape(-1)).to(vectors.device)
        return Batch(x, vectors_of(distinct), number.repeat(2))


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """The head that is trained, and on which features.

    Attributes:
        recipe: its kind and settings; of kind ``none`` nothing stands behind the encoder.
        objective: what is minimised.
        seed: of its first weights, of order and of dropout.
        prompts: of the features; none yet where those are taken that suit encoder and head.
        subtract: whether unconditional features are subtracted.
        start: a head fitted before, whose weights are the first ones; None: they are drawn.
        metric: what dev is scored by.
    """

    recipe: Recipe
    objective: ObjectiveSettings
    seed: int
    prompts: tuple[Prompt, ...] = ()
    subtract: bool = False
    start: FittedHead | None = None
    metric: Metric = METRICS["spearman"]


class TunedModel(RatedModel[RatedInputs]):
    """From rows to the loss: the encoder's vectors, the head's embeddings, the objective."""

    def __init__(self, engine: Engine, plan: HeadPlan, dims: tuple[int, int]) -> None:
        """Put a head behind an engine.

        Raises:
            UserError: the head goes with no features of these ``dims``, those of sentences and of
                conditions.
        """
        recipe = plan.recipe
        (head, objective), _ = seeded(
            lambda: (recipe.family(recipe.settings, *dims), Objective(plan.objective)), plan.seed
        )
        if plan.start is not None:
            start = plan.start.module.state_dict()
            drawn = {name: value.shape for name, value in head.state_dict().items()}
            if drawn != {name: value.shape for name, value in start.items()}:
                raise UserError(
                    "the head to start from was fitted on features of other sizes: this encoder "
                    f"and prompt give {dims[0]} dimensions. Start from a head of the same encoder "
                    "and prompt."
                )
            head.load_state_dict(start)
        super().__init__(engine, head, recipe.kind, plan.seed, plan.metric)
        self.objective = objective.to(engine.out)
        self.plan = plan

    def forward(self, inputs: RatedInputs, rows: Positions, seed: list[int]) -> Tensor:
        """Return the mean loss of some rows, a scalar; ``seed`` is that of dropout."""
        self.seed_dropout(seed)
        used = inputs.used(rows)
        vectors = inputs.embed(self.engine, used)
        with torch.autocast(vectors.device.type, enabled=False):
            batch = inputs.batch(rows, used, vectors.float())
            first, second = self.head(*batch).chunk(2)
            device, contrastive = first.device, None
            pair = to_device(torch.from_numpy(inputs.pair[rows]), device)
            if self.plan.objective.contrasts:
                found = adjacent_pairs(contrast_groups(inputs.pair)[rows])
                contrastive = to_device(torch.from_numpy(found), device)
            info = RatedBatch(self.head.similarity, pair, contrastive)
            rating = to_device(torch.from_numpy(inputs.rating[rows]), device).to(first)
            loss: Tensor = self.objective(first, second, rating, info)
            return loss

    def groups(self, inputs: RatedInputs) -> NDArray[np.int64]:
        """Return (n,) a number for each row, the same for the two of a contrastive pair."""
        contrasts = self.plan.objective.contrasts
        return contrast_groups(inputs.pair) if contrasts else super().groups(inputs)

    def predict(self, inputs: RatedInputs, shared: Shared) -> NDArray[np.float32]:
        """Return the predicted similarity of all rows, (n,), each distinct input encoded once."""
        vectors = shared(len(inputs.items), lambda which: self.encode(inputs, which))
        pairs = inputs.arrays(vectors)
        head: FittedHead = self.fitted()
        return head.similarity(pairs.first, pairs.second, pairs.condition)

    def encode(self, inputs: RatedInputs, which: Positions) -> NDArray[np.float32]:
        """Return (u, dim) the vectors of distinct inputs (u,), without dropout and gradients."""
        if not inputs.queries:
            return self.vectors([inputs.tokens[i] for i in which])
        was = self.training
        self.eval()
        vectors = np.empty((len(which), self.engine.dim), dtype=np.float32)
        with torch.inference_mode():
            for start in range(0, len(which), _ROUTED):
                part = inputs.embed(self.engine, which[start : start + _ROUTED])
                vectors[start : start + _ROUTED] = part.float().cpu().numpy()
        self.train(was)
        return vectors
