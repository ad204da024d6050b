"""``llmcond export``: save an embedder as a model of another library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmcond.commands.base import Command, as_function
from llmcond.files import check_new_folder
from llmcond.options import option
from llmcond.workflows.options.common import ConditionOptions, EmbedderOptions

if TYPE_CHECKING:
    from llmcond.exporting.export import ExportResult


@dataclass(frozen=True, kw_only=True)
class Export(ConditionOptions, EmbedderOptions, Command):
    """Save an embedder as a model of sentence-transformers.

    With one --condition, or several to choose from in each call, the model works without llmcond.
    Without --condition, it takes any condition and needs llmcond.
    """

    position = 180
    example = "llmcond export --out places --condition 'the place'"

    out: str | Path = option(
        metavar="DIR", writes=check_new_folder, help="new folder for the model"
    )
    format: Literal["sentence-transformers"] = option(
        "sentence-transformers", help="library that loads the model"
    )
    condition: Sequence[str] = option(
        (),
        metavar="C",
        repeat=True,
        help="condition of the model; may be repeated (default: any condition)",
    )

    def execute(self) -> ExportResult:
        """Export the embedder.

        Returns:
            An ``ExportResult``: the folder, the conditions, the modules, and the largest difference
            between the exported model's vectors and those of llmcond.

        Raises:
            UserError: ``out`` exists, or the embedder cannot be expressed in modules of
                sentence-transformers under these conditions.
            LlmcondError: the exported model gives different vectors; nothing is saved.

        Examples:
            >>> import llmcond
            >>> result = llmcond.export(out="places", condition="the place")
            >>> result.conditions, result.dim
            (['the place'], 384)
        """
        run_folder = self.resolve_folder()
        # A wrong name is reported before the slow imports.
        from llmcond.exporting.export import export_model

        return export_model(
            run_folder,
            Path(self.out),
            self.conditions(),
            head=self.head,
            prompt=self.prompt,
            device=self.device,
        )

    def show(self, result: ExportResult, form: str) -> None:
        """Report the modules, the result of the test load, and notes for users of the model."""
        from llmcond.log import log

        descriptions = {
            "fixed": f"under {', '.join(map(repr, result.conditions))}",
            "any": "under any condition, by llmcond",
        }
        conditions = descriptions.get(
            result.chosen_by,
            f"under {len(result.conditions)} conditions, chosen by {result.chosen_by}=",
        )
        log.info(
            f"{result.dim} dimensions {conditions}: {', '.join(result.modules)} -> {result.out}"
        )
        if result.difference is None:
            log.info("the model was not tested, because sentence-transformers is not installed")
        else:
            log.info(
                "the vectors of the model in sentence-transformers differ from llmcond's by at "
                f"most {result.difference:.1e}"
            )
        for note in result.notes:
            log.info(note)


export = as_function(Export)
