"""CSR: a condition's router inside the last layers of an encoder.

Lin et al., Varying Sentence Representations via Condition-Specified Routers (EMNLP 2024 Findings),
section 2.

The condition is encoded by itself, and leaves a query q. In each routed layer q is compared with
the keys k_i of the sentence's n tokens, and what the layer attended to is scaled, token by token,
before its output projection::

    w = softmax_i(q . k_i / sqrt(d))        h_i = (1 + strength w_i) h'_i

What the modes take for q and k_i, see :data:`llmcond.encoders.routers.settings.RouterMode`. The
layers before the routed ones do not see the condition: in a packed row they are computed once a
sentence, whatever number of conditions it has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from llmcond.encoders.engine import attention
from llmcond.encoders.engine.batching import Batch, flat
from llmcond.encoders.engine.forward import (
    Forward,
    PackedForward,
    PaddedForward,
    Passes,
    Runtime,
    attention_plan,
)
from llmcond.encoders.engine.tokenizing import Tokens
from llmcond.encoders.routers.settings import RELEASED
from llmcond.encoders.settings import EncoderIdentity
from llmcond.errors import LlmcondError, UserError
from llmcond.system import to_device

Usual = Callable[[], Tensor]

#: Of the norm of states, where a router changes them at all: in Gemma 4e-7, elsewhere over 0.05.
_CHANGED = 1e-3
#: The name that a network has its heavy router under.
_ATTRIBUTE = "csr_router"


class HeavyRouter(nn.Module):
    """The heavy router's weights: W_q and W_k of each routed layer, (d, d)."""

    def __init__(self, n_layers: int, width: int) -> None:
        super().__init__()
        # As a linear layer's; not layers of that kind, which might be quantised or adapted.
        bound = width**-0.5
        drawn = (torch.empty(n_layers, width, width).uniform_(-bound, bound) for _ in range(2))
        self.query, self.key = (nn.ParameterList([*weights]) for weights in drawn)


