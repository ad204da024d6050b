"""Bodies of requests, responses and errors, and the reading of requests up to a size limit.

``/openapi.json`` publishes the schemas of the bodies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, NotRequired, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic accepts typing's from 3.12 on

from llmcond.base.errors import UserError, format_count, list_legal_values, shortened_repr
from llmcond.base.options import Precision
from llmcond.base.text import (
    MAX_VALUES,
    Condition,
    check_characters,
    condition_key,
    normalise_condition,
)
from llmcond.serving.model import ClosedError

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
    max_length: int | None
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


#: Status, in logs and metrics, of a request whose client disconnected before the response.
CLIENT_CLOSED = 499

#: Error type of OpenAI's protocol for a status; other statuses use a general type.
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """An error that is reported to the client.

    It has an HTTP status, a code for programs, a one-line message, the name of the invalid field if
    there is one, and response headers.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})

    def response(self) -> JsonResponse[ErrorResponse]:
        """Convert the error to a response."""
        default_type = "server_error" if self.status >= 500 else "invalid_request_error"
        error: ErrorResponse = {
            "error": {
                "message": " ".join(str(self).split()),
                "type": _TYPES.get(self.status, default_type),
                "param": self.param,
                "code": self.code,
            }
        }
        return JsonResponse(error, self.status, self.headers)


def invalid_value_error(param: str | None, message: str) -> RequestError:
    """Return the error of a field whose value is invalid."""
    return RequestError(422, "invalid_value", message, param=param)


def to_request_error(error: Exception) -> RequestError:
    """Convert an exception to the error that the client receives.

    The message of an unexpected exception is not passed on, because it may contain data of another
    client.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ClientDisconnect):
        return RequestError(CLIENT_CLOSED, "client_gone", "the client closed the connection.")
    if isinstance(error, ClosedError):
        headers = {"Retry-After": "1"}
        return RequestError(503, "closing", "the server is stopping.", headers=headers)
    return RequestError(
        500,
        "internal_error",
        "the server failed; its log names the cause under the X-Request-Id of this response.",
    )


#: Type of the body of a response, and of a request.
Content = TypeVar("Content")
Body = TypeVar("Body", bound=BaseModel)


class JsonResponse(Response, Generic[Content]):
    """A response whose body is JSON of the type ``Content``."""

    def __init__(
        self, value: Content, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        body = to_json(value, inf_nan_mode="null")
        super().__init__(body, status, headers, "application/json")


def _check_text(text: str) -> str:
    try:
        check_characters(text)
    except ValueError as error:
        raise ValueError(f"it {error}") from None
    return text


def _check_true(value: bool) -> bool:
    if not value:
        raise ValueError("it must be true")
    return value


def _check_distinct(conditions: object) -> object:
    keys = [condition_key(name) for name in conditions] if isinstance(conditions, dict) else []
    repeated = next((key for key, count in Counter(keys).items() if count > 1), None)
    if repeated is not None:
        raise ValueError(f"it has {repeated!r} twice, in different spellings")
    return conditions


# The schemas say that texts and lists of texts are not empty. Endpoints check it, because they know
# which text of how many it is, and that white space alone is empty as well.
_NOT_BLANK = Field(json_schema_extra={"minLength": 1, "pattern": r"\S"})
_NOT_EMPTY = Field(fail_fast=True, json_schema_extra={"minItems": 1})

#: A string that the encoder can read and that can be written to files.
_String = Annotated[str, AfterValidator(_check_text)]
_Text = Annotated[_String, _NOT_BLANK]
#: A condition in its normal form.
_Condition = Annotated[_Text, AfterValidator(normalise_condition)]
#: Example values of one condition.
_Values = Annotated[list[_String], Field(fail_fast=True, max_length=MAX_VALUES)]

#: A switch that cannot be turned off.
_True = Annotated[bool, AfterValidator(_check_true), Field(json_schema_extra={"const": True})]
#: The most conditions of a search, and the most that a request ignores.
_MAX_CONDITIONS = 64
_Ignored = Annotated[list[_Condition], Field(max_length=_MAX_CONDITIONS)]
#: Weights, and example values, of several conditions.
_Weights = Annotated[
    dict[_Condition, Annotated[float, Field(allow_inf_nan=False)]],
    BeforeValidator(_check_distinct),
    Field(max_length=_MAX_CONDITIONS, json_schema_extra={"minProperties": 1}),
]
_ValuesByCondition = Annotated[dict[_Condition, _Values], BeforeValidator(_check_distinct)]

#: A text, or several.
TextOrTexts = str | list[str]
_TextOrTexts = _Text | Annotated[list[_Text], _NOT_EMPTY]


_NO_CONDITION = "there is no condition that the values belong to; give condition as well."


class _RequestBody(BaseModel):
    """A body, in which a field that is null counts as absent unless it is required."""

    model_config = ConfigDict(extra="forbid", strict=True)

    #: Ignored: the server has one model, whatever name clients use.
    model: _String | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        required = {name for name, info in cls.model_fields.items() if info.is_required()}
        return {n: value for n, value in body.items() if value is not None or n in required}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema of the body, in which optional fields may be null."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, field in schema["properties"].items():
            alternatives = field.get("anyOf", [])
            if name not in schema.get("required", ()) and {"type": "null"} not in alternatives:
                annotations = {key: field.pop(key) for key in ("title", "default") if key in field}
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **annotations}
        return schema


class _ConditionedRequest(_RequestBody):
    """One condition for all texts or one per text, with values for all conditions or for each."""

    condition: _Condition | Annotated[list[_Condition], _NOT_EMPTY] | None = None
    values: _Values | Annotated[list[_Values], Field(fail_fast=True)] | None = None
    #: The conditions that every condition ignores.
    ignore: _Ignored | None = None

    def conditions(self) -> TextOrTexts | None:
        """Return the conditions with their values; None if there are none.

        Raises:
            UserError: if the values are invalid, or do not fit the conditions.
        """
        condition, values = self.condition, self.values
        if values is None:
            return condition
        if condition is None:
            raise UserError(_NO_CONDITION)
        nested = bool(values) and not isinstance(values[0], str)
        if isinstance(condition, str):
            if nested:
                raise UserError(
                    "there is one condition, but values is a list of lists; give one list."
                )
            return Condition(condition, values)  # type: ignore[arg-type]
        each = values if nested else [values] * len(condition)
        if len(each) != len(condition):
            raise UserError(
                f"there are values for {format_count(len(each), 'condition')}, but condition has "
                f"{len(condition)}; give one list for each, or one for all."
            )
        keys = [(text, tuple(value)) for text, value in zip(condition, each, strict=True)]
        distinct = {key: Condition(*key) for key in keys}  # type: ignore[arg-type]
        return [distinct[key] for key in keys]


class _ForeignFields(_ConditionedRequest):
    """Fields of other servers. They have no effect: each asks for what this server does anyway."""

    user: _String | None = None
    #: The model has no prefixes for queries, documents and kinds of task.
    input_type: _String | None = None
    task: _String | None = None
    #: Texts that are too long are cut at their end.
    truncate: Literal["END"] | _True = "END"
    truncation: _True = True


class EmbeddingsRequest(_ForeignFields):
    """Texts to embed, as in OpenAI's protocol, with one condition for all or one for each."""

    input: _TextOrTexts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    precision: Precision = "float32"
    normalized: _True = True
    embedding_type: Literal["float"] = "float"


