"""The result of a search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from llmcond.display import Displayed
from llmcond.heads.guide import Guide, Guides
from llmcond.runs.embedder import guides_json


@dataclass(frozen=True)
class Hits(Displayed):
    """The texts nearest to a query under a condition, best first.

    Attributes:
        query: the text that was searched for.
        conditions: weight of each condition.
        rows: a dictionary for each hit: ``rank`` (from 1), ``score``, ``text``, ``id``, and the
            index's other columns. With ``explain`` also the hit's score under each condition and
            without a condition.
        searched: number of texts that were compared: all texts, or those that match the filter.
        plain: with ``explain``, name of the encoder that gave the scores without a condition, if
            there are any.
        exact: whether all of these texts were compared under the condition in half precision.
            Otherwise only the texts nearest to the query without the condition were, or the index
            has vectors of 8 bits or 1 bit for each number.
        guides: the guides of those conditions that have one in the index.

    Examples:
        >>> import llmcond
        >>> texts = ["The parcel never arrived.", "I was charged twice."]
        >>> index = llmcond.Index.build("complaints", texts)
        >>> hits = index.search("Where is my order?", "the problem", k=1)
        >>> hits.rows[0]["text"]
        'The parcel never arrived.'
        >>> len(hits), hits.searched
        (1, 2)
    """

    query: str
    conditions: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]]
    searched: int
    exact: bool = True
    plain: str | None = None
    guides: Mapping[Any, Guide] = field(default_factory=Guides)

    def __len__(self) -> int:
        return len(self.rows)

    def to_json(self) -> dict[str, Any]:
        """Convert the result to the dictionary that ``--json`` prints.

        Returns:
            A dictionary with ``results`` (the rows), ``query``, ``conditions``, ``searched``,
            ``exact``, ``plain`` if there are scores without a condition, and the guides. Dates and
            times are texts in ISO 8601, bytes are hexadecimal, and numbers that are not finite are
            None.
        """
        return {
            "results": [_as_json(row) for row in self.rows],
            "query": self.query,
            "conditions": dict(self.conditions),
            "searched": self.searched,
            "exact": self.exact,
            **({} if self.plain is None else {"plain": self.plain}),
            **guides_json(self.guides),
        }

    @override
    def _displayed(self) -> Mapping[str, Any]:
        values = self.to_json()
        return {"rows": values.pop("results"), **values}

    def to_pandas(self) -> Any:
        """Convert the hits to a data frame.

        Returns:
            A ``pandas.DataFrame`` with one row per hit and the columns of ``rows``.
        """
        import pandas as pd

        return pd.DataFrame([dict(row) for row in self.rows])


def _as_json(value: Any) -> Any:
    """Convert a value of any column's type to one that JSON can hold."""
    if isinstance(value, Mapping):
        return {name: _as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
