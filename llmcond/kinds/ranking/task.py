"""The base class of ranking tasks: a query is a text under a condition, answered by a candidate."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import MatrixLike
from llmcond.data.datasets import DataOptions
from llmcond.data.formats import ReadOptions
from llmcond.data.rows import KnownAnswers, QueryRows
from llmcond.errors import UserError
from llmcond.metrics import RANKING_NAMES
from llmcond.tasks.base import AnyTask, Data

if TYPE_CHECKING:
    from llmcond.kinds.ranking.heads import QueryArrays


@dataclass(frozen=True, slots=True)
class QueryTexts:
    """The texts of queries and candidates, without duplicates as far as the task can detect them.

    Attributes:
        sentences: sentences of the queries, without their conditions.
        conditions: conditions of the queries.
        candidates: texts that are ranked. If it is the same object as ``sentences``, both are the
            same things.
        query_pairs: positions of the sentence and the condition of each distinct query, (n, 2).
        names: nouns for a sentence, a condition and a candidate in messages, such as ``entity``.
    """

    sentences: Sequence[str]
    conditions: Sequence[str]
    candidates: Sequence[str]
    query_pairs: NDArray[np.int64]
    names: tuple[str, str, str] = ("sentence", "condition", "candidate")


class QueryData(Data, Protocol):
    """A dataset of queries."""

    @property
    def splits(self) -> Mapping[str, NDArray[np.int32]]:
        """The examples of ``train``, ``dev`` and ``test``; dev and test may be missing."""

    def queries(self, split: str) -> NDArray[np.int32]:
        """Return the positions of each query's sentence, condition and answer, (n, 3)."""


Q = TypeVar("Q", bound=QueryData)


class RankingTask(AnyTask[Q]):
    """A task that ranks candidates for queries, each of which is a text under a condition.

    The sentence under its condition is rendered by the conditional parts of a template, a candidate
    by the template's ``[plain]`` part, which is the unchanged text by default.
    """

    kind: ClassVar[str] = "ranking"
    #: Noun for the examples in messages.
    unit: ClassVar[str] = "examples"
    #: Noun for the sentences and answers that confidence intervals resample, because several
    #: examples share them; empty: examples are independent.
    clusters: ClassVar[str] = ""
    metrics: ClassVar[Sequence[str]] = RANKING_NAMES
    recipes: ClassVar[str | None] = "kgc"
    #: The default prompt encodes sentences and conditions separately, because their pairs are many.
    prompt: ClassVar[str | None] = "separate"

    @abstractmethod
    def texts(self, dataset: Q) -> QueryTexts:
        """Return the texts that are encoded."""

    @abstractmethod
    def known(self, dataset: Q) -> KnownAnswers:
        """Return the correct answers of all queries; all but the target are left out of ranks."""

    @abstractmethod
    def arrays(
        self,
        dataset: Q,
        candidates: MatrixLike,
        conditions: MatrixLike | None,
        joint: MatrixLike | None,
        query_pairs: NDArray[np.int64],
    ) -> QueryArrays:
        """Return the arrays on which heads are fitted.

        Args:
            dataset: the dataset.
            candidates: features of all candidates, (n, d).
            conditions: features of all conditions, (c, d), for heads that read them.
            joint: features of sentences under conditions, (m, d), for heads that read them.
            query_pairs: positions of the sentence and the condition of each row of ``joint``,
                (m, 2).
        """

    def rows(self, dataset: Q, split: str) -> QueryRows:
        """Return a split's queries in readable form: by default, their texts."""
        texts = self.texts(dataset)
        sources = (texts.sentences, texts.conditions, texts.candidates)
        names = ("sentence", "condition", "answer")
        positions_by_name = zip(names, sources, dataset.queries(split).T.tolist(), strict=True)
        columns = {
            name: [source[i] for i in positions] for name, source, positions in positions_by_name
        }
        return QueryRows(columns, ("condition",), ("sentence", "answer"), group_column="condition")

    def pool_keys(self, dataset: Q) -> list[Any]:
        """Return what determines ranks besides queries: by default, the candidates' texts."""
        return list(self.texts(dataset).candidates)

    def add_external_data(self, dataset: Q, data: DataOptions, split: str | None) -> tuple[Q, str]:
        """Return a dataset with an additional split, ``OTHER_SPLIT``, of queries from elsewhere.

        These queries have sentences, conditions and candidates of the dataset. Their answers are
        known answers, like all others.

        Args:
            dataset: the dataset.
            data: options that say where the queries are.
            split: split of a folder; by default test, or dev if there is no test file.

        Returns:
            The dataset, and the split's name in results.

        Raises:
            UserError: The task cannot read other queries, or the queries are invalid.
        """
        raise UserError(
            f"--data: the task {self.name} can only read the queries of the run. Leave it out, or "
            "implement add_external_data() for the task."
        )

    def check_options(self, data: DataOptions) -> None:
        """Raise a UserError for options that are only for rated rows or dialogues."""
        self.reject_leaks_option(data)
        self.reject_rated_options(data, "sentences and conditions")
        if data.reading != ReadOptions():
            raise UserError(
                "--encoding, --delimiter and --skip-empty are for rated rows and dialogues. Leave "
                f"them out; the task {self.name} reads files in UTF-8 whose columns tabs separate."
            )
        if data.split_seed is not None:
            raise UserError(
                f"--split-seed splits a single file of rows; the task {self.name} reads its splits "
                "from files. Leave it out."
            )
