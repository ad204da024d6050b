"""LanceDB's embedding function for a model with one condition."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lancedb.embeddings import TextEmbeddingFunction, register
from pydantic import ConfigDict
from typing_extensions import override

from llmcond.integrations.conditioned import ConditionedModel


@register("llmcond")
class LanceEmbeddingFunction(TextEmbeddingFunction):  # type: ignore[misc]  # untyped base
    """An embedding function for a column of a LanceDB table, under one condition.

    LanceDB stores its settings with the table. After this module has been imported, a table that is
    opened again embeds texts and queries under the same condition.

    Attributes:
        conditioned: The model and its condition.

    Examples:
        >>> import lancedb
        >>> from lancedb.pydantic import LanceModel, Vector
        >>> from llmcond.integrations.lancedb import LanceEmbeddingFunction
        >>> function = LanceEmbeddingFunction.create("the problem")
        >>> class Ticket(LanceModel):
        ...     text: str = function.SourceField()
        ...     problem: Vector(function.ndims()) = function.VectorField()
        >>> table = lancedb.connect("tickets").create_table("tickets", schema=Ticket)
        >>> added = table.add([{"text": "The parcel is late."}, {"text": "It is broken."}])
        >>> table.search("Where is my order?").limit(1).to_list()[0]["text"]
        'The parcel is late.'
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    conditioned: ConditionedModel

    @classmethod
    @override
    def create(cls, condition: str, **settings: Any) -> LanceEmbeddingFunction:
        """Create an embedding function.

        Args:
            condition: The condition.
            settings: Other arguments of ``ConditionedModel``, or what LanceDB stored.

        Raises:
            UserError: The condition is empty or ignores others, or the model has changed since the
                table was created.
        """
        if "fingerprint" in settings:
            return cls(conditioned=ConditionedModel.from_json({"condition": condition, **settings}))
        return cls(conditioned=ConditionedModel(condition, **settings))

    @override
    def safe_model_dump(self) -> dict[str, Any]:
        return self.conditioned.to_json()

    @override
    def ndims(self) -> int:
        return self.conditioned.embedder.dim

    @override
    def generate_embeddings(self, texts: list[str]) -> list[list[float]]:
        # LanceDB calls this from a thread of Rust, where the process crashes when OpenVINO is used.
        with ThreadPoolExecutor(1) as executor:
            vectors = executor.submit(self.conditioned.embed, texts).result()
        return vectors.tolist()  # type: ignore[no-any-return]  # columns of float16 need Python's numbers

    # LanceDB repeats failed requests for minutes, which is meant for servers.
    compute_source_embeddings_with_retry = TextEmbeddingFunction.compute_source_embeddings
    compute_query_embeddings_with_retry = TextEmbeddingFunction.compute_query_embeddings
