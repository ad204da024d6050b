"""The model of an index, and the projections that compute vectors of texts under a condition.

The input of a head comes from up to three kinds of encoder inputs: the text alone, e(s), which is
encoded once and stored; the condition alone, e(c), which is encoded when a condition is first used;
and both together, e(s|c). A view without inputs of the last kind, as heads on separate features
have, is a function of e(s), and no text needs to be encoded again for a new condition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import (
    Array,
    DenseMatrix,
    Matrix,
    SharedRows,
    check_truncate_dim,
    scale_to_unit_norm,
)
from llmcond.base.errors import UserError
from llmcond.base.text import wordings
from llmcond.data.guides import LabelledTexts
from llmcond.encoders.spec import EncoderInput, check_finite
from llmcond.features.view import FeaturePart
from llmcond.heads.guide import Guide, Guides
from llmcond.heads.numpy_heads import ACTIVATIONS, NumpyHead
from llmcond.prompts import Prompt
from llmcond.prompts import template as templates
from llmcond.runs.embedder import (
    Embedder,
    EmbeddingModel,
    base_encoder,
    fit_checked_guide,
    normalise_vectors,
)

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder

#: Function that computes the vectors, (n, dim), of encoder inputs.
Encode = Callable[[Sequence[EncoderInput]], Matrix]
#: Value that replaces a condition to select embeddings without one: e(s), of unit length.
NO_CONDITION = None
#: Number of conditions whose projections stay in memory.
_MAX_PROJECTIONS = 64


class ConditionProjection:
    """A function that computes vectors of texts under one condition."""

    def __init__(
        self, model: SearchModel, condition: str | None, of_condition: dict[EncoderInput, Array]
    ) -> None:
        """Create a projection; ``of_condition`` has the vectors, (dim,), of its own inputs."""
        self._model, self._head = model, model.head.head
        self._condition, self._of_condition = condition, of_condition

    def __call__(self, texts: Sequence[str], stored: NDArray[Any], encode: Encode) -> Array:
        """Compute unit vectors, (n, k) float32.

        Args:
            texts: n texts.
            stored: (n, parts * dim): the vectors of ``text_inputs``, concatenated for each text;
                (n, 0) if there are none.
            encode: computes the vectors of inputs that contain both the text and the condition.
        """
        if self._condition is NO_CONDITION:
            return normalise_vectors(np.asarray(stored, dtype=np.float32))
        condition = self._condition

        def read(prompt: Prompt, side: FeaturePart) -> Matrix:
            part: templates.InputTemplate = getattr(prompt, side)
            if part.placeholders == {"condition"}:
                vector = self._of_condition[part.render("", condition)]
                return SharedRows(vector[None], np.zeros(len(texts), dtype=np.int64))
            if part in self._model.text_only:
                dim = stored.shape[1] // len(self._model.text_only)
                start = self._model.text_only.index(part) * dim
                return DenseMatrix(stored[:, start : start + dim])
            return encode([part.render(text, condition) for text in texts])

        features = self._model.view.sentence_features(read)
        matrix = self._factored[0]
        if matrix is None:
            vectors = self._head.transform(features, self._model.view.condition_features(read))
            vectors = vectors[:, : check_truncate_dim(self._model.truncate_dim, vectors.shape[1])]
        else:
            activation = ACTIVATIONS[self._head.settings.activation]
            vectors = activation(features.read() @ matrix)
        head = f"the head {self._model.head.name}"
        check_finite(vectors, texts, head, "Fit the head again.")
        return normalise_vectors(vectors, self._head)

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
        head, prompt = self._head, self._model.view.condition_prompt()
        if isinstance(head, NumpyHead) or not head.generates_matrices or prompt is None:
            return None, None
        vector = self._of_condition[prompt.unconditional.render("", str(self._condition))]
        factors = [factor[0] for factor in head.module.generated_matrices(vector[None])]
        dim = check_truncate_dim(self._model.truncate_dim, factors[-1].shape[1])
        factors[-1] = factors[-1][:, :dim]
        last, basis = factors[-1], None
        if head.settings.activation == "none" and last.shape[0] < last.shape[1]:
            basis, upper = np.linalg.qr(last.T.astype(np.float64))
            factors[-1] = upper.T.astype(np.float32)
        matrix: Array = factors[0]
        for factor in factors[1:]:
            matrix = matrix @ factor
        return matrix, basis


@dataclass(frozen=True)
class SearchModel(EmbeddingModel):
    """The model whose vectors an index searches. The encoder is loaded at first use.

    Raises:
        UserError: if the head does not compare embeddings by their cosine.
    """

    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False, compare=False)
    _loading: Any = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.head.head.compares_by_cosine:
            raise UserError(
                f"the head {self.head.name} does not compare embeddings by their cosine, but an "
                "index does. Choose another --head."
            )

    @cached_property
    def _required(self) -> list[templates.InputTemplate]:
        return [getattr(prompt, part) for prompt, part in self.view.required_parts()]

    @cached_property
    def text_only(self) -> list[templates.InputTemplate]:
        """The templates of e(s), the text alone, of the prompts that have one."""
        templates_alone = [prompt.sentence_part for prompt in self.view.prompts]
        return list(dict.fromkeys(part for part in templates_alone if part is not None))

    @cached_property
    def joint(self) -> list[templates.InputTemplate]:
        """The templates that contain both the text and the condition."""
        return [part for part in self._required if len(part.placeholders) > 1]

    @cached_property
    def condition_only(self) -> list[templates.InputTemplate]:
        """The templates that contain only the condition."""
        return [part for part in self._required if part.placeholders == {"condition"}]

    def text_inputs(self, texts: Sequence[str]) -> list[EncoderInput]:
        """Return the inputs of texts alone, with all inputs of one text next to each other."""
        return [part.render(text, "") for text in texts for part in self.text_only]

    def is_joint(self, condition: str | None) -> bool:
        """Return whether each text is encoded together with the condition."""
        return condition is not NO_CONDITION and bool(self.joint)

    def projection(self, condition: str | None) -> ConditionProjection:
        """Return the projection of a condition, and encode the condition's inputs if needed."""
        with self._lock:
            return self._cached_projection(condition)

    @cached_property
    def _cached_projection(self) -> Callable[[str | None], ConditionProjection]:
        @lru_cache(_MAX_PROJECTIONS)
        def create(condition: str | None) -> ConditionProjection:
            parts = [] if condition is NO_CONDITION else self.condition_only
            inputs = [part.render("", str(condition)) for part in parts]
            vectors = dict(zip(inputs, self.encode_inputs(inputs)[:], strict=True))
            return ConditionProjection(self, condition, vectors)

        return create

    def vectors(
        self, texts: Sequence[str], stored: NDArray[Any], condition: str | None, encode: Encode
    ) -> Array:
        """Return unit vectors, (n, k), under a condition, before any guide maps them.

        The arguments are those of a projection. Of several wordings, it is the mean.
        """
        parts = wordings(condition)
        return self.mean(parts, [self.projection(part)(texts, stored, encode) for part in parts])

    def mean(self, parts: Sequence[str | None], vectors: Sequence[Array]) -> Array:
        """Return the unit mean of the unit vectors, (n, k), that each wording gives."""
        if len(parts) == 1:
            return vectors[0]
        lifted = [self.rebase(v, part) for v, part in zip(vectors, parts, strict=True)]
        return scale_to_unit_norm(np.asarray(np.sum(lifted, axis=0, dtype=np.float32)))

    def _basis(self, condition: str | None) -> Array | None:
        """The basis of the vectors under a condition, if they are of low rank."""
        parts = wordings(condition)
        return self.projection(parts[0]).basis if len(parts) == 1 else None

    def rebase(self, vectors: Array, condition: str | None, target: str | None = None) -> Array:
        """Return vectors under a condition in the basis of those under another one.

        Vectors of low rank have another basis under each condition. Without a target, the result
        are the embeddings themselves.
        """
        before = self._basis(condition)
        after = None if target is None else self._basis(target)
        lifted = vectors if before is None else vectors @ before.T
        return np.asarray(lifted if after is None else lifted @ after, dtype=np.float32)

    def encode_texts(self, texts: Sequence[str]) -> Array:
        """Encode queries in the form in which texts are stored, (q, parts * dim)."""
        return self.encode_inputs(self.text_inputs(texts))[:].reshape(len(texts), -1)

    def encode_inputs(self, inputs: Sequence[EncoderInput]) -> Matrix:
        """Return the vectors of a few inputs, without storing them.

        Raises:
            UserError: if the encoder returns NaN or infinity.
        """
        if not inputs:
            return DenseMatrix(np.zeros((0, 0), dtype=np.float32))
        with self._loading:
            encoder = self.encoder()
        return DenseMatrix(encoder.encode(inputs))

    @cached_property
    def base(self) -> Encoder | None:
        """The encoder without adapters, whose embeddings give scores without a condition.

        It is None where that encoder is unknown.
        """
        return base_encoder(self.encoder())

    def fit_guide(self, labelled: LabelledTexts) -> Guide:
        """Fit a guide on the vectors that searches compare.

        Raises:
            UserError: if the encoder returns NaN.
        """
        texts, condition = labelled.texts, labelled.condition
        vectors = self.vectors(texts, self.encode_texts(texts), condition, self.encode_inputs)
        before = self.guides.without_labels(condition)
        if before is not None:
            vectors = before.transform(vectors)
        return fit_checked_guide(labelled, vectors, self.head.head, before)

    @cached_property
    def _unguided(self) -> Embedder:
        return self.load()

    @property
    def embedder(self) -> Embedder:
        """An embedder with the same run, head and guides. Access loads the encoder."""
        guides = Guides()
        for condition, guide in self.guides.items():
            basis = self._basis(condition)
            guides[condition] = guide if basis is None else guide.change_basis(basis)
        return replace(self._unguided, guides=guides)


def short_name(encoder: Encoder) -> str:
    """Return an encoder's name on the Hugging Face Hub or a server, or the end of its path."""
    name = encoder.name
    if encoder.resolved.checkpoint.server is not None:
        return name.partition("#")[2]
    return name if name == encoder.resolved.checkpoint.repo else PurePath(name).name
