"""From what is stored of texts to their vectors under a condition.

What a head sees of a text under a condition is made of up to three kinds of inputs: of the text
alone, e(s), which is encoded once and stored; of the condition alone, e(c), encoded when one comes;
and of both together, e(s|c). A view without inputs of the last kind is a map of e(s), and costs no
encoding: so it is with heads on separate features.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Array, Dense, Gathered, Matrix
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError, brief
from llmcond.features.view import Part, View
from llmcond.heads.loading import EmbeddingHead
from llmcond.heads.plain import ACTIVATIONS, PlainHead
from llmcond.prompts import Prompt
from llmcond.prompts import template as templates
from llmcond.runs.embedder import unit_length

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder

#: From inputs to their vectors, (n, dim).
Encode = Callable[[Sequence[EncoderInput]], Matrix]
#: In the place of a condition: embeddings without one, e(s) of unit length.
ALONE = None
#: Conditions whose projections are kept in memory.
_KEPT = 64


@dataclass(frozen=True)
class Sources:
    """The inputs behind a view, by what they are made of."""

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

    def conditions(self, condition: str) -> list[EncoderInput]:
        """Return the inputs of the condition alone."""
        return [part.render("", condition) for part in self.of_condition]


class Projection:
    """Makes vectors of texts under one condition."""

    def __init__(
        self,
        sources: Sources,
        head: EmbeddingHead,
        condition: str | None,
        of_condition: dict[EncoderInput, Array],
    ) -> None:
        """``of_condition`` are the vectors, (dim,), of the condition's own inputs."""
        self._sources, self._head = sources, head
        self._condition, self._of_condition = condition, of_condition

    def __call__(self, texts: Sequence[str], stored: NDArray[Any], encode: Encode) -> Array:
        """Return unit vectors, (n, k) float32.

        Args:
            texts: n texts.
            stored: (n, parts * dim) vectors of :meth:`Sources.stored`, side by side; (n, 0) where
                there are none.
            encode: gives the vectors of inputs of texts with the condition.
        """
        if self._condition is ALONE:
            return unit_length(np.asarray(stored, dtype=np.float32))
        condition = self._condition

        def read(prompt: Prompt, side: Part) -> Matrix:
            part: templates.Part = getattr(prompt, side)
            if part.placeholders == {"condition"}:
                vector = self._of_condition[part.render("", condition)]
                return Gathered(vector[None], np.zeros(len(texts), dtype=np.int64))
            if part in self._sources.alone:
                dim = stored.shape[1] // len(self._sources.alone)
                start = self._sources.alone.index(part) * dim
                return Dense(stored[:, start : start + dim])
            return encode([part.render(text, condition) for text in texts])

        features = self._sources.view.sentence(read)
        matrix = self._factored[0]
        if matrix is None:
            made = self._head.transform(features, self._sources.view.condition(read))
        else:
            activation = ACTIVATIONS[self._head.settings.activation]
            made = activation(features.read() @ matrix)
        return unit_length(made, self._head)

    @property
    def basis(self) -> Array | None:
        """Return Q, (k, r), with which vectors z of this are embeddings zQ^T; None: they are."""
        return self._factored[1]

    @cached_property
    def _factored(self) -> tuple[Array | None, Array | None]:
        """Return what a hypernetwork multiplies features by, and the basis; None: it is none.

        Where nothing comes behind, it is M, (dim, r), with r as small as can be, so that x M has
        the cosines of x W_c. In low rank W_c = W_1 W_2, and with W_2^T = Q R the inner products of
        x W_1 W_2 are those of x W_1 R^T, of K numbers in the place of k.
        """
        head, prompt = self._head, self._sources.view.of_condition()
        if isinstance(head, PlainHead) or not head.generates_matrices or prompt is None:
            return None, None
        vector = self._of_condition[prompt.unconditional.render("", str(self._condition))]
        factors = [factor[0] for factor in head.module.generated_matrices(vector[None])]
        last, basis = factors[-1], None
        if head.settings.activation == "none" and last.shape[0] < last.shape[1]:
            basis, upper = np.linalg.qr(last.T.astype(np.float64))
            factors[-1] = upper.T.astype(np.float32)
        matrix: Array = factors[0]
        for factor in factors[1:]:
            matrix = matrix @ factor
        return matrix, basis


class Projections:
    """The projections of conditions that were asked for, and the queries that they are made of.

    Several threads may use it.
    """

    def __init__(
        self, sources: Sources, head: EmbeddingHead, encoder: Callable[[], Encoder]
    ) -> None:
        self._sources, self._head, self._encoder = sources, head, encoder
        self._kept: OrderedDict[str | None, Projection] = OrderedDict()
        self._lock, self._loading = threading.Lock(), threading.Lock()

    def of(self, condition: str | None) -> Projection:
        """Return the projection of a condition, whose own inputs are encoded if that is needed."""
        with self._lock:
            found = self._kept.get(condition)
            if found is None:
                inputs = [] if condition is ALONE else self._sources.conditions(condition)
                own = dict(zip(inputs, self.encode(inputs)[:], strict=True))
                found = Projection(self._sources, self._head, condition, own)
                self._kept[condition] = found
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(condition)
            return found

    def stored(self, texts: Sequence[str]) -> Array:
        """Return of queries what is stored of texts, (q, parts * dim)."""
        return self.encode(self._sources.stored(texts))[:].reshape(len(texts), -1)

    def encode(self, inputs: Sequence[EncoderInput]) -> Matrix:
        """Return the vectors of a few inputs, which are not kept.

        Raises:
            UserError: the encoder gave NaN.
        """
        if not inputs:
            return Dense(np.zeros((0, 0), dtype=np.float32))
        with self._loading:
            encoder = self._encoder()
        vectors = encoder.encode(inputs)
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise UserError(f"the encoder gave NaN or infinity for {brief(inputs[bad[0]].text)}.")
        return Dense(vectors)
