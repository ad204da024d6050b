"""``llmcond serve``: embeddings, similarity, reranking and search over HTTP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmcond.commands.base import Command, as_function
from llmcond.conditions import Condition
from llmcond.options import option
from llmcond.serving.server import ServedSource, ServerSettings
from llmcond.workflows.options.common import (
    VALUES_HELP,
    EmbedderOptions,
    GuideOption,
    RangesOption,
    TruncateOption,
)

if TYPE_CHECKING:
    from llmcond.serving.server import ServeResult


@dataclass(frozen=True, kw_only=True)
class Serve(GuideOption, EmbedderOptions, TruncateOption, RangesOption, ServerSettings, Command):
    """Serve embeddings, similarity, reranking and search over HTTP.

    The protocol is OpenAI's embeddings API with a condition added. The server does not encrypt: to
    serve other machines, put it behind a proxy that does.
    """

    position = 190
    example = "llmcond serve --port 8000 --condition 'the activity'"

    index: str | Path | None = option(
        None,
        metavar="DIR",
        help="index to search, written by `llmcond index`; the server uses the model of the index",
    )
    condition: str | None = option(
        None,
        metavar="C",
        help="condition of requests that do not name one (default: reject such requests)",
    )
    values: str | None = option(None, metavar="VALUES", needs="--condition", help=VALUES_HELP)

    def execute(self) -> ServeResult:
        """Serve until the process gets SIGTERM or Ctrl-C.

        Returns:
            A ``ServeResult``: the server's URL, the model, the number of requests, and how many
            seconds it ran.

        Raises:
            UserError: the extra ``serve`` is not installed, the port is in use, or the model, index
                or keys cannot be read.
            LlmcondError: the model cannot be loaded, or fails to encode a text.

        Examples:
            >>> import llmcond
            >>> llmcond.serve(port=8000, condition="the activity")  # doctest: +SKIP
        """
        condition = self.condition
        if condition is not None and self.values is not None:
            condition = Condition(condition, self.values)
        from llmcond.serving.server import serve

        return serve(replace(self.select(ServedSource), condition=condition), self)


serve = as_function(Serve)