class CsrPasses(Passes):
    """The forward passes of a network whose last layers have a router.

    What routes an input is its condition's query, (d,), or for modes that read it, its tokens.

    Attributes:
        causal: whether a token sees what stands before it only.
        first: the first routed layer.
    """

    inside = True

    def __init__(self, network: Any, identity: EncoderIdentity, name: str) -> None:
        """Find the network's layers, and prepare those that are routed.

        Raises:
            UserError: the architecture's attention takes no router, or it has fewer layers.
        """
        self.mode, self._strength = identity.router_mode, identity.router_strength
        self.causal, self.reads_routers = identity.attention == "causal", self.mode in RELEASED
        self._heavy: HeavyRouter | None = getattr(network, _ATTRIBUTE, None)
        if self.mode == "heavy" and self._heavy is None:
            raise UserError(
                f"router_mode is 'heavy', whose weights are trained, and {name} has none. Train "
                "them: llmcond train-lora --router csr --router-mode heavy"
            )
        modules, self._head = _attention_modules(network, name)
        count = len(modules)
        if identity.router_layers > count:
            raise UserError(
                f"router_layers is {identity.router_layers}, and {name} has {count} layers; it "
                f"must be at most {count}."
            )
        self.first = count - identity.router_layers
        self._layer_of = {module: layer for layer, module in enumerate(modules)}
        blocks = _blocks(network, modules, name)
        # Final states that are keys of every layer have no place to be rotated to.
        rotary = "position_embeddings" in inspect.signature(modules[0].forward).parameters
        if self.reads_routers and (self.causal or rotary):
            raise UserError(
                f"router_mode is {self.mode!r}, which is for bidirectional encoders that add "
                f"positions to their embeddings, as BERT and RoBERTa do; {name} does not. "
                "Take --router-mode paper."
            )
        for module in modules:
            module.register_forward_pre_hook(_before_attention, with_kwargs=True)
            module.register_forward_hook(_after_attention, with_kwargs=True)
        for number, block in enumerate(blocks[self.first :]):
            before = partial(_before_layer, first=number == 0)
            block.register_forward_pre_hook(before, with_kwargs=True)

    # -- what the engine runs ------------------------------------------------------------------

    def forward(
        self,
        runtime: Runtime,
        rows: Sequence[Tokens],
        batch: Batch | None = None,
        routes: Sequence[Any] = (),
        *,
        queries: bool = False,
    ) -> Forward:
        """Return the pass of sentences, each under one condition, or of conditions themselves.

        In a packed row, sentences side by side that have the same tokens begin as one.
        """
        if queries:
            plain = PackedForward(runtime, batch, rows) if batch else PaddedForward(runtime, rows)
            return _CaptureForward(self, plain)
        if not routes:
            return super().forward(runtime, rows, batch)
        if self.reads_routers:
            released = _ReleasedTri if self.mode == "released-tri" else _ReleasedBi
            return released(self, runtime, rows, routes)
        if batch is None:
            return _RoutedForward(self, PaddedForward(runtime, rows), routes)
        groups = [list(group) for _, group in groupby(batch.inputs, key=lambda i: id(rows[i]))]
        once = flat([group[0] for group in groups], [len(row.ids) for row in rows])
        begins = [number for number, group in enumerate(groups) for _ in group]
        forward = PackedForward(runtime, once, rows, leaving=batch)
        return _RoutedForward(self, forward, [routes[index] for index in batch.inputs], begins)

    # -- weights -------------------------------------------------------------------------------

    @staticmethod
    def load_weights(network: Any, identity: EncoderIdentity, file: Path, device: str) -> None:
        """Put the trained weights of a heavy router into a network; see :class:`Passes`."""
        if identity.router_mode != "heavy" or not file.is_file():
            return
        layers, width = identity.router_layers, int(network.config.hidden_size)
        router = HeavyRouter(layers, width)
        try:
            router.load_state_dict(load_file(file))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise LlmcondError(
                f"{file} holds no router of {layers} layers and {width} dimensions. Copy it anew, "
                "or give the --router-layers that it was trained with."
            ) from error
        setattr(network, _ATTRIBUTE, router.to(device))

    @staticmethod
    def train_weights(network: Any, identity: EncoderIdentity, device: str) -> None:
        """Have a heavy router's weights trained with the network; where it has none, draw them."""
        if identity.router_mode == "heavy":
            router = getattr(network, _ATTRIBUTE, None)
            router = router or HeavyRouter(identity.router_layers, int(network.config.hidden_size))
            setattr(network, _ATTRIBUTE, router.to(device).requires_grad_(True))

    @staticmethod
    def weights(network: Any) -> Mapping[str, Tensor]:
        """Return the weights of a network's heavy router; {} without any."""
        router: HeavyRouter | None = getattr(network, _ATTRIBUTE, None)
        return {} if router is None else router.state_dict()

    # -- the router's formula ------------------------------------------------------------------

    def routes(self, module: nn.Module) -> bool:
        """Return whether a layer has a router."""
        return self._layer_of[module] >= self.first

    def scores(self, module: nn.Module, queries: Tensor, keys: Tensor) -> Tensor:
        """Return q . k_i / sqrt(d), (m, n) float32, of queries (m, dq) and keys (m, n, dk)."""
        with torch.autocast(keys.device.type, enabled=False):
            queries, keys = queries.to(keys.device).float(), keys.float()
            width = queries.shape[1]
            if self._heavy is not None:
                layer = self._layer_of[module] - self.first
                queries = linear(queries, self._heavy.query[layer])
                keys = linear(keys, self._heavy.key[layer])
            elif keys.shape[2] != width:
                # Queries in groups share a head of keys: q . k summed over all of them.
                shape = (len(queries), -1, width // keys.shape[2], self._head)
                queries = queries.view(shape).sum(dim=2).flatten(1)
            scores: Tensor = (keys @ queries[:, :, None])[..., 0] / width**0.5
            return scores

    def scale(self, attended: Tensor, weights: Tensor) -> Tensor:
        """Return (1 + strength w_i) h'_i; w is (batch, tokens)."""
        factor = 1 + self._strength * weights.to(attended.device)
        return attended * factor.to(attended.dtype)[..., None, None]


class _Trial:
    """Notes the layers that are run, and multiplies what they attend to."""

    def __init__(self, factor: float) -> None:
        self.modules: list[nn.Module] = []
        self.head, self._factor = 0, factor

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: Any, usual: Usual
    ) -> Tensor:
        self.modules.append(module)
        self.head = q.shape[3]
        return usual() * self._factor


