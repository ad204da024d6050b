"""What every request passes: its key, how many there are at a time, its time limit, and the log."""

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

from llmcond.errors import brief
from llmcond.serving.app import Endpoints
from llmcond.serving.batching import Batcher, ClosedError
from llmcond.serving.errors import GONE, RequestError, refusal
from llmcond.serving.metrics import Metrics

#: A line for each request, without its texts and without its key.
request_log = logging.getLogger("llmcond.requests")

#: What needs no key: it tells nothing of texts, and takes none.
_OPEN = ("/", "/healthz", "/readyz")
_HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]


class Gate:
    """The application as the server calls it.

    Attributes:
        closing: whether further requests are refused.
    """

    def __init__(
        self,
        app: Endpoints,
        batcher: Batcher,
        metrics: Metrics,
        keys: Sequence[bytes],
        most: int,
        timeout: float,
        local: bool,
    ) -> None:
        """Let requests with one of these keys through, so many at a time, for so many seconds.

        ``local``: it listens to this machine only. Without keys, a name that leads here is refused
        then: a page of anybody, in a browser on this machine, could have it lead here (DNS
        rebinding), and would read what it likes.
        """
        self._app, self._batcher, self._metrics = app, batcher, metrics
        #: Others may hold anything: they are neither logged nor counted each by itself.
        self._paths = app.routes.keys()
        self._keys, self._most, self._timeout = keys, most, timeout
        self._checks_host = local and not keys
        self._in_progress = 0
        self.closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever goes wrong."""
        began, status = time.perf_counter(), GONE
        number = _request_id(dict(scope["headers"]).get(b"x-request-id", b""))

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [*_HEADERS, (b"x-request-id", number.encode())]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        scope["state"] = facts = dict[str, Any]()
        # uvicorn has answered a malformed body by then, and drops a second answer.
        await asyncio.sleep(0)
        try:
            await self._pass(scope, receive, sending)
        except TimeoutError:
            # Before anything of it was counted, its body was being read.
            late, limit = 504 if facts else 408, f"{self._timeout:g} s (--timeout)"
            error = RequestError(late, "timeout", f"this took longer than {limit}.")
            await error.response()(scope, receive, sending)
        except Exception as error:
            told = refusal(error)
            if told.code == "internal_error":
                request_log.error("%s id=%s", _place(error), number)
            if status == GONE:  # nothing was sent yet
                await told.response()(scope, receive, sending)
        seconds = time.perf_counter() - began
        route = scope["path"] if scope["path"] in self._paths else "other"
        self._metrics.on_request(route, status, seconds)
        given = "".join(f" {name}={value}" for name, value in facts.items())
        request_log.info(
            "%s %s %d%s ms=%.1f id=%s", scope["method"], route, status, given, 1e3 * seconds, number
        )

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if {b"transfer-encoding", b"content-length"} <= headers.keys():
            # A proxy that reads the other one sees the requests of this connection end elsewhere.
            raise RequestError(
                400,
                "two_lengths",
                "the request has both Transfer-Encoding and Content-Length; send one of them.",
                headers={"Connection": "close"},
            )
        if self._checks_host:
            _check_host(headers.get(b"host", b"").decode("latin-1"))
        if scope["path"] not in _OPEN:
            self._check_key(headers.get(b"authorization", b""))
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
            raise ClosedError
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


def _check_host(given: str) -> None:
    try:
        name = urlsplit(f"//{given}").hostname or ""
        if name != "localhost":
            ipaddress.ip_address(name)
    except ValueError:
        raise RequestError(
            403,
            "host",
            "this server has no keys and answers as localhost or by an address, not as "
            f"{brief(given)}. Give it keys: --api-key-file",
        ) from None


def _request_id(given: bytes) -> str:
    """Return the id that a client or a proxy gave, if it is one, or a new one."""
    if re.fullmatch(rb"[\w.:-]{1,64}", given, re.ASCII):
        return given.decode()
    return secrets.token_hex(8)


def _place(error: Exception) -> str:
    """Return the kind of an error and where it was raised, without its message."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {last.filename}:{last.lineno}"
