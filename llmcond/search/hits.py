"""What a search found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmcond.display import Displayed
from llmcond.heads.guide import Guide
from llmcond.runs.embedder import guides_json


@dataclass(frozen=True)
class Hits(Displayed):
    """The texts nearest to a query under a condition, best first.

    Attributes:
        query: what was searched for.
        conditions: its conditions with their weights.
        rows: a dictionary for each hit: ``rank`` from 1, ``score``, ``text``, ``id``, and the other
            columns; with ``explain`` also its score under each condition and without one.
        searched: texts that were compared: all, or those that a filter lets through.
        plain: name of the encoder that gave the scores without a condition, if there are any.
        exact: whether all of these were compared under the condition; else only the nearest of them
            by their embeddings without it.
        guides: those of its conditions that the index has.
    """

    query: str
    conditions: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]]
    searched: int
    exact: bool = True
    plain: str | None = None
    guides: Mapping[Any, Guide] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "results": [dict(row) for row in self.rows],
            "query": self.query,
            "conditions": dict(self.conditions),
            "searched": self.searched,
            "exact": self.exact,
            **({} if self.plain is None else {"plain": self.plain}),
            **guides_json(self.guides),
        }

    def to_pandas(self) -> Any:
        """Return the hits as a data frame."""
        import pandas as pd  # type: ignore[import-untyped,unused-ignore]

        return pd.DataFrame([dict(row) for row in self.rows])
