"""Condition-aware text embeddings on frozen encoders."""

from llmcond.version import __version__

__all__ = ["__version__"]
