"""From what is stored of texts to their vectors under a condition.

What a head sees of a text under a condition is made of up to three kinds of inputs: of the text
alone, e(s), which is encoded once and stored; of the condition alone, e(c), encoded when one comes;
and of both together, e(s|c). A view without inputs of the last kind is a map of e(s), and costs no
encoding: so it is with heads on separate features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Array, Dense, Gathered, Matrix
from llmcond.encoders.spec import EncoderInput
from llmcond.features.view import Part, View
from llmcond.heads import FittedHead
from llmcond.prompts import Prompt
from llmcond.prompts import template as templates
from llmcond.runs.embedder import unit_length

#: From inputs to their vectors, (n, dim).
Encode = Callable[[Sequence[EncoderInput]], Matrix]


@dataclass(frozen=True)
class Sources:
    """The inputs behind a view of a head, or of zero-shot features, by what they are made of."""

    view: View

    @cached_property
    def alone(self) -> list[templates.Part]:
        """Return what makes e(s), for each prompt that gives it."""
        found = [prompt.alone for prompt in self.view.prompts]
        return list(dict.fromkeys(part for part in found if part is not None))

    @cached_property
    def joint(self) -> list[templates.Part]:
        """Return what makes inputs of a text and the condition together."""
        parts = (getattr(prompt, part) for prompt, part in self.view.needed())
        return [part for part in parts if len(part.placeholders) > 1]

    @cached_property
    def of_condition(self) -> list[templates.Part]:
        """Return what makes inputs of the condition alone."""
        parts = (getattr(prompt, part) for prompt, part in self.view.needed())
        return [part for part in parts if part.placeholders == {"condition"}]

    def stored(self, texts: Sequence[str]) -> list[EncoderInput]:
        """Return the inputs of texts alone, all of a text side by side."""
        return [part.render(text, "") for text in texts for part in self.alone]

    def together(self, texts: Sequence[str], condition: str) -> list[EncoderInput]:
        """Return the inputs of texts with the condition."""
        return [part.render(text, condition) for text in texts for part in self.joint]

    def conditions(self, condition: str) -> list[EncoderInput]:
        """Return the inputs of the condition alone."""
        return [part.render("", condition) for part in self.of_condition]


class Projection:
    """Makes vectors of texts under one condition.

    Attributes:
        condition: None: without one, e(s) of unit length.
    """

    def __init__(
        self,
        sources: Sources,
        head: FittedHead | None,
        condition: str | None,
        of_condition: dict[EncoderInput, Array],
    ) -> None:
        """``of_condition`` are the vectors, (dim,), of the condition's own inputs."""
        self.condition, self._sources, self._head = condition, sources, head
        self._of_condition = of_condition

    def __call__(self, texts: Sequence[str], stored: NDArray[Any], encode: Encode) -> Array:
        """Return unit vectors, (n, k) float32.

        Args:
            texts: n texts.
            stored: (n, parts * dim) vectors of :meth:`Sources.stored`, side by side; (n, 0) where
                there are none.
            encode: gives the vectors of inputs of texts with the condition.
        """
        if self.condition is None:
            return unit_length(np.asarray(stored, dtype=np.float32), None)

        def read(prompt: Prompt, side: Part) -> Matrix:
            part: templates.Part = getattr(prompt, side)
            if part.placeholders == {"condition"}:
                vector = self._of_condition[part.render("", str(self.condition))]
                return Gathered(vector[None], np.zeros(len(texts), dtype=np.int64))
            if part in self._sources.alone:
                dim = stored.shape[1] // len(self._sources.alone)
                start = self._sources.alone.index(part) * dim
                return Dense(stored[:, start : start + dim])
            return encode([part.render(text, str(self.condition)) for text in texts])

        features = self._sources.view.sentence(read)
        if self._head is None:
            return unit_length(features.read(), None)
        of_condition = self._sources.view.condition(read)
        if of_condition is not None and self._is_matrix:
            if self._matrix is None:
                self._matrix = _matrix(self._head, of_condition.read(slice(0, 1)))
            return unit_length(features.read() @ self._matrix, None)
        return unit_length(self._head.transform(features, of_condition), self._head)

    _matrix: Array | None = None

    @property
    def _is_matrix(self) -> bool:
        """Return whether a condition is one matrix, so that cosines need no more than that."""
        head = self._head
        return (
            head is not None
            and head.generates_matrices
            and head.compares_by_cosine
            and head.settings.activation == "none"
        )


def _matrix(head: FittedHead, of_condition: Array) -> Array:
    """Return M, (dim, r), with r as small as can be, so that e M has the cosines of e W_c.

    In low rank W_c = W_1 W_2, and with W_2^T = Q R the inner products of e W_1 W_2 are those of
    e W_1 R^T, of K numbers in the place of k.
    """
    factors = [factor[0] for factor in head.module.generated_matrices(of_condition)]
    last = factors[-1]
    if last.shape[0] < last.shape[1]:
        upper: Any = np.linalg.qr(last.T.astype(np.float64), mode="r")
        factors[-1] = upper.T.astype(np.float32)
    matrix: Array = factors[0]
    for factor in factors[1:]:
        matrix = matrix @ factor
    return matrix
