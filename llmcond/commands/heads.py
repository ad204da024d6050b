"""``llmcond heads``: the bundled recipes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from llmcond.commands.base import Command
from llmcond.config import bundled_names


@dataclass(frozen=True, kw_only=True)
class Heads(Command):
    """List the bundled head recipes."""

    example: ClassVar[str] = "llmcond heads --json"
    formats: ClassVar[bool] = True

    def execute(self) -> dict[str, Any]:
        """List."""
        from llmcond.heads.recipes import load_recipe

        rows = []
        for recipe in map(load_recipe, bundled_names("heads")):
            settings = " ".join(f"{k}={v}" for k, v in asdict(recipe.settings).items())
            about = {"name": recipe.name, "kind": recipe.kind, "description": recipe.description}
            rows.append({**about, "settings": settings, "source": recipe.source})
        return {"heads": rows}

    def show(self, result: dict[str, Any], form: str) -> None:
        """Print a table."""
        from llmcond.report.terminal import listing, show

        show(listing(result["heads"]), form)
