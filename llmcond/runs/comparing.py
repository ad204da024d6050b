"""What is the same of all that compares two texts under a condition: how it is called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import as_list
from llmcond.errors import UserError

Vectors = NDArray[np.float32]


class Comparing(ABC):
    """Compares sentences under conditions; a subclass defines :meth:`_compared`."""

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
        """Return how similar both sentences are under each row's condition, (n,) float32.

        The similarity is the cosine of their embeddings, unless the head compares them in another
        way. A cross-encoder predicts the rating, mostly between 0 and 1.

        Args:
            sentences1: n texts: a list, an iterator, a column of a data frame or an Arrow array.
                Or one text; the result is a float then.
            sentences2: n other texts, or one.
            conditions: n conditions, one for each row; or one text for all rows.
            show_progress: whether to show a progress bar on standard error.

        Raises:
            UserError: lengths that differ, an empty sentence or condition, or a text beside a list
                of texts.
            LlmcondError: the encoder gave NaN, or ran out of memory.
        """
        if isinstance(sentences1, str) != isinstance(sentences2, str):
            raise UserError("one of both sides is a text, the other a list; give two of a kind.")
        if isinstance(sentences1, str) and isinstance(sentences2, str):
            return float(self.similarity([sentences1], [sentences2], one_text(conditions))[0])
        left, right = as_list(sentences1), as_list(sentences2)
        if len(left) != len(right):
            raise UserError(
                f"sentences1 has {len(left)} texts and sentences2 {len(right)}; they must be as "
                "many."
            )
        shared = conditions if isinstance(conditions, str) else as_list(conditions)
        first, second = checked_texts(left, shared), checked_texts(right, shared)
        return self._compared(first, second, show_progress)

    @abstractmethod
    def _compared(
        self,
        first: Sequence[tuple[str, str]],
        second: Sequence[tuple[str, str]],
        show_progress: bool,
    ) -> Vectors:
        """Return the similarity of n sentences, each with its condition, to n others, (n,)."""


def one_text(conditions: str | Iterable[str]) -> Sequence[str]:
    """Return the condition of a single sentence in a list; a UserError if it is none."""
    if not isinstance(conditions, str):
        raise UserError("the sentence is one text, the condition a list; give two of a kind.")
    return [conditions]


def checked_texts(
    sentences: Iterable[str], conditions: str | Iterable[str]
) -> list[tuple[str, str]]:
    """Return each sentence with its condition, which may be one for all.

    Raises:
        UserError: other numbers of both, or what is empty or no text.
    """
    texts = as_list(sentences)
    given = [conditions] * len(texts) if isinstance(conditions, str) else as_list(conditions)
    if len(given) != len(texts):
        raise UserError(
            f"there are {len(texts)} sentences and {len(given)} conditions; they must be as "
            "many, or one condition for all."
        )
    rows = list(zip(texts, given, strict=True))
    for number, row in enumerate(rows):
        for name, text in zip(("sentence", "condition"), row, strict=True):
            if not isinstance(text, str):
                raise UserError(f"position {number} holds {text!r}, which is not a text.")
            if not text.strip():
                raise UserError(f"the {name} at position {number} is empty.")
    return rows
