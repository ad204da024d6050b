"""``llmcond embed``: write an embedding for each row of a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from llmcond.commands.base import REUSES_VECTORS, Command, verb
from llmcond.data.readers import EMBEDDING_SUFFIXES
from llmcond.errors import UserError
from llmcond.workflows.options.texts import EmbedOptions

if TYPE_CHECKING:
    from llmcond.workflows.embed import EmbedResult


@dataclass(frozen=True, kw_only=True)
class Embed(EmbedOptions, Command):
    """Write an embedding for each row of a file, or of more than fits in memory.

    What --out names decides: a file, whose texts are read at once, or a folder or Lance dataset,
    which is written bit by bit.
    """

    position = 130
    example = "llmcond embed texts.csv --out vectors.parquet --condition-text 'the activity'"
    if_interrupted = (
        "what was written to a folder or dataset is kept, and the same command resumes; "
        f"{REUSES_VECTORS}"
    )

    def execute(self) -> EmbedResult:
        """Embed."""
        if is_streamed(self.out):
            if not isinstance(self.source, str | Path):
                raise UserError(
                    f"source is a {type(self.source).__name__}, and out is a folder or dataset, "
                    f"{self.out}, which is written from files. Name a .parquet, .csv or .npy file."
                )
            from llmcond.workflows.embed_stream import embed_stream

            return embed_stream(self)
        if self.scale is not None:
            raise UserError(f"--scale is for --out FOLDER, and {self.out} is one file.")
        from llmcond.workflows.embed import embed_file

        return embed_file(self)


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
