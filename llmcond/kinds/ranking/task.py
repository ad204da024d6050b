"""Tasks that rank candidates: a query is a text under a condition, and one candidate answers it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import MatrixLike
from llmcond.data.datasets import DataOptions
from llmcond.data.queries import KnownAnswers, QueryRows
from llmcond.errors import UserError
from llmcond.metrics import RANKING_NAMES
from llmcond.tasks.base import AnyTask, Data

if TYPE_CHECKING:
    from llmcond.kinds.ranking.arrays import QueryArrays


@dataclass(frozen=True, slots=True)
class QueryTexts:
    """The texts behind queries, each distinct one once as far as its task can tell.

    Attributes:
        sentences: of queries, without their conditions.
        conditions: that sentences are asked under.
        candidates: what is ranked; where it is ``sentences`` itself, both are the same things.
        asked: (n, 2) the positions of each sentence and condition that some query joins, once.
        names: what messages call a sentence, a condition and a candidate: ``entity``, ...
    """

    sentences: Sequence[str]
    conditions: Sequence[str]
    candidates: Sequence[str]
    asked: NDArray[np.int64]
    names: tuple[str, str, str] = ("sentence", "condition", "candidate")


class QueryData(Data, Protocol):
    """A data set of queries."""

    @property
    def splits(self) -> Mapping[str, NDArray[np.int32]]:
        """Return what ``train``, ``dev`` and ``test`` hold; dev and test may be missing."""

    def queries(self, split: str) -> NDArray[np.int32]:
        """Return (n, 3) positions of each query's sentence, condition and right candidate."""


Q = TypeVar("Q", bound=QueryData)


class RankingTask(AnyTask[Q]):
    """Queries, each a text under a condition, against candidates.

    The sentence under its condition is rendered by a template's own parts, a candidate by its
    ``[plain]`` part, which is the text as it is unless the template says otherwise.
    """

    kind: ClassVar[str] = "ranking"
    #: What messages call its examples.
    unit: ClassVar[str] = "examples"
    metrics: ClassVar[Sequence[str]] = RANKING_NAMES
    recipes: ClassVar[str | None] = "kgc"
    #: Nothing is encoded for each pair of sentence and condition, which are many.
    prompt: ClassVar[str | None] = "separate"

    @abstractmethod
    def texts(self, dataset: Q) -> QueryTexts:
        """Return the texts that are encoded."""

    @abstractmethod
    def known(self, dataset: Q) -> KnownAnswers:
        """Return the right answers of all queries, of which those not asked for are left out."""

    @abstractmethod
    def arrays(
        self,
        dataset: Q,
        candidates: MatrixLike,
        conditions: MatrixLike | None,
        joint: MatrixLike | None,
        asked: NDArray[np.int64],
    ) -> QueryArrays:
        """Return the data set as heads take it.

        Args:
            dataset: it.
            candidates: (n, d) features of all candidates.
            conditions: (c, d) features of all conditions, for heads that take them.
            joint: (m, d) features of sentences under conditions, for heads that take those.
            asked: (m, 2) which sentence and condition each of these is of.
        """

    def rows(self, dataset: Q, split: str) -> QueryRows:
        """Return a split's queries as readers see them: of their texts, unless it says more."""
        texts = self.texts(dataset)
        sources = (texts.sentences, texts.conditions, texts.candidates)
        names = ("sentence", "condition", "answer")
        asked = zip(names, sources, dataset.queries(split).T.tolist(), strict=True)
        columns = {name: [source[i] for i in own] for name, source, own in asked}
        return QueryRows(columns, ("condition",), ("sentence", "answer"), by="condition")

    def with_others(self, dataset: Q, data: DataOptions, split: str | None) -> tuple[Q, str]:
        """Return a data set with a further split, :data:`OTHERS`, of queries from elsewhere.

        They are of the data set's own sentences, conditions and candidates; their answers are known
        as all others are.

        Args:
            dataset: it.
            data: where they are.
            split: which one of a folder; None: test, or dev where it has none.

        Returns:
            It, and what results call the split.

        Raises:
            UserError: the task reads none, or what is wrong in them.
        """
        raise UserError(
            f"--data: the task {self.name} reads no queries besides a run's own. Leave it out, or "
            "write with_others() for the task."
        )

    def check_options(self, data: DataOptions) -> None:
        """Raise a UserError for options of rated rows, or of dialogues."""
        self.refuse_leaks_option(data)
        self.refuse_rated_options(data, "sentences and conditions")
        if data.split_seed is not None:
            raise UserError(
                f"--split-seed splits a single file of rows; the task {self.name} reads its splits "
                "from files. Leave it out."
            )
