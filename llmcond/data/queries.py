"""Queries as texts for readers: the question, its subject, and the correct answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class KnownAnswers(Protocol):
    """The known correct answers of queries."""

    def gather(
        self, sentence: NDArray[np.integer], condition: NDArray[np.integer], /
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the answers of m queries, flattened.

        Args:
            sentence: (m,) index of each query's sentence.
            condition: (m,) index of each query's condition.

        Returns:
            (k,) position of a query, and (k,) index of one of its answers.
        """


@dataclass(frozen=True)
class QueryRows:
    """Queries as columns of n texts.

    Attributes:
        columns: all columns that the files have, by name.
        heading: names of the columns that state the question.
        texts: names of the columns with the subject of the question, and with the answer.
        group_column: name of the column whose values define the groups that metrics are reported
            for.
    """

    columns: Mapping[str, Sequence[str]]
    heading: Sequence[str]
    texts: Sequence[str]
    group_column: str

    def __len__(self) -> int:
        return len(self.columns[self.group_column])

    @property
    def headings(self) -> list[str]:
        """The question of each query, for example ``the place`` or ``dialogue d3, history 2``.

        Several columns are joined, each with its name.
        """
        columns = [self.columns[name] for name in self.heading]
        if len(columns) == 1:
            return list(columns[0])
        return [
            ", ".join(f"{name} {text}" for name, text in zip(self.heading, row, strict=True))
            for row in zip(*columns, strict=True)
        ]
