"""Errors of searches, in a module that a server without an index can import quickly."""

from __future__ import annotations

from llmcond.errors import UserError


class FilterError(UserError):
    """A filter is invalid, or takes too long."""


class UnpreparedConditionError(UserError):
    """Texts would have to be encoded under a condition before a search under it.

    Attributes:
        condition: the condition.
        problem: what is missing, as a sentence.
        command: the command that encodes the texts.
    """

    def __init__(self, condition: str, problem: str, command: str) -> None:
        super().__init__(f"{problem} Encode them: {command}")
        self.condition, self.problem, self.command = condition, problem, command
