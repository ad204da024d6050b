"""One forward pass: what a network is given for a batch, and the pooled vectors that come of it.

An engine asks :class:`Passes` for the pass of each batch. A router inside the network is another
class of them: the engine knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.encoders.engine.attention import AttentionPlan
from llmcond.encoders.engine.attention_plan import plan_attention
from llmcond.encoders.engine.batching import Batch
from llmcond.encoders.engine.interface import Routes
from llmcond.encoders.engine.pooling import PoolBatch, routed
from llmcond.encoders.engine.tokenizing import Tokens
from llmcond.encoders.engine.varlen import plan_varlen
from llmcond.encoders.poolings import POOLINGS, Pooling
from llmcond.encoders.settings import EncoderIdentity
from llmcond.encoders.spec import Attention
from llmcond.system import to_device


@dataclass(frozen=True, slots=True)
class Runtime:
    """How a network is run, whatever the batch.

    Attributes:
        network: from token ids to token vectors.
        pooling, pool: how token vectors become one vector, and the function that does it.
        pad_id: fills rows up; masked, so its value never matters.
        kernel: attention for uneven lengths; None: PyTorch's own for even ones.
        skipped_id: see :func:`skipped_id`.
        spread: whether its layers are on several devices.
        max_length: tokens that an input may have.
        step: packed rows are filled up to a multiple of so many tokens. oneDNN prepares a product
            for each number of rows that it meets, in milliseconds, and keeps it, in megabytes.
    """

    network: Any
    pooling: Pooling
    pool: PoolBatch
    attention: Attention
    pad_id: int
    device: torch.device
    dtype: torch.dtype
    max_length: int
    kernel: Callable[..., Any] | None = None
    skipped_id: int | None = None
    step: int = 1
    spread: bool = False


def skipped_id(network: Any) -> int | None:
    """Return the token id behind which RoBERTa's positions begin, None for other networks.

    RoBERTa and its kind count positions from ``padding_idx + 1``, and give that token none of its
    own.
    """
    tables = (m for name, m in network.named_modules() if name.endswith("position_embeddings"))
    index: int | None = getattr(next(tables, None), "padding_idx", None)
    return index


class Forward(Protocol):
    """The forward pass of one batch.

    Attributes:
        n_tokens: tokens that go through the network, padding included.
    """

    n_tokens: int

    def prepare(self) -> None:
        """Make what the network is given; needs no lock of the device."""
        ...

    def pooled(self) -> Tensor:
        """Return one vector an input, or one a route of each, (vectors, width) in float32."""
        ...


class PaddedForward:
    """Inputs as the rows of a rectangle, filled up on the right.

    Attributes:
        rows: the inputs.
        arguments: what the network is given, once the pass is prepared.
        n_tokens: tokens that go through the network, padding included.
    """

    def __init__(
        self, runtime: Runtime, rows: Sequence[Tokens], routes: Sequence[Routes] = ()
    ) -> None:
        """Take inputs, each with what weights its tokens; ``()``: they are pooled as usual."""
        self.runtime, self.rows, self._routes = runtime, rows, routes
        self.width = max(len(row.ids) for row in rows)
        self.arguments: dict[str, Any] = {}
        self.n_tokens = len(rows) * self.width

    def place(self, index: int, token: int) -> int:
        """Return where a token of an input is among the tokens of the pass."""
        return index * self.width + token

    def prepare(self) -> None:
        """Make what the network is given; needs no lock of the device."""
        shape = (len(self.rows), self.width)
        ids = torch.full(shape, self.runtime.pad_id)
        attended, types = torch.zeros(2, *shape, dtype=torch.long)
        counted = torch.zeros(shape, dtype=torch.bool)
        for index, row in enumerate(self.rows):
            # On the right whatever the tokenizer prefers: see PADDING_SIDE.
            ids[index, : len(row.ids)] = torch.tensor(row.ids)
            attended[index, : len(row.ids)] = 1
            types[index, row.second : len(row.ids)] = 1
            counted[index, row.first : row.last] = True
        arguments = {"input_ids": ids, "attention_mask": attended}
        if types.any():
            arguments["token_type_ids"] = types
        if self.runtime.pooling.part == "latent":
            arguments["pooled"] = counted.flatten().nonzero()[:, 0]
        device = self.runtime.device
        self.arguments = {key: to_device(value, device) for key, value in arguments.items()}
        self._counted = to_device(counted, device)

    def hidden(self) -> Tensor:
        """Return the vectors of all tokens, (inputs, longest, width)."""
        hidden: Tensor = self.runtime.network(**self.arguments).last_hidden_state
        return hidden

    def pooled(self) -> Tensor:
        """Return one vector an input, or one a route of each, (vectors, width) in float32."""
        output: Any = self.runtime.network(**self.arguments)
        if self._routes:
            spans = [(row.first, row.last) for row in self.rows]
            return routed(output.last_hidden_state, spans, self._routes)
        if self.runtime.pooling.part == "pooler":
            vectors: Tensor = output.pooler_output.float()
            return vectors
        hidden = output.last_hidden_state
        lengths = [len(row.ids) for row in self.rows]
        return self.runtime.pool(hidden, self._counted.to(hidden.device), lengths)


class PackedForward:
    """Inputs one behind the other in a single row, without padding.

    Attributes:
        batch, leaving: the row as it enters the network, and as it leaves it.
        rows: the inputs, in the order of their vectors.
        arguments: what the network is given, once the pass is prepared.
        n_tokens: tokens of the row as it leaves the network, what it is filled up with included.
    """

    def __init__(
        self,
        runtime: Runtime,
        batch: Batch,
        rows: Sequence[Tokens],
        routes: Sequence[Routes] = (),
        leaving: Batch | None = None,
    ) -> None:
        """Take a batch whose sources and inputs are positions in ``rows`` and ``routes``.

        ``leaving`` is the row as it leaves the network, where inputs are repeated within it.
        """
        self.runtime, self.batch, self._sources = runtime, batch, rows
        self.leaving = leaving or batch
        self.rows = [rows[index] for index in self.leaving.inputs]
        self._routes = [routes[index] for index in batch.inputs] if routes else []
        self.arguments: dict[str, Any] = {}
        self.width, self.n_tokens = filled(batch, runtime), filled(self.leaving, runtime)

    def place(self, index: int, token: int) -> int:
        """Return where a token of an input is among the tokens of the row as it leaves."""
        return self.leaving.position(self.leaving.leaves[index], token)

    def prepare(self) -> None:
        """Make what the network is given; needs no lock of the device."""
        runtime, skipped = self.runtime, self.runtime.skipped_id
        segments, n = self.batch.segments, self.batch.n_tokens
        sources = [self._sources[segment.source] for segment in segments]
        texts = (
            row.ids[segment.begin : segment.end]
            for row, segment in zip(sources, segments, strict=True)
        )
        # Token ids, positions and token types of the whole row, in one copy.
        values = np.zeros((3, 1, self.width), dtype=np.int64)
        ids, positions, types = values[:, 0]
        ids[:n] = np.fromiter(chain.from_iterable(texts), np.int64, n)
        ids[n:], positions[n:] = runtime.pad_id, skipped or 0
        lengths = [segment.length for segment in segments]
        offsets = [segment.begin - segment.start for segment in segments]
        within = np.arange(n) + np.repeat(offsets, lengths)
        positions[:n] = within if skipped is None else _counted_from(skipped, ids[:n], lengths)
        types[:n] = within >= np.repeat([row.second for row in sources], lengths)
        names = ["input_ids", "position_ids", *(["token_type_ids"] if types.any() else [])]
        given = to_device(torch.from_numpy(values[: len(names)]), runtime.device)
        self.arguments = dict(zip(names, given, strict=True))
        # transformers passes a mask of four dimensions on as it is, and makes none for the row.
        self.arguments["attention_mask"] = torch.zeros(1, 1, 1, 1, device=runtime.device)
        self.arguments["packed"] = attention_plan(runtime, self.batch)
        pooled, counted = self._pooled_positions()
        if runtime.pooling.part == "latent":
            self.arguments["pooled"] = to_device(pooled[counted], runtime.device)
        self._pooled = to_device(pooled, runtime.device)
        self._counted = to_device(counted, runtime.device)

    def _pooled_positions(self) -> tuple[Tensor, Tensor]:
        """Return the positions of each input's pooled tokens, padded, and which of them count."""
        rows = self.rows
        # Of routed inputs all that count are weighted, whatever is pooled of others.
        pooling = POOLINGS["mean"] if self._routes else self.runtime.pooling
        ranges = [pooling.tokens(row.first, row.last, len(row.ids)) for row in rows]
        starts = [self.place(index, first) for index, (first, _) in enumerate(ranges)]
        self._lengths = [last - first for first, last in ranges]
        at = torch.arange(max(self._lengths))
        positions = at + torch.tensor([first for first, _ in ranges])[:, None]
        counted = positions >= torch.tensor([row.first for row in rows])[:, None]
        counted &= positions < torch.tensor([row.last for row in rows])[:, None]
        pooled = at < torch.tensor(self._lengths)[:, None]
        return torch.where(pooled, torch.tensor(starts)[:, None] + at, 0), counted & pooled

    def hidden(self) -> Tensor:
        """Return the vectors of all tokens of the row, (tokens, width)."""
        hidden: Tensor = self.runtime.network(**self.arguments).last_hidden_state
        return hidden[0]

    def pooled(self) -> Tensor:
        """Return one vector an input, or one a route of each, (vectors, width) in float32."""
        hidden = self.hidden()
        pooled = self._pooled.to(hidden.device)
        # Not hidden[pooled]: gradients of an index are added one by one, in any order.
        hidden = hidden.index_select(0, pooled.flatten()).view(*pooled.shape, -1)
        if self._routes:
            return routed(hidden, [(0, length) for length in self._lengths], self._routes)
        if self.runtime.pooling.part == "pooler":
            vectors: Tensor = self.runtime.network.pooler(hidden).float()
            return vectors
        return self.runtime.pool(hidden, self._counted.to(hidden.device), self._lengths)


