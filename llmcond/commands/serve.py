"""``llmcond serve``: embeddings, similarity and search over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from llmcond.commands.base import verb
from llmcond.commands.shared import VALUES_HELP, WithEmbedder, WithGuide
from llmcond.conditions import Condition
from llmcond.errors import UserError
from llmcond.options import option
from llmcond.serving.settings import ServerSettings

if TYPE_CHECKING:
    from llmcond.serving.server import ServeResult


@dataclass(frozen=True, kw_only=True)
class Serve(WithGuide, WithEmbedder, ServerSettings):
    """Serve embeddings, similarity and search over HTTP.

    OpenAI's protocol for embeddings, with a condition. There is no encryption: where others than
    this machine are served, let a proxy do that.
    """

    example: ClassVar[str] = "llmcond serve --port 8000 --condition 'the activity'"

    index: str | Path | None = option(
        None,
        metavar="DIR",
        help="a collection to search, which `llmcond index` made; its model is served",
    )
    condition: str | None = option(
        None, metavar="C", help="of requests that name none (default: such are refused)"
    )
    values: str | None = option(None, metavar="VALUES", help=VALUES_HELP)

    def execute(self) -> ServeResult:
        """Serve until SIGTERM or Ctrl-C."""
        self.check_guide()
        condition = self.condition
        if self.values is not None:
            if condition is None:
                raise UserError("--values are given without --condition; name the condition.")
            condition = Condition(condition, self.values)
        from llmcond.serving.server import serve

        return self.call(serve, condition=condition, settings=self.part(ServerSettings))


serve = verb(Serve)
