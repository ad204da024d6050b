"""Routed inputs: grouping them, so that each is encoded once, and embedding them with gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcond.encoders.engine.interface import AnyEngine, Routes
from llmcond.encoders.engine.tokenizing import Tokens
from llmcond.encoders.spec import EncoderInput, Router
from llmcond.system import move_to_device

if TYPE_CHECKING:
    from torch import Tensor

    from llmcond.encoders.engine.engine import Engine


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


def embed_routed(
    engine: Engine,
    items: Sequence[EncoderInput],
    tokens: Sequence[Tokens],
    queries: Mapping[str, Tokens],
) -> Tensor:
    """Return the vectors of inputs, (n, dim) in float32, with gradients, also through the routers.

    Args:
        engine: The engine to run.
        items: The inputs, with or without a router.
        tokens: The tokens of each input.
        queries: The tokens of each router by its text.

    Raises:
        UserError: As in ``Engine.embed``.
        OutOfMemoryError: As in ``Engine.embed``.
    """
    import torch

    parts, order = [], [position for position, item in enumerate(items) if item.router is None]
    if order:
        parts.append(engine.embed([tokens[position] for position in order]))
    groups = group_routed_inputs(items)
    if groups:
        texts = list(router_inputs(items))
        router_tokens = [queries[text] for text in texts]
        states = None if engine.reads_routers else engine.embed(router_tokens, queries=True)
        row_of = {text: row for row, text in enumerate(texts)}
        rows: list[Tokens] = []
        routes: list[Any] = []
        for group in groups:
            routers = list_routers([items[position] for position in group])
            row_indices = [row_of[router.text] for router in routers]
            if states is None:
                group_queries: Any = [router_tokens[index] for index in row_indices]
            else:
                # The backward pass of states[...] would add up gradients in any order.
                group_queries = states.index_select(
                    0, move_to_device(torch.tensor(row_indices), states.device)
                )
            group_routes = make_routes(engine, group_queries, routers[0])
            routes += group_routes
            rows += [tokens[group[0]]] * len(group_routes)
        parts.append(engine.embed(rows, routes=routes))
        order += [position for group in groups for position in group]
    return torch.cat(parts).index_select(
        0, move_to_device(torch.tensor(order).argsort(), engine.output_device)
    )
