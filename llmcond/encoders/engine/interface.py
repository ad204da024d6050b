"""What every engine offers, whichever library computes: batches of tokens in, vectors out.

:class:`llmcond.encoders.engine.engine.Engine` computes with PyTorch, and
:class:`llmcond.encoders.openvino.engine.OpenVinoEngine` with OpenVINO. Importing this module
imports neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcond.encoders.engine.tokenizing import Tokens
from llmcond.encoders.spec import Router
from llmcond.errors import LlmcondError, UserError


class OutOfMemoryError(LlmcondError):
    """One input alone is too much for the memory."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """What a batch gives.

    Attributes:
        inputs: positions of its inputs.
        vectors: one for each, (inputs, dim); of routed ones, one for each route of each.
        n_computed: tokens that went through the network, padding included.
    """

    inputs: Sequence[int]
    vectors: NDArray[np.float32]
    n_computed: int


@dataclass(frozen=True, slots=True)
class Routes:
    """What weights the tokens of one input: several routers, with the settings they share.

    Attributes:
        queries: (k, dim) the routers' vectors, as they leave the encoder's own pooling: a tensor,
            which has gradients in training, or an array.
        router: one of the routers, for the settings that all of them share.
    """

    queries: Any
    router: Router


class AnyEngine(Protocol):
    """A loaded network, run in batches.

    Attributes:
        dim: size of its vectors.
        budget: the most tokens that one batch has.
        inside: whether routers act inside the network, where each needs a pass of its own.
        reads_routers: whether routers are read along with each input, and have no query of their
            own.
    """

    dim: int
    budget: int
    inside: bool
    reads_routers: bool

    def run(
        self,
        rows: Sequence[Tokens],
        before_batch: Callable[[], None] = ...,
        routes: Sequence[Any] = (),
        *,
        queries: bool = False,
    ) -> Iterator[Pooled]:
        """Yield the vectors of inputs, batch by batch; each input once.

        With ``routes``, one :class:`Routes` for each input (or what a router inside the network
        takes), tokens are weighted by them. ``queries`` gives what inputs are as routers of others:
        vectors as they leave the pooling, before dense layers, in the space of the tokens' states.
        What ``before_batch`` raises ends the work.

        Raises:
            UserError: a token that the network has no embedding of.
            OutOfMemoryError: one input alone does not fit.
        """
        ...

    def finish_states(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return vectors as inputs have them, (n, dim), of what left the pooling, (n, width)."""
        ...


def n_routes(route: Any) -> int:
    """Return how many vectors an input has by what routes it."""
    return len(route.queries) if isinstance(route, Routes) else 1


def check_ids(rows: Sequence[Tokens], n_ids: int, name: str) -> None:
    """Raise a UserError for a token that the network of an encoder has no embedding of."""
    ids: set[int | None] = set(chain.from_iterable(row.ids for row in rows))
    for wrong in (one for one in ids if one is None or one >= n_ids):
        raise UserError(
            f"the tokenizer of {name} gives the token id {wrong}, and its network has embeddings "
            f"for the ids 0 to {n_ids - 1:,} only. Put the tokenizer that it was trained with "
            "beside its weights."
        )
