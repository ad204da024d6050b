"""``llmcond serve``: embeddings, similarity and search over HTTP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmcond.commands.base import Command, verb
from llmcond.conditions import Condition
from llmcond.options import option
from llmcond.serving.settings import Served, ServerSettings
from llmcond.workflows.options.common import VALUES_HELP, WithEmbedder, WithGuide

if TYPE_CHECKING:
    from llmcond.serving.server import ServeResult


@dataclass(frozen=True, kw_only=True)
class Serve(WithGuide, WithEmbedder, ServerSettings, Command):
    """Serve embeddings, similarity and search over HTTP.

    OpenAI's protocol for embeddings, with a condition. There is no encryption: where others than
    this machine are served, let a proxy do that.
    """

    position = 190
    example = "llmcond serve --port 8000 --condition 'the activity'"

    index: str | Path | None = option(
        None,
        metavar="DIR",
        help="a collection to search, which `llmcond index` made; its model is served",
    )
    condition: str | None = option(
        None, metavar="C", help="of requests that name none (default: such are refused)"
    )
    values: str | None = option(None, metavar="VALUES", needs="--condition", help=VALUES_HELP)

    def execute(self) -> ServeResult:
        """Serve until SIGTERM or Ctrl-C."""
        condition = self.condition
        if condition is not None and self.values is not None:
            condition = Condition(condition, self.values)
        from llmcond.serving.server import serve

        return serve(replace(self.part(Served), condition=condition), self)


serve = verb(Serve)
