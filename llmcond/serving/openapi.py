"""The routes of a server, and the OpenAPI document that describes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from llmcond.serving.responses import ErrorResponse
from llmcond.version import __version__

#: A function that answers a request.
Handler = Callable[[Request], Awaitable[Response]]

#: The statuses of errors with their reasons.
_ERRORS: Mapping[int, str] = {
    400: "The request is not valid HTTP, or its body is not valid JSON.",
    401: "The API key is missing or wrong.",
    403: "The host name is not a local one, and the server has no API keys.",
    404: "The server does not have what the request needs.",
    408: "The headers or the body took too long to arrive.",
    413: "The body is too large, or has too many texts.",
    415: "The body is not JSON, or is compressed.",
    422: "A field of the body is invalid.",
    429: "The server has too many requests at a time.",
    431: "The headers are too large.",
    500: "The server failed.",
    503: "The server is stopping, or cannot answer.",
    504: "The answer took too long.",
}
#: Errors of every route, and of every route with a body.
_ANY_ROUTE, _ANY_BODY = (400, 408, 431, 500), (413, 415, 422, 429, 503, 504)
_KEY = "bearerKey"


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint.

    Attributes:
        method: the HTTP method.
        path: the path; ``{id}`` at its end is a parameter.
        handler: the function that answers. If it is annotated with ``JsonResponse[T]``, T is the
            type of the response's body.
        body: the type of the request's body; None: it has none.
        errors: statuses of errors, besides those that every route may have.
        public: whether no key is needed, because the endpoint neither reads nor returns texts.
        media_type: content type of a response that is not JSON.
    """

    method: str
    path: str
    handler: Handler
    body: type[BaseModel] | None = None
    errors: Collection[int] = ()
    public: bool = False
    media_type: str = "application/json"

    @property
    def methods(self) -> Sequence[str]:
        """The methods that the path accepts. The server leaves the body of HEAD out."""
        return (self.method, *(["HEAD"] if self.method == "GET" else []), "OPTIONS")

    @property
    def content(self) -> Any:
        """The type of the response's body; str for a response that is not JSON."""
        (content,) = get_args(get_type_hints(self.handler)["return"]) or (str,)
        return content


def describe_api(
    routes: Collection[Route], *, needs_key: bool, needs_condition: bool
) -> dict[str, Any]:
    """Return the OpenAPI document of the routes.

    Args:
        routes: the routes.
        needs_key: whether the routes that are not public need an API key.
        needs_condition: whether bodies need a condition, because there is no default.
    """
    from pydantic import TypeAdapter  # only the document needs it

    bodies = [route.body for route in routes if route.body is not None]
    types = [ErrorResponse, *(route.content for route in routes)]
    types += bodies
    schemas, definitions = TypeAdapter.json_schemas(
        [(name, "validation", TypeAdapter(name)) for name in dict.fromkeys(types)],
        ref_template="#/components/schemas/{model}",
    )
    if needs_condition:
        _require_condition(definitions["$defs"][body.__name__] for body in bodies)
    by_type = {name: schema for (name, _), schema in schemas.items()}

    def describe_content(media_type: str, content: Any) -> dict[str, Any]:
        return {"content": {media_type: {"schema": by_type[content]}}}

    def describe_route(route: Route) -> dict[str, Any]:
        statuses = {*_ANY_ROUTE, *route.errors, *(_ANY_BODY if route.body else ())}
        if not needs_key:
            statuses.add(403)
        elif not route.public:
            statuses.add(401)
        success = {"description": "Success", **describe_content(route.media_type, route.content)}
        error = describe_content("application/json", ErrorResponse)
        operation: dict[str, Any] = {
            "operationId": route.handler.__name__,
            "summary": (route.handler.__doc__ or "").partition("\n")[0],
            "responses": {"200": success}
            | {
                f"{status}": {"description": _ERRORS[status], **error}
                for status in sorted(statuses)
            },
        }
        if route.body is not None:
            body = describe_content("application/json", route.body)
            operation["requestBody"] = {"required": True, **body}
        if "{id}" in route.path:
            schema = {"type": "string"}
            operation["parameters"] = [
                {"name": "id", "in": "path", "required": True, "schema": schema}
            ]
        if needs_key and route.public:
            operation["security"] = []
        return operation

    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "llmcond", "version": __version__},
        "paths": {route.path: {route.method.lower(): describe_route(route)} for route in routes},
        "components": {"schemas": definitions["$defs"]},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
        document["security"] = [{_KEY: []}]
    return document


def _require_condition(schemas: Iterable[dict[str, Any]]) -> None:
    """Change the schemas of bodies so that they need a condition."""
    for schema in schemas:
        schema["required"].append("condition")
        condition = schema["properties"]["condition"]
        condition["anyOf"].remove({"type": "null"})
        del condition["default"]
