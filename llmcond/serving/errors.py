"""Errors of requests, in the format that clients of OpenAI's protocol read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from llmcond.serving.batching import ClosedError
from llmcond.serving.responses import ErrorResponse

T = TypeVar("T")

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


class JsonResponse(Response, Generic[T]):
    """A response whose body is JSON of the type T."""

    def __init__(
        self, value: T, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        body = to_json(value, inf_nan_mode="null")
        super().__init__(body, status, headers, "application/json")
