"""Chroma's embedding function for a model with one condition."""

from __future__ import annotations

from typing import Any

import numpy as np
from chromadb import EmbeddingFunction
from chromadb.utils.embedding_functions import register_embedding_function
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.errors import UserError
from llmcond.integrations.conditioned import ConditionedModel


@register_embedding_function
class ChromaEmbeddingFunction(ConditionedModel, EmbeddingFunction):  # type: ignore[misc]  # untyped base
    """An embedding function for a collection of Chroma, under one condition.

    Chroma stores its configuration with the collection. After this module has been imported, a
    collection that is opened again embeds queries under the same condition. The arguments are those
    of ``ConditionedModel``.

    Raises:
        UserError: The condition is empty or ignores others.

    Examples:
        >>> import chromadb
        >>> from llmcond.integrations.chroma import ChromaEmbeddingFunction
        >>> function = ChromaEmbeddingFunction("the problem")
        >>> client = chromadb.EphemeralClient()
        >>> collection = client.create_collection("tickets", embedding_function=function)
        >>> collection.add(["1", "2"], documents=["The parcel is late.", "It is broken."])
        >>> collection.query(query_texts="Where is my order?", n_results=1)["ids"]
        [['1']]
    """

    def __call__(self, input: list[str]) -> NDArray[np.float32]:  # noqa: A002 - Chroma's name
        """Embed texts or queries.

        Args:
            input: n texts.

        Returns:
            (n, k) vectors of unit norm. Chroma converts them to a list of arrays.

        Raises:
            UserError, LlmcondError: As ``Embedder.encode``.
        """
        return self.embed(input)

    @staticmethod
    @override
    def name() -> str:
        return "llmcond"

    @override
    def get_config(self) -> dict[str, Any]:
        return self.to_json()

    @staticmethod
    @override
    def build_from_config(config: dict[str, Any]) -> ChromaEmbeddingFunction:
        return ChromaEmbeddingFunction.from_json(config)

    @override
    def is_legacy(self) -> bool:
        return False  # Chroma's method would build another function to find this out

    @override
    def default_space(self) -> str:
        return "cosine"

    @override
    def validate_config_update(
        self, old_config: dict[str, Any], new_config: dict[str, Any]
    ) -> None:
        if old_config["fingerprint"] != new_config["fingerprint"]:
            raise UserError(
                f"the collection has vectors under {old_config['condition']!r} of "
                f"{old_config['model']}. Queries under {new_config['condition']!r} of "
                f"{new_config['model']} need a collection of their own."
            )
