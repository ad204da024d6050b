"""Queries as readers see them: what is asked of what, and what the right answer is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class KnownAnswers(Protocol):
    """The known right answers of queries."""

    def gather(
        self, sentence: NDArray[np.integer], condition: NDArray[np.integer], /
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return those of m queries, flat: (k,) the query and (k,) an answer of it."""


@dataclass(frozen=True)
class QueryRows:
    """Queries in columns of texts, (n,) each.

    Attributes:
        columns: all that files have of them, by name.
        heading: the columns that say what is asked.
        texts: the columns that say of what it is asked, and the answer.
        by: the column whose values are parts that figures are told of.
    """

    columns: Mapping[str, Sequence[str]]
    heading: Sequence[str]
    texts: Sequence[str]
    by: str

    def __len__(self) -> int:
        return len(self.columns[self.by])

    @property
    def headings(self) -> list[str]:
        """Return what is asked by each query: a text, or several with the names of their columns.

        ``the place``, or ``dialogue d3, history 2``.
        """
        columns = [self.columns[name] for name in self.heading]
        if len(columns) == 1:
            return list(columns[0])
        return [
            ", ".join(f"{name} {text}" for name, text in zip(self.heading, row, strict=True))
            for row in zip(*columns, strict=True)
        ]
