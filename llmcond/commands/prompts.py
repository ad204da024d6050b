"""``llmcond prompts``: list the bundled prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmcond.bundled import bundled_names
from llmcond.commands.base import Command


@dataclass(frozen=True, kw_only=True)
class Prompts(Command):
    """List the bundled prompts, or show the encoder inputs that a prompt renders for a row.

    The first table lists the prompts of encoders, the second one those that `annotate` sends to a
    language model.
    """

    position = 220
    example = "llmcond prompts show concat-sent-cond --row 3 --model minilm"
    formats = True

    def execute(self) -> dict[str, Any]:
        """Return the prompts of encoders and those of ``annotate``, one row each."""
        from llmcond.annotation.template import bundled_templates
        from llmcond.prompts import load_prompt

        rows = []
        for prompt in map(load_prompt, bundled_names("prompts")):
            about = {name: getattr(prompt, name) for name in ("name", "description", "control")}
            for prefix, part in ("", prompt.conditional), ("unconditional_", prompt.unconditional):
                for name in ("instruction", "context", "text", "router"):
                    about[f"{prefix}{name}"] = getattr(part, name)
            rows.append({**about, "source": prompt.source})
        return {
            "prompts": rows,
            "annotate": [template.to_json() for template in bundled_templates()],
        }

    def show(self, result: dict[str, Any], form: str) -> None:
        """Print two tables; in a terminal without the texts, which ``prompts show`` prints."""
        from llmcond.display import Table

        brief = ("name", "description") if form == "table" else ()
        Table.of_rows(result["prompts"], brief).print(form)
        Table.of_rows(result["annotate"], ("name", "kind", "description")).print(form)
