"""Poolings: how the states of an input's tokens become one vector.

A pooling is a line of :data:`POOLINGS`. Engines compute it by the tokens that it takes:
:mod:`llmcond.encoders.engine.pooling` with PyTorch, :mod:`llmcond.encoders.openvino.engine` with
numpy. A function of the user's own is named ``FILE.py:NAME`` or ``MODULE:NAME``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmcond import plugins
from llmcond.errors import UserError
from llmcond.files import digest_bytes


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the states of an input's tokens become one vector.

    Attributes:
        takes: the state of the input's ``first`` token or of the ``last`` one that counts; the
            ``mean`` of those that count; or ``all``, for a function of the user's own.
        module: its name in the pooling module of sentence-transformers; empty where it has none.
        counts: whether the user chooses which tokens count.
        routed: whether the states of tokens lie in one space with the vectors of texts, so that
            routers can weight them.
        part: the part of the network that it needs: its ``pooler``, a dense layer behind the first
            token; or its ``latent`` attention, behind every token.
    """

    takes: Literal["first", "last", "mean", "all"]
    module: str = ""
    counts: bool = False
    routed: bool = False
    part: Literal["", "pooler", "latent"] = ""

    def tokens(self, first: int, last: int, length: int) -> tuple[int, int]:
        """Return the range of tokens that it reads of an input of a ``length``.

        The tokens from ``first`` up to ``last``, which is left out, are those that count.
        """
        ranges = {"first": (0, 1), "last": (last - 1, last), "mean": (first, last)}
        return ranges.get(self.takes, (0, length))


POOLINGS: Mapping[str, Pooling] = {
    "cls": Pooling("first", "cls_token", routed=True),
    "mean": Pooling("mean", "mean_tokens", counts=True, routed=True),
    "last": Pooling("last", "lasttoken", counts=True, routed=True),
    # As SimCSE pools.
    "pooler": Pooling("first", "cls_token", part="pooler"),
    # As NV-Embed-v2 pools.
    "latent": Pooling("mean", part="latent"),
}
ROUTED_POOLINGS = tuple(name for name, pooling in POOLINGS.items() if pooling.routed)


def pooling_named(name: str) -> Pooling:
    """Return the pooling that an identity names."""
    return Pooling("all", counts=True) if plugins.is_plugin(name) else POOLINGS[name]


def identify_pooling(name: str, source: str) -> str:
    """Return what an identity records of a user's own pooling: its name and its file's digest.

    A name as the user gave it loads its file; one of an identity (``NAME@DIGEST``) does not.

    Raises:
        UserError: it cannot be loaded, is no function, or has changed since it was recorded.
    """
    given, _, digest = name.partition("@")
    function = plugins.recorded(given, source) if digest else plugins.load(given)
    try:
        file = Path(inspect.getsourcefile(function) or "")
        found = digest_bytes(file.read_bytes(), size=8).hex()
    except (OSError, TypeError) as error:
        raise UserError(f"the pooling {given} is no function in a Python file.") from error
    if digest not in ("", found):
        raise UserError(
            f"{source} records the pooling {given} with the digest {digest}, and {file} has "
            f"changed since ({found}). Restore it, or use another --run."
        )
    return f"{plugins.record_name(given)}@{found}"
