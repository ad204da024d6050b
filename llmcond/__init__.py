"""Condition-aware text embeddings on frozen encoders.

The public names are listed in ``__init__.pyi``, and imported when they are first used, so that the
command line starts at once.
"""

from llmcond.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
