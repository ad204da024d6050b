"""Condition-aware text embeddings on frozen encoders.

The public names are imported when they are first used, so that the command line starts at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmcond.version import __version__

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder, load_encoder
    from llmcond.encoders.spec import EncoderInput
    from llmcond.errors import LlmcondError, UserError
    from llmcond.heads.estimator import Head
    from llmcond.plugins import register
    from llmcond.runs.embedder import Embedder, load_embedder

__all__ = [
    "Embedder",
    "Encoder",
    "EncoderInput",
    "Head",
    "LlmcondError",
    "UserError",
    "__version__",
    "load_embedder",
    "load_encoder",
    "register",
]

_HOMES = {
    "Embedder": "llmcond.runs.embedder",
    "Encoder": "llmcond.encoders.encoder",
    "EncoderInput": "llmcond.encoders.spec",
    "Head": "llmcond.heads.estimator",
    "LlmcondError": "llmcond.errors",
    "UserError": "llmcond.errors",
    "load_embedder": "llmcond.runs.embedder",
    "load_encoder": "llmcond.encoders.encoder",
    "register": "llmcond.plugins",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'llmcond' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
