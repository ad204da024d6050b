"""The routers that can act inside an encoder's network, by their names in its settings."""

from __future__ import annotations

from collections.abc import Mapping

from llmcond.encoders.engine.forward import Passes
from llmcond.encoders.routers.csr import CsrPasses
from llmcond.encoders.routers.settings import RouterKind
from llmcond.encoders.settings import EncoderIdentity

_PASSES: Mapping[RouterKind, type[Passes]] = {"none": Passes, "csr": CsrPasses}


def passes_class(identity: EncoderIdentity) -> type[Passes]:
    """Return the class that creates an encoder's forward passes."""
    return _PASSES[identity.router]