def _attention_modules(network: Any, name: str) -> tuple[list[nn.Module], int]:
    """Return the attention module of each layer, as they are run, and the size of a head."""
    kind, instead = network.config.model_type, "Leave out --router: routed pooling goes with any."
    trial = _Trial(1.0)
    if getattr(network, "_supports_attention_backend", False):
        network.set_attn_implementation(attention.NAME)
        usual, other = _run(network, trial), _run(network, _Trial(2.0))
    if not trial.modules:
        raise UserError(
            f"{name} ({kind}) computes its attention in a way of its own, and a router inside the "
            "encoder needs transformers' attention interface, as BERT, RoBERTa, Mistral and Qwen "
            f"have it. {instead}"
        )
    if len(set(trial.modules)) < len(trial.modules):
        raise UserError(
            f"{name} ({kind}) shares its weights between layers, so that a router cannot be in "
            f"some of them only. {instead}"
        )
    if (usual - other).norm() < _CHANGED * usual.norm():
        # As Gemma does: a router would leave the condition out, silently.
        raise UserError(
            f"{name} ({kind}) scales what its attention gives to one norm, so that a router, which "
            f"scales it too, changes nothing. {instead}"
        )
    return trial.modules, trial.head


@torch.inference_mode()
def _run(network: Any, router: Any) -> Tensor:
    """Return the states of two tokens."""
    device = network.get_input_embeddings().weight.device
    ids, mask = torch.tensor([[[1, 2]], [[1, 1]]]).to(device)
    hidden: Tensor = network(input_ids=ids, attention_mask=mask, router=router).last_hidden_state
    return hidden.float()


def _blocks(network: nn.Module, modules: Sequence[nn.Module], name: str) -> list[nn.Module]:
    """Return the layers that attention modules are in."""
    for child in network.modules():
        if isinstance(child, nn.ModuleList) and len(child) == len(modules):
            pairs = zip(child, modules, strict=True)
            if all(any(part is own for part in block.modules()) for block, own in pairs):
                return list(child)
    raise UserError(f"{name} has no list of layers, so --router csr cannot tell which are last.")


# -- hooks: what a network does with the router that it is given ---------------------------------


