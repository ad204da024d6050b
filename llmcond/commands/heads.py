"""``llmcond heads``: the bundled recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from llmcond.commands.base import Command


@dataclass(frozen=True, kw_only=True)
class Heads(Command):
    """List the bundled head recipes."""

    example: ClassVar[str] = "llmcond heads --json"
    formats: ClassVar[bool] = True

    def execute(self) -> dict[str, Any]:
        """List."""
        from llmcond.commands.listings import heads

        return {"heads": heads()}

    def show(self, result: dict[str, Any], form: str) -> None:
        """Print a table."""
        from llmcond.report.terminal import listing, show

        show(listing(result["heads"]), form)
