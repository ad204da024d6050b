"""``llmcond index``: make an index of texts, or add to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmcond.commands.base import RESUMES
from llmcond.commands.shared import TEXT_HELP, WithConditions, WithEmbedder, check_source
from llmcond.data.readers import FILES, TEXT_FILES
from llmcond.errors import UserError
from llmcond.options import option

if TYPE_CHECKING:
    from llmcond.workflows.index import Indexed


@dataclass(frozen=True, kw_only=True)
class IndexTexts(WithConditions, WithEmbedder):
    """Make an index of texts for searching, or add to the one that is there.

    A text whose id is there replaces that one; the same id with the same text costs nothing, so
    that the same command goes on where it was stopped.
    """

    example: ClassVar[str] = "llmcond index texts.csv --out texts.index --condition 'the place'"
    if_interrupted: ClassVar[str] = RESUMES

    texts: str | None = option(None, flag="", metavar="TEXTS", help=TEXT_FILES)
    out: str | Path = option(metavar="DIR", help="folder of the index")
    text: str | None = option(None, metavar="COL", help=TEXT_HELP)
    id: str | None = option(
        None, metavar="COL", help="column of their ids (default: made of the texts)"
    )
    keep: Sequence[str] = option(
        (), metavar="COL", help="further columns, to filter by and to show"
    )
    condition: Sequence[str] = option(
        (),
        metavar="C",
        repeat=True,
        help="make the vectors of all texts under it now; may be repeated. That saves time where "
        "the model encodes each text together with the condition. The index records its --values",
    )
    guide: Any = option(
        None,
        metavar="SRC",
        help="a few labelled texts that searches follow from now on: a table with the columns "
        "text, label and, unless there is one --condition, condition. none: remove the guide of "
        "each --condition",
    )
    delete: Sequence[str] = option(
        (), metavar="ID", help="ids of texts to delete, or a file with one a line"
    )

    def execute(self) -> Indexed:
        """Index."""
        if self.texts is not None:
            check_source(self.texts, TEXT_FILES)
        elif not Path(self.out, "index.json").exists():
            raise UserError(f"there is no index at {self.out}. Name TEXTS to make one of.")
        elif not (self.condition or self.delete or self.run or self.guide is not None):
            raise UserError("there is nothing to do. Name TEXTS, --condition or --delete.")
        if not (isinstance(self.guide, str) and self.guide == "none"):
            check_source(self.guide, FILES)
        from llmcond.workflows.index import index_texts

        return self.call(index_texts, conditions=self.conditions())
