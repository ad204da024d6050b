"""What is encoded for a ranking task: texts under a condition, and candidates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import MatrixLike
from llmcond.base.errors import UserError
from llmcond.data.rows import KnownAnswers, QueryRows
from llmcond.encoders.spec import EncoderInput
from llmcond.prompts.template import InputTemplate, Prompt, shuffle_conditions
from llmcond.tasks import AnyTask, Data

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


class QueryInputs:
    """The inputs of queries and candidates.

    Each column is rendered when it is first read, and then cached.
    """

    def __init__(self, texts: QueryTexts, prompt: Prompt) -> None:
        """Check the prompt.

        Raises:
            UserError: The template names columns of the data.
        """
        if prompt.fields:
            raise UserError(
                f"the prompt {prompt.name} names the column {prompt.fields[0]!r}, but this task "
                "only has sentences and conditions. Choose another --prompt."
            )
        self.texts, self.prompt = texts, prompt

    @cached_property
    def candidates(self) -> list[EncoderInput]:
        """The inputs of the candidates."""
        plain_part = self.prompt.plain or InputTemplate("{sentence}")
        return [plain_part.render(text, "") for text in self.texts.candidates]

    @cached_property
    def joint(self) -> list[EncoderInput]:
        """The inputs of each pair of sentence and condition of the queries.

        For separate features these are the inputs of the sentences, e(s), like ``sentences``.
        """
        texts, pairs = self.texts, self.texts.query_pairs.tolist()
        rows = [(texts.sentences[s], texts.conditions[c]) for s, c in pairs]
        if self.prompt.control == "shuffled":
            shuffled_conditions = shuffle_conditions(
                [c for _, c in rows], rows, self.prompt, "queries"
            )
            rows = [
                (sentence, c) for (sentence, _), c in zip(rows, shuffled_conditions, strict=True)
            ]
        return [self.prompt.conditional.render(*row) for row in rows]

    @cached_property
    def sentences(self) -> list[EncoderInput]:
        """The inputs of the sentences without a condition."""
        part = self.prompt.sentence_part or self.prompt.conditional
        return [part.render(text, "") for text in self.texts.sentences]

    @cached_property
    def conditions(self) -> list[EncoderInput]:
        """The inputs of the conditions without a sentence."""
        return [self.prompt.unconditional.render("", text) for text in self.texts.conditions]

    @property
    def columns(self) -> dict[str, Sequence[EncoderInput]]:
        """The inputs that the prompt needs, by column name."""
        columns: dict[str, Sequence[EncoderInput]] = {"candidates": self.candidates}
        if not self.prompt.separate:
            columns["joint"] = self.joint
        if self.prompt.separate or not self.prompt.subtracts_condition:
            columns["sentences"] = self.sentences
        if self.prompt.subtracts_condition:
            columns["conditions"] = self.conditions
        return columns

    def __iter__(self) -> Iterator[EncoderInput]:
        for column in self.columns.values():
            yield from column

    def __len__(self) -> int:
        return sum(map(len, self.columns.values()))

    def locate(self, item: EncoderInput) -> str | None:
        """Return a description of the text that needs an input, such as ``the entity 'dog'``."""
        sentence, condition, candidate = self.texts.names
        tables = {
            "candidates": (candidate, self.texts.candidates),
            "sentences": (sentence, self.texts.sentences),
            "conditions": (condition, self.texts.conditions),
        }
        for column, inputs in self.columns.items():
            if item in inputs:
                position = inputs.index(item)
                if column == "joint":
                    return self._describe_query(*self.texts.query_pairs[position].tolist())
                label, texts = tables[column]
                return f"the {label} {texts[position]!r}"
        return None

    def check_distinct(self) -> None:
        """Raise a UserError if two queries with different conditions have the same input."""
        if self.prompt.control is not None or self.prompt.separate:
            return
        texts = self.texts
        seen: dict[bytes, int] = {}
        for position, item in enumerate(self.joint):
            earlier_position = seen.setdefault(item.key, position)
            (s, c), (earlier_sentence, earlier_condition) = (
                texts.query_pairs[position].tolist(),
                texts.query_pairs[earlier_position].tolist(),
            )
            if texts.conditions[c] == texts.conditions[earlier_condition]:
                continue
            raise UserError(
                f"the prompt {self.prompt.name} renders the same input for "
                f"{self._describe_query(earlier_sentence, earlier_condition)} and for "
                f"{self._describe_query(s, c)}, so the encoder cannot distinguish them. Put words "
                "or punctuation between {sentence} and {condition} in the template."
            )

    def _describe_query(self, sentence: int, condition: int) -> str:
        names, texts = self.texts.names, self.texts
        return (
            f"the {names[0]} {texts.sentences[sentence]!r} under the {names[1]} "
            f"{texts.conditions[condition]!r}"
        )


class QueryData(Data, Protocol):
    """A dataset of queries."""

    @property
    def splits(self) -> Mapping[str, NDArray[np.int32]]:
        """The examples of ``train``, ``dev`` and ``test``; dev and test may be missing."""

    def queries(self, split: str) -> NDArray[np.int32]:
        """Return the positions of each query's sentence, condition and answer, (n, 3)."""


Q = TypeVar("Q", bound=QueryData)


class QueryTask(AnyTask[Q]):
    """What a ranking task says about its data."""

    #: Noun for the sentences and answers that confidence intervals resample, because several
    #: examples share them; empty: examples are independent.
    clusters: ClassVar[str] = ""

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
