"""What a user chooses about a router inside the encoder, and what of it does not go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from llmcond.encoders.poolings import pooling_named
from llmcond.errors import UserError

#: Where another text weights the tokens of an input: as they are pooled, or (``csr``) inside the
#: last layers of the network; see :mod:`llmcond.encoders.routers.csr`.
RouterPlace = Literal["none", "csr"]
#: What CSR compares, of the condition's first token (of a causal encoder its last) and of the
#: sentence's tokens. ``paper``: its query in the last layer, and their keys (section 2). ``hidden``
#: and ``heavy``: the states that these are made of, as they are or under trained matrices W_q and
#: W_k (section 3.3). ``released-tri`` and ``released-bi``: as in the authors' code, where sentences
#: also attend to the condition, in each layer.
RouterMode = Literal["paper", "hidden", "heavy", "released-tri", "released-bi"]
RELEASED: tuple[RouterMode, ...] = ("released-tri", "released-bi")


def check_router(name: str, chosen: Mapping[str, Any], trained: Any, pooling: str | None) -> None:
    """Check what was chosen about the router of an encoder, and its pooling.

    ``chosen`` are settings of the router by their names, ``trained`` is the router that the encoder
    was trained with, if any.

    Raises:
        UserError: some of that does not go together.
    """
    if chosen.get("router", "none") == "none":
        if trained not in (None, "none"):
            raise UserError(
                f"{name} was trained with --router {trained}, and without it its vectors would be "
                "others. Leave out --router none."
            )
        for setting in [name for name in chosen if name != "router"]:
            raise UserError(
                f"{setting} is {chosen[setting]!r}, and there is no router in the encoder. Give "
                "--router csr as well."
            )
    elif chosen.get("router_mode") in RELEASED and pooling not in (None, "cls"):
        raise UserError(
            f"router_mode is {chosen['router_mode']!r}, whose vector is the first token's, and "
            f"pooling is {pooling!r}. Leave out --pooling."
        )


def check_layers(name: str, mode: RouterMode, layers: int, pooling: str) -> None:
    """Raise a UserError for routers in so few layers that they change nothing."""
    if layers == 1 and mode not in RELEASED and pooling_named(pooling).takes in ("first", "last"):
        raise UserError(
            f"router_layers is 1, and {name} pools by {pooling}: all that the router could change "
            "is the weight of one token. Give --router-layers 3, or --pooling mean."
        )
