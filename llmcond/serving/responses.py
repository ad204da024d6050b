"""Response bodies. The endpoints build them, and ``/openapi.json`` publishes their schemas."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic accepts typing's from 3.12 on

#: A number, or null for NaN and infinity, which JSON does not have.
Number = float | None


class ErrorDetails(TypedDict):
    """The reason of an error."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(TypedDict):
    """An error in OpenAI's format."""

    error: ErrorDetails


class HealthResponse(TypedDict):
    """The state of the server."""

    status: Literal["ok", "ready"]
    model: str


class ModelEntry(TypedDict):
    """The served model. The fields that may be missing depend on its kind."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    encoder: str
    fingerprint: str
    head: str
    fitted_on: str
    max_length: int
    model: NotRequired[str]
    revision: NotRequired[str]
    dim: NotRequired[int]
    dtype: NotRequired[str]
    prompt: NotRequired[str]
    runtime: NotRequired[str]
    subtract: NotRequired[bool]
    guides: NotRequired[dict[str, Any]]
    orders: NotRequired[str]
    conditions: NotRequired[list[str]]


class ModelList(TypedDict):
    """A list of one model, in OpenAI's format."""

    object: Literal["list"]
    data: list[ModelEntry]


class Usage(TypedDict):
    """Numbers of tokens before texts are cut."""

    prompt_tokens: int
    total_tokens: int


class Counts(TypedDict):
    """Counts of a request: its tokens, and its texts that were cut or have a zero vector."""

    usage: Usage
    truncated: int
    zero_vectors: NotRequired[int]


class Embedding(TypedDict):
    """An embedding as numbers, or as base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[Number] | str


class EmbeddingsResponse(Counts):
    """Embeddings in the order of the texts, in OpenAI's format."""

    object: Literal["list"]
    model: str
    data: list[Embedding]


class SimilarityResponse(Counts):
    """The similarity of each pair."""

    model: str
    similarities: list[Number]


class RerankDocument(TypedDict):
    """The text of a document."""

    text: Annotated[str, Field(json_schema_extra={"minLength": 1, "pattern": r"\S"})]


class RerankResult(TypedDict):
    """A document by its position in the request, with its similarity to the query."""

    index: int
    relevance_score: Number
    document: NotRequired[RerankDocument]


class RerankResponse(Counts):
    """Documents with the most similar one first."""

    model: str
    results: list[RerankResult]


class HitScores(TypedDict):
    """Scores of a hit under each condition, and its score and rank without a condition, if any."""

    under: dict[str, Number]
    without: Number
    rank_without: int | None


class SearchHit(TypedDict):
    """A text of the index, with the index's other columns as further fields."""

    rank: int
    score: Number
    text: str
    id: str
    explain: NotRequired[HitScores]


class SearchResponse(TypedDict):
    """The texts nearest to a query."""

    model: str
    results: list[SearchHit]
    query: str
    conditions: dict[str, float]
    searched: int
    exact: bool
    plain: NotRequired[str]
    guides: NotRequired[dict[str, Any]]
