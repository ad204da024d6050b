"""The common interface of models that compare two texts under a condition."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import as_list
from llmcond.conditions import as_condition
from llmcond.errors import UserError, shortened_repr

Vectors = NDArray[np.float32]


class SimilarityModel(ABC):
    """A model that compares sentences under conditions."""

    __slots__ = ()

    @overload
    def similarity(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, sentences1: str, sentences2: str, conditions: str, *, show_progress: bool = False
    ) -> float: ...

    @overload
    def similarity(
        self,
        sentences1: Iterable[str],
        sentences2: Iterable[str],
        conditions: str | Iterable[str],
        *,
        show_progress: bool = False,
    ) -> Vectors: ...

    def similarity(
        self,
        sentences1: str | Iterable[str],
        sentences2: str | Iterable[str],
        conditions: str | Iterable[str],
        *,
        show_progress: bool = False,
    ) -> Vectors | float:
        """Compute the similarity of two sentences under the condition of each row.

        The similarity is the cosine of their embeddings, unless the head compares embeddings in
        another way. A cross-encoder predicts the rating, which is mostly between 0 and 1.

        Args:
            sentences1: n texts: a list, an iterator, a column of a data frame or an Arrow array.
                Or a single text.
            sentences2: n other texts, or a single text.
            conditions: n conditions, one for each row, or one condition for all rows.
            show_progress: Whether to show a progress bar on standard error.

        Returns:
            The similarities, (n,) float32. A float if the sentences are single texts.

        Raises:
            UserError: The lengths differ, a sentence or condition is empty, or one argument is a
                text and the other a list of texts.
            LlmcondError: The encoder returned NaN, or ran out of memory.
        """
        if isinstance(sentences1, str) != isinstance(sentences2, str):
            raise UserError(
                "one of sentences1 and sentences2 is a text and the other a list. Give two texts, "
                "or two lists."
            )
        if isinstance(sentences1, str) and isinstance(sentences2, str):
            return float(
                self.similarity([sentences1], [sentences2], as_condition_list(conditions))[0]
            )
        texts1, texts2 = as_list(sentences1, "sentences1"), as_list(sentences2, "sentences2")
        if len(texts1) != len(texts2):
            raise UserError(
                f"sentences1 has {len(texts1)} texts and sentences2 has {len(texts2)}. Give two "
                "lists of the same length."
            )
        row_conditions = (
            conditions if isinstance(conditions, str) else as_list(conditions, "conditions")
        )
        rows1, rows2 = (
            pair_with_conditions(texts1, row_conditions),
            pair_with_conditions(texts2, row_conditions),
        )
        return self._compute_similarity(rows1, rows2, show_progress)

    #: The name in sentence-transformers, whose ``similarity`` returns a matrix.
    similarity_pairwise = similarity

    def similarity_matrix(
        self,
        sentences1: Iterable[str],
        sentences2: Iterable[str],
        condition: str,
        *,
        show_progress: bool = False,
    ) -> Vectors:
        """Compute the similarity of each sentence to each other sentence under a condition.

        The similarities are those of ``similarity``. An embedder encodes n + m sentences; a
        cross-encoder reads n * m pairs.

        Args:
            sentences1: n texts: a list, an iterator, a column of a data frame or an Arrow array.
            sentences2: m other texts.
            condition: The condition.
            show_progress: Whether to show a progress bar on standard error.

        Returns:
            The similarities, (n, m) float32.

        Raises:
            UserError: A sentence or the condition is empty, or there are several conditions.
            LlmcondError: The encoder returned NaN, or ran out of memory.
        """
        if not isinstance(condition, str):
            raise UserError(
                "condition is not a text. All entries of the matrix have the same condition; call "
                "similarity_matrix once for each."
            )
        texts1, texts2 = (
            [texts] if isinstance(texts, str) else texts for texts in (sentences1, sentences2)
        )
        first, second = (pair_with_conditions(texts, condition) for texts in (texts1, texts2))
        return self._compute_matrix(first, second, show_progress)

    def _compute_matrix(
        self,
        first: Sequence[tuple[str, str]],
        second: Sequence[tuple[str, str]],
        show_progress: bool,
    ) -> Vectors:
        """Return the similarities, (n, m), of n (sentence, condition) rows to m other ones."""
        repeated = [row for row in first for _ in second]
        values = self._compute_similarity(repeated, [*second] * len(first), show_progress)
        return values.reshape(len(first), len(second))

    @abstractmethod
    def _compute_similarity(
        self,
        first: Sequence[tuple[str, str]],
        second: Sequence[tuple[str, str]],
        show_progress: bool,
    ) -> Vectors:
        """Return the similarities, (n,), of n (sentence, condition) rows and n other ones."""


def as_condition_list(conditions: str | Iterable[str]) -> Sequence[str]:
    """Return the condition of a single sentence as a list.

    Raises:
        UserError: It is not a text.
    """
    if isinstance(conditions, str) or not isinstance(conditions, Iterable):
        return [as_condition(conditions)]
    raise UserError(
        "the sentence is a text and the condition a list. Give two texts, or two lists."
    )


def as_conditions(conditions: str | Iterable[str]) -> list[str]:
    """Return one condition, or several, as a list.

    Raises:
        UserError: There are none, or one is empty or not a text.
    """
    listed = [conditions] if isinstance(conditions, str) else as_list(conditions, "conditions")
    if not listed:
        raise UserError("there are no conditions; give at least one.")
    names = [f"condition {number} of {len(listed)}" for number in range(1, len(listed) + 1)]
    return [as_condition(*pair) for pair in zip(listed, names, strict=True)]


def pair_with_conditions(
    sentences: Iterable[str], conditions: str | Iterable[str]
) -> list[tuple[str, str]]:
    """Return (sentence, condition) rows, with the conditions in their normal form.

    A single condition applies to all sentences.

    Raises:
        UserError: The lengths differ, or an item is empty or not a text.
    """
    texts = as_list(sentences, "sentences")
    row_conditions = (
        [conditions] * len(texts)
        if isinstance(conditions, str)
        else as_list(conditions, "conditions")
    )
    if len(row_conditions) != len(texts):
        raise UserError(
            f"there are {len(texts)} sentences and {len(row_conditions)} conditions. Give one "
            "condition for each sentence, or one condition for all."
        )
    rows = list(zip(texts, row_conditions, strict=True))
    for number, row in enumerate(rows):
        for noun, text in zip(("sentence", "condition"), row, strict=True):
            if not isinstance(text, str):
                raise UserError(
                    f"{noun} {number + 1} of {len(rows)} is {shortened_repr(text)}, which is not a "
                    "text. Give a text."
                )
            if not text.strip():
                which = f"{noun} {number + 1} of {len(rows)}" if number else f"the first {noun}"
                raise UserError(f"{which} is empty. Give a text.")
    normal = {condition: as_condition(condition) for _, condition in rows}
    return [(text, normal[condition]) for text, condition in rows]
