"""Forward passes: a network's arguments and pooled vectors, and NV-Embed's latent block.

An engine asks ``Passes`` for the pass of each batch. A router inside the network is a subclass of
``Passes``, and the engine does not depend on anything else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import MistralConfig, MistralModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from llmcond.base import package as plugins
from llmcond.base.errors import UserError, first_line
from llmcond.base.system import move_to_device
from llmcond.encoders.settings import EncoderIdentity
from llmcond.encoders.spec import POOLINGS, Attention, Pooling, identify_pooling
from llmcond.encoders.tokenizing import Routes, Tokens, record_weights
from llmcond.encoders.torch.attention import AttentionPlan, plan_attention, plan_varlen
from llmcond.encoders.torch.batching import PackedRow

#: A pooling function for batches. Its arguments are token vectors, (inputs, tokens, dim); a mask of
#: the tokens that count, (inputs, tokens) bool, with at least one for each input; and the number of
#: tokens of each input. It returns (inputs, dim) in float32. Texts are padded on the right.
PoolBatch = Callable[[Tensor, Tensor, Sequence[int]], Tensor]


def first_token(hidden: Tensor, counted: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the vector of each input's first token."""
    return hidden[:, 0].float()


def last_token(hidden: Tensor, counted: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the vector of each input's last token that counts."""
    positions = torch.arange(counted.shape[1], device=counted.device)
    last = torch.where(counted, positions, -1).amax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last].float()


