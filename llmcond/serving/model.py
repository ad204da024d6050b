"""The model of a server, with an optional index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Array
from llmcond.errors import format_list
from llmcond.heads.numpy_heads import ZERO_SHOT
from llmcond.options import Precision
from llmcond.quantization import CALIBRATED, quantize_embeddings
from llmcond.runs import cross
from llmcond.runs.cross import CrossEncoder
from llmcond.runs.embedder import Embedder, describe, normalise_vectors
from llmcond.search.model import short_name
from llmcond.serving.batching import Row

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder
    from llmcond.encoders.spec import Encoded
    from llmcond.search import Index


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with its index, if it has one.

    Attributes:
        model: an embedder or a cross-encoder.
        condition: default condition of requests; None: every request must name one.
        index: the index to search, or None.
        ranges: (2, k) lowest and highest value of each dimension, for ``int8`` and ``uint8``; None:
            the server does not offer them.
    """

    model: Embedder | CrossEncoder
    condition: str | None = None
    index: Index | None = None
    ranges: Array | None = None

    @property
    def name(self) -> str:
        """The model's name in responses."""
        return short_name(self.encoder)

    @property
    def encoder(self) -> Encoder:
        """The model's encoder."""
        return self.model.encoder

    @property
    def max_row_tokens(self) -> int:
        """Maximal number of tokens of a row after truncation."""
        inputs = len(self.model.view.required_parts()) if isinstance(self.model, Embedder) else 1
        return inputs * self.encoder.identity.max_length

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Return embeddings of (sentence, condition) rows, or a cross-encoder's similarities.

        The rows of a cross-encoder are (sentence, sentence, condition), and their tokens are not
        counted.

        Raises:
            LlmcondError: for the reasons of ``Embedder.encode_with_counts`` or
                ``CrossEncoder.similarity``.
        """
        if isinstance(self.model, Embedder):
            return self.model.encode_with_counts([(text, condition) for text, condition in rows])
        from llmcond.encoders.spec import Encoded

        similarities = self.model.similarity(*map(list, zip(*rows, strict=True)))
        zeros = np.zeros(len(rows), dtype=np.int32)
        return Encoded(similarities, zeros, zeros.astype(bool), 0)

    def find_form_problem(
        self, dimensions: int | None, precision: Precision
    ) -> tuple[str, str] | None:
        """Return the field of a request for embeddings that cannot be satisfied, and the reason.

        As in vLLM, embeddings are truncated only to sizes that the model was trained for, because
        clients cannot know that others give poor results. The operator can choose any
        size (``--truncate-dim``).
        """
        embedder, sizes = self.model, self._truncations()
        if not isinstance(embedder, Embedder):
            return None
        dim = embedder.dim
        if dimensions not in (None, dim, *sizes):
            if embedder.guides:
                why = "its guides map all of them. Omit dimensions."
            elif sizes:
                listed = f"1 to {dim - 1}" if len(sizes) == dim - 1 else format_list(sizes)
                why = f"the other sizes that it supports are: {listed}."
            else:
                why = (
                    "it was not trained to have fewer. Omit dimensions, or start the server with "
                    "--truncate-dim."
                )
            problem = f"dimensions is {dimensions}, but this model's embeddings have {dim}, and"
            return "dimensions", f"{problem} {why}"
        is_truncated = dimensions not in (None, dim)
        if precision in CALIBRATED and (self.ranges is None or is_truncated):
            return "precision", (
                f"precision is {precision}, and the server has no ranges of {dimensions or dim} "
                "dimensions. Use binary or ubinary, or start the server with --ranges."
            )
        return None

    def _truncations(self) -> Sequence[int]:
        """Return the sizes that embeddings can be truncated to; a guide maps all dimensions."""
        model = self.model
        if not isinstance(model, Embedder) or model.guides:
            return []
        return model.matryoshka_dims

    def form_embeddings(
        self, vectors: Array, dimensions: int | None, precision: Precision
    ) -> NDArray[Any]:
        """Return embeddings, (n, k), in the size and precision of a request, with unit L2 norm."""
        head = self.model.head if isinstance(self.model, Embedder) else ZERO_SHOT
        unit = normalise_vectors(vectors[:, :dimensions], head)
        return quantize_embeddings(unit, precision, self.ranges)

    def ready_row(self) -> Row:
        """Return a row to encode before the first request and at each readiness check."""
        return ("ready",) * (2 if isinstance(self.model, Embedder) else 3)

    def describe(self) -> dict[str, Any]:
        """Return what the model consists of, without paths."""
        model = self.model
        description = describe(model) if isinstance(model, Embedder) else cross.describe(model)
        source = description["fitted_on"]
        source = source if source.startswith("hf://") else PurePath(source).name
        return {**description, "encoder": self.name, "fitted_on": source}

    def without_paths(self, error: Exception | str) -> str:
        """Return an error's message with the paths of model and index shortened to their names."""
        text, folders = str(error), [self.encoder.resolved.checkpoint.folder]
        if self.index is not None:
            folders.append(self.index.folder)
        for folder in folders:
            absolute = str(folder.resolve())
            # Lance omits the leading slash.
            for path in (absolute, absolute.lstrip("/"), str(folder)):
                if "/" in path:
                    text = text.replace(path, folder.resolve().name)
        return text
