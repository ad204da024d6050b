"""The version, in a separate module that imports nothing."""

__version__ = "0.2.0"
