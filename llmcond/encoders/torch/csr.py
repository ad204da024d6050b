"""CSR, a router inside the last layers of an encoder that weights tokens by a condition.

Lin et al., Varying Sentence Representations via Condition-Specified Routers (EMNLP 2024 Findings),
section 2.

The condition is encoded separately, which yields a query q. Each routed layer compares q with the
keys k_i of the sentence's n tokens. The output h'_i of the layer's attention is scaled token by
token, before the output projection::

    w = softmax_i(q . k_i / sqrt(d))        h_i = (1 + strength w_i) h'_i

``RouterMode`` (llmcond/encoders/settings.py) says what the modes use as q and k_i, and
``RouterWeight`` says what else may replace 1 + strength w_i. The layers before the routed ones do
not depend on the condition. In a packed row, they are computed once per sentence, however many
conditions it has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from typing_extensions import override

from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.system import move_to_device
from llmcond.encoders.settings import (
    READING_MODES,
    RELEASED_MODES,
    EncoderIdentity,
    RouterMode,
)
from llmcond.encoders.tokenizing import Tokens, record_row, record_weights
from llmcond.encoders.torch.attention import NAME, AttentionCall
from llmcond.encoders.torch.batching import PackedRow, concatenate_inputs
from llmcond.encoders.torch.forward import (
    Forward,
    ForwardSettings,
    PackedForward,
    PaddedForward,
    Passes,
    plan_row_attention,
)

#: Smallest effect of a router on states, as a share of their norm, with weights in float32 and in
#: 16 bit. In Gemma a trial router changes them by rounding, 1e-5 in float32 and 0.006 in bfloat16;
#: in other encoders by more than 0.05, and by 0.02 in small ones with random weights.
_MIN_CHANGE = 0.001, 0.015
#: The attribute of a network that has its heavy router.
_ROUTER_ATTRIBUTE = "csr_router"


class HeavyRouter(nn.Module):
    """The weights of a heavy router: W_q and W_k of each routed layer, (d, d)."""

    def __init__(self, n_layers: int, width: int) -> None:
        super().__init__()
        # Initialised like nn.Linear, but as bare parameters, so that they are neither quantised nor
        # adapted.
        bound = width**-0.5
        initial = (torch.empty(n_layers, width, width).uniform_(-bound, bound) for _ in range(2))
        self.query, self.key = (nn.ParameterList([*weights]) for weights in initial)


class CsrPasses(Passes):
    """Creates the forward passes of a network with a router in its last layers.

    The route of an input is the query of its condition, (d,). In modes that read the condition
    along with the input, it is the condition's tokens.

    Attributes:
        mode: The router mode.
        weight: How weights scale tokens.
        causal: Whether a token sees only itself and the tokens before it.
        first_layer: Index of the first routed layer.
    """

    routes_inside = True

    def __init__(self, network: Any, identity: EncoderIdentity, name: str) -> None:
        """Find the network's layers, and register the router's hooks.

        Raises:
            UserError: If the router does not support the architecture, or if the network has too
                few layers or no trained router.
        """
        self.mode, self._strength = identity.router_mode, identity.router_strength
        self.weight = identity.router_weight
        self.causal = identity.attention == "causal"
        self.reads_routers = self.mode in READING_MODES
        self._heavy: HeavyRouter | None = getattr(network, _ROUTER_ATTRIBUTE, None)
        if self.mode == "heavy" and self._heavy is None:
            raise UserError(
                f"router_mode is 'heavy', which needs trained weights, but {name} has none. Train "
                "them: llmcond train-lora --router csr --router-mode heavy"
            )
        modules, self._head_size = _find_attention_modules(network, name)
        count = len(modules)
        if identity.router_layers > count:
            raise UserError(
                f"router_layers is {identity.router_layers}, but {name} has {count} layers; it "
                f"must be at most {count}."
            )
        self.first_layer = count - identity.router_layers
        self._layer_of = {module: layer for layer, module in enumerate(modules)}
        layers = _find_layers(network, modules, name)
        # In released-tri, the condition's final states are keys in every layer. With rotary
        # positions, they would have no position to be rotated to.
        rotary = "position_embeddings" in inspect.signature(modules[0].forward).parameters
        if self.mode in RELEASED_MODES and (self.causal or rotary):
            raise UserError(
                f"router_mode is {self.mode!r}, which is for bidirectional encoders that add "
                f"positions to their embeddings, as BERT and RoBERTa do; {name} does not. "
                "Use --router-mode paper."
            )
        enter, leave = (partial(_call_router, f"{verb}_attention") for verb in ("enter", "leave"))
        for module in modules:
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(leave, with_kwargs=True)
        for number, layer in enumerate(layers[self.first_layer :]):
            hook = partial(_call_router, "enter_layer" if number else "enter_first_layer")
            layer.register_forward_pre_hook(hook, with_kwargs=True)

    # -- the engine's interface ----------------------------------------------------------------

    @override
    def forward(
        self,
        runtime: ForwardSettings,
        rows: Sequence[Tokens],
        batch: PackedRow | None = None,
        routes: Sequence[Any] = (),
        *,
        queries: bool = False,
    ) -> Forward:
        """Create the pass of sentences, each under one condition, or of conditions (``queries``).

        Adjacent sentences of a packed row with the same ``Tokens`` are computed once up to the
        first routed layer. The arguments are those of ``Passes.forward``.
        """
        if queries:
            plain = PackedForward(runtime, batch, rows) if batch else PaddedForward(runtime, rows)
            return _ConditionForward(self, plain)
        if not routes:
            return super().forward(runtime, rows, batch)
        if self.reads_routers:
            read_together = _READING_FORWARDS[self.mode](self, runtime, rows, routes)
            record_row(read_together.rows)
            return read_together
        if batch is None:
            return _RoutedForward(self, PaddedForward(runtime, rows), routes)
        groups = [list(group) for _, group in groupby(batch.inputs, key=lambda i: id(rows[i]))]
        distinct = concatenate_inputs(
            [group[0] for group in groups], [len(row.ids) for row in rows]
        )
        distinct_indices = [number for number, group in enumerate(groups) for _ in group]
        forward = PackedForward(runtime, distinct, rows, leaving=batch)
        return _RoutedForward(
            self, forward, [routes[index] for index in batch.inputs], distinct_indices
        )

    # -- the router's formula ------------------------------------------------------------------

    def is_routed(self, module: nn.Module) -> bool:
        """Return whether the layer with this attention module is routed."""
        return self._layer_of[module] >= self.first_layer

    def routed_index(self, module: nn.Module) -> int:
        """Return the index of a routed layer among the routed ones."""
        return self._layer_of[module] - self.first_layer

    def sample_weights(self, texts: Sequence[Sequence[int]], width: int) -> Tensor | None:
        """Sample the random weights of texts; None if the router computes its own weights.

        Args:
            texts: The token ids of each text, which are the seed of its weights.
            width: Number of tokens to pad to; the weights of padding are 0.

        Returns:
            The weights, (routed layers, texts, width), on the CPU. Those of a text add up to 1.
        """
        if self.weight != "random":
            return None
        n_layers = len(self._layer_of) - self.first_layer
        weights = torch.zeros(n_layers, len(texts), width)
        for index, ids in enumerate(texts):
            scores = np.random.default_rng(ids).standard_normal((n_layers, len(ids)))
            weights[:, index, : len(ids)] = torch.from_numpy(scores).softmax(dim=1)
        return weights

    def scores(self, module: nn.Module, queries: Tensor, keys: Tensor) -> Tensor:
        """Compute q . k_i / sqrt(d), (m, n) float32, for queries (m, dq) and keys (m, n, dk)."""
        with torch.autocast(keys.device.type, enabled=False):
            queries, keys = queries.to(keys.device).float(), keys.float()
            width = queries.shape[1]
            if self._heavy is not None:
                layer = self.routed_index(module)
                # The layers of the network may be on several devices.
                queries = linear(queries, self._heavy.query[layer].to(keys.device))
                keys = linear(keys, self._heavy.key[layer].to(keys.device))
            elif keys.shape[2] != width:
                # Groups of query heads share a key head: q . k is summed over the group.
                shape = (len(queries), -1, width // keys.shape[2], self._head_size)
                queries = queries.view(shape).sum(dim=2).flatten(1)
            scores: Tensor = (keys @ queries[:, :, None])[..., 0] / width**0.5
            return scores

    def scale(self, attended: Tensor, weights: Tensor) -> Tensor:
        """Scale h'_i as the router's ``weight`` says, with the weights w as (batch, tokens)."""
        record_weights(weights)
        factor = self._strength * weights.to(attended.device)
        if self.weight != "only":
            factor = 1 + factor
        return attended * factor.to(attended.dtype)[..., None, None]


class _TrialRouter:
    """Records the layers that are run, and multiplies the output of their attention.

    Attributes:
        modules: The attention modules, in the order of their calls.
        head_size: Size of a head.
    """

    def __init__(self, factor: float) -> None:
        self.modules: list[nn.Module] = []
        self.head_size, self._factor = 0, factor

    def attend(self, call: AttentionCall) -> Tensor:
        self.modules.append(call.module)
        self.head_size = call.query.shape[3]
        return call.attend() * self._factor

    @torch.inference_mode()
    def run(self, network: Any) -> Tensor:
        """Return the states of two tokens."""
        device = network.get_input_embeddings().weight.device
        ids, mask = torch.tensor([[[1, 2]], [[1, 1]]]).to(device)
        hidden: Tensor = network(input_ids=ids, attention_mask=mask, router=self).last_hidden_state
        return hidden.float()


def _find_attention_modules(network: Any, name: str) -> tuple[list[nn.Module], int]:
    """Return the attention module of each layer, in the order of their calls, and the head size.

    Raises:
        UserError: If a router cannot act inside this network.
    """
    trial, obstacle = _TrialRouter(1.0), ""
    if getattr(network, "_supports_attention_backend", False):
        network.set_attn_implementation(NAME)
        plain, doubled = trial.run(network), _TrialRouter(2.0).run(network)
    exact = next(network.parameters()).dtype == torch.float32
    if not trial.modules:
        obstacle = "computes its attention without transformers' attention interface"
    elif len(set(trial.modules)) < len(trial.modules):
        obstacle = "shares its weights between layers, so only some of them cannot have a router"
    elif (plain - doubled).norm() < _MIN_CHANGE[not exact] * plain.norm():
        # Gemma does this. Its vectors would silently ignore the condition.
        obstacle = "scales the output of its attention to a fixed norm, which undoes the router's"
    if obstacle:
        raise UserError(
            f"{name} ({network.config.model_type}) {obstacle}, so it cannot have a router inside. "
            "BERT, RoBERTa, Mistral and Qwen can. Leave out --router: routed pooling works with "
            "any encoder."
        )
    return trial.modules, trial.head_size


def _find_layers(network: nn.Module, modules: Sequence[nn.Module], name: str) -> list[nn.Module]:
    """Return the layers that contain the attention modules."""
    for child in network.modules():
        if isinstance(child, nn.ModuleList) and len(child) == len(modules):
            pairs = zip(child, modules, strict=True)
            if all(any(part is module for part in layer.modules()) for layer, module in pairs):
                return list(child)
    raise UserError(
        f"{name} has no list of layers, so --router csr cannot determine which layers are last."
    )


# -- hooks, through which a network calls the router that it gets as an argument -----------------


def _call_router(
    method: str, module: nn.Module, args: Any, kwargs: dict[str, Any], *output: Any
) -> Any:
    """Call a method of the router that is among a module's arguments, if there is one."""
    router = kwargs.get("router")
    return router and getattr(router, method)(args, kwargs, *output)


