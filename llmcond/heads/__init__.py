"""Heads: small modules fitted on cached features. They know arrays, but no encoders and no rows.

The public names are listed in ``__init__.pyi``; those that need torch are imported on first use.
"""

from llmcond.base.package import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