def _before_attention(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    router = kwargs.get("router")
    return router and router.enter_attention(module, args, kwargs)


def _after_attention(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    router = kwargs.get("router")
    return router and router.leave_attention(output)


def _before_layer(module: nn.Module, args: Any, kwargs: dict[str, Any], *, first: bool) -> Any:
    """Enter a routed layer; the ``first`` of them is where what is computed once ends."""
    router = kwargs.get("router")
    return router and router.enter_layer(args, kwargs, first=first)


def _states(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    states: Tensor = args[0] if args else kwargs["hidden_states"]
    return states


def _with_states(states: Tensor, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})


class _Router:
    """What a network's hooks and its attention call."""

    def __init__(self, csr: CsrPasses) -> None:
        self.csr = csr
        #: What entered the attention of the layer that is being run.
        self.states = torch.empty(0)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: Any, usual: Usual
    ) -> Tensor:
        """Return what a layer attends to, (batch, tokens, heads, head_dim), before W_O.

        Queries, keys and values are (batch, heads, tokens, head_dim), and ``usual`` gives what
        there would be without a router.
        """
        attended = usual()
        if not self.csr.routes(module):
            return attended
        return self.csr.scale(attended, self.weights(module, q, k, scale))

    def weights(self, module: nn.Module, q: Tensor, k: Tensor, scale: float | None) -> Tensor:
        """Return the weight of each token in a routed layer, (batch, tokens)."""
        raise NotImplementedError

    def enter_layer(self, args: Any, kwargs: dict[str, Any], *, first: bool) -> Any:
        return None

    def enter_attention(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self.states = _states(args, kwargs)

    def leave_attention(self, output: Any) -> Any:
        return None

    def keys(self, key: Tensor) -> Tensor:
        """Return what the tokens of a layer are compared by, (batch * tokens, d)."""
        if self.csr.mode in ("hidden", "heavy"):  # made of what enters a layer's attention
            return self.states.flatten(0, 1)
        return key.transpose(1, 2).flatten(2).flatten(0, 1)


class _Capture(_Router):
    """Keeps the queries of conditions: of one token of each, in the last layer.

    Attributes:
        found: (m, d).
    """

    def __init__(self, csr: CsrPasses, places: list[int], device: torch.device) -> None:
        """Take the place of each condition's token among all of a pass, m of them."""
        super().__init__(csr)
        self._places, self.found = to_device(torch.tensor(places), device), torch.empty(0)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: Any, usual: Usual
    ) -> Tensor:
        # The last layer is the last to write.
        queries = self.keys(q)
        self.found = queries.index_select(0, self._places.to(queries.device)).float()
        return usual()


class _CaptureForward:
    """The pass of conditions, which gives their queries."""

    def __init__(self, csr: CsrPasses, forward: PaddedForward | PackedForward) -> None:
        self._csr, self._forward, self.n_tokens = csr, forward, forward.n_tokens

    def prepare(self) -> None:
        forward = self._forward
        forward.prepare()
        # A condition's query is that of the token that has seen all of it.
        tokens = (len(row.ids) - 1 if self._csr.causal else 0 for row in forward.rows)
        places = [forward.place(index, token) for index, token in enumerate(tokens)]
        self._router = _Capture(self._csr, places, forward.runtime.device)
        forward.arguments["router"] = self._router

    def pooled(self) -> Tensor:
        self._forward.hidden()
        return self._router.found


# -- sentences -----------------------------------------------------------------------------------


class _Weights(_Router):
    """Scales the tokens of sentences by their nearness to a query each."""

    def __init__(
        self,
        csr: CsrPasses,
        device: torch.device,
        queries: Tensor,
        real: Tensor,
        places: Tensor,
        n: int,
    ) -> None:
        """Take queries, (m, d), and where each sentence's tokens are among the ``n`` of a pass.

        ``places`` and ``real``, (m, longest) on the CPU: where there is a token.
        """
        super().__init__(csr)
        # Of each token of the pass: which of the weights, (m * longest) and a zero behind, it has.
        back = torch.full((n,), real.numel())
        back[places[real]] = torch.arange(real.numel())[real.flatten()]
        # Once, rather than in each layer.
        self._queries, self._real = to_device(queries, device), to_device(real, device)
        self._places, self._back = to_device(places, device), to_device(back, device)

    def weights(self, module: nn.Module, q: Tensor, k: Tensor, scale: float | None) -> Tensor:
        keys = self.keys(k)
        places = self._places.to(keys.device)
        own = keys.index_select(0, places.flatten()).view(*places.shape, -1)
        scores = self.csr.scores(module, self._queries, own)
        weights = scores.masked_fill(~self._real.to(keys.device), float("-inf")).softmax(dim=1)
        spread = pad(weights.flatten(), (0, 1)).index_select(0, self._back.to(keys.device))
        return spread.view(len(q), -1)


class _Widened(_Weights):
    """The same in a packed row, whose sentences are repeated before the first routed layer."""

    def __init__(self, expand: Tensor, plan: attention.AttentionPlan, *args: Any) -> None:
        """Take the row as it is from there on: the place that each of its tokens had, and plan."""
        super().__init__(*args)
        self._expand, self._plan = expand, plan

    def enter_layer(self, args: Any, kwargs: dict[str, Any], *, first: bool) -> Any:
        states = _states(args, kwargs)
        if first:
            self._n = states.shape[1]
            args, kwargs = _with_states(self._widen(states), args, kwargs)
        rest = {key: self._widen(v) for key, v in kwargs.items() if key != "hidden_states"}
        return args, {**kwargs, **rest, "packed": self._plan}

    def _widen(self, value: Any) -> Any:
        if isinstance(value, tuple):  # the sines and cosines of rotary positions
            return tuple(self._widen(part) for part in value)
        own = isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, self._n)
        return value.index_select(1, self._expand.to(value.device)) if own else value


