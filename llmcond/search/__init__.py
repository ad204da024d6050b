"""Search of a collection of texts under any condition: an index on disk, scanned exactly."""

from llmcond.search.hits import Hits
from llmcond.search.index import Index

__all__ = ["Hits", "Index"]