def mean_pooling(hidden: Tensor, counted: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the mean over the tokens that count.

    The sum is computed in float32: pooling in bfloat16 costs more accuracy than the whole encoder
    in bfloat16.
    """
    weights = counted.unsqueeze(-1).float()
    return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)


def pool_routed(
    hidden: Tensor, spans: Sequence[tuple[int, int]], routes: Sequence[Routes]
) -> Tensor:
    """Pool each input under each of its routers; the formula is that of ``Router``.

    On a CPU inputs are pooled one by one, so that no vector depends on the other inputs of the
    batch. On a GPU all are pooled at once, because launching kernels for each input would take many
    times as long as the whole network.

    Args:
        hidden: Token vectors, (inputs, tokens, dim).
        spans: First index, and index behind the last, of the tokens that count, for each input.
        routes: The routers of each input.

    Returns:
        One vector per input and router, in this order, (vectors, dim) in float32.
    """
    # In training, autocast would compute the products in 16 bit.
    with torch.autocast(hidden.device.type, enabled=False):
        if not hidden.is_cpu:
            return _pool_routed_at_once(hidden, spans, routes)
        vectors = []
        for states, (first, last), route in zip(hidden, spans, routes, strict=True):
            tokens = states[first:last].float()
            centred = tokens - tokens.mean(dim=0) if route.router.centre else tokens
            queries = move_to_device(torch.as_tensor(route.queries), tokens.device)
            cosines = normalize(queries, dim=1) @ normalize(centred, dim=1).T
            if route.router.standardize:
                # The small constant keeps the divisor above 0, and its gradient finite, if all
                # tokens are alike, for example if there is only one.
                cosines = cosines / (cosines.var(dim=1, correction=0, keepdim=True) + 1e-12).sqrt()
            weights = (cosines / route.router.temperature).softmax(dim=1)
            record_weights(weights, tokens)
            vectors.append(weights @ tokens)
        return torch.cat(vectors)


def _pool_routed_at_once(
    hidden: Tensor, spans: Sequence[tuple[int, int]], routes: Sequence[Routes]
) -> Tensor:
    """Compute what ``pool_routed`` does, with the same number of routers for each input."""
    device, width = hidden.device, hidden.shape[2]
    counts = torch.tensor([len(route.queries) for route in routes])
    router_indices = torch.arange(int(counts.max()))
    real = router_indices < counts[:, None]
    # An input with fewer routers is padded with its first one.
    rows = torch.where(real, router_indices, 0) + (counts.cumsum(0) - counts)[:, None]
    real_indices = move_to_device(real.flatten().nonzero()[:, 0], device)
    first, last = torch.tensor(spans).T[:, :, None]
    tokens = torch.arange(hidden.shape[1])
    counted = move_to_device((first <= tokens) & (tokens < last), device)[:, None]
    routers = [route.router for route in routes]
    settings = [(router.temperature, router.centre, router.standardize) for router in routers]
    columns = move_to_device(torch.tensor(settings, dtype=torch.float32), device)
    temperature, centre, standardize = columns.T[:, :, None, None]

    tokens_float32 = hidden.float()
    weights = counted.float() / counted.sum(dim=2, keepdim=True)
    centred = tokens_float32 - centre * (weights @ tokens_float32)
    all_queries = torch.cat([torch.as_tensor(route.queries) for route in routes])
    all_queries = normalize(move_to_device(all_queries, device), dim=1)
    queries = all_queries.index_select(0, move_to_device(rows.flatten(), device)).view(
        *rows.shape, width
    )
    cosines = queries @ normalize(centred, dim=2).transpose(1, 2)
    deviations = cosines - (cosines * weights).sum(dim=2, keepdim=True)
    spread = ((deviations.square() * weights).sum(dim=2, keepdim=True) + 1e-12).sqrt()
    cosines = cosines / torch.where(standardize > 0, spread, 1.0) / temperature
    router_weights = cosines.masked_fill(~counted, float("-inf")).softmax(dim=2)
    begin, end = spans[0]
    record_weights(router_weights[0, :, begin:end], tokens_float32[0, begin:end])
    padded = router_weights @ tokens_float32
    vectors: Tensor = padded.flatten(0, 1).index_select(0, real_indices)
    return vectors


#: The pooling functions by ``Pooling.takes``. They get the output of the part of the network that
#: the pooling needs.
_FUNCTIONS: Mapping[str, PoolBatch] = {
    "first": first_token,
    "last": last_token,
    "mean": mean_pooling,
}


def find_pooling(name: str) -> PoolBatch:
    """Return the pooling function that an ``EncoderIdentity`` names.

    Raises:
        UserError: If it is a user's function that was not named in this process, or that has
            changed since it was recorded.
    """
    if not plugins.is_plugin(name):
        return _FUNCTIONS[POOLINGS[name].states]
    identify_pooling(name, "the encoder")
    function = plugins.get_registered(name.partition("@")[0], "the encoder")

    def pool(hidden: Tensor, counted: Tensor, lengths: Sequence[int]) -> Tensor:
        try:
            vectors = [
                function(hidden[row, :length].float(), counted[row, :length])
                for row, length in enumerate(lengths)
            ]
        except Exception as error:  # a user's code raises any kind of error
            if "memory" in str(error):
                raise  # the engine tries again with a smaller batch
            raise UserError(f"the pooling {name} failed: {first_line(error)}.") from error
        for vector in vectors:
            if not isinstance(vector, Tensor) or vector.shape != hidden.shape[-1:]:
                result = tuple(getattr(vector, "shape", ())) or type(vector).__name__
                raise UserError(
                    f"the pooling {name} returned {result} for an input; expected a tensor of "
                    f"shape {tuple(hidden.shape[-1:])}."
                )
        return torch.stack(vectors).float()

    return pool


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """The settings of a network's forward passes, the same for all batches.

    Attributes:
        network: Computes token vectors from token ids.
        pooling: How token vectors become one vector.
        pool: The function of that pooling.
        attention: Direction of the attention.
        pad_id: Token id for padding. Padding is masked, so its value never matters.
        device: Where token ids are put.
        dtype: Number type of the network.
        max_length: Most tokens of an input.
        kernel: Attention kernel for segments of any length; None means that PyTorch's scaled dot
            product attention is called for blocks of texts of about one length.
        skipped_id: See the function ``skipped_id``.
        typed: Whether tokens of a second text have another type.
        step: Packed rows are padded to a multiple of this number of tokens. oneDNN prepares a
            product for each number of rows that it meets, which takes milliseconds, and caches it,
            which takes megabytes.
        on_several_devices: Whether the layers are on several devices.
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
    typed: bool = False
    step: int = 1
    on_several_devices: bool = False


def skipped_id(network: Any) -> int | None:
    """Return the padding id after which RoBERTa's positions begin, None for other networks.

    RoBERTa and similar networks count positions from ``padding_idx + 1``, and do not count the
    token with the id ``padding_idx``.
    """
    tables = (m for name, m in network.named_modules() if name.endswith("position_embeddings"))
    index: int | None = getattr(next(tables, None), "padding_idx", None)
    return index


class Forward(Protocol):
    """The forward pass of one batch.

    Attributes:
        n_tokens: Number of tokens that go through the network, including padding.
    """

    n_tokens: int

    def prepare(self) -> None:
        """Create the network's arguments. This needs no lock of the device."""
        ...

    def pooled(self) -> Tensor:
        """Run the network; return one vector per input or per route, (vectors, width) float32."""
        ...


class PaddedForward:
    """The forward pass of inputs as rows of a rectangle, padded on the right.

    Attributes:
        runtime: The network and its settings.
        rows: The inputs.
        width: Number of tokens of each row, including padding.
        arguments: The network's arguments, once the pass is prepared.
        n_tokens: Number of tokens that go through the network, including padding.
    """

    def __init__(
        self, runtime: ForwardSettings, rows: Sequence[Tokens], routes: Sequence[Routes] = ()
    ) -> None:
        """Create the pass of inputs.

        Args:
            runtime: The network and its settings.
            rows: The inputs.
            routes: What weights the tokens of each input; ``()`` means the encoder's own pooling.
        """
        self.runtime, self.rows, self._routes = runtime, rows, routes
        self.width = max(len(row.ids) for row in rows)
        self.arguments: dict[str, Any] = {}
        self.n_tokens = len(rows) * self.width

    def token_position(self, index: int, token: int) -> int:
        """Return the position of an input's token among the tokens of the pass."""
        return index * self.width + token

    def prepare(self) -> None:
        """Create the network's arguments. This needs no lock of the device."""
        shape = (len(self.rows), self.width)
        ids = torch.full(shape, self.runtime.pad_id)
        attended, types = torch.zeros(2, *shape, dtype=torch.long)
        counted = torch.zeros(shape, dtype=torch.bool)
        for index, row in enumerate(self.rows):
            # Padding is on the right, whatever the tokenizer prefers: see PADDING_SIDE.
            ids[index, : len(row.ids)] = torch.tensor(row.ids)
            attended[index, : len(row.ids)] = 1
            types[index, row.second : len(row.ids)] = 1
            counted[index, row.first : row.last] = True
        arguments = {"input_ids": ids, "attention_mask": attended}
        if self.runtime.typed and types.any():
            arguments["token_type_ids"] = types
        if self.runtime.pooling.part == "latent":
            arguments["pooled"] = counted.flatten().nonzero()[:, 0]
        device = self.runtime.device
        self.arguments = {key: move_to_device(value, device) for key, value in arguments.items()}
        self._counted = move_to_device(counted, device)

    def hidden(self, **router: Any) -> Tensor:
        """Run the network, with the ``router`` inside if one is given.

        Returns:
            The vectors of all tokens, (inputs, longest, width).
        """
        hidden: Tensor = self.runtime.network(**self.arguments, **router).last_hidden_state
        return hidden

    def pooled(self, **router: Any) -> Tensor:
        """Run the network; return one vector per input or per route, (vectors, width) float32."""
        output: Any = self.runtime.network(**self.arguments, **router)
        if self._routes:
            spans = [(row.first, row.last) for row in self.rows]
            return pool_routed(output.last_hidden_state, spans, self._routes)
        if self.runtime.pooling.part == "pooler":
            vectors: Tensor = output.pooler_output.float()
            return vectors
        hidden = output.last_hidden_state
        lengths = [len(row.ids) for row in self.rows]
        return self.runtime.pool(hidden, self._counted.to(hidden.device), lengths)


class PackedForward:
    """The forward pass of inputs that are concatenated in a single row.

    Attributes:
        runtime: The network and its settings.
        batch: The row as it enters the network.
        output_batch: The row as it leaves the network.
        rows: The inputs, in the order of their vectors.
        width: Number of tokens of the row as it enters the network, including padding.
        arguments: The network's arguments, once the pass is prepared.
        n_tokens: Number of tokens of the row as it leaves the network, including padding.
    """

    def __init__(
        self,
        runtime: ForwardSettings,
        batch: PackedRow,
        rows: Sequence[Tokens],
        routes: Sequence[Routes] = (),
        leaving: PackedRow | None = None,
    ) -> None:
        """Create the pass of a packed row.

        Args:
            runtime: The network and its settings.
            batch: The row; its sources and inputs are positions in ``rows`` and ``routes``.
            rows: Inputs.
            routes: What weights the tokens of each input; ``()`` means the encoder's own pooling.
            leaving: The row as it leaves the network, if inputs are repeated within the network.
        """
        self.runtime, self.batch, self._sources = runtime, batch, rows
        self.output_batch = leaving or batch
        self.rows = [rows[index] for index in self.output_batch.inputs]
        self._routes = [routes[index] for index in batch.inputs] if routes else []
        self.arguments: dict[str, Any] = {}
        self.width = padded_length(batch, runtime)
        self.n_tokens = padded_length(self.output_batch, runtime)

    def token_position(self, index: int, token: int) -> int:
        """Return the position of an input's token in the row as it leaves the network."""
        return self.output_batch.position(self.output_batch.leaves[index], token)

    def prepare(self) -> None:
        """Create the network's arguments. This needs no lock of the device."""
        runtime, skipped = self.runtime, self.runtime.skipped_id
        segments, n = self.batch.segments, self.batch.n_tokens
        sources = [self._sources[segment.source] for segment in segments]
        texts = (
            row.ids[segment.begin : segment.end]
            for row, segment in zip(sources, segments, strict=True)
        )
        # Token ids, positions and token types of the whole row, copied to the device at once.
        values = np.zeros((3, 1, self.width), dtype=np.int64)
        ids, positions, types = values[:, 0]
        ids[:n] = np.fromiter(chain.from_iterable(texts), np.int64, n)
        ids[n:], positions[n:] = runtime.pad_id, skipped or 0
        lengths = [segment.length for segment in segments]
        offsets = [segment.begin - segment.start for segment in segments]
        within = np.arange(n) + np.repeat(offsets, lengths)
        positions[:n] = within if skipped is None else _roberta_positions(skipped, ids[:n], lengths)
        types[:n] = within >= np.repeat([row.second for row in sources], lengths)
        is_typed = runtime.typed and types.any()
        names = ["input_ids", "position_ids", *(["token_type_ids"] if is_typed else [])]
        tensors = move_to_device(torch.from_numpy(values[: len(names)]), runtime.device)
        self.arguments = dict(zip(names, tensors, strict=True))
        # transformers passes a mask of four dimensions on as it is, and creates none for the row.
        self.arguments["attention_mask"] = torch.zeros(1, 1, 1, 1, device=runtime.device)
        self.arguments["packed"] = plan_row_attention(runtime, self.batch)
        pooled, counted = self._pooled_positions()
        if runtime.pooling.part == "latent":
            self.arguments["pooled"] = move_to_device(pooled[counted], runtime.device)
        self._pooled = move_to_device(pooled, runtime.device)
        self._counted = move_to_device(counted, runtime.device)

    def _pooled_positions(self) -> tuple[Tensor, Tensor]:
        """Return the positions in the row of each input's pooled tokens, and which of them count.

        Both are padded to the most pooled tokens of an input, (inputs, tokens).
        """
        rows = self.rows
        # Routed inputs weight all tokens that count, whatever the encoder's own pooling needs.
        pooling = POOLINGS["mean"] if self._routes else self.runtime.pooling
        ranges = [pooling.tokens(row.first, row.last, len(row.ids)) for row in rows]
        starts = [self.token_position(index, first) for index, (first, _) in enumerate(ranges)]
        self._lengths = [last - first for first, last in ranges]
        offsets = torch.arange(max(self._lengths))
        positions = offsets + torch.tensor([first for first, _ in ranges])[:, None]
        counted = positions >= torch.tensor([row.first for row in rows])[:, None]
        counted &= positions < torch.tensor([row.last for row in rows])[:, None]
        pooled = offsets < torch.tensor(self._lengths)[:, None]
        return torch.where(pooled, torch.tensor(starts)[:, None] + offsets, 0), counted & pooled

    def hidden(self, **router: Any) -> Tensor:
        """Run the network as in ``PaddedForward``; return all tokens' vectors, (tokens, width)."""
        hidden: Tensor = self.runtime.network(**self.arguments, **router).last_hidden_state
        return hidden[0]

    def pooled(self, **router: Any) -> Tensor:
        """Run the network; return one vector per input or per route, (vectors, width) float32."""
        hidden = self.hidden(**router)
        pooled = self._pooled.to(hidden.device)
        # The backward pass of hidden[pooled] would add up gradients one by one, in any order.
        hidden = hidden.index_select(0, pooled.flatten()).view(*pooled.shape, -1)
        if self._routes:
            return pool_routed(hidden, [(0, length) for length in self._lengths], self._routes)
        if self.runtime.pooling.part == "pooler":
            network = self.runtime.network
            # ALBERT's pooler is a linear layer without its activation.
            activation = getattr(network, "pooler_activation", None)
            vectors: Tensor = (
                network.pooler(hidden)
                if activation is None
                else activation(network.pooler(hidden[:, 0]))
            )
            return vectors.float()
        return self.runtime.pool(hidden, self._counted.to(hidden.device), self._lengths)


def padded_length(batch: PackedRow, runtime: ForwardSettings) -> int:
    """Return the length of a packed row including its padding, in tokens."""
    return -(-batch.n_tokens // runtime.step) * runtime.step


def plan_row_attention(runtime: ForwardSettings, batch: PackedRow) -> AttentionPlan:
    """Plan the attention of a packed row for the runtime's kernel."""
    causal = runtime.attention == "causal"

    def plan(device: torch.device) -> AttentionPlan:
        if runtime.kernel is None:
            return plan_attention(batch, causal, device, runtime.dtype)
        return plan_varlen(batch, causal, device, runtime.kernel)

    if not runtime.on_several_devices:
        return plan(runtime.device)
    plan_once = cache(plan)
    return lambda query, *rest: plan_once(query.device)(query, *rest)


def _roberta_positions(
    skipped: int, ids: NDArray[np.int64], lengths: list[int]
) -> NDArray[np.int64]:
    """Return the positions of tokens where they are counted as in RoBERTa; see ``skipped_id``.

    Encoders with such positions are bidirectional, so each segment is a whole input.
    """
    counted = (ids != skipped).cumsum()
    ends = np.cumsum(lengths)[:-1]
    previous = np.concatenate([[0], counted[ends - 1]])
    return np.where(ids == skipped, skipped, skipped + counted - np.repeat(previous, lengths))


class Passes:
    """Creates the forward passes with which an engine computes batches.

    In this class, routers weight the tokens of inputs as they are pooled. A router that acts inside
    the network has a subclass.

    Attributes:
        routes_inside: Whether routers act inside the network, so that each router needs its own
            pass.
        reads_routers: Whether the network reads the router's text along with each input, so that
            routers have no query vector.
    """

    routes_inside = reads_routers = False

    def __init__(self, network: Any, identity: EncoderIdentity, name: str) -> None:
        """Prepare the network of the encoder called ``name``."""

    def forward(
        self,
        runtime: ForwardSettings,
        rows: Sequence[Tokens],
        batch: PackedRow | None = None,
        routes: Sequence[Any] = (),
        *,
        queries: bool = False,
    ) -> Forward:
        """Create the forward pass of a batch.

        Args:
            runtime: The network and its settings.
            rows: Inputs.
            batch: The packed row of some of these inputs; None means all inputs, padded.
            routes: What weights the tokens of each input.
            queries: Whether to compute the vectors that the inputs have as routers of other inputs.
        """
        if batch is None:
            return PaddedForward(runtime, rows, routes)
        return PackedForward(runtime, batch, rows, routes)


class LatentConfig(MistralConfig):  # type: ignore[misc]
    """The config of a Mistral, with the sizes of the latent-attention block."""

    model_type = "nvembed"

    num_latents: int = 512
    num_cross_heads: int = 8
    cross_head_dim: int = 4096


def read_config(config: Mapping[str, Any]) -> LatentConfig:
    """Create the config from the content of NV-Embed's config.json.

    Raises:
        KeyError: If one of its two nested configs, or a size in them, is missing.
        ValueError: If its latent block is not as wide as its backbone.
    """
    latent = config["latent_attention_config"]
    backbone = {
        key: value
        for key, value in config["text_config"].items()
        if key not in {"model_type", "architectures", "torch_dtype", "dtype", "auto_map"}
    }
    width = backbone["hidden_size"]
    widths = {key: latent.get(key, width) for key in ("hidden_dim", "latent_dim")}
    if set(widths.values()) != {width}:
        raise ValueError(f"the backbone has {width} dimensions, but the latent block has {widths}")
    # The original masks padding only: it has no causal direction and no sliding window. This must
    # be set on the config: if set on the attention layers, SDPA would still be causal for padded
    # batches.
    backbone.update(is_causal=False, sliding_window=None, use_cache=False)
    return LatentConfig(
        **backbone,
        num_latents=latent["num_latents_value"],
        num_cross_heads=latent["num_cross_heads"],
        cross_head_dim=latent["cross_dim_head"],
    )


class _PreNorm(nn.Module):
    """A module with a layer norm for its input and, for attention, one for its context."""

    def __init__(self, width: int, function: nn.Module, context: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        if context:
            self.norm_context = nn.LayerNorm(width)
        self.fn = function


class _GEGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, dim=-1)
        return value * nn.functional.gelu(gate)


class LatentAttention(nn.Module):
    """The block that transforms the backbone's token vectors before they are averaged.

    Tokens are the queries; trained latents are the keys and values. The latents are frozen, so the
    projections around them can be multiplied out once: see ``fold``.
    """

    def __init__(self, config: LatentConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.head_dim = config.num_cross_heads, config.cross_head_dim
        self.latents = nn.Parameter(torch.empty(config.num_latents, width))
        inner = self.heads * self.head_dim
        projections = {
            "to_q": nn.Linear(width, inner, bias=False),
            "to_kv": nn.Linear(width, 2 * inner, bias=False),
            "to_out": nn.Linear(inner, width, bias=False),
        }
        feed = nn.Sequential(nn.Linear(width, 8 * width), _GEGLU(), nn.Linear(4 * width, width))
        attention = _PreNorm(width, nn.ModuleDict(projections), context=True)
        outer = _PreNorm(width, nn.ModuleDict({"net": feed}), context=False)
        self.cross_attend_blocks = nn.ModuleList([attention, outer])
        self.scores: nn.Linear | None = None
        self.values: nn.Linear | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform token vectors, (rows, tokens, width); the shape stays the same."""
        blocks: Any = self.cross_attend_blocks
        hidden = self._attend(blocks[0], blocks[0].norm(hidden)) + hidden
        transformed: Tensor = blocks[1].fn["net"](blocks[1].norm(hidden)) + hidden
        return transformed

    def _attend(self, block: Any, queries: Tensor) -> Tensor:
        """Compute the attention of tokens to the latents, folded or not."""
        if self.scores is not None and self.values is not None:
            weights = self.scores(queries).unflatten(-1, (self.heads, -1)).softmax(dim=-1)
            folded: Tensor = self.values(weights.flatten(-2))
            return folded
        rows = queries.shape[0]
        keys, values = block.fn["to_kv"](block.norm_context(self.latents)).chunk(2, dim=-1)
        heads = (-1, self.heads, self.head_dim)
        attended = nn.functional.scaled_dot_product_attention(
            block.fn["to_q"](queries).unflatten(-1, heads[1:]).transpose(1, 2),
            keys.view(heads).transpose(0, 1).expand(rows, -1, -1, -1),
            values.view(heads).transpose(0, 1).expand(rows, -1, -1, -1),
        )
        projected: Tensor = block.fn["to_out"](attended.transpose(1, 2).flatten(-2))
        return projected

    @torch.no_grad()
    def fold(self) -> None:
        """Multiply the frozen latents into the projections around them.

        All queries are compared with the same keys. So ``to_q`` and the keys become one matrix per
        head, and so do the values and ``to_out``. At NV-Embed-v2's size, 537 M parameters become
        34 M. The products are computed in float32, one head at a time.
        """
        block: Any = self.cross_attend_blocks[0]
        like, norm = block.fn["to_q"].weight, block.norm_context
        context = nn.functional.layer_norm(
            self.latents.float(), norm.normalized_shape, norm.weight.float(), norm.bias.float()
        )
        # to_kv is multiplied in two halves, because at full size it takes 1 GiB in float32.
        keys, values = (context @ half.float().T for half in block.fn["to_kv"].weight.chunk(2))
        scale = self.head_dim**-0.5
        scores, outputs = [], []
        for head in range(self.heads):
            part = slice(head * self.head_dim, (head + 1) * self.head_dim)
            scores.append(scale * keys[:, part] @ block.fn["to_q"].weight[part].float())
            outputs.append(values[:, part] @ block.fn["to_out"].weight[:, part].float().T)
        self.scores = _make_linear(torch.cat(scores), like)
        self.values = _make_linear(torch.cat(outputs).T, like)
        del block.fn, block.norm_context, self.latents


def _make_linear(weight: Tensor, like: Tensor) -> nn.Linear:
    """Create a projection without bias, in the type and on the device of ``like``."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.to(like).contiguous(), requires_grad=False)
    return linear


class NVEmbedModel(PreTrainedModel):  # type: ignore[misc]
    """NV-Embed-v2: a bidirectional Mistral, followed by latent attention.

    The output is token vectors, and the embedding is their masked mean. The original excludes the
    tokens of the instruction from the mean, and only these.
    """

    config_class = LatentConfig
    base_model_prefix = ""
    _no_split_modules = ("MistralDecoderLayer", "LatentAttention")
    _supports_sdpa = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def __init__(self, config: LatentConfig) -> None:
        super().__init__(config)
        self.embedding_model = MistralModel(config)
        self.latent_attention_model = LatentAttention(config)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, pooled: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """Compute token vectors.

        Args:
            input_ids: (rows, tokens).
            attention_mask: (rows, tokens).
            pooled: Positions among all tokens of all rows whose vectors are needed, (n,). All other
                vectors are zero, which is possible because the latent block treats each token
                independently. None means all tokens.
            **kwargs: More arguments of the backbone.

        Returns:
            The token vectors, (rows, tokens, width), as ``last_hidden_state``.
        """
        backbone = self.embedding_model(
            input_ids=input_ids, attention_mask=attention_mask, **kwargs
        )
        hidden = backbone.last_hidden_state
        if pooled is None:
            return BaseModelOutput(self.latent_attention_model(hidden))
        # With a mask instead of positions, the CPU would wait for the GPU to count its True values.
        pooled = pooled.to(hidden.device)
        tokens = hidden.flatten(0, 1)
        transformed = self.latent_attention_model(tokens.index_select(0, pooled)[None])[0]
        vectors = torch.zeros_like(tokens).index_copy(0, pooled, transformed.type_as(tokens))
        return BaseModelOutput(vectors.view_as(hidden))

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Choose the backbone's attention; that of the latent block does not change."""
        self.embedding_model.set_attn_implementation(*args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings."""
        embeddings: nn.Module = self.embedding_model.embed_tokens
        return embeddings
