"""The interface of all engines: batches of tokens in, vectors out.

``Engine`` (llmcond/encoders/engine/engine.py) computes with PyTorch, and ``OpenVinoEngine``
(llmcond/encoders/openvino/engine.py) with OpenVINO. Importing this module imports neither library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcond.encoders.engine.tokenizing import Tokens
from llmcond.encoders.spec import EncoderInput, Router
from llmcond.errors import LlmcondError, UserError

if TYPE_CHECKING:
    pass


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


@dataclass(slots=True)
class WeightRecording:
    """The token weights of a pass of one input under one router.

    Attributes:
        weights: The weights of the tokens, one array per routed layer, or a single one from routed
            pooling; an array may also cover padding at its end.
        states: The states that routed pooling weights, (tokens, width); None inside the network.
        row: The tokens that the network reads, if the router changed them; None otherwise.
    """

    weights: list[NDArray[np.float32]] = field(default_factory=list)
    states: NDArray[np.float32] | None = None
    row: Tokens | None = None


_ACTIVE: ContextVar[WeightRecording | None] = ContextVar("token_weights", default=None)


@contextmanager
def recording_weights() -> Iterator[WeightRecording]:
    """Record the token weights of the pass of one input that this thread runs in the block."""
    recording = WeightRecording()
    token = _ACTIVE.set(recording)
    try:
        yield recording
    finally:
        _ACTIVE.reset(token)


def record_weights(weights: Any, states: Any = None) -> None:
    """Record the weights, (1, tokens), of a pass, if a recording is active.

    Args:
        weights: The weights, as a tensor or an array.
        states: With routed pooling, the states that are weighted, (tokens, width).
    """
    recording = _ACTIVE.get()
    if recording is not None:
        recording.weights.append(_copy(weights)[0])
        recording.states = None if states is None else _copy(states)


def record_row(rows: Sequence[Tokens]) -> None:
    """Record the tokens that the network reads if a router changed them, like the weights."""
    recording = _ACTIVE.get()
    if recording is not None:
        (recording.row,) = rows


def _copy(values: Any) -> NDArray[np.float32]:
    """Copy a tensor or an array, whose memory the engine may use again."""
    if not isinstance(values, np.ndarray):
        values = values.detach().float().cpu().numpy()
    return np.array(values, dtype=np.float32)


def strip_router(item: EncoderInput) -> tuple[EncoderInput, Router | None]:
    """Return an input without its router, and the router's settings without its text.

    Inputs for which these are the same go through the network once.
    """
    settings = None if item.router is None else replace(item.router, text="")
    return replace(item, router=None), settings


def group_routed_inputs(items: Sequence[EncoderInput]) -> list[list[int]]:
    """Group the positions of inputs with a router; in a group, only the routers' texts differ."""
    groups: dict[object, list[int]] = {}
    for position, item in enumerate(items):
        if item.router is not None:
            groups.setdefault(strip_router(item), []).append(position)
    return list(groups.values())


def list_routers(items: Sequence[EncoderInput]) -> list[Router]:
    """Return the routers of the inputs that have one."""
    return [item.router for item in items if item.router is not None]


def router_inputs(items: Sequence[EncoderInput]) -> dict[str, EncoderInput]:
    """Return the distinct texts of routers, each with the input that encodes it, in text order."""
    texts = sorted({router.text for router in list_routers(items)})
    return {text: EncoderInput("", text) for text in texts}


def make_routes(engine: AnyEngine, queries: Any, router: Router) -> list[Any]:
    """Return the routes of one input for several routers.

    This is a single ``Routes`` with all of them, or one route per router if routers act inside the
    network.

    Args:
        engine: The engine that will run the input.
        queries: The routers' vectors, (k, width), as an array or a tensor; a list if routers act
            inside the network.
        router: One of the routers, for their common settings.
    """
    if engine.routes_inside:
        return list(queries)
    return [Routes(queries, router)]
