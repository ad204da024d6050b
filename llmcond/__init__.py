"""Condition-aware text embeddings on frozen encoders.

``__init__.pyi`` lists the public names. Each is imported when it is first used, so that the command
line starts quickly.
"""

from llmcond.base.package import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