def _get_states(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Return the states among a module's arguments."""
    states: Tensor = args[0] if args else kwargs["hidden_states"]
    return states


def _replace_states(
    states: Tensor, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return a module's arguments with other states."""
    return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})


class _Router:
    """A router as it is called by a network's hooks and attention.

    Attributes:
        csr: The router's settings, layers and formula.
        states: The input of the attention of the current layer.
    """

    #: The tokens that are scaled, (batch, tokens); None: all.
    scaled_tokens: Any = None
    #: The weights of ``CsrPasses.sample_weights``; None: the router computes them.
    random_weights: Tensor | None = None

    def __init__(self, csr: CsrPasses) -> None:
        self.csr, self.states = csr, torch.empty(0)

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention of a layer, (batch, tokens, heads, head_dim), before W_O."""
        attended = call.attend()
        if not self.csr.is_routed(call.module):
            return attended
        scaled = self.csr.scale(attended, self.token_weights(call))
        if self.scaled_tokens is None:
            return scaled
        is_scaled = self.scaled_tokens.to(attended.device)[..., None, None]
        return torch.where(is_scaled, scaled, attended)

    def token_weights(self, call: AttentionCall) -> Tensor:
        """Return the weight of each token in a routed layer, (batch, tokens)."""
        if self.random_weights is None:
            return self.compute_weights(call)
        return self.random_weights[self.csr.routed_index(call.module)]

    def compute_weights(self, call: AttentionCall) -> Tensor:
        """Compute the router's own weights."""
        raise NotImplementedError

    def enter_first_layer(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return changed arguments of the first routed layer; None leaves them as they are."""
        return self.enter_layer(args, kwargs)

    def enter_layer(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return changed arguments of a routed layer; None leaves them as they are."""
        return None

    def enter_attention(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record the states; return changed arguments of an attention module, or None."""
        self.states = _get_states(args, kwargs)

    def leave_attention(self, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Return a changed output of an attention module; None leaves it as it is."""
        return None

    def keys(self, key: Tensor) -> Tensor:
        """Return the vectors by which the router compares tokens, (batch * tokens, d)."""
        if self.csr.mode in ("hidden", "heavy"):  # compare the input of a layer's attention
            return self.states.flatten(0, 1)
        return key.transpose(1, 2).flatten(2).flatten(0, 1)


class _ConditionForward(_Router):
    """The pass of conditions, whose result is their queries, those of one token of each.

    Attributes:
        n_tokens: Number of tokens that go through the network, including padding.
    """

    def __init__(self, csr: CsrPasses, forward: PaddedForward | PackedForward) -> None:
        super().__init__(csr)
        self._forward, self.n_tokens, self._queries = forward, forward.n_tokens, torch.empty(0)

    def prepare(self) -> None:
        """Create the network's arguments."""
        forward = self._forward
        forward.prepare()
        # A condition's query is that of a token that sees the whole condition.
        tokens = (len(row.ids) - 1 if self.csr.causal else 0 for row in forward.rows)
        positions = [forward.token_position(index, token) for index, token in enumerate(tokens)]
        self._positions = move_to_device(torch.tensor(positions), forward.runtime.device)

    @override
    def attend(self, call: AttentionCall) -> Tensor:
        # Each layer overwrites the queries of the previous one, so those of the last layer remain.
        queries = self.keys(call.query)
        self._queries = queries.index_select(0, self._positions.to(queries.device)).float()
        return call.attend()

    def pooled(self) -> Tensor:
        """Run the network; return the query of each condition, (m, d)."""
        self._forward.hidden(router=self)
        return self._queries


# -- sentences -----------------------------------------------------------------------------------


class _RoutedForward(_Router):
    """The pass of sentences, each under one condition.

    It scales the tokens of each sentence by their similarity to the query of its condition.

    Attributes:
        n_tokens: Number of tokens that leave the network, including padding.
    """

    #: For each token of a row that leaves the network, its index in the row that enters it, if the
    #: sentences are repeated at the first routed layer.
    _expand: Any = None

    def __init__(
        self,
        csr: CsrPasses,
        forward: PaddedForward | PackedForward,
        queries: Sequence[Any],
        distinct_indices: Sequence[int] = (),
    ) -> None:
        """Create a routed pass of m sentences.

        Args:
            csr: The router's settings, layers and formula.
            forward: The pass of the sentences without a router.
            queries: The query of each sentence's condition, (d,).
            distinct_indices: For each sentence, the index of its segment in the row that enters the
                network, if some sentences share a segment.
        """
        super().__init__(csr)
        self._forward, self.n_tokens = forward, forward.n_tokens
        self._query_list, self._distinct_indices = queries, torch.tensor(distinct_indices)

    def prepare(self) -> None:
        """Create the network's arguments."""
        forward, move = self._forward, partial(move_to_device, device=self._forward.runtime.device)
        forward.prepare()
        lengths = torch.tensor([len(row.ids) for row in forward.rows])
        starts = torch.tensor([forward.token_position(index, 0) for index in range(len(lengths))])
        offsets = torch.arange(int(lengths.max()))
        real = offsets < lengths[:, None]
        # The positions of each sentence's tokens among those of the pass, (m, longest).
        positions = torch.where(real, starts[:, None] + offsets, 0)
        # For each token of the pass, the index of its weight among m * longest weights. Tokens
        # outside the sentences have the zero that is appended to the weights.
        weight_indices = torch.full((self.n_tokens,), real.numel())
        weight_indices[positions[real]] = torch.arange(real.numel())[real.flatten()]
        # Tensors are copied to the device once, rather than in each layer.
        self._queries = move(torch.stack([torch.as_tensor(query) for query in self._query_list]))
        self._real, self._positions, self._weight_indices = map(
            move, (real, positions, weight_indices)
        )
        self.random_weights = self.csr.sample_weights(
            [row.ids for row in forward.rows], len(offsets)
        )
        if isinstance(forward, PackedForward) and len(forward.batch.segments) < len(lengths):
            segment_starts = torch.tensor([segment.start for segment in forward.batch.segments])
            segment_starts = segment_starts[self._distinct_indices]
            expand = torch.zeros(self.n_tokens, dtype=torch.long)
            expand[positions[real]] = torch.where(real, segment_starts[:, None] + offsets, 0)[real]
            self._expand = move(expand)
            self._plan = plan_row_attention(forward.runtime, forward.output_batch)

    def pooled(self) -> Tensor:
        """Run the network; return one vector per sentence, (m, width) in float32."""
        return self._forward.pooled(router=self)

    @override
    def token_weights(self, call: AttentionCall) -> Tensor:
        weights = move_to_device(super().token_weights(call), call.query.device)
        indices = self._weight_indices.to(weights.device)
        return pad(weights.flatten(), (0, 1)).index_select(0, indices).view(len(call.query), -1)

    @override
    def compute_weights(self, call: AttentionCall) -> Tensor:
        all_keys = self.keys(call.key)
        positions = self._positions.to(all_keys.device)
        keys = all_keys.index_select(0, positions.flatten()).view(*positions.shape, -1)
        scores = self.csr.scores(call.module, self._queries, keys)
        return scores.masked_fill(~self._real.to(all_keys.device), float("-inf")).softmax(dim=1)

    @override
    def enter_first_layer(self, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._expand is None:
            return None
        states = _get_states(args, kwargs)
        self._n = states.shape[1]
        return self.enter_layer(*_replace_states(self._expand_row(states), args, kwargs))

    @override
    def enter_layer(self, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._expand is None:
            return None
        rest = {key: self._expand_row(v) for key, v in kwargs.items() if key != "hidden_states"}
        return args, {**kwargs, **rest, "packed": self._plan}

    def _expand_row(self, value: Any) -> Any:
        """Expand a tensor that has one entry per token of the row; return others as they are."""
        if isinstance(value, tuple):  # the sines and cosines of rotary positions
            return tuple(self._expand_row(part) for part in value)
        is_row = isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, self._n)
        return value.index_select(1, self._expand.to(value.device)) if is_row else value


# -- sentences that are read together with their conditions --------------------------------------


class _TriEncoderForward(PaddedForward, _Router):
    """The tri-encoder of the authors' code: sentences attend to their condition in every layer.

    The separator of a sentence is repeated at its beginning, and the state of this first token is
    the sentence's vector. The keys and values of every layer are those of the condition's final
    states and of the sentence. The weights of the sentence's tokens are the attention of the first
    token to them, averaged over heads. Positions are those within the sentence. In the released
    code, they depend on the longest condition of the batch.
    """

    def __init__(
        self,
        csr: CsrPasses,
        runtime: ForwardSettings,
        rows: Sequence[Tokens],
        queries: Sequence[Any],
    ) -> None:
        PaddedForward.__init__(self, runtime, [_prepend_separator(row, runtime) for row in rows])
        _Router.__init__(self, csr)
        distinct = {id(query): query for query in queries}
        index_of = {key: index for index, key in enumerate(distinct)}
        self._condition_indices = torch.tensor([index_of[id(query)] for query in queries])
        self._conditions = PaddedForward(runtime, list(distinct.values()))
        self.n_tokens += self._conditions.n_tokens

    @override
    def prepare(self) -> None:
        super().prepare()
        self._conditions.prepare()
        self._condition_indices = move_to_device(self._condition_indices, self.runtime.device)

    @override
    def pooled(self, **router: Any) -> Tensor:
        conditions, indices = self._conditions, self._condition_indices
        # The states of each sentence's condition, (m, c, d), and a mask of keys, (m, c + n).
        self._condition = conditions.hidden().index_select(0, indices)
        self._n = self._condition.shape[1]
        masks = conditions.arguments["attention_mask"].index_select(0, indices)
        visible = torch.cat([masks, self.arguments["attention_mask"]], dim=1).bool()
        self._visible = visible[:, None, None]
        self.random_weights = self.csr.sample_weights([row.ids for row in self.rows], self.width)
        return super().pooled(router=self)

    @override
    def enter_attention(self, args: Any, kwargs: dict[str, Any]) -> Any:
        states = _get_states(args, kwargs)
        both = torch.cat([self._condition.to(states), states], dim=1)
        return _replace_states(both, args, kwargs)

    @override
    def attend(self, call: AttentionCall) -> Tensor:
        queries, visible = call.query[:, :, self._n :], self._visible.to(call.query.device)
        attended = scaled_dot_product_attention(
            queries, call.key, call.value, attn_mask=visible, scale=call.scale
        ).transpose(1, 2)
        if self.csr.is_routed(call.module):
            attended = self.csr.scale(attended, self.token_weights(call))
        # The module expects as many tokens as there were states. leave_attention removes those of
        # the condition again.
        return pad(attended, (0, 0, 0, 0, self._n, 0))

    @override
    def compute_weights(self, call: AttentionCall) -> Tensor:
        first, visible = call.query[:, :, self._n : self._n + 1], self._visible
        return _attention_weights(first, call.key, visible, call.scale)[:, self._n :]

    @override
    def leave_attention(self, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        return (output[0][:, self._n :], *output[1:])


def _prepend_separator(row: Tokens, runtime: ForwardSettings) -> Tokens:
    """Return a sentence with its last token, a separator, repeated at its beginning."""
    # A sentence of the maximum length loses its last word.
    words = row.ids[:-1] if len(row.ids) < runtime.max_length else row.ids[:-2]
    ids = [row.ids[-1], *words, row.ids[-1]]
    return replace(row, ids=ids, first=0, last=len(ids), second=len(ids))


class _BiEncoderForward(PaddedForward, _Router):
    """The paper's bi-encoder: the tokens of sentence and condition in one sequence.

    The weights of the sentence's tokens are the attention of the condition's first token to them,
    or of its last token in a causal encoder, averaged over heads and divided by their sum. Tokens
    of the condition are not scaled. The encoder pools the whole sequence.
    """

    def __init__(
        self,
        csr: CsrPasses,
        runtime: ForwardSettings,
        rows: Sequence[Tokens],
        queries: Sequence[Any],
    ) -> None:
        pairs = [
            (_cut_sentence(row, condition, csr, runtime), condition)
            for row, condition in zip(rows, queries, strict=True)
        ]
        PaddedForward.__init__(self, runtime, [self.join(*pair) for pair in pairs])
        _Router.__init__(self, csr)
        self._sentences = [sentence.ids for sentence, _ in pairs]
        self.lengths = torch.tensor([len(ids) for ids in self._sentences])
        # The positions of the tokens whose attention weights the sentences.
        if csr.causal:
            self.query_positions = torch.tensor([len(row.ids) - 1 for row in self.rows])
        else:
            n_condition = torch.tensor([len(condition.ids) for condition in queries])
            self.query_positions = torch.tensor([len(row.ids) for row in self.rows]) - n_condition

    @staticmethod
    def join(sentence: Tokens, condition: Tokens) -> Tokens:
        """Return the tokens of a sentence and its condition as one text."""
        ids = [*sentence.ids, *condition.ids]
        last = len(sentence.ids) + condition.last
        return replace(sentence, ids=ids, last=last, second=len(ids))

    @override
    def prepare(self) -> None:
        super().prepare()
        device = self.runtime.device
        self.query_positions = move_to_device(self.query_positions, device)
        self._real = self.arguments["attention_mask"].bool()
        lengths = move_to_device(self.lengths, device)
        self.scaled_tokens = torch.arange(self.width, device=device) < lengths[:, None]
        self.random_weights = self.csr.sample_weights(self._sentences, self.width)

    @override
    def pooled(self, **router: Any) -> Tensor:
        return super().pooled(router=self)

    @override
    def compute_weights(self, call: AttentionCall) -> Tensor:
        query, device = call.query, call.query.device
        # Groups of heads share a key head.
        key = call.key.repeat_interleave(query.shape[1] // call.key.shape[1], dim=1)
        queries = query[torch.arange(len(query), device=device), :, self.query_positions.to(device)]
        visible = self._real[:, None, None]
        attended = _attention_weights(queries[:, :, None], key, visible, call.scale)
        weights: Tensor = attended * self.scaled_tokens.to(device)
        return weights / weights.sum(dim=1, keepdim=True)


def _cut_sentence(
    row: Tokens, condition: Tokens, csr: CsrPasses, runtime: ForwardSettings
) -> Tokens:
    """Return a sentence that fits the encoder together with its condition and a separator.

    Raises:
        UserError: If the condition leaves no room for a sentence.
    """
    room = runtime.max_length - len(condition.ids) - 1
    if room < 2:
        raise UserError(
            f"router_mode is {csr.mode!r}, which reads sentence and condition as one text, "
            f"but a condition has {len(condition.ids)} of the {runtime.max_length} tokens "
            "that the encoder takes. Shorten it, or encode with a larger max_length "
            "(llmcond extract --max-length)."
        )
    if len(row.ids) <= room:
        return row
    return replace(row, ids=[*row.ids[: room - 1], row.ids[-1]], last=min(row.last, room))


class _ReleasedBiEncoderForward(_BiEncoderForward):
    """The bi-encoder of the authors' code.

    In addition to ``_BiEncoderForward``, a second separator is between sentence and condition, no
    other token attends to the condition's first token, and the state of the sentence's first token
    is the vector.
    """

    @staticmethod
    @override
    def join(sentence: Tokens, condition: Tokens) -> Tokens:
        ids = [*sentence.ids, sentence.ids[-1], *condition.ids]
        return replace(sentence, ids=ids, first=0, last=len(sentence.ids), second=len(ids))

    @override
    def prepare(self) -> None:
        super().prepare()
        device = self.runtime.device
        real = self._real
        offsets = torch.arange(self.width, device=device)
        is_query = offsets == self.query_positions[:, None]
        # (m, queries, keys): all real tokens are visible, but the condition's first token is
        # visible to itself only.
        visible = real[:, None] & (~is_query[:, None] | is_query[:, :, None])
        # Padding must see something too, or its states would be NaN.
        visible |= ~real[:, :, None]
        mask = torch.zeros(visible.shape, dtype=self.runtime.dtype, device=device)
        self.arguments["attention_mask"] = mask.masked_fill(~visible, float("-inf"))[:, None]


def _attention_weights(query: Tensor, key: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    """Return the attention weights of one query per text, averaged over heads, (m, keys)."""
    with torch.autocast(query.device.type, enabled=False):
        scale = query.shape[3] ** -0.5 if scale is None else scale
        scores = (query.float() @ key.float().transpose(2, 3)) * scale
        return (
            scores.masked_fill(~visible.to(query.device), float("-inf"))
            .softmax(dim=3)
            .mean(dim=1)[:, 0]
        )


_READING_FORWARDS: Mapping[RouterMode, Callable[..., PaddedForward]] = {
    "bi": _BiEncoderForward,
    "released-tri": _TriEncoderForward,
    "released-bi": _ReleasedBiEncoderForward,
}


# -- the weights of heavy routers ------------------------------------------------------------------


def load_router(network: Any, identity: EncoderIdentity, file: Path, device: str) -> None:
    """Load a heavy router's trained weights into a network, if the file exists.

    Raises:
        LlmcondError: If they cannot be read, or belong to another encoder.
    """
    if identity.router_mode != "heavy" or not file.is_file():
        return
    layers, width = identity.router_layers, int(network.config.hidden_size)
    router = HeavyRouter(layers, width)
    try:
        router.load_state_dict(load_file(file))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise LlmcondError(
            f"{file} does not contain a router of {layers} layers and {width} dimensions. Set "
            "--router-layers to the value that it was trained with, or copy the file again if "
            "it is damaged."
        ) from error
    setattr(network, _ROUTER_ATTRIBUTE, router.to(device))


def train_router(network: Any, identity: EncoderIdentity, device: str) -> None:
    """Make a heavy router's weights trainable; initialise them if the network has none yet."""
    if identity.router_mode == "heavy":
        router = getattr(network, _ROUTER_ATTRIBUTE, None)
        router = router or HeavyRouter(identity.router_layers, int(network.config.hidden_size))
        setattr(network, _ROUTER_ATTRIBUTE, router.to(device).requires_grad_(True))


def router_weights(network: Any) -> Mapping[str, Tensor]:
    """Return the weights of a network's heavy router by their names in its file; {} without any."""
    router: HeavyRouter | None = getattr(network, _ROUTER_ATTRIBUTE, None)
    return {} if router is None else router.state_dict()
