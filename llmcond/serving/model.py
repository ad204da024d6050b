"""The model of a server, with an optional index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from llmcond.runs import cross
from llmcond.runs.cross import CrossEncoder
from llmcond.runs.embedder import Embedder, describe
from llmcond.search.model import short_name
from llmcond.serving.batching import Row

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoded, Encoder
    from llmcond.search import Index


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with its index, if it has one.

    Attributes:
        model: an embedder or a cross-encoder.
        condition: default condition of requests; None: every request must name one.
        index: the index to search, or None.
    """

    model: Embedder | CrossEncoder
    condition: str | None = None
    index: Index | None = None

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
        from llmcond.encoders.encoder import Encoded

        similarities = self.model.similarity(*map(list, zip(*rows, strict=True)))
        zeros = np.zeros(len(rows), dtype=np.int32)
        return Encoded(similarities, zeros, zeros.astype(bool), 0)

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
