"""Recording of token weights in the forward pass that computes a vector from them.

The poolings and the routers call ``record_weights`` with the weights that they multiply token
states by. Unless a recording is active on the same thread, this does nothing, so ordinary passes
neither keep nor copy any weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.encoders.engine.tokenizing import Tokens


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
