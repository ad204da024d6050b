"""The version, apart from everything else so that nothing else is imported with it."""

__version__ = "0.1.0"
