"""Request bodies: reading them up to a size limit, and the fields that they may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import Request

from llmcond.conditions import Condition
from llmcond.config import describe_validation_error
from llmcond.errors import UserError, format_count, shortened_repr
from llmcond.options import Precision
from llmcond.serving.errors import RequestError
from llmcond.serving.responses import RerankDocument

T = TypeVar("T", bound=BaseModel)

#: A text, or several.
TextOrTexts = str | Annotated[list[str], Field(fail_fast=True)]

#: Example values of one condition.
_Values = Annotated[list[str], Field(fail_fast=True)]

_Weight = Annotated[float, Field(allow_inf_nan=False)]


_NO_CONDITION = "there is no condition that the values belong to; give condition as well."


class _RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    #: Ignored: the server has one model, whatever name clients use.
    model: str | None = None


class _ConditionedRequest(_RequestBody):
    """One condition for all texts or one per text, with values for all conditions or for each."""

    condition: TextOrTexts | None = None
    values: _Values | Annotated[list[_Values], Field(fail_fast=True)] | None = None

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
        return [Condition(*pair) for pair in zip(condition, each, strict=True)]  # type: ignore[arg-type]


class EmbeddingsRequest(_ConditionedRequest):
    """Texts to embed, as in OpenAI's protocol, with one condition for all or one for each."""

    input: TextOrTexts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    precision: Precision = "float32"
    user: str | None = None


class SimilarityRequest(_ConditionedRequest):
    """Pairs of sentences to compare; a single text is paired with every text of the other side."""

    sentence1: TextOrTexts
    sentence2: TextOrTexts


def _read_document(document: object) -> str:
    """Return the text of a document, which is a text or an object with it."""
    if isinstance(document, dict) and document.keys() == {"text"}:
        document = document["text"]
    if not isinstance(document, str):
        raise ValueError('it should be a text or {"text": ...}')
    return document


_Document = Annotated[
    str, BeforeValidator(_read_document, json_schema_input_type=str | RerankDocument)
]


class RerankRequest(_ConditionedRequest):
    """A query and the documents to order by it, as in the protocols of Cohere and Jina."""

    query: str
    documents: Annotated[list[_Document], Field(fail_fast=True)]
    condition: str | None = None
    values: _Values | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False


class SearchRequest(_RequestBody):
    """A query under a condition, or under several conditions with weights."""

    query: str
    condition: str | dict[str, _Weight] | None = None
    values: _Values | dict[str, _Values] | None = None
    k: int = Field(10, ge=1, le=10_000)
    where: str | None = None
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


async def read_request(request: Request, body_type: type[T], limit: int) -> T:
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
    problem = max(problems, key=lambda entry: len(entry["loc"]))
    reason = problem["type"]
    if reason == "json_invalid":
        detail = str(problem.get("ctx", {}).get("error", problem["msg"]))
        return RequestError(400, "invalid_json", f"the body is not valid JSON: {detail}.")
    if not problem["loc"]:
        return RequestError(422, "invalid_type", "the body must be a JSON object.")
    name = problem["loc"][0]
    if name == "input" and reason == "string_type" and isinstance(problem["input"], int | list):
        return RequestError(
            422,
            "token_ids",
            "input holds token ids, which belong to another model's tokenizer; send texts instead. "
            "LangChain's OpenAIEmbeddings sends texts with check_embedding_ctx_length=False.",
            param=name,
        )
    location = _without_alternatives(problem["loc"])
    described = {**problem, "loc": location}
    expected = [
        _EXPECTED[other["type"]]
        for other in problems
        if other["type"] in _EXPECTED and _without_alternatives(other["loc"]) == location
    ]
    if reason in _EXPECTED:
        described["msg"] = f"it should be {' or '.join(dict.fromkeys(expected))}"
    message = describe_validation_error(described, list(kind.model_fields))
    if problem["input"] is None:
        message = message.replace(" is None: ", " is null: ", 1)
    return RequestError(422, _CODES.get(reason, "invalid_value"), message, param=str(name)[:80])


def _without_alternatives(location: Sequence[int | str]) -> tuple[int | str, ...]:
    """Return a location without the alternatives of a type, which the client does not know."""
    return (location[0], *(part for part in location[1:] if isinstance(part, int)))
