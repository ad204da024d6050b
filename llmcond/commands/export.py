"""``llmcond export``: write an embedder as a model of another library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmcond.commands.base import Command, verb
from llmcond.options import option
from llmcond.workflows.options.common import WithConditions, WithEmbedder

if TYPE_CHECKING:
    from llmcond.exporting.exported import ExportResult


@dataclass(frozen=True, kw_only=True)
class Export(WithConditions, WithEmbedder, Command):
    """Write an embedder as a model of sentence-transformers.

    Under one condition, or several that are chosen with each call, it needs no llmcond any more;
    without --condition it takes any condition, where llmcond is installed.
    """

    position = 180
    example = "llmcond export --out places --condition 'the place'"

    out: str | Path = option(metavar="DIR", help="a new folder")
    format: Literal["sentence-transformers"] = option(
        "sentence-transformers", help="the library that loads it"
    )
    condition: Sequence[str] = option(
        (), metavar="C", repeat=True, help="may be repeated (default: any condition)"
    )

    def execute(self) -> ExportResult:
        """Export."""
        from llmcond.exporting.export import export_model

        return export_model(
            self.folder(),
            Path(self.out),
            self.conditions(),
            head=self.head,
            prompt=self.prompt,
            device=self.device,
        )

    def show(self, result: ExportResult, form: str) -> None:
        """Say what it is, how it was tried out, and what to know of it."""
        from llmcond.log import log

        ways = {
            "fixed": f"under {', '.join(map(repr, result.conditions))}",
            "any": "under any condition, by llmcond",
        }
        own = ways.get(
            result.chosen_by,
            f"under {len(result.conditions)} conditions, chosen by {result.chosen_by}=",
        )
        log.info(f"{result.dim} dimensions {own}: {', '.join(result.modules)} -> {result.out}")
        if result.difference is None:
            log.info("it was not tried out, as sentence-transformers is not installed")
        else:
            log.info(
                "loaded in sentence-transformers, its vectors differ from llmcond's by at most "
                f"{result.difference:.1e}"
            )
        for note in result.notes:
            log.info(note)


export = verb(Export)
