"""``llmcond index``: create or update an index of texts."""

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
    from llmcond.workflows.index import IndexResult


@dataclass(frozen=True, kw_only=True)
class IndexTexts(IndexOptions, Command):
    """Create an index of texts for searching, or update an existing index.

    A text replaces the text that has the same id. If both are equal, nothing is computed, so that
    the same command resumes after an interruption.
    """

    position = 140
    example = "llmcond index texts.csv --out texts.index --condition 'the place'"
    if_interrupted = RESUMES

    def execute(self) -> IndexResult:
        """Create or update the index.

        Raises:
            UserError: there is no index and no text, or an option is invalid.
        """
        if self.texts is None and not Path(self.out, "index.json").exists():
            raise UserError(f"there is no index at {self.out}. Name TEXTS to create one.")
        if self.texts is None and not (
            self.condition or self.delete or self.run or self.guide is not None
        ):
            raise UserError("there is nothing to do. Name TEXTS, --condition or --delete.")
        if not (isinstance(self.guide, str) and self.guide == "none"):
            check_source(self.guide, FILES)
        from llmcond.workflows.index import index_texts

        return index_texts(self)
