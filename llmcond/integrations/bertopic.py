"""BERTopic under a condition: a backend that embeds documents and words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from bertopic.backend import BaseEmbedder
from numpy.typing import NDArray

from llmcond.base.errors import UserError
from llmcond.base.text import as_condition, ignored_by, ignoring, without_ignored
from llmcond.heads.guide import Guide
from llmcond.integrations.conditioned import ConditionedModel


class ConditionalBackend(BaseEmbedder):  # type: ignore[misc]  # BERTopic has no types
    """An embedding model of BERTopic with one condition.

    Words, zero-shot topics and documents are embedded under the same condition, so that they can be
    compared. The encoder is loaded when the first text is embedded.

    Args:
        condition: The condition, or a ``Condition`` with example values or several wordings.
        ignore: A condition to ignore, or several. What they are is found from the first documents,
            at least 50, and used for all later ones.
        options: The other arguments of ``ConditionedModel``: ``model``, ``head``, ``prompt``,
            ``revision``, ``truncate_dim`` and ``device``.

    Raises:
        UserError: The condition is empty, or among those to ignore.

    Examples:
        >>> from llmcond.integrations.bertopic import ConditionalBackend
        >>> backend = ConditionalBackend("the product")
        >>> backend.embed_documents(["The kettle leaks.", "My tent is late."]).shape
        (2, 384)
    """

    def __init__(self, condition: str, ignore: str | Iterable[str] = (), **options: Any) -> None:
        super().__init__()
        condition = as_condition(condition)
        ignored = [ignore] if isinstance(ignore, str) else ignore
        self.condition = ignoring(condition, ignored)
        self.model = ConditionedModel(without_ignored(self.condition), **options)
        self._guides: Mapping[str | None, Guide] = {}

    def embed_documents(
        self, document: Sequence[str], verbose: bool = False
    ) -> NDArray[np.float32]:
        """Embed documents, after finding what to ignore if these are the first ones.

        Args:
            document: n documents.
            verbose: Whether to show a progress bar.

        Returns:
            (n, k) float32 with unit norm, as ``Embedder.encode`` returns them. Zeros for blank
            documents.

        Raises:
            UserError, LlmcondError: As ``Embedder.encode``, and as ``Embedder.ignoring`` for the
                first documents if a condition is ignored.
        """
        if ignored_by(self.condition) and not self._guides:
            texts = (text for text in document if not _is_blank(text))
            self._guides = self.model.embedder.ignoring(texts, self.condition).guides
        return self.embed(document, verbose)

    def embed(self, documents: Sequence[str], verbose: bool = False) -> NDArray[np.float32]:
        """Embed documents or words, as ``embed_documents`` does once it knows what to ignore.

        Raises:
            UserError, LlmcondError: As ``embed_documents``, or it does not know what to ignore yet.
        """
        if ignored_by(self.condition) and not self._guides:
            raise UserError(
                f"what {str(self.condition)!r} ignores is not known yet. With embed_documents, "
                "embed at least 50 documents first."
            )
        embedder = replace(self.model.embedder, guides=self._guides)
        # KeyBERTInspired and MaximalMarginalRelevance fill short lists of words with "".
        is_filled = np.array([not _is_blank(text) for text in documents], dtype=bool)
        vectors = np.zeros((len(is_filled), embedder.dim), dtype=np.float32)
        texts = [text for text in documents if not _is_blank(text)]
        # BERTopic passes None for the names of zero-shot topics.
        vectors[is_filled] = embedder.encode(texts, self.condition, show_progress=bool(verbose))
        return vectors


def _is_blank(document: object) -> bool:
    return isinstance(document, str) and not document.strip()
