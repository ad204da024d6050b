"""Embeddings under a condition for Haystack."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any, Self

# mypy skips Haystack, so that its decorators have no types.
from haystack import Document, component, default_to_dict

from llmcond.integrations.conditioned import ConditionedModel


@dataclass(frozen=True)
class _ConditionalEmbedder(ConditionedModel):
    """What both components share: the arguments, serialisation, and loading.

    Attributes:
        progress_bar: Whether documents are embedded with a progress bar on standard error.
    """

    progress_bar: bool = False

    # Pipelines compare components, and two components may have the same settings.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        # A component has sockets, which only its class's call creates.
        return self.from_dict, (self.to_dict(),)

    def warm_up(self) -> None:
        """Load the model, which the first run does otherwise."""
        _ = self.embedder

    def to_dict(self) -> dict[str, Any]:
        """Serialise the component, with the fingerprint of its model."""
        others = {"device": self.device, "progress_bar": self.progress_bar}
        output: dict[str, Any] = default_to_dict(self, **self.to_json(), **others)
        return output

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Create a component from the output of ``to_dict``, or from a pipeline written by hand.

        Raises:
            UserError: The parameters are wrong, or the model has changed since ``to_dict``.
        """
        return cls.from_json(data["init_parameters"])


@component
class ConditionalTextEmbedder(_ConditionalEmbedder):
    """A component of Haystack that embeds a query under one condition.

    The arguments are those of ``ConditionedModel``. ``Pipeline.loads`` needs
    ``allowed_modules=["llmcond.integrations.haystack"]``.

    Raises:
        UserError: The condition is empty or ignores others.

    Examples:
        >>> from llmcond.integrations.haystack import ConditionalTextEmbedder
        >>> result = ConditionalTextEmbedder("the place").run("A man swims in the sea.")
        >>> len(result["embedding"])
        384
    """

    @component.output_types(embedding=list[float])  # type: ignore[untyped-decorator]
    def run(self, text: str) -> dict[str, list[float]]:
        """Embed a text.

        Returns:
            ``embedding``: a unit vector of k numbers.

        Raises:
            UserError, LlmcondError: As ``Embedder.encode``, for example because the text is empty.
        """
        return {"embedding": self.embed([text])[0].tolist()}

    @component.output_types(embedding=list[float])  # type: ignore[untyped-decorator]
    async def run_async(self, text: str) -> dict[str, list[float]]:
        """Embed a text in another thread; see ``run``."""
        return await asyncio.to_thread(self.run, text)


@component
class ConditionalDocumentEmbedder(_ConditionalEmbedder):
    """A component of Haystack that embeds documents under one condition.

    The arguments are those of ``ConditionedModel``, and ``progress_bar``. ``Pipeline.loads`` needs
    ``allowed_modules=["llmcond.integrations.haystack"]``.

    Raises:
        UserError: The condition is empty or ignores others.

    Examples:
        >>> from haystack import Document
        >>> from llmcond.integrations.haystack import ConditionalDocumentEmbedder
        >>> documents = [Document(content="Two women cook at night.")]
        >>> result = ConditionalDocumentEmbedder("the place").run(documents)
        >>> len(result["documents"][0].embedding)
        384
    """

    @component.output_types(documents=list[Document])  # type: ignore[untyped-decorator]
    def run(self, documents: list[Document]) -> dict[str, list[Document]]:
        """Embed the texts of documents.

        Returns:
            ``documents``: copies with unit vectors of k numbers. A document without text, such as
            an image, gets no vector.

        Raises:
            UserError, LlmcondError: As ``Embedder.encode``.
        """
        texts = [document.content for document in documents if _has_text(document)]
        vectors = iter(self.embed(texts, show_progress=self.progress_bar).tolist())
        return {
            "documents": [
                replace(document, embedding=next(vectors) if _has_text(document) else None)
                for document in documents
            ]
        }

    @component.output_types(documents=list[Document])  # type: ignore[untyped-decorator]
    async def run_async(self, documents: list[Document]) -> dict[str, list[Document]]:
        """Embed the texts of documents in another thread; see ``run``."""
        return await asyncio.to_thread(self.run, documents)


def _has_text(document: Document) -> bool:
    return bool((document.content or "").strip())
