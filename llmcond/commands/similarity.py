"""``llmcond similarity``: compare two sentences under conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from llmcond.commands.shared import WithEmbedder
from llmcond.errors import UserError
from llmcond.options import option


@dataclass(frozen=True)
class Similarities:
    """The similarity of two sentences under each condition, and what computed it."""

    conditions: Sequence[str]
    values: Sequence[float]
    about: dict[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each condition."""
        pairs = zip(self.conditions, self.values, strict=True)
        return [{"condition": text, "similarity": round(value, 6)} for text, value in pairs]

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {"similarities": self.rows(), **self.about}


@dataclass(frozen=True, kw_only=True)
class Similarity(WithEmbedder):
    """Compare two sentences under conditions."""

    example: ClassVar[str] = (
        "llmcond similarity 'A man rides a horse.' 'A girl cycles.' --condition 'the activity'"
    )
    formats: ClassVar[bool] = True

    sentence1: str = option(flag="", metavar="SENTENCE1", help="a text")
    sentence2: str = option(flag="", metavar="SENTENCE2", help="another text")
    condition: Sequence[str] = option(metavar="C", repeat=True, help="may be repeated")

    def execute(self) -> Similarities:
        """Encode both sentences under every condition."""
        from llmcond.log import log
        from llmcond.runs import cross, open_run
        from llmcond.runs.embedder import describe, load_embedder
        from llmcond.runs.familiarity import unfamiliar

        n = len(self.condition)
        texts, folder = ([self.sentence1] * n, [self.sentence2] * n, self.condition), self.folder()
        if open_run(folder, cross=True).cross:
            if self.head or self.prompt:
                raise UserError(
                    f"{folder} holds a cross-encoder, which has neither heads nor prompts. Leave "
                    "out --head and --prompt."
                )
            loaded = cross.load_cross_encoder(folder, device=self.device)
            values = loaded.similarity(*texts)
            return Similarities(self.condition, values.tolist(), cross.describe(loaded))
        embedder = load_embedder(folder, self.head, prompt=self.prompt, device=self.device)
        for text, nearest in unfamiliar(open_run(folder), embedder, self.condition).items():
            log.warning(
                f"the condition {text!r} is unlike those that {embedder.name} was fitted on (the "
                f"nearest is {nearest!r}); what it gives may mean little (--head none: zero-shot)"
            )
        values = embedder.similarity(*texts)
        return Similarities(self.condition, values.tolist(), describe(embedder))

    def show(self, result: Similarities, form: str) -> None:
        """Print a table."""
        from llmcond.log import log
        from llmcond.report.terminal import listing, show

        about = result.about
        fitted = f", fitted on {about['fitted_on']}" if about["fitted_on"] else ""
        made = [f"{key} {about[key]}" for key in ("prompt", "head", "orders") if key in about]
        log.info(f"{', '.join([about['encoder'], *made])}{fitted}")
        show(listing(result.rows()), form)
