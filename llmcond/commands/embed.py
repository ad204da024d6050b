"""``llmcond embed``: write an embedding for each row of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from llmcond.commands.base import verb
from llmcond.commands.shared import WithEmbedder, check_source
from llmcond.data.readers import FILES
from llmcond.options import option

if TYPE_CHECKING:
    from llmcond.workflows.embed import Embedded


@dataclass(frozen=True, kw_only=True)
class Embed(WithEmbedder):
    """Write an embedding for each row of a file."""

    example: ClassVar[str] = (
        "llmcond embed texts.csv --out vectors.parquet --condition-text 'the activity'"
    )

    source: str = option(flag="", metavar="SRC", help=FILES)
    out: Path = option(metavar="FILE", help=".parquet or .npy")
    sentence: str = option("sentence", metavar="COL", help="column of the sentences")
    condition: str | None = option(
        None, metavar="COL", help="column of the conditions (default: condition)"
    )
    keep: Sequence[str] = option(
        (), metavar="COL", help="further columns to write to a .parquet file, such as an id"
    )
    condition_text: str | None = option(
        None, metavar="TEXT", help="one condition for every row, instead of a column"
    )
    normalize: bool = option(
        True, help="unit L2 norm, so that inner products are cosines; --no-normalize keeps norms"
    )

    def execute(self) -> Embedded:
        """Embed."""
        check_source(self.source)
        from llmcond.workflows.embed import embed_file

        return self.call(embed_file, run_folder=self.folder())


embed = verb(Embed)
