"""``llmcond prompts``: the bundled prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmcond.bundled import bundled_names
from llmcond.commands.base import Command


@dataclass(frozen=True, kw_only=True)
class Prompts(Command):
    """List the bundled prompts, or show the inputs that one gives for a row.

    Those of encoders come first, and then those that `annotate` asks a language model.
    """

    position = 220
    example = "llmcond prompts show concat-sent-cond --row 3 --model minilm"
    formats = True

    def execute(self) -> dict[str, Any]:
        """List."""
        from llmcond.annotation.template import bundled_templates
        from llmcond.prompts import load_prompt

        rows = []
        for prompt in map(load_prompt, bundled_names("prompts")):
            about = {name: getattr(prompt, name) for name in ("name", "description", "control")}
            for prefix, part in ("", prompt.conditional), ("unconditional_", prompt.unconditional):
                for name in ("instruction", "context", "text", "router"):
                    about[f"{prefix}{name}"] = getattr(part, name)
            rows.append({**about, "source": prompt.source})
        return {"prompts": rows, "annotate": [own.to_json() for own in bundled_templates()]}

    def show(self, result: dict[str, Any], form: str) -> None:
        """Print a table; in a terminal without the texts, which ``prompts show`` has."""
        from llmcond.report.terminal import listing, show

        brief = ("name", "description") if form == "table" else ()
        show(listing(result["prompts"], brief), form)
        show(listing(result["annotate"], ("name", "kind", "description")), form)
