"""Poolings, which turn the token vectors of an input into one vector.

The built-in poolings are listed in llmcond/encoders/poolings.py. Any other is a function written by
the user, named ``my_pooling.py:attention_sink`` or ``package.module:name``::

    def attention_sink(hidden: Tensor, counted: Tensor) -> Tensor:
        return hidden[0] + hidden[counted].mean(dim=0)

It gets one input at a time: the float32 vectors of all its tokens, (tokens, dim), and a mask of the
tokens that count, (tokens,) bool. It returns a vector, (dim,).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from llmcond import plugins
from llmcond.encoders.engine.interface import Routes
from llmcond.encoders.engine.token_weights import record_weights
from llmcond.encoders.poolings import POOLINGS, identify_pooling
from llmcond.errors import UserError, first_line
from llmcond.system import move_to_device

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
        One vector per input and router, in this order, (vectors, dim).
    """
    if not hidden.is_cpu:
        return _pool_routed_at_once(hidden, spans, routes)
    vectors = []
    for states, (first, last), route in zip(hidden, spans, routes, strict=True):
        tokens = states[first:last].float()
        centred = tokens - tokens.mean(dim=0) if route.router.centre else tokens
        queries = move_to_device(torch.as_tensor(route.queries), tokens.device)
        cosines = normalize(queries, dim=1) @ normalize(centred, dim=1).T
        if route.router.standardize:
            # The small constant keeps the divisor above 0, and its gradient finite, if all tokens
            # are alike, for example if there is only one.
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
