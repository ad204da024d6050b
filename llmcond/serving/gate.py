"""Checks of every request: API key, number of concurrent requests, time limit; and its logging."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import re
import secrets
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Message, Receive, Scope, Send

from llmcond.errors import shortened_repr
from llmcond.serving.app import Endpoints
from llmcond.serving.batching import Batcher, ClosedError
from llmcond.serving.errors import CLIENT_CLOSED, RequestError, to_request_error
from llmcond.serving.metrics import Metrics

#: Log of one line for each request, without its texts and its key.
request_log = logging.getLogger("llmcond.requests")

_HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]


class Gate:
    """The ASGI application that the server calls.

    Attributes:
        app: the endpoints.
        closing: whether further requests are rejected.
    """

    def __init__(
        self,
        app: Endpoints,
        batcher: Batcher,
        metrics: Metrics,
        keys: Sequence[bytes],
        max_requests: int,
        timeout: float,
        local: bool,
    ) -> None:
        """Wrap the endpoints.

        Args:
            app: the endpoints.
            batcher: the queue in front of the model.
            metrics: the server's metrics.
            keys: valid API keys; without any, no key is required.
            max_requests: maximal number of concurrent requests.
            timeout: time limit of a request in seconds.
            local: whether the server listens on this machine only. Without keys, requests under any
                host name but localhost are then rejected: otherwise a website that is open in a
                browser on this machine could let its own name resolve to this server (DNS
                rebinding), and read whatever the server returns.
        """
        self.app, self._batcher, self._metrics = app, batcher, metrics
        self._keys, self._max_requests, self._timeout = keys, max_requests, timeout
        self._checks_host = local and not keys
        self._in_progress = 0
        self.closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever fails."""
        start_time, status = time.perf_counter(), CLIENT_CLOSED
        request_id = _choose_request_id(dict(scope["headers"]).get(b"x-request-id", b""))

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra_headers = [*_HEADERS, (b"x-request-id", request_id.encode())]
                message = {**message, "headers": [*message["headers"], *extra_headers]}
            await send(message)

        scope["state"] = facts = dict[str, Any]()
        # Let uvicorn answer a malformed body first; it then drops a second answer.
        await asyncio.sleep(0)
        try:
            await self._handle(scope, receive, send_with_id)
        except Exception as error:
            reported = to_request_error(error)
            if isinstance(error, TimeoutError):
                message = f"the request took longer than {self._timeout:g} s (--timeout)."
                # If no facts were recorded, the time was spent on reading the body.
                reported = (
                    RequestError(504, "timeout", f"{message} Send fewer texts at a time.")
                    if facts
                    else RequestError(408, "timeout", message)
                )
            elif reported.code == "internal_error":
                request_log.error("%s id=%s", _locate(error), request_id)
            if status == CLIENT_CLOSED:  # nothing has been sent yet
                await reported.response()(scope, receive, send_with_id)
        seconds = time.perf_counter() - start_time
        known_route = self.app.find_route(scope["path"])
        # Other paths may contain anything.
        route = "other" if known_route is None else known_route.path
        self._metrics.on_request(route, status, seconds)
        details = "".join(f" {name}={value}" for name, value in facts.items())
        request_log.info(
            "%s %s %d%s ms=%.1f id=%s",
            scope["method"],
            route,
            status,
            details,
            1e3 * seconds,
            request_id,
        )

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if {b"transfer-encoding", b"content-length"} <= headers.keys():
            # A proxy that evaluates the other header would split this connection into different
            # requests.
            raise RequestError(
                400,
                "two_lengths",
                "the request has both Transfer-Encoding and Content-Length; send only one of them.",
                headers={"Connection": "close"},
            )
        # A browser always sends a host; old probes, in HTTP/1.0, send none.
        if self._checks_host and b"host" in headers:
            _check_host(headers[b"host"].decode("latin-1"))
        route = self.app.find_route(scope["path"])
        if route is None or not route.public:
            self._check_key(headers.get(b"authorization", b""))
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        with self._limit_concurrency():
            async with asyncio.timeout(self._timeout):
                await self.app(scope, receive, send)

    def _check_key(self, authorization: bytes) -> None:
        if not self._keys:
            return
        scheme, _, key = authorization.partition(b" ")
        # Every key is compared, so that the time reveals nothing.
        matches = [hmac.compare_digest(key.strip(), valid) for valid in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise RequestError(
                401,
                "invalid_api_key",
                "the API key is missing or wrong. Send one: Authorization: Bearer KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )

    @contextmanager
    def _limit_concurrency(self) -> Iterator[None]:
        if self.closing:
            raise ClosedError
        if self._in_progress >= self._max_requests:
            raise RequestError(
                429,
                "too_many_requests",
                f"the server is busy with {self._in_progress} requests, its limit "
                "(--max-concurrent-requests). Try again later.",
                headers={
                    "Retry-After": str(min(60, max(1, math.ceil(self._batcher.estimated_delay))))
                },
            )
        self._in_progress += 1
        self._metrics.in_progress.set(self._in_progress)
        try:
            yield
        finally:
            self._in_progress -= 1
            self._metrics.in_progress.set(self._in_progress)


def _check_host(host: str) -> None:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name != "localhost":
            ipaddress.ip_address(name)
    except ValueError:
        raise RequestError(
            403,
            "host",
            "this server has no API keys, so it answers only under localhost or an IP address, "
            f"not under {shortened_repr(host)}. Give it keys with --api-key-file.",
        ) from None


def _choose_request_id(header: bytes) -> str:
    """Return the request id that a client or a proxy sent, if it is valid, or a new one."""
    if re.fullmatch(rb"[\w.:-]{1,64}", header, re.ASCII):
        return header.decode()
    return secrets.token_hex(8)


def _locate(error: Exception) -> str:
    """Return the type of an error and where it was raised, without its message."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {frame.filename}:{frame.lineno}"
