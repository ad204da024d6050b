"""What a server serves: one model, and what can be asked of it."""

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
        model: what encodes, or compares.
        condition: of requests that name none; None: they must.
        index: the collection that is searched.
    """

    model: Embedder | CrossEncoder
    condition: str | None = None
    index: Index | None = None

    @property
    def name(self) -> str:
        """Return what answers call it."""
        return short_name(self.encoder)

    @property
    def encoder(self) -> Encoder:
        """Return its encoder."""
        return self.model.encoder

    @property
    def longest(self) -> int:
        """Return how many tokens a row has at most, once its texts are cut."""
        inputs = len(self.model.view.needed()) if isinstance(self.model, Embedder) else 1
        return inputs * self.encoder.identity.max_length

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Return embeddings of (sentence, condition) rows, or a cross-encoder's similarities.

        The rows of a cross-encoder are (sentence, sentence, condition), and their tokens are not
        counted.

        Raises:
            LlmcondError: as ``encode_counted`` of an embedder, or ``similarity``.
        """
        if isinstance(self.model, Embedder):
            return self.model.encode_counted([(text, condition) for text, condition in rows])
        from llmcond.encoders.encoder import Encoded

        similarities = self.model.similarity(*map(list, zip(*rows, strict=True)))
        none = np.zeros(len(rows), dtype=np.int32)
        return Encoded(similarities, none, none.astype(bool), 0)

    def ready_row(self) -> Row:
        """Return a row that is encoded before the first request, and by each check of readiness."""
        return ("ready",) * (2 if isinstance(self.model, Embedder) else 3)

    def describe(self) -> dict[str, Any]:
        """Return what it is made of, without paths."""
        model = self.model
        about = describe(model) if isinstance(model, Embedder) else cross.describe(model)
        data = about["fitted_on"]
        data = data if data.startswith("hf://") else PurePath(data).name
        return {**about, "encoder": self.name, "fitted_on": data}

    def without_paths(self, error: Exception) -> str:
        """Return an error's message with names in the place of the paths of model and index."""
        text, folders = str(error), [self.encoder.resolved.checkpoint.folder]
        if self.index is not None:
            folders.append(self.index.folder)
        for folder in folders:
            absolute = str(folder.resolve())
            # Lance leaves out the first slash.
            for path in (absolute, absolute.lstrip("/"), str(folder)):
                if "/" in path:
                    text = text.replace(path, folder.resolve().name)
        return text
