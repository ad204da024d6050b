"""``llmcond similarity``: compare two sentences under conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmcond.commands.base import Command
from llmcond.conditions import condition_json
from llmcond.options import option
from llmcond.workflows.options.common import ConditionOptions, EmbedderOptions


@dataclass(frozen=True)
class Similarities:
    """The similarity of two sentences under each condition, and the model that computed it.

    Attributes:
        conditions: the conditions.
        values: the similarity under each condition.
        about: description of the run, encoder and head, for ``--json``.
    """

    conditions: Sequence[str]
    values: Sequence[float]
    about: dict[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per condition."""
        return [
            {**condition_json(condition), "similarity": round(value, 6)}
            for condition, value in zip(self.conditions, self.values, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that ``--json`` prints."""
        return {"similarities": self.rows(), **self.about}


@dataclass(frozen=True, kw_only=True)
class Similarity(ConditionOptions, EmbedderOptions, Command):
    """Compare two sentences under conditions."""

    position = 120
    example = (
        "llmcond similarity 'A man rides a horse.' 'A girl cycles.' --condition 'the activity'"
    )
    formats = True

    sentence1: str = option(flag="", metavar="SENTENCE1", help="first sentence")
    sentence2: str = option(flag="", metavar="SENTENCE2", help="second sentence")
    condition: Sequence[str] = option(
        metavar="C", repeat=True, help="condition to compare the sentences under; may be repeated"
    )

    def execute(self) -> Similarities:
        """Encode both sentences under every condition, and compare them."""
        from llmcond.log import log
        from llmcond.runs import cross, open_run
        from llmcond.runs.embedder import describe
        from llmcond.runs.familiarity import find_unfamiliar_conditions
        from llmcond.runs.languages import report_foreign_texts

        conditions, folder = self.conditions(), self.resolve_folder()
        n = len(conditions)
        texts = [self.sentence1] * n, [self.sentence2] * n, conditions
        loaded = cross.load_similarity_model(folder, self.head, self.prompt, self.device)
        report_foreign_texts([self.sentence1, self.sentence2], loaded.encoder.resolved.checkpoint)
        if isinstance(loaded, cross.CrossEncoder):
            values = loaded.similarity(*texts)
            return Similarities(conditions, values.tolist(), cross.describe(loaded))
        for text, nearest in find_unfamiliar_conditions(
            open_run(folder), loaded, conditions
        ).items():
            log.warning(
                f"the condition {text!r} is unlike those that {loaded.name} was fitted on (the "
                f"nearest is {nearest!r}), so its similarities may be unreliable. Use --head none "
                "for zero-shot"
            )
        values = loaded.similarity(*texts)
        return Similarities(conditions, values.tolist(), describe(loaded))

    def show(self, result: Similarities, form: str) -> None:
        """Print a table."""
        from llmcond.display import Table

        rows = result.rows()
        columns = ["condition", "values", "similarity"]
        if not any("values" in row for row in rows):
            columns.remove("values")
        rows = [{**row, "values": ", ".join(row.get("values", ()))} for row in rows]
        Table.of_rows(rows, columns).print(form)
