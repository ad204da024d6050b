"""The interface of all engines: batches of tokens in, vectors out.

``Engine`` (llmcond/encoders/engine/engine.py) computes with PyTorch, and ``OpenVinoEngine``
(llmcond/encoders/openvino/engine.py) with OpenVINO. Importing this module imports neither library.
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
    """A single input, or a single training step, does not fit into memory."""


@dataclass(frozen=True, slots=True)
class BatchVectors:
    """The vectors of a batch.

    Attributes:
        inputs: Positions of the batch's inputs.
        vectors: One vector per input, (inputs, dim). Routed inputs have one vector per route, in
            the order of the inputs.
        n_computed: Number of tokens that went through the network, including padding.
    """

    inputs: Sequence[int]
    vectors: NDArray[np.float32]
    n_computed: int


@dataclass(frozen=True, slots=True)
class Routes:
    """Several routers that weight the tokens of one input, with the settings they share.

    Attributes:
        queries: The routers' vectors as they leave the encoder's pooling, (k, dim). This is a
            tensor, with gradients in training, or an array.
        router: One of the routers, for the settings that all of them share.
    """

    queries: Any
    router: Router


class AnyEngine(Protocol):
    """A loaded network that is run in batches.

    Attributes:
        dim: Size of the vectors.
        budget: Most tokens of one batch.
        routes_inside: Whether routers act inside the network, so that each router needs its own
            pass.
        reads_routers: Whether the network reads the router's text along with each input, so that
            routers have no query vector.
    """

    dim: int
    budget: int
    routes_inside: bool
    reads_routers: bool

    def run(
        self,
        rows: Sequence[Tokens],
        before_batch: Callable[[], None] = ...,
        routes: Sequence[Any] = (),
        *,
        queries: bool = False,
    ) -> Iterator[BatchVectors]:
        """Yield the vectors of inputs, batch by batch; each input once.

        Args:
            rows: The inputs' tokens.
            before_batch: Called before each batch. An exception that it raises ends the work.
            routes: If given, what weights the tokens of each input: a ``Routes``, or the route that
                a router inside the network expects.
            queries: Whether to compute the vectors that the inputs have as routers of other inputs.
                These vectors leave the pooling without passing the dense layers, in the space of
                the tokens' states.

        Raises:
            UserError: If the network has no embedding of a token.
            OutOfMemoryError: If a single input does not fit into memory.
        """
        ...

    def finish_states(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Turn states that left the pooling, (n, width), into vectors of inputs, (n, dim)."""
        ...


def n_routes(route: Any) -> int:
    """Return the number of vectors that an input with this route gets."""
    return len(route.queries) if isinstance(route, Routes) else 1


def check_token_ids(rows: Sequence[Tokens], n_ids: int, name: str) -> None:
    """Raise a UserError if the network of an encoder has no embedding of a token."""
    ids: set[int | None] = set(chain.from_iterable(row.ids for row in rows))
    for invalid in (token_id for token_id in ids if token_id is None or token_id >= n_ids):
        raise UserError(
            f"the tokenizer of {name} produces the token id {invalid}, but its network only has "
            f"embeddings for the ids 0 to {n_ids - 1:,}. Use the tokenizer that the model was "
            "trained with: put it next to the model's weights."
        )
