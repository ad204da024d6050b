"""``llmcond embed``: write an embedding for each row of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from llmcond.commands.base import REUSES_VECTORS, verb
from llmcond.commands.shared import (
    TEXT_HELP,
    VALUES_HELP,
    WithEmbedder,
    WithGuide,
    WithScale,
    check_source,
)
from llmcond.data.readers import EMBEDDING_SUFFIXES, TEXT_FILES
from llmcond.errors import UserError
from llmcond.options import option

if TYPE_CHECKING:
    from llmcond.workflows.embed import EmbedResult


@dataclass(frozen=True, kw_only=True)
class Embed(WithGuide, WithEmbedder, WithScale):
    """Write an embedding for each row of a file, or of more than fits in memory.

    What --out names decides: a file, whose texts are read at once, or a folder or Lance dataset,
    which is written bit by bit.
    """

    example: ClassVar[str] = (
        "llmcond embed texts.csv --out vectors.parquet --condition-text 'the activity'"
    )
    if_interrupted: ClassVar[str] = (
        "what was written to a folder or dataset is kept, and the same command resumes; "
        f"{REUSES_VECTORS}"
    )

    source: Any = option(
        flag="",
        metavar="SRC",
        help=f"{TEXT_FILES}; for --out FOLDER a folder of .parquet "
        "files, one of them, or a .lance dataset, also by URI (s3://BUCKET/PATH); from Python also "
        "a pandas or Arrow table",
    )
    out: str | Path = option(
        metavar="OUT",
        parse=str,  # a URI is no path
        help=".parquet, .csv or .npy file, or FOLDER: a folder (Parquet files) or a .lance "
        "dataset, also by URI; the same command goes on with it where it stopped",
    )
    text: str | None = option(None, metavar="COL", help=TEXT_HELP)
    sentence: str | None = option(None, metavar="COL", help="the same as --text")
    condition: str | None = option(
        None,
        metavar="COL_OR_TEXT",
        help="column of the conditions, or where there is none of that name, the condition of "
        "every row (default: the column condition)",
    )
    values: str | None = option(
        None, metavar="VALUES", help=f"{VALUES_HELP}. Every condition of the file gets them"
    )
    keep: Sequence[str] = option(
        (),
        metavar="COL",
        help="further columns to write, such as an id (of a file; default: none, or for --out "
        "FOLDER all)",
    )
    condition_text: str | None = option(
        None, metavar="TEXT", help="condition of every row, also where a column is called so"
    )
    normalize: bool = option(
        True, help="unit L2 norm, so that inner products are cosines; --no-normalize keeps norms"
    )

    def execute(self) -> EmbedResult:
        """Embed."""
        cluster = self.cluster()
        check_source(self.source, TEXT_FILES)
        self.check_guide()
        if None not in (self.text, self.sentence) and self.text != self.sentence:
            raise UserError("--text and --sentence name two columns; give one of them.")
        column = self.text or self.sentence
        if is_streamed(self.out):
            if not isinstance(self.source, str | Path):
                raise UserError(
                    f"source is a {type(self.source).__name__}, and out is a folder or dataset, "
                    f"{self.out}, which is written from files. Name a .parquet, .csv or .npy file."
                )
            from llmcond.workflows.embed_stream import embed_stream

            return self.call(
                embed_stream,
                source=str(self.source),
                run_folder=self.folder(),
                out=str(self.out),
                text=column,
                cluster=cluster,
            )
        if cluster is not None:
            raise UserError(f"--scale is for --out FOLDER, and {self.out} is one file.")
        from llmcond.workflows.embed import embed_file

        return self.call(embed_file, run_folder=self.folder(), out=Path(self.out), text=column)


def is_streamed(out: str | Path) -> bool:
    """Return whether what is written is a folder or a Lance dataset, not one file."""
    name = str(out)
    suffix = PurePath(name).suffix.lower()
    if suffix in EMBEDDING_SUFFIXES:
        if "://" in name:
            raise UserError(
                f"{name}: one file is written on this machine only. Name a folder or .lance there."
            )
        return False
    return suffix in ("", ".lance") or name.endswith("/") or "://" in name or Path(name).is_dir()


embed = verb(Embed)
