"""What every request passes: its key, how many there are at a time, its time limit, and the log."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcond.serving.batching import Batcher, ClosedError
from llmcond.serving.errors import RequestError
from llmcond.serving.metrics import Metrics

#: A line for each request, without its texts and without its key.
request_log = logging.getLogger("llmcond.requests")

#: What needs no key: it tells nothing of texts, and takes none.
_OPEN = ("/", "/healthz", "/readyz")
#: Status in logs and metrics of a request whose client hung up before it was answered.
_GONE = 499
_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
]


class Gate:
    """The application as the server calls it.

    Attributes:
        closing: whether further requests are refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        batcher: Batcher,
        metrics: Metrics,
        keys: Sequence[bytes],
        most: int,
        timeout: float,
    ) -> None:
        """Let requests with one of these keys through, so many at a time, for so many seconds."""
        self._app, self._batcher, self._metrics = app, batcher, metrics
        self._keys, self._most, self._timeout = keys, most, timeout
        self._in_progress = 0
        self.closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever goes wrong."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), _GONE
        number = _request_id(dict(scope["headers"]).get(b"x-request-id", b""))

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [*_HEADERS, (b"x-request-id", number.encode())]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        scope["state"] = facts = dict[str, Any]()
        try:
            await self._pass(scope, receive, sending)
        except Exception as error:
            refused = self._refusal(error, number, reading=not facts)
            if refused is not None and status == _GONE:
                await refused.response()(scope, receive, sending)
        seconds = time.perf_counter() - began
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.on_request(route, status, seconds)
        told = "".join(f" {name}={value}" for name, value in facts.items())
        request_log.info(
            "%s %s %d%s ms=%.1f id=%s", scope["method"], route, status, told, 1e3 * seconds, number
        )

    def _refusal(self, error: Exception, number: str, *, reading: bool) -> RequestError | None:
        """Return what a client is told of an error; None if it hung up."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, ClientDisconnect):
            return None
        if isinstance(error, ClosedError):
            return _closing()
        if isinstance(error, TimeoutError):
            status, limit = 408 if reading else 504, f"{self._timeout:g} s (--timeout)"
            return RequestError(status, "timeout", f"this took longer than {limit}.")
        # Its message may hold what somebody sent.
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place else "?"
        request_log.error("%s in %s id=%s", type(error).__name__, where, number)
        return RequestError(
            500, "internal_error", f"the server failed; its log has more under {number}."
        )

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in _OPEN:
            self._check_key(dict(scope["headers"]).get(b"authorization", b""))
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with self._admitted():
            async with asyncio.timeout(self._timeout):
                await self._app(scope, receive, send)

    def _check_key(self, given: bytes) -> None:
        if not self._keys:
            return
        kind, _, key = given.partition(b" ")
        # All are compared, so that the time tells nothing.
        right = [hmac.compare_digest(key.strip(), own) for own in self._keys]
        if kind.lower() != b"bearer" or not any(right):
            raise RequestError(
                401,
                "invalid_api_key",
                "this server needs a key that is right: Authorization: Bearer KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self.closing:
            raise _closing()
        if self._in_progress >= self._most:
            raise RequestError(
                429,
                "too_many_requests",
                f"{self._in_progress} requests are being answered, as many as are taken at a time. "
                "Try again later.",
                headers={"Retry-After": str(min(60, max(1, math.ceil(self._batcher.delay))))},
            )
        self._in_progress += 1
        self._metrics.in_progress.set(self._in_progress)
        try:
            yield
        finally:
            self._in_progress -= 1
            self._metrics.in_progress.set(self._in_progress)


def _closing() -> RequestError:
    return RequestError(503, "closing", "the server is stopping.", headers={"Retry-After": "1"})


def _request_id(given: bytes) -> str:
    """Return the id that a client or a proxy gave, if it is one, or a new one."""
    if re.fullmatch(rb"[\w.:-]{1,64}", given, re.ASCII):
        return given.decode()
    return secrets.token_hex(8)