class _RoutedForward:
    """The pass of sentences, each under one condition."""

    def __init__(
        self,
        csr: CsrPasses,
        forward: PaddedForward | PackedForward,
        queries: Sequence[Any],
        begins: Sequence[int] = (),
    ) -> None:
        """Take a pass, a query for each of its rows, and as which of its texts each row begins.

        Without ``begins``, each is a text of its own.
        """
        self._csr, self._forward, self._queries = csr, forward, queries
        self._begins, self.n_tokens = torch.tensor(begins), forward.n_tokens

    def prepare(self) -> None:
        forward, device = self._forward, self._forward.runtime.device
        forward.prepare()
        lengths = torch.tensor([len(row.ids) for row in forward.rows])
        starts = torch.tensor([forward.place(index, 0) for index in range(len(lengths))])
        at = torch.arange(int(lengths.max()))
        real = at < lengths[:, None]
        places = torch.where(real, starts[:, None] + at, 0)
        queries = torch.stack([torch.as_tensor(query) for query in self._queries])
        weights = self._csr, device, queries, real, places, self.n_tokens
        if isinstance(forward, PaddedForward) or len(forward.batch.segments) == len(lengths):
            forward.arguments["router"] = _Weights(*weights)
            return
        began = torch.tensor([segment.start for segment in forward.batch.segments])[self._begins]
        expand = torch.zeros(self.n_tokens, dtype=torch.long)
        expand[places[real]] = torch.where(real, began[:, None] + at, 0)[real]
        plan = attention_plan(forward.runtime, forward.leaving)
        forward.arguments["router"] = _Widened(to_device(expand, device), plan, *weights)

    def pooled(self) -> Tensor:
        return self._forward.pooled()


# -- as the authors released it --------------------------------------------------------------------


class _ReleasedTri(PaddedForward):
    """The tri-encoder of the authors' code: sentences attend to their condition in every layer.

    A sentence begins with its separator once more, whose state is its vector. Keys and values of
    every layer are those of the condition's final states, and the sentence's own; the separator's
    attention to the sentence's tokens, the mean of its heads, is their weight. Positions are those
    of the sentence itself: the released ones depend on the longest condition of the batch.
    """

    def __init__(
        self, csr: CsrPasses, runtime: Runtime, rows: Sequence[Tokens], queries: Sequence[Any]
    ) -> None:
        super().__init__(runtime, [_begun(row, runtime) for row in rows])
        distinct = {id(query): query for query in queries}
        number = {key: at for at, key in enumerate(distinct)}
        self._csr, self._which = csr, torch.tensor([number[id(query)] for query in queries])
        self._conditions = PaddedForward(runtime, list(distinct.values()))
        self.n_tokens += self._conditions.n_tokens

    def prepare(self) -> None:
        super().prepare()
        self._conditions.prepare()
        self._which = to_device(self._which, self.runtime.device)

    def pooled(self) -> Tensor:
        conditions, which = self._conditions, self._which
        states = conditions.hidden().index_select(0, which)
        masks = conditions.arguments["attention_mask"].index_select(0, which)
        visible = torch.cat([masks, self.arguments["attention_mask"]], dim=1).bool()
        self.arguments["router"] = _Crossed(self._csr, states, visible)
        return super().pooled()


def _begun(row: Tokens, runtime: Runtime) -> Tokens:
    """Return a sentence that begins with its last token, a separator, once more."""
    # One that has all the positions there are gives up its last word.
    words = row.ids[:-1] if len(row.ids) < runtime.max_length else row.ids[:-2]
    ids = [row.ids[-1], *words, row.ids[-1]]
    return replace(row, ids=ids, first=0, last=len(ids), second=len(ids))


