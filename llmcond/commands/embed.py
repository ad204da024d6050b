"""``llmcond embed``: embed each row of a file, table or dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import REUSES_VECTORS, Command, as_function
from llmcond.errors import UserError
from llmcond.workflows.options.texts import EmbedOptions

if TYPE_CHECKING:
    from llmcond.workflows.embed import EmbedResult


@dataclass(frozen=True, kw_only=True)
class Embed(EmbedOptions, Command):
    """Embed each row of a source, and write the embeddings.

    If --out names a file, the source is read into memory. If it names a folder or a Lance dataset,
    the embeddings are written part by part, and .parquet and .lance sources are read part by part,
    so that they may be larger than memory.
    """

    position = 130
    example = "llmcond embed texts.csv --out vectors.parquet --condition-text 'the activity'"
    if_interrupted = (
        "parts written to a folder or dataset are kept, and the same command resumes; "
        f"{REUSES_VECTORS}"
    )

    def execute(self) -> EmbedResult:
        """Embed the rows.

        Returns:
            An ``EmbedResult``: ``out``, the number of ``rows``, the dimension ``dim``, and the head
            and prompt.

        Raises:
            UserError: an option is invalid, the source cannot be read or has an empty text, or
                ``out`` holds something else.
            DiskFullError: the disk is full; parts written to a folder or dataset are kept.
            LlmcondError: the encoder fails.

        Examples:
            >>> import llmcond
            >>> rows = [{"text": "A man rides a horse."}, {"text": "A girl reads."}]
            >>> result = llmcond.embed(texts=rows, out="vectors.npy", condition_text="the hobby")
            >>> result.rows, result.dim
            (2, 384)
        """
        if self.is_streamed:
            from llmcond.workflows.embed_stream import embed_stream

            return embed_stream(self)
        if self.scale is not None:
            raise UserError(
                f"--scale needs --out FOLDER, and {self.out} is a file. Name a folder or a .lance "
                "dataset, or leave out --scale."
            )
        from llmcond.workflows.embed import embed_file

        return embed_file(self)


embed = as_function(Embed)