def filled(batch: Batch, runtime: Runtime) -> int:
    """Return the tokens of a packed row with what it is filled up with."""
    return -(-batch.n_tokens // runtime.step) * runtime.step


def attention_plan(runtime: Runtime, batch: Batch) -> AttentionPlan:
    """Return which tokens of a packed row attend to which, for the kernel that there is."""
    causal = runtime.attention == "causal"

    def plan(device: torch.device) -> AttentionPlan:
        if runtime.kernel is None:
            return plan_attention(batch, causal, device, runtime.dtype)
        return plan_varlen(batch, causal, device, runtime.kernel)

    return _ByDevice(cache(plan)) if runtime.spread else plan(runtime.device)


@dataclass(frozen=True, slots=True)
class _ByDevice:
    """The plan of a row for a network on several devices: each layer attends on its own."""

    plan: Callable[[torch.device], AttentionPlan]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See :class:`AttentionPlan`."""
        return self.plan(query.device).attend(query, key, value, scale)


def _counted_from(skipped: int, ids: NDArray[np.int64], lengths: list[int]) -> NDArray[np.int64]:
    """Return the positions of tokens that are counted behind a padding token's.

    Encoders with such positions are bidirectional, so a segment is a whole input.
    """
    counted = (ids != skipped).cumsum()
    ends = np.cumsum(lengths)[:-1]
    before = np.concatenate([[0], counted[ends - 1]])
    return np.where(ids == skipped, skipped, skipped + counted - np.repeat(before, lengths))


class Passes:
    """The forward passes that an engine computes batches by.

    In these, routers weight the tokens of inputs as they are pooled. A class for a router inside
    the network overrides what it does otherwise.

    Attributes:
        inside: whether routers act inside the network, where each needs a pass of its own.
        reads_routers: whether routers are read along with each input, and have no query of their
            own.
    """

    inside = reads_routers = False

    def __init__(self, network: Any, identity: EncoderIdentity, name: str) -> None:
        """Prepare the network of an encoder, which has a ``name``, for such passes."""

    def forward(
        self,
        runtime: Runtime,
        rows: Sequence[Tokens],
        batch: Batch | None = None,
        routes: Sequence[Any] = (),
        *,
        queries: bool = False,
    ) -> Forward:
        """Return the pass of a batch: of some of ``rows`` packed, or without ``batch`` of all.

        ``routes`` has what weights the tokens of each row; ``queries`` asks what rows are as
        routers of others.
        """
        if batch is None:
            return PaddedForward(runtime, rows, routes)
        return PackedForward(runtime, batch, rows, routes)

    @staticmethod
    def load_weights(network: Any, identity: EncoderIdentity, file: Path, device: str) -> None:
        """Put the router's trained weights into a network, where there is a file of them.

        Raises:
            LlmcondError: they cannot be read, or are of another encoder.
        """

    @staticmethod
    def train_weights(network: Any, identity: EncoderIdentity, device: str) -> None:
        """Have the router's weights trained with the network; where it has none yet, draw them."""

    @staticmethod
    def weights(network: Any) -> Mapping[str, Tensor]:
        """Return the weights of a network's router, by their names in its file; {} without any."""
        return {}
