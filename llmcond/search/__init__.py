"""Search of a collection of texts under any condition: an index on disk, scanned exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcond.lazy import lazy_getattr

if TYPE_CHECKING:
    from llmcond.search.hits import Hits
    from llmcond.search.index import Index

__all__ = ["Hits", "Index"]


if not TYPE_CHECKING:  # otherwise type checkers would accept any name of the package
    __getattr__ = lazy_getattr(
        __name__, {"Hits": "llmcond.search.hits", "Index": "llmcond.search.index"}
    )
