"""Projections: functions that compute vectors of texts under a condition.

The input of a head comes from up to three kinds of encoder inputs: the text alone, e(s), which is
encoded once and stored; the condition alone, e(c), which is encoded when a condition is first used;
and both together, e(s|c). A view without inputs of the last kind, as heads on separate features
have, is a function of e(s), and no text needs to be encoded again for a new condition.
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

#: Function that computes the vectors, (n, dim), of encoder inputs.
Encode = Callable[[Sequence[EncoderInput]], Matrix]
#: Value that replaces a condition to select embeddings without one: e(s), of unit length.
ALONE = None
#: Number of conditions whose projections stay in memory.
_MAX_PROJECTIONS = 64


@dataclass(frozen=True)
class Sources:
    """The encoder inputs of a view, by whether they contain the text, the condition, or both."""

    view: View

    @cached_property
    def alone(self) -> list[templates.Part]:
        """The templates of e(s), the text alone, of the prompts that have one."""
        templates_alone = [prompt.alone for prompt in self.view.prompts]
        return list(dict.fromkeys(part for part in templates_alone if part is not None))

    @cached_property
    def joint(self) -> list[templates.Part]:
        """The templates that contain both the text and the condition."""
        parts = (getattr(prompt, part) for prompt, part in self.view.needed())
        return [part for part in parts if len(part.placeholders) > 1]

    @cached_property
    def of_condition(self) -> list[templates.Part]:
        """The templates that contain only the condition."""
        parts = (getattr(prompt, part) for prompt, part in self.view.needed())
        return [part for part in parts if part.placeholders == {"condition"}]

    def stored(self, texts: Sequence[str]) -> list[EncoderInput]:
        """Return the inputs of texts alone, with all inputs of one text next to each other."""
        return [part.render(text, "") for text in texts for part in self.alone]

    def conditions(self, condition: str) -> list[EncoderInput]:
        """Return the inputs that contain only the condition."""
        return [part.render("", condition) for part in self.of_condition]


class Projection:
    """A function that computes vectors of texts under one condition."""

    def __init__(
        self,
        sources: Sources,
        head: EmbeddingHead,
        condition: str | None,
        of_condition: dict[EncoderInput, Array],
    ) -> None:
        """Create a projection; ``of_condition`` has the vectors, (dim,), of its inputs."""
        self._sources, self._head = sources, head
        self._condition, self._of_condition = condition, of_condition

    def __call__(self, texts: Sequence[str], stored: NDArray[Any], encode: Encode) -> Array:
        """Compute unit vectors, (n, k) float32.

        Args:
            texts: n texts.
            stored: (n, parts * dim): the vectors of ``Sources.stored``, concatenated for each text;
                (n, 0) if there are none.
            encode: computes the vectors of inputs that contain both the text and the condition.
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
            vectors = self._head.transform(features, self._sources.view.condition(read))
        else:
            activation = ACTIVATIONS[self._head.settings.activation]
            vectors = activation(features.read() @ matrix)
        return unit_length(vectors, self._head)

    @property
    def basis(self) -> Array | None:
        """Q, (k, r): a vector z of this projection stands for the embedding zQ^T.

        It is None where the vectors are the embeddings themselves.
        """
        return self._factored[1]

    @cached_property
    def _factored(self) -> tuple[Array | None, Array | None]:
        """The matrix that a hypernetwork multiplies features by, and the basis, if there are any.

        If no activation follows, the matrix is M, (dim, r), with r as small as possible, such that
        x M has the cosines of x W_c. In low rank W_c = W_1 W_2, and with W_2^T = Q R the inner
        products of x W_1 W_2 equal those of x W_1 R^T, which has K numbers instead of k.
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
    """The projections of recently used conditions, and the encoding of queries.

    Several threads may use it at once.
    """

    def __init__(
        self, sources: Sources, head: EmbeddingHead, encoder: Callable[[], Encoder]
    ) -> None:
        self._sources, self._head, self._encoder = sources, head, encoder
        self._projections: OrderedDict[str | None, Projection] = OrderedDict()
        self._lock, self._loading = threading.Lock(), threading.Lock()

    def of(self, condition: str | None) -> Projection:
        """Return the projection of a condition, and encode the condition's inputs if needed."""
        with self._lock:
            projection = self._projections.get(condition)
            if projection is None:
                inputs = [] if condition is ALONE else self._sources.conditions(condition)
                vectors = dict(zip(inputs, self.encode(inputs)[:], strict=True))
                projection = Projection(self._sources, self._head, condition, vectors)
                self._projections[condition] = projection
                if len(self._projections) > _MAX_PROJECTIONS:
                    self._projections.popitem(last=False)
            self._projections.move_to_end(condition)
            return projection

    def stored(self, texts: Sequence[str]) -> Array:
        """Encode queries in the form in which texts are stored, (q, parts * dim)."""
        return self.encode(self._sources.stored(texts))[:].reshape(len(texts), -1)

    def encode(self, inputs: Sequence[EncoderInput]) -> Matrix:
        """Return the vectors of a few inputs, without storing them.

        Raises:
            UserError: if the encoder returns NaN or infinity.
        """
        if not inputs:
            return Dense(np.zeros((0, 0), dtype=np.float32))
        with self._loading:
            encoder = self._encoder()
        vectors = encoder.encode(inputs)
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise UserError(
                f"the encoder returned NaN or infinity for {brief(inputs[bad[0]].text)}."
            )
        return Dense(vectors)
