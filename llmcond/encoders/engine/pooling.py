"""Poolings: from the token vectors of an input to one vector.

Those that are built in are listed in :mod:`llmcond.encoders.poolings`. Any other is a function of
the user's own, named ``my_pooling.py:attention_sink`` or ``package.module:name``::

    def attention_sink(hidden: Tensor, counted: Tensor) -> Tensor:
        return hidden[0] + hidden[counted].mean(dim=0)

It gets one input at a time: the float32 vectors of all its tokens, (tokens, dim), and which of them
count, (tokens,) bool; and returns (dim,).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from llmcond import plugins
from llmcond.encoders.engine.interface import Routes
from llmcond.encoders.poolings import POOLINGS, identify_pooling
from llmcond.errors import UserError, first_line
from llmcond.system import to_device

#: From (inputs, tokens, dim), (inputs, tokens) bool that is True at the tokens that count, one at
#: least for each input, and the tokens of each input; to (inputs, dim) in float32. Texts are padded
#: on the right.
PoolBatch = Callable[[Tensor, Tensor, Sequence[int]], Tensor]


def first_token(hidden: Tensor, counted: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the vector of each input's first token."""
    return hidden[:, 0].float()


def last_token(hidden: Tensor, counted: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the vector of each input's last token that counts."""
    positions = torch.arange(counted.shape[1], device=counted.device)
    last = torch.where(counted, positions, -1).amax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last].float()


def mean(hidden: Tensor, counted: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the mean over the tokens that count.

    The sum is taken in float32: pooling in bfloat16 costs more accuracy than the whole encoder.
    """
    weights = counted.unsqueeze(-1).float()
    return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)


def routed(hidden: Tensor, spans: Sequence[tuple[int, int]], routes: Sequence[Routes]) -> Tensor:
    """Return the vectors of inputs under each of their routers, one behind the other.

    ``hidden`` is (inputs, tokens, dim); the tokens ``first`` to ``last`` of an input count.
    Input by input, so that none depends on what it is in a batch with; but all at once on a GPU,
    where launching kernels for each would take many times as long as the whole network.
    """
    if not hidden.is_cpu:
        return _routed_at_once(hidden, spans, routes)
    found = []
    for states, (first, last), route in zip(hidden, spans, routes, strict=True):
        own = states[first:last].float()
        centred = own - own.mean(dim=0) if route.router.centre else own
        queries = to_device(torch.as_tensor(route.queries), own.device)
        near = normalize(queries, dim=1) @ normalize(centred, dim=1).T
        if route.router.standardize:
            # Above 0, and its gradient finite, also where all tokens are alike: a single one is.
            near = near / (near.var(dim=1, correction=0, keepdim=True) + 1e-12).sqrt()
        found.append((near / route.router.temperature).softmax(dim=1) @ own)
    return torch.cat(found)


def _routed_at_once(
    hidden: Tensor, spans: Sequence[tuple[int, int]], routes: Sequence[Routes]
) -> Tensor:
    """Compute what :func:`routed` does, with as many routers for each input as any has."""
    device, width = hidden.device, hidden.shape[2]
    counts = torch.tensor([len(route.queries) for route in routes])
    at = torch.arange(int(counts.max()))
    real = at < counts[:, None]
    # Where an input has fewer routers, its first stands in for those that it has not.
    rows = torch.where(real, at, 0) + (counts.cumsum(0) - counts)[:, None]
    kept = to_device(real.flatten().nonzero()[:, 0], device)
    first, last = torch.tensor(spans).T[:, :, None]
    tokens = torch.arange(hidden.shape[1])
    counted = to_device((first <= tokens) & (tokens < last), device)[:, None]
    routers = [route.router for route in routes]
    settings = [(one.temperature, one.centre, one.standardize) for one in routers]
    columns = to_device(torch.tensor(settings, dtype=torch.float32), device)
    temperature, centre, standardize = columns.T[:, :, None, None]

    own = hidden.float()
    weights = counted.float() / counted.sum(dim=2, keepdim=True)
    centred = own - centre * (weights @ own)
    every = torch.cat([torch.as_tensor(route.queries) for route in routes])
    every = normalize(to_device(every, device), dim=1)
    queries = every.index_select(0, to_device(rows.flatten(), device)).view(*rows.shape, width)
    near = queries @ normalize(centred, dim=2).transpose(1, 2)
    apart = near - (near * weights).sum(dim=2, keepdim=True)
    spread = ((apart.square() * weights).sum(dim=2, keepdim=True) + 1e-12).sqrt()
    near = near / torch.where(standardize > 0, spread, 1.0) / temperature
    vectors = near.masked_fill(~counted, float("-inf")).softmax(dim=2) @ own
    found: Tensor = vectors.flatten(0, 1).index_select(0, kept)
    return found


#: By what a pooling takes. The part of the network that it needs is behind the states already.
_FUNCTIONS: Mapping[str, PoolBatch] = {"first": first_token, "last": last_token, "mean": mean}


def find_pooling(name: str) -> PoolBatch:
    """Return the pooling that an ``EncoderIdentity`` names.

    Raises:
        UserError: it is a user's own that was not named, or has changed since it was recorded.
    """
    if not plugins.is_plugin(name):
        return _FUNCTIONS[POOLINGS[name].takes]
    identify_pooling(name, "the encoder")
    function = plugins.recorded(name.partition("@")[0], "the encoder")

    def pool(hidden: Tensor, counted: Tensor, lengths: Sequence[int]) -> Tensor:
        try:
            vectors = [
                function(hidden[row, :length].float(), counted[row, :length])
                for row, length in enumerate(lengths)
            ]
        except Exception as error:  # whatever a user's code raises
            if "memory" in str(error):
                raise  # the engine tries again with less
            raise UserError(f"the pooling {name} failed: {first_line(error)}.") from error
        for vector in vectors:
            if not isinstance(vector, Tensor) or vector.shape != hidden.shape[-1:]:
                got = tuple(getattr(vector, "shape", ())) or type(vector).__name__
                raise UserError(
                    f"the pooling {name} gave {got} for an input; expected a tensor of shape "
                    f"{tuple(hidden.shape[-1:])}."
                )
        return torch.stack(vectors).float()

    return pool
