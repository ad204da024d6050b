"""Inputs under routers: what is encoded once, and their vectors with gradients through both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcond.encoders.engine.interface import AnyEngine, Routes
from llmcond.encoders.engine.tokenizing import Tokens
from llmcond.encoders.spec import EncoderInput, Router
from llmcond.system import to_device

if TYPE_CHECKING:
    from torch import Tensor

    from llmcond.encoders.engine.engine import Engine


def unrouted(item: EncoderInput) -> tuple[EncoderInput, Router | None]:
    """Return what inputs have in common that go through the network once: all but router texts."""
    settings = None if item.router is None else replace(item.router, text="")
    return replace(item, router=None), settings


def grouped(items: Sequence[EncoderInput]) -> list[list[int]]:
    """Return the positions of inputs with a router, those side by side that differ by it only."""
    groups: dict[object, list[int]] = {}
    for place, item in enumerate(items):
        if item.router is not None:
            groups.setdefault(unrouted(item), []).append(place)
    return list(groups.values())


def routers_of(items: Sequence[EncoderInput]) -> list[Router]:
    """Return the routers of inputs that have one."""
    return [item.router for item in items if item.router is not None]


def router_inputs(items: Sequence[EncoderInput]) -> dict[str, EncoderInput]:
    """Return the inputs that routers themselves are, each once, by their texts."""
    texts = sorted({router.text for router in routers_of(items)})
    return {text: EncoderInput("", text) for text in texts}


def routes_of(engine: AnyEngine, queries: Any, router: Router) -> list[Any]:
    """Return what routes one input by several queries: all at once, or inside the network each.

    ``queries`` are (k, width), an array or a tensor; or a list, where routers are inside.
    """
    if engine.inside:
        return list(queries)
    return [Routes(queries, router)]


def embed_routed(
    engine: Engine,
    items: Sequence[EncoderInput],
    tokens: Sequence[Tokens],
    queries: Mapping[str, Tokens],
) -> Tensor:
    """Return the vectors of inputs, (n, dim) in float32, with gradients, also through the routers.

    ``tokens`` are those of the inputs, ``queries`` those of the routers by their texts. Raises as
    ``Engine.embed``.
    """
    import torch

    parts, order = [], [place for place, item in enumerate(items) if item.router is None]
    if order:
        parts.append(engine.embed([tokens[place] for place in order]))
    groups = grouped(items)
    if groups:
        texts = list(router_inputs(items))
        read = [queries[text] for text in texts]
        states = None if engine.reads_routers else engine.embed(read, queries=True)
        row_of = {text: row for row, text in enumerate(texts)}
        rows: list[Tokens] = []
        routes: list[Any] = []
        for own in groups:
            routers = routers_of([items[place] for place in own])
            numbers = [row_of[router.text] for router in routers]
            if states is None:
                found: Any = [read[number] for number in numbers]
            else:
                # Not states[numbers]: gradients of an index are added in any order.
                found = states.index_select(0, to_device(torch.tensor(numbers), states.device))
            added = routes_of(engine, found, routers[0])
            routes += added
            rows += [tokens[own[0]]] * len(added)
        parts.append(engine.embed(rows, routes=routes))
        order += [place for own in groups for place in own]
    return torch.cat(parts).index_select(0, to_device(torch.tensor(order).argsort(), engine.out))
