"""Rated rows as the distinct inputs of an encoder, each tokenised once."""

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
from llmcond.features.view import Part, View
from llmcond.heads import Gathered, PairArrays
from llmcond.heads.module import Batch
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import row_inputs

T = TypeVar("T")


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

        x = torch.cat(
            [
                self.view.sentence(
                    self._reader(side, lambda column: vectors_of(column[rows])),
                    torch.sub,
                    torch.hstack,
                    conditioned,
                )
                for side, conditioned in enumerate(self.conditioned)
            ]
        )
        prompt = self.view.of_condition()
        if prompt is None:
            return Batch(x)
        column = self.columns[prompt.name, "unconditional", 0][rows]
        distinct, which = np.unique(column, return_inverse=True)
        number = torch.from_numpy(which.reshape(-1)).to(vectors.device)
        return Batch(x, vectors_of(distinct), number.repeat(2))