class SimilarityRequest(_ConditionedRequest):
    """Pairs of sentences to compare; a single text is paired with every text of the other side."""

    sentence1: _TextOrTexts
    sentence2: _TextOrTexts


def _read_document(document: object) -> str:
    """Return the text of a document, which is a text or an object with it."""
    if isinstance(document, dict) and document.keys() == {"text"}:
        document = document["text"]
    if not isinstance(document, str):
        raise ValueError('it should be a text or {"text": ...}')
    return document


_Document = Annotated[
    _String, BeforeValidator(_read_document, json_schema_input_type=_Text | RerankDocument)
]


class RerankRequest(_ForeignFields):
    """A query and the documents to order by it, as in the protocols of Cohere and Jina."""

    query: _Text
    documents: Annotated[list[_Document], _NOT_EMPTY]
    condition: _Condition | None = None
    values: _Values | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False
    #: Without effect: documents are cut at the length that the model reads.
    max_tokens_per_doc: int | None = Field(None, ge=1)
    max_chunks_per_doc: int | None = Field(None, ge=1)


class SearchRequest(_RequestBody):
    """A query under a condition, or under several conditions with weights."""

    query: _Text
    condition: _Condition | _Weights | None = None
    values: _Values | _ValuesByCondition | None = None
    ignore: _Ignored | None = None
    k: int = Field(10, ge=1, le=10_000)
    where: _String | None = None
    explain: bool = False

    def conditions(self) -> str | Mapping[str, float] | None:
        """Return the condition, or weighted conditions, with their values; None if there is none.

        Raises:
            UserError: if the values are invalid, or do not fit the conditions.
        """
        condition, values = self.condition, self.values
        if values is None:
            return condition
        if condition is None:
            raise UserError(_NO_CONDITION)
        weights = {condition: 1.0} if isinstance(condition, str) else condition
        if isinstance(values, list):
            if len(weights) != 1:
                raise UserError(
                    f"values is a list, but there are {format_count(len(weights), 'condition')}; "
                    "give an "
                    "object with the values of each."
                )
            values = dict.fromkeys(weights, values)
        for name in values.keys() - weights.keys():
            raise UserError(
                f"there are values for {shortened_repr(name)}, which is not in condition."
            )
        return {
            Condition(text, values[text]) if text in values else text: weight
            for text, weight in weights.items()
        }


