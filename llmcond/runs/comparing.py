"""What is the same of all that compares two texts under a condition: how it is called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

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
        sentences1: Sequence[str],
        sentences2: Sequence[str],
        conditions: str | Sequence[str],
        *,
        show_progress: bool = False,
    ) -> Vectors: ...

    def similarity(
        self,
        sentences1: str | Sequence[str],
        sentences2: str | Sequence[str],
        conditions: str | Sequence[str],
        *,
        show_progress: bool = False,
    ) -> Vectors | float:
        """Return how similar both sentences are under each row's condition, (n,) float32.

        As a rule that is the cosine of their embeddings; a cross-encoder predicts the rating, 0 to
        1, and may pass these ends. Of two texts, not in lists: a float. ``show_progress`` shows a
        bar on standard error.

        Raises:
            UserError: lengths that differ, an empty sentence or condition, or a text beside a list
                of texts.
            LlmcondError: the encoder gave NaN, or ran out of memory.
        """
        if isinstance(sentences1, str) != isinstance(sentences2, str):
            raise UserError("one of both sides is a text, the other a list; give two of a kind.")
        if isinstance(sentences1, str) and isinstance(sentences2, str):
            return float(self.similarity([sentences1], [sentences2], one_text(conditions))[0])
        if len(sentences1) != len(sentences2):
            raise UserError(
                f"sentences1 has {len(sentences1)} texts and sentences2 {len(sentences2)}; they "
                "must be as many."
            )
        first = checked_texts(sentences1, conditions)
        return self._compared(first, checked_texts(sentences2, conditions), show_progress)

    @abstractmethod
    def _compared(
        self,
        first: Sequence[tuple[str, str]],
        second: Sequence[tuple[str, str]],
        show_progress: bool,
    ) -> Vectors:
        """Return the similarity of n sentences, each with its condition, to n others, (n,)."""


def one_text(conditions: str | Sequence[str]) -> Sequence[str]:
    """Return the condition of a single sentence in a list; a UserError if it is none."""
    if not isinstance(conditions, str):
        raise UserError("the sentence is one text, the condition a list; give two of a kind.")
    return [conditions]


def checked_texts(
    sentences: Sequence[str], conditions: str | Sequence[str]
) -> list[tuple[str, str]]:
    """Return each sentence with its condition, which may be one for all.

    Raises:
        UserError: other numbers of both, or what is empty or no text.
    """
    given = [conditions] * len(sentences) if isinstance(conditions, str) else list(conditions)
    if len(given) != len(sentences):
        raise UserError(
            f"there are {len(sentences)} sentences and {len(given)} conditions; they must be as "
            "many, or one condition for all."
        )
    rows = list(zip(sentences, given, strict=True))
    for number, texts in enumerate(rows):
        for name, text in zip(("sentence", "condition"), texts, strict=True):
            if not isinstance(text, str):
                raise UserError(f"position {number} holds {text!r}, which is not a text.")
            if not text.strip():
                raise UserError(f"the {name} at position {number} is empty.")
    return rows
