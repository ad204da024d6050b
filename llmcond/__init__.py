"""Condition-aware text embeddings on frozen encoders.

The public names are imported when they are first used, so that the command line starts at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmcond.version import __version__

if TYPE_CHECKING:
    from llmcond.api import (
        analyse,
        compare_prompts,
        embed,
        evaluate,
        extract,
        fit_head,
        push,
        sweep,
        train_lora,
    )
    from llmcond.encoders.encoder import Encoder, load_encoder
    from llmcond.encoders.spec import EncoderInput
    from llmcond.errors import LlmcondError, UserError
    from llmcond.heads.estimator import Head
    from llmcond.plugins import register
    from llmcond.runs.embedder import Embedder, load_embedder
    from llmcond.tasks import Task

__all__ = [
    "Embedder",
    "Encoder",
    "EncoderInput",
    "Head",
    "LlmcondError",
    "Task",
    "UserError",
    "__version__",
    "analyse",
    "compare_prompts",
    "embed",
    "evaluate",
    "extract",
    "fit_head",
    "load_embedder",
    "load_encoder",
    "push",
    "register",
    "sweep",
    "train_lora",
]

_HOMES = {
    "Embedder": "llmcond.runs.embedder",
    "Encoder": "llmcond.encoders.encoder",
    "EncoderInput": "llmcond.encoders.spec",
    "Head": "llmcond.heads.estimator",
    "LlmcondError": "llmcond.errors",
    "Task": "llmcond.tasks",
    "UserError": "llmcond.errors",
    "load_embedder": "llmcond.runs.embedder",
    "load_encoder": "llmcond.encoders.encoder",
    "register": "llmcond.plugins",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'llmcond' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "llmcond.api")), name)


def __dir__() -> list[str]:
    return list(__all__)