async def read_request(request: Request, body_type: type[Body], limit: int) -> Body:
    """Read and validate the body of a request.

    Args:
        request: the request.
        body_type: the model of the body.
        limit: maximal size of the body in bytes.

    Raises:
        RequestError: if the body is not JSON, is larger than ``limit``, or has invalid fields.
    """
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content != "application/json":
        problem = f"is {shortened_repr(content)}" if content else "is missing"
        raise RequestError(
            415, "content_type", f"the Content-Type {problem}; expected application/json."
        )
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError(415, "content_encoding", "the body is compressed; send it uncompressed.")
    body = await _read_body(request, limit)
    try:
        return body_type.model_validate_json(body)
    except ValidationError as error:
        raise _convert_error(error, body_type) from None


async def _read_body(request: Request, limit: int) -> bytes:
    too_large = RequestError(
        413,
        "body_too_large",
        f"the body is larger than {limit:,} bytes (--payload-limit). Send fewer texts at a time.",
    )
    content_length = request.headers.get("content-length", "0")
    if content_length.isascii() and content_length.isdigit() and int(content_length[:20]) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


#: Error code for pydantic's type of a validation error; other types give ``invalid_value``.
_CODES = {"extra_forbidden": "unknown_field", "missing": "missing_field"}
#: What pydantic's types of a validation error expect, in the words of this API.
_EXPECTED = {
    "string_type": "a text",
    "list_type": "a list of texts",
    "dict_type": "an object",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
}


def _convert_error(error: ValidationError, kind: type[BaseModel]) -> RequestError:
    """Convert a validation error; of several alternatives of a field, use the innermost problem."""
    problems = error.errors(include_url=False)
    # A wrong type is the reason of an alternative that was not meant.
    problem = max(problems, key=lambda entry: (len(entry["loc"]), entry["type"] not in _EXPECTED))
    reason = problem["type"]
    if reason == "json_invalid":
        detail = str(problem.get("ctx", {}).get("error", problem["msg"]))
        return RequestError(400, "invalid_json", f"the body is not valid JSON: {detail}.")
    if not problem["loc"]:
        return RequestError(422, "invalid_type", "the body must be a JSON object.")
    name = problem["loc"][0]
    if name == "input" and any(_is_token_ids(entry["input"]) for entry in problems):
        return RequestError(
            422,
            "token_ids",
            "input holds token ids, which belong to another model's tokenizer; send texts instead. "
            "LangChain's OpenAIEmbeddings sends texts with check_embedding_ctx_length=False.",
            param=name,
        )
    location = _without_alternatives(problem["loc"])
    key = shortened_repr(".".join(map(str, location)))
    if reason == "missing":
        message = f"the key {key} is missing. Legal keys: {', '.join(kind.model_fields)}."
    elif reason == "extra_forbidden":
        message = f"unknown key {key}. {list_legal_values(str(location[-1]), kind.model_fields)}"
    else:
        detail = problem["msg"].removeprefix("Value error, ").replace("Input should", "it should")
        detail = detail.replace("greater than or equal to", "at least")
        if reason in _EXPECTED:
            expected = [
                _EXPECTED[other["type"]]
                for other in problems
                if other["type"] in _EXPECTED and _without_alternatives(other["loc"]) == location
            ]
            detail = f"it should be {' or '.join(dict.fromkeys(expected))}"
        shown = "null" if problem["input"] is None else shortened_repr(problem["input"])
        message = f"{key} is {shown}: {detail[:1].lower()}{detail[1:]}."
    return RequestError(422, _CODES.get(reason, "invalid_value"), message, param=str(name)[:80])


def _is_token_ids(value: object) -> bool:
    """Return whether a value is a list of integers, or a list of such lists."""
    if not isinstance(value, list) or not value:
        return False
    ids = [i for item in value for i in (item if isinstance(item, list) else [item])]
    return all(type(i) is int for i in ids)


def _without_alternatives(location: Sequence[int | str]) -> tuple[int | str, ...]:
    """Return a location without the alternative of a type, which the client does not know."""
    field, *parts = location
    has_alternatives = bool(parts) and not isinstance(parts[0], int)
    return (field, *(part for part in parts[has_alternatives:] if part != "[key]"))
