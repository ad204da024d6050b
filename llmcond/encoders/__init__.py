"""Frozen encoders: lookup by name, loading with stock transformers, batching by a token budget.

Importing this package imports neither torch nor transformers; ``encoder`` and ``loading`` do.
"""

from llmcond.encoders.resolve import ResolvedEncoder, check_encoder, resolve, resolve_base
from llmcond.encoders.settings import (
    MODELS,
    EncoderIdentity,
    EncoderOptions,
    KnownModel,
    find_model,
)
from llmcond.encoders.spec import EncoderInput

__all__ = [
    "MODELS",
    "EncoderIdentity",
    "EncoderInput",
    "EncoderOptions",
    "KnownModel",
    "ResolvedEncoder",
    "check_encoder",
    "find_model",
    "resolve",
    "resolve_base",
]
