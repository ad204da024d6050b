"""Requests: bodies that are read up to a limit, and the fields that they may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from llmcond.conditions import Condition
from llmcond.errors import UserError, brief, did_you_mean, plural
from llmcond.serving.errors import RequestError

T = TypeVar("T", bound=BaseModel)

#: A text, or several.
Texts = str | Annotated[list[str], Field(fail_fast=True)]

#: Example values of one condition.
_Values = Annotated[list[str], Field(fail_fast=True)]

_Weight = Annotated[float, Field(allow_inf_nan=False)]


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
        if condition is None or values is None:
            _check_values(condition, values)
            return condition
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
        if condition is None or values is None:
            _check_values(condition, values)
            return condition
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


def _check_values(condition: object, values: object) -> None:
    """Raise a UserError for values without a condition."""
    if condition is None and values is not None:
        raise UserError("there is no condition that they are values of; give it as well.")


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


def _invalid(error: ValidationError, kind: type[BaseModel]) -> RequestError:
    """Return what is wrong with the fields, the innermost of what was tried."""
    found = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
    reason, names = found["type"], list(kind.model_fields)
    if reason == "json_invalid":
        said = str(found.get("ctx", {}).get("error", found["msg"]))
        return RequestError(400, "invalid_json", f"the body is no JSON: {said}.")
    if not found["loc"]:
        return RequestError(422, "invalid_type", "the body is no JSON object; expected one.")
    name = str(found["loc"][0])
    if reason == "extra_forbidden":
        known = did_you_mean(name, names) or f"There are {', '.join(names)}."
        return RequestError(
            422, "unknown_field", f"{brief(name)} is no field of this. {known}", param=name[:80]
        )
    if name == "input" and reason == "string_type" and isinstance(found["input"], int | list):
        return RequestError(
            422,
            "token_ids",
            "input holds token ids of another model's tokenizer; send texts. LangChain's "
            "OpenAIEmbeddings sends texts with check_embedding_ctx_length=False.",
            param=name,
        )
    if reason == "missing":
        return RequestError(422, "missing_field", f"{name} is missing.", param=name)
    places = "".join(f"[{one}]" for one in found["loc"][1:] if isinstance(one, int))
    return RequestError(422, "invalid_value", f"{name}{places} {_told(found)}.", param=name)


def _told(found: Any) -> str:
    got = found["input"]
    kind = "null" if got is None else _KINDS.get(type(got), type(got).__name__)
    shown = f"{kind} {brief(got)}" if isinstance(got, int | float) else kind
    return f"{found['msg'].removeprefix('Input ')}, got {shown}"


_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "the number",
    float: "the number",
    bool: "the value",
}
