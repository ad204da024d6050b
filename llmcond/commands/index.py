"""``llmcond index``: make an index of texts, or add to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcond.commands.base import RESUMES, Command
from llmcond.data.readers import FILES
from llmcond.errors import UserError
from llmcond.options import check_source
from llmcond.workflows.options.texts import IndexOptions

if TYPE_CHECKING:
    from llmcond.workflows.index import Indexed


@dataclass(frozen=True, kw_only=True)
class IndexTexts(IndexOptions, Command):
    """Make an index of texts for searching, or add to the one that is there.

    A text whose id is there replaces that one; the same id with the same text costs nothing, so
    that the same command goes on where it was stopped.
    """

    position = 140
    example = "llmcond index texts.csv --out texts.index --condition 'the place'"
    if_interrupted = RESUMES

    def execute(self) -> Indexed:
        """Index."""
        if self.texts is None and not Path(self.out, "index.json").exists():
            raise UserError(f"there is no index at {self.out}. Name TEXTS to make one of.")
        if self.texts is None and not (
            self.condition or self.delete or self.run or self.guide is not None
        ):
            raise UserError("there is nothing to do. Name TEXTS, --condition or --delete.")
        if not (isinstance(self.guide, str) and self.guide == "none"):
            check_source(self.guide, FILES)
        from llmcond.workflows.index import index_texts

        return index_texts(self)
