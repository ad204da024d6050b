"""Poolings: how the states of an input's tokens become one vector.

Each entry of ``POOLINGS`` says which token states it needs. The engines compute it:
``llmcond.encoders.engine.pooling`` with PyTorch, ``llmcond.encoders.openvino.engine`` with numpy. A
user-defined function is named ``FILE.py:NAME`` or ``MODULE:NAME``.
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
        states: the states that it needs: of the ``first`` token of the input, of the ``last``
            pooled token, the ``mean`` of the pooled tokens, or ``all`` for a user-defined function.
        module: its name in the pooling module of sentence-transformers; empty if it has none.
        supports_pool_over: whether ``pool_over`` applies, that is, whether users choose which
            tokens are pooled.
        supports_routers: whether token states lie in the same space as the vectors of texts, so
            that routers can weight them.
        part: the part of the network that it needs: the ``pooler``, a dense layer after the first
            token, or the ``latent`` attention after every token; empty if neither.
    """

    states: Literal["first", "last", "mean", "all"]
    module: str = ""
    supports_pool_over: bool = False
    supports_routers: bool = False
    part: Literal["", "pooler", "latent"] = ""

    def tokens(self, first: int, last: int, length: int) -> tuple[int, int]:
        """Return the range of tokens, end excluded, whose states an input's vector needs.

        Args:
            first: position of the first pooled token.
            last: position after the last pooled token.
            length: number of tokens of the input.
        """
        ranges = {"first": (0, 1), "last": (last - 1, last), "mean": (first, last)}
        return ranges.get(self.states, (0, length))


POOLINGS: Mapping[str, Pooling] = {
    "cls": Pooling("first", "cls_token", supports_routers=True),
    "mean": Pooling("mean", "mean_tokens", supports_pool_over=True, supports_routers=True),
    "last": Pooling("last", "lasttoken", supports_pool_over=True, supports_routers=True),
    # Used by SimCSE.
    "pooler": Pooling("first", "cls_token", part="pooler"),
    # Used by NV-Embed-v2.
    "latent": Pooling("mean", part="latent"),
}
ROUTED_POOLINGS = tuple(name for name, pooling in POOLINGS.items() if pooling.supports_routers)


def get_pooling(name: str) -> Pooling:
    """Return the pooling with this name, which may be that of a user-defined function."""
    return Pooling("all", supports_pool_over=True) if plugins.is_plugin(name) else POOLINGS[name]


def identify_pooling(name: str, source: str) -> str:
    """Return the name of a user-defined pooling with the digest of its file, ``NAME@DIGEST``.

    Args:
        name: ``FILE.py:NAME`` or ``MODULE:NAME``, whose file is loaded; or the recorded form
            ``NAME@DIGEST``, whose function must have been loaded before.
        source: name of the record in messages.

    Raises:
        UserError: it cannot be loaded, is not a function, or has changed since it was recorded.
    """
    import_path, _, recorded_digest = name.partition("@")
    function = (
        plugins.get_registered(import_path, source)
        if recorded_digest
        else plugins.load(import_path)
    )
    try:
        file = Path(inspect.getsourcefile(function) or "")
        current_digest = digest_bytes(file.read_bytes(), size=8).hex()
    except (OSError, TypeError) as error:
        raise UserError(
            f"the pooling {import_path} is not a function that is defined in a Python file."
        ) from error
    if recorded_digest not in ("", current_digest):
        raise UserError(
            f"{source} records the pooling {import_path} with the digest {recorded_digest}, but "
            f"{file} has changed since then ({current_digest}). Restore the file, or use another "
            "--run."
        )
    return f"{plugins.record_name(import_path)}@{current_digest}"
