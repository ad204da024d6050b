"""Errors of requests, in the shape that clients of OpenAI's protocol read."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from llmcond.serving.batching import ClosedError

#: Status in logs and figures of a request whose client hung up before it was answered.
GONE = 499

#: What OpenAI's clients are told of a status.
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """A request that is not answered as it was meant.

    It has a status of HTTP, a code for programs, a message for people in one line, the field that
    is wrong, and headers of the response.
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

    def response(self) -> Response:
        """Return it as a response."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": " ".join(str(self).split()),
            "type": _TYPES.get(self.status, usual),
            "param": self.param,
            "code": self.code,
        }
        return json_response({"error": error}, self.status, self.headers)


def invalid_value(param: str | None, message: str) -> RequestError:
    """Return the error of a field whose value is wrong."""
    return RequestError(422, "invalid_value", message, param=param)


def refusal(error: Exception) -> RequestError:
    """Return what a client is told of an error; what is no error of a request is told of no more.

    Its message may hold what somebody else sent.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ClientDisconnect):
        return RequestError(GONE, "client_gone", "the client hung up.")
    if isinstance(error, ClosedError):
        later = {"Retry-After": "1"}
        return RequestError(503, "closing", "the server is stopping.", headers=later)
    return RequestError(
        500, "internal_error", "the server failed; its log tells where, by the X-Request-Id."
    )


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a value as a response of JSON."""
    return Response(to_json(value, inf_nan_mode="null"), status, headers, "application/json")
