"""Requests: bodies that are read up to a limit, and the fields that they may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from llmcond.conditions import Condition
from llmcond.config import explain
from llmcond.errors import UserError, brief, plural
from llmcond.serving.errors import RequestError

T = TypeVar("T", bound=BaseModel)

#: A text, or several.
Texts = str | Annotated[list[str], Field(fail_fast=True)]

#: Example values of one condition.
_Values = Annotated[list[str], Field(fail_fast=True)]

_Weight = Annotated[float, Field(allow_inf_nan=False)]


_NO_CONDITION = "there is no condition that they are values of; give it as well."


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    #: There is one model, whatever clients call it.
    model: str | None = None


class _ConditionedRequest(_Body):
    """A condition for all texts, or one for each, with values for all conditions or for each."""

    condition: Texts | None = None
    values: _Values | Annotated[list[_Values], Field(fail_fast=True)] | None = None

    def conditions(self) -> Texts | None:
        """Return the conditions with their values; None: there are none.

        Raises:
            UserError: values that are not right, or do not go with the conditions.
        """
        condition, values = self.condition, self.values
        if values is None:
            return condition
        if condition is None:
            raise UserError(_NO_CONDITION)
        nested = bool(values) and not isinstance(values[0], str)
        if isinstance(condition, str):
            if nested:
                raise UserError("there is one condition, and values is a list of lists; give one.")
            return Condition(condition, values)  # type: ignore[arg-type]
        each = values if nested else [values] * len(condition)
        if len(each) != len(condition):
            raise UserError(
                f"there are values of {plural(len(each), 'condition')}, and {len(condition)} in "
                "condition; give a list for each, or one list for all."
            )
        return [Condition(*pair) for pair in zip(condition, each, strict=True)]  # type: ignore[arg-type]


class EmbeddingsRequest(_ConditionedRequest):
    """Texts to embed, as in OpenAI's protocol, and the condition, one for all or one for each."""

    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None


class SimilarityRequest(_ConditionedRequest):
    """Pairs of sentences to compare; one text stands for as many as the others are."""

    sentence1: Texts
    sentence2: Texts


class SearchRequest(_Body):
    """A query under a condition, or under several with weights."""

    query: str
    condition: str | dict[str, _Weight] | None = None
    values: _Values | dict[str, _Values] | None = None
    k: int = Field(10, ge=1, le=10_000)
    where: str | None = None
    explain: bool = False

    def conditions(self) -> str | Mapping[str, float] | None:
        """Return the condition, or conditions with weights, with their values; None: there is none.

        Raises:
            UserError: values that are not right, or do not go with the conditions.
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
                    f"values is a list, and there are {plural(len(weights), 'condition')}; give an "
                    "object with the values of each."
                )
            values = dict.fromkeys(weights, values)
        for name in values.keys() - weights.keys():
            raise UserError(f"they are of {brief(name)}, which is not in condition.")
        return {
            Condition(one, values[one]) if one in values else one: weight
            for one, weight in weights.items()
        }


async def read_request(request: Request, kind: type[T], limit: int) -> T:
    """Return what a request holds.

    Raises:
        RequestError: no JSON, a body of more than ``limit`` bytes, or fields that are wrong.
    """
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content != "application/json":
        got = f"is {brief(content)}" if content else "is missing"
        raise RequestError(
            415, "content_type", f"the Content-Type {got}; expected application/json."
        )
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError(415, "content_encoding", "the body is compressed; send it as it is.")
    body = await _read_body(request, limit)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error, kind) from None


async def _read_body(request: Request, limit: int) -> bytes:
    too_large = RequestError(
        413,
        "body_too_large",
        f"the body has more than the {limit:,} bytes that are taken (--payload-limit). Send fewer "
        "texts at a time.",
    )
    stated = request.headers.get("content-length", "0")
    if stated.isascii() and stated.isdigit() and int(stated[:20]) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


#: Codes of what pydantic finds wrong with a field; anything else is an ``invalid_value``.
_CODES = {"extra_forbidden": "unknown_field", "missing": "missing_field"}


def _invalid(error: ValidationError, kind: type[BaseModel]) -> RequestError:
    """Return what is wrong with the fields, the innermost of the alternatives."""
    problem = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
    reason = problem["type"]
    if reason == "json_invalid":
        detail = str(problem.get("ctx", {}).get("error", problem["msg"]))
        return RequestError(400, "invalid_json", f"the body is no JSON: {detail}.")
    if not problem["loc"]:
        return RequestError(422, "invalid_type", "the body is no JSON object; expected one.")
    name, *inner = problem["loc"]
    if name == "input" and reason == "string_type" and isinstance(problem["input"], int | list):
        return RequestError(
            422,
            "token_ids",
            "input holds token ids of another model's tokenizer; send texts. LangChain's "
            "OpenAIEmbeddings sends texts with check_embedding_ctx_length=False.",
            param=name,
        )
    # A location also names the alternatives of a type, which are none of the client's words.
    location = (name, *(part for part in inner if isinstance(part, int)))
    message = explain({**problem, "loc": location}, list(kind.model_fields))
    return RequestError(422, _CODES.get(reason, "invalid_value"), message, param=str(name)[:80])
