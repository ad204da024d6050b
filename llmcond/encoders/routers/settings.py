"""The settings of a router inside the encoder, and the checks that they fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from llmcond.encoders.poolings import get_pooling
from llmcond.errors import UserError

#: Where a router weights the tokens of an input: as they are pooled (``none``), or inside the last
#: layers of the network (``csr``, see llmcond/encoders/routers/csr.py).
RouterKind = Literal["none", "csr"]
#: What CSR compares. The condition is represented by its first token, or by its last token in a
#: causal encoder. ``paper`` compares this token's query in the last layer with the keys of the
#: sentence's tokens (section 2). ``hidden`` compares the states from which queries and keys are
#: projected, and ``heavy`` projects these states with trained matrices W_q and W_k (section 3.3).
#: ``bi`` is the paper's bi-encoder, which reads sentence and condition as one text, and whose
#: weights are the attention of the condition's token to the sentence (section 3.1).
#: ``released-tri`` and ``released-bi`` are the variants in the authors' code, where sentences also
#: attend to the condition in each layer.
RouterMode = Literal["paper", "hidden", "heavy", "bi", "released-tri", "released-bi"]
RELEASED_MODES: tuple[RouterMode, ...] = ("released-tri", "released-bi")
#: Modes in which the encoder reads the condition's tokens along with each sentence.
READING_MODES: tuple[RouterMode, ...] = ("bi", *RELEASED_MODES)
#: How a weight w scales a token (table 3): ``one-plus`` by 1 + A w, ``only`` by A w, and ``random``
#: by 1 + A w with random weights instead of the router's.
RouterWeight = Literal["one-plus", "only", "random"]


def check_router(name: str, options: Mapping[str, Any], trained: Any, pooling: str | None) -> None:
    """Check that the router settings and the pooling of an encoder fit together.

    Args:
        name: The encoder's name.
        options: Router settings that the user has set, by their names.
        trained: The router that the encoder was trained with, if any.
        pooling: The pooling that the user has set, if any.

    Raises:
        UserError: If they do not fit together.
    """
    if options.get("router", "none") == "none":
        if trained not in (None, "none"):
            raise UserError(
                f"{name} was trained with --router {trained}, and its vectors would be wrong "
                "without it. Leave out --router none."
            )
        for setting in [option for option in options if option != "router"]:
            raise UserError(
                f"{setting} is {options[setting]!r}, but the encoder has no router. Add --router "
                "csr."
            )
    elif options.get("router_mode") in RELEASED_MODES and pooling not in (None, "cls"):
        raise UserError(
            f"router_mode is {options['router_mode']!r}, which always uses the vector of the first "
            f"token, but pooling is {pooling!r}. Leave out --pooling."
        )
    elif options.get("router_weight") == "random" and options.get("router_mode") in (
        "hidden",
        "heavy",
    ):
        raise UserError(
            "router_weight is 'random', which uses neither queries nor keys, so it cannot be "
            f"combined with router_mode {options['router_mode']!r}. Use --router-mode paper."
        )


def check_layers(name: str, mode: RouterMode, layers: int, pooling: str) -> None:
    """Raise a UserError for a router in so few layers that it has almost no effect."""
    if (
        layers == 1
        and mode not in RELEASED_MODES
        and get_pooling(pooling).states in ("first", "last")
    ):
        raise UserError(
            f"router_layers is 1, but {name} pools by {pooling}, so the router could only change "
            "the weight of one token. Use --router-layers 3, or --pooling mean."
        )