class _Crossed(_Router):
    def __init__(self, csr: CsrPasses, condition: Tensor, visible: Tensor) -> None:
        """Take the conditions' states, (m, c, d), and which keys there are, (m, c + n)."""
        super().__init__(csr)
        self._condition, self._visible = condition, visible[:, None, None]
        self._n = condition.shape[1]

    def enter_attention(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        states = _states(args, kwargs)
        both = torch.cat([self._condition.to(states), states], dim=1)
        return _with_states(both, args, kwargs)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: Any, usual: Usual
    ) -> Tensor:
        own, visible = q[:, :, self._n :], self._visible.to(q.device)
        attended = scaled_dot_product_attention(own, k, v, attn_mask=visible, scale=scale)
        attended = attended.transpose(1, 2)
        if self.csr.routes(module):
            weights = _row(own[:, :, :1], k, visible, scale)
            attended = self.csr.scale(attended, weights[:, self._n :])
        # As many as there were states; those of the condition are cut off again.
        return pad(attended, (0, 0, 0, 0, self._n, 0))

    def leave_attention(self, output: Any) -> Any:
        return (output[0][:, self._n :], *output[1:])


class _ReleasedBi(PaddedForward):
    """The bi-encoder of the authors' code: sentence and condition in one sequence.

    Nobody but itself attends to the condition's first token, whose attention to the sentence's
    tokens, the mean of its heads, is their weight; the sentence's first token is the vector.
    """

    def __init__(
        self, csr: CsrPasses, runtime: Runtime, rows: Sequence[Tokens], queries: Sequence[Any]
    ) -> None:
        joined, lengths = [], []
        for row, condition in zip(rows, queries, strict=True):
            room = runtime.max_length - len(condition.ids) - 1
            if room < 2:
                raise UserError(
                    f"router_mode is 'released-bi', which reads sentence and condition as one, and "
                    f"a condition has {len(condition.ids)} of the {runtime.max_length} tokens that "
                    "the encoder takes. Shorten it, or encode with a larger max_length (llmcond "
                    "extract --max-length)."
                )
            own = row.ids if len(row.ids) <= room else [*row.ids[: room - 1], row.ids[-1]]
            ids = [*own, row.ids[-1], *condition.ids]
            lengths.append(len(own))
            joined.append(replace(row, ids=ids, first=0, last=len(own), second=len(ids)))
        super().__init__(runtime, joined)
        self._csr, self._lengths = csr, torch.tensor(lengths)

    def prepare(self) -> None:
        super().prepare()
        device = self.runtime.device
        real = self.arguments["attention_mask"].bool()
        lengths, at = to_device(self._lengths, device), torch.arange(self.width, device=device)
        first = lengths + 1
        own = at == first[:, None]
        # (m, queries, keys): all that are there, but of the condition's first token by itself only.
        visible = real[:, None] & (~own[:, None] | own[:, :, None])
        # Padding sees something too, or its states would be NaN.
        visible |= ~real[:, :, None]
        mask = torch.zeros(visible.shape, dtype=self.runtime.dtype, device=device)
        self.arguments["attention_mask"] = mask.masked_fill(~visible, float("-inf"))[:, None]
        self.arguments["router"] = _Joined(self._csr, first, real, at < lengths[:, None])


class _Joined(_Router):
    def __init__(self, csr: CsrPasses, first: Tensor, real: Tensor, sentence: Tensor) -> None:
        """Take the place of each condition's first token, (m,), and which tokens are what."""
        super().__init__(csr)
        self._first, self._real, self._sentence = first, real, sentence

    def weights(self, module: nn.Module, q: Tensor, k: Tensor, scale: float | None) -> Tensor:
        own = q[torch.arange(len(q), device=q.device), :, self._first.to(q.device)][:, :, None]
        weights = _row(own, k, self._real.to(q.device)[:, None, None], scale)
        weights = weights * self._sentence.to(q.device)
        return weights / weights.sum(dim=1, keepdim=True)


def _row(query: Tensor, key: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    """Return what one query of each text attends to, (m, keys), the mean of its heads."""
    with torch.autocast(query.device.type, enabled=False):
        scale = query.shape[3] ** -0.5 if scale is None else scale
        scores = (query.float() @ key.float().transpose(2, 3)) * scale
        return scores.masked_fill(~visible, float("-inf")).softmax(dim=3).mean(dim=1)[:, 0]
