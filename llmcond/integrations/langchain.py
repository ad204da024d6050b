"""Embeddings under a condition for LangChain."""

from __future__ import annotations

from dataclasses import dataclass

from langchain_core.embeddings import Embeddings

from llmcond.integrations.conditioned import ConditionedModel


@dataclass(frozen=True)
class ConditionalEmbeddings(ConditionedModel, Embeddings):  # type: ignore[misc]  # mypy skips it
    """LangChain's embeddings under one condition.

    The arguments are those of ``ConditionedModel``. For another condition, create another object,
    which shares the encoder. An object can be pickled and copied. A cache of vectors can use
    ``fingerprint`` as its namespace.

    Attributes:
        show_progress: Whether ``embed_documents`` shows a progress bar on standard error.

    Raises:
        UserError: The condition is empty or ignores others.

    Examples:
        >>> from langchain_core.vectorstores import InMemoryVectorStore
        >>> from llmcond.integrations.langchain import ConditionalEmbeddings
        >>> store = InMemoryVectorStore(ConditionalEmbeddings("the activity"))
        >>> ids = store.add_texts(["A man rides a horse.", "A girl reads at the beach."])
        >>> store.similarity_search("A boy on a pony.", k=1)[0].page_content
        'A man rides a horse.'
    """

    show_progress: bool = False

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed texts.

        Args:
            texts: n texts.

        Returns:
            n unit vectors of k numbers.

        Raises:
            UserError, LlmcondError: As ``Embedder.encode``, for example because a text is empty.
        """
        vectors: list[list[float]] = self.embed(texts, show_progress=self.show_progress).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """Embed one text, in the same way as ``embed_documents``.

        Returns:
            A unit vector of k numbers.

        Raises:
            UserError, LlmcondError: As ``embed_documents``.
        """
        vector: list[float] = self.embed([text])[0].tolist()
        return vector
