"""Search of a collection of texts under any condition: an index on disk, scanned exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcond.base.errors import UserError
from llmcond.base.package import lazy_getattr

if TYPE_CHECKING:
    from llmcond.search.index import Index
    from llmcond.search.query import Hits

__all__ = ["FilterError", "Hits", "Index", "UnpreparedConditionError"]


class FilterError(UserError):
    """A filter is invalid, or takes too long."""


class UnpreparedConditionError(UserError):
    """An index lacks what a search under a condition needs.

    Attributes:
        condition: the condition.
        problem: what is missing, as a sentence.
        command: the command that adds what is missing.
    """

    def __init__(self, condition: str, problem: str, command: str) -> None:
        super().__init__(f"{problem} Run: {command}")
        self.condition, self.problem, self.command = condition, problem, command


if not TYPE_CHECKING:  # otherwise type checkers would accept any name of the package
    __getattr__ = lazy_getattr(
        __name__, {"Hits": "llmcond.search.query", "Index": "llmcond.search.index"}
    )
