"""Embeddings under a condition for LlamaIndex."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import Field, PrivateAttr

from llmcond.integrations.conditioned import ConditionedModel


class ConditionalEmbedding(BaseEmbedding):  # type: ignore[misc]  # mypy skips it
    """LlamaIndex's embeddings under one condition.

    The arguments are those of ``ConditionedModel`` and of ``BaseEmbedding``, such as
    ``embed_batch_size``. For another condition, create another object, which shares the encoder.
    Serialised settings contain the fingerprint of the model, so that the cache of an
    ``IngestionPipeline`` has no vectors of another model or condition. An ``embeddings_cache`` is
    only for one condition, because its keys are texts.

    Attributes:
        condition: The condition without its example values.
        values: The example values of the condition.
        fingerprint: A digest of all that determines the vectors.

    Raises:
        UserError: The condition is empty or ignores others, an argument is unknown, or the model
            has changed since the settings were serialised.

    Examples:
        >>> from llmcond.integrations.llama_index import ConditionalEmbedding
        >>> embedding = ConditionalEmbedding("the place", truncate_dim=64)
        >>> len(embedding.get_query_embedding("A man swims in the sea."))
        64
    """

    condition: str = Field(frozen=True)
    values: list[str] = Field(frozen=True)
    model: str = Field(frozen=True)
    head: str = Field(frozen=True)
    prompt: str | None = Field(None, frozen=True)
    revision: str | None = Field(None, frozen=True)
    truncate_dim: int | None = Field(frozen=True)
    device: str = Field(frozen=True)
    fingerprint: str = Field(frozen=True)
    _conditioned: ConditionedModel = PrivateAttr()

    def __init__(self, condition: str, **options: Any) -> None:
        """Create the embeddings; see the class."""
        options.pop("class_name", None)  # is in all that LlamaIndex serialises
        base = {name: options.pop(name) for name in BaseEmbedding.model_fields.keys() & options}
        conditioned = ConditionedModel.from_json({"condition": condition, **options})
        settings = {**conditioned.to_json(), "device": conditioned.device}
        super().__init__(**{"model_name": settings["model"], **settings, **base})
        self._conditioned = conditioned

    @classmethod
    def class_name(cls) -> str:
        """The name of the class in what LlamaIndex serialises."""
        return "ConditionalEmbedding"

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._conditioned.embed(texts).tolist()
        return vectors

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await self._aget_text_embedding(query)
