"""A model behind HTTP: limits of connections, checks of every request, and the running server."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import re
import secrets
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llmcond.base.arrays import Array, read_ranges
from llmcond.base.errors import UserError, shortened_repr
from llmcond.base.text import ignored_by
from llmcond.data.guides import read_guide
from llmcond.runs.cross import load_similarity_model
from llmcond.runs.embedder import Embedder
from llmcond.runs.open import resolve_run
from llmcond.serving.app import Endpoints, Metrics
from llmcond.serving.model import Batcher, ClosedError, ServedModel
from llmcond.serving.requests import CLIENT_CLOSED, RequestError, to_request_error
from llmcond.serving.settings import ServedSource, ServerSettings

if TYPE_CHECKING:
    from llmcond.search import Index

#: Largest number of bytes of request line and headers, and of anything else that is not a body:
#: empty lines before a request, trailers, and extensions of a chunk.
MAX_HEAD_BYTES = 65_536
#: Seconds in which request line and headers must arrive, and in which a client must close the
#: connection or send the next request if its body was not read.
HEAD_SECONDS = 10.0
#: Seconds for which a client may stop reading its answer.
STALL_SECONDS = 60.0


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol for one connection, with limits."""

    #: Number of bytes since the last complete head or part of a body.
    _head_bytes = 0
    #: Whether the last bytes completed a head, or contained a part of a body.
    _advanced = False
    #: Timers of HEAD_SECONDS and of STALL_SECONDS.
    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late = self.loop.call_later(HEAD_SECONDS, self._close_late)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), MAX_HEAD_BYTES):
            self._advanced = False
            part = data[start : start + MAX_HEAD_BYTES]
            super().data_received(part)
            # A head that begins in the same part as the end of a body is counted from the next
            # part on.
            self._head_bytes = 0 if self._advanced else self._head_bytes + len(part)
            if self.transport.is_closing():
                return
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    RequestError(
                        431,
                        "headers_too_large",
                        f"the request line and the headers are larger than {MAX_HEAD_BYTES:,} "
                        "bytes. Send fewer or shorter headers; texts belong in the body.",
                    )
                )
                return
        # Started after the bytes are parsed, because most requests arrive in one part.
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._late is None and not is_answering:
            self._late = self.loop.call_later(HEAD_SECONDS, self._close_late)

    @override
    def on_headers_complete(self) -> None:
        self._advanced = True
        if self._late is not None:
            self._late.cancel()
            self._late = None
        super().on_headers_complete()

    @override
    def on_body(self, body: bytes) -> None:
        self._advanced = True
        super().on_body(body)

    @override
    def pause_writing(self) -> None:
        self._stalled = self.loop.call_later(STALL_SECONDS, self.transport.abort)
        super().pause_writing()

    @override
    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        super().resume_writing()

    @override
    def send_400_response(self, msg: str) -> None:
        message = (
            "the request is not valid HTTP. Check its request line, its headers and the sizes of "
            "its chunks."
        )
        self._refuse(RequestError(400, "invalid_http", message))

    def _close_late(self) -> None:
        if self._head_bytes and not self.transport.is_closing():
            message = (
                f"the request line and the headers took longer than {HEAD_SECONDS:g} s. Send them "
                "at once."
            )
            self._refuse(RequestError(408, "headers_too_slow", message))
        self.transport.close()

    def _refuse(self, error: RequestError) -> None:
        """Answer with an error, and close the connection."""
        response = error.response()
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
        lines += [b"%b: %b" % header for header in response.raw_headers]
        lines += [b"connection: close", b"", bytes(response.body)]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()


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
        settings: ServerSettings,
    ) -> None:
        """Wrap the endpoints.

        Args:
            app: the endpoints.
            batcher: the queue in front of the model.
            metrics: the server's metrics.
            keys: valid API keys; without any, no key is required.
            settings: limits, and the numeric address. If only this machine can reach it, and there
                are no keys, requests under any host name but localhost are rejected: otherwise a
                website that is open in a browser on this machine could let its own name resolve to
                this server (DNS rebinding), and read whatever the server returns.
        """
        self.app, self._batcher, self._metrics = app, batcher, metrics
        self._keys, self._timeout = keys, settings.timeout
        self._max_requests = settings.max_concurrent_requests
        self._checks_host = ipaddress.ip_address(settings.host).is_loopback and not keys
        self._in_progress = 0
        self.closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever fails."""
        start_time, status = time.perf_counter(), CLIENT_CLOSED
        # The id that a client or a proxy sent, if it is valid.
        request_id = dict(scope["headers"]).get(b"x-request-id", b"")
        if not re.fullmatch(rb"[\w.:-]{1,64}", request_id, re.ASCII):
            request_id = secrets.token_hex(8).encode()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra_headers = [*_HEADERS, (b"x-request-id", request_id)]
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
                # The message may contain texts.
                *_, frame = traceback.extract_tb(error.__traceback__)
                where = f"{type(error).__name__} in {frame.filename}:{frame.lineno}"
                request_log.error("%s id=%s", where, request_id.decode())
            if status == CLIENT_CLOSED:  # nothing has been sent yet
                await reported.response()(scope, receive, send_with_id)
        seconds = time.perf_counter() - start_time
        known_route = self.app.find_route(scope["path"])
        # Other paths may contain anything.
        route = "other" if known_route is None else known_route.path
        self._metrics.on_request(route, status, seconds)
        details = "".join(f" {name}={value}" for name, value in facts.items())
        request_log.info(
            f"{scope['method']} {route} {status}{details} ms={1e3 * seconds:.1f} "
            f"id={request_id.decode()}"
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


#: Forward passes per batch. Inputs are sorted by length across the passes, which saves padding.
_PASSES = 2


def load_model(served: ServedSource) -> ServedModel:
    """Load the model, and the index if there is one; raises the errors of ``serve``."""
    index, condition, guide = served.index, served.condition, served.guide
    if index is not None:
        opened_index = _open_index(served, index)
        if ignored_by(condition):
            opened_index.prepare([condition])  # type: ignore[list-item]  # it is not None
        embedder = opened_index.embedder
        return ServedModel(embedder, condition, opened_index, _load_ranges(served, embedder))
    loaded = load_similarity_model(
        resolve_run(served.run, served.model, served.revision),
        served.head,
        served.prompt,
        served.device,
    )
    if isinstance(loaded, Embedder):
        loaded = replace(loaded, truncate_dim=served.truncate_dim)
        conditions = [] if condition is None else [condition]
        guides = [] if guide is None else read_guide(guide, None, conditions, closed=False)
        for labelled in guides:
            loaded = loaded.with_guide(labelled)
    elif any(value is not None for value in (served.truncate_dim, served.ranges, guide)):
        raise UserError(
            "--truncate-dim, --ranges and --guide are for embeddings, but a cross-encoder has "
            "none. Omit them, or choose an embedder."
        )
    return ServedModel(loaded, condition, ranges=_load_ranges(served, loaded))


def _open_index(served: ServedSource, folder: Path) -> Index:
    """Open the index of a folder, and check that its model and size are the named ones."""
    from llmcond.search import Index

    settings: dict[str, Any] = {"head": served.head, "prompt": served.prompt}
    if served.run is not None or served.model is not None:
        settings["run"] = resolve_run(served.run, served.model, served.revision)
    if any(settings.values()) and (folder / "index.json").exists():
        # Without texts, `build` only opens the index and checks that the model is the same.
        index = Index.build(folder, **settings, device=served.device)
    else:
        index = Index.open(folder, device=served.device)
    if served.truncate_dim not in (None, index.truncate_dim):
        raise UserError(
            f"--truncate-dim is {served.truncate_dim}, but {folder} was built with "
            f"{index.truncate_dim or 'all dimensions'}. Omit --truncate-dim."
        )
    return index


def _load_ranges(served: ServedSource, model: Any) -> Array | None:
    return None if served.ranges is None else read_ranges(served.ranges, model.dim)


class ModelServer(uvicorn.Server):
    """A server of one model.

    Attributes:
        model: the served model.
        gate: the application that checks every request.
    """

    def __init__(
        self, model: ServedModel, settings: ServerSettings, keys: Sequence[bytes] = ()
    ) -> None:
        """Encode one text to test the model, and set up the server.

        Raises:
            LlmcondError: if the model cannot encode.
        """
        self.model, metrics = model, Metrics(model)
        model.encode([model.ready_row()])
        tokens = settings.max_batch_tokens or _PASSES * model.encoder.engine.budget
        self._batcher = Batcher(model.encode, tokens, model.max_row_tokens, metrics.on_batch)
        metrics.watch(self._batcher)
        endpoints = Endpoints(model, self._batcher, metrics, settings, needs_key=bool(keys))
        self.gate = Gate(endpoints, self._batcher, metrics, keys, settings)
        app: ASGIApp = self.gate
        if settings.cors_origin:
            from starlette.middleware.cors import CORSMiddleware

            # Outside the gate, because a preflight request has no API key, and because a page can
            # only read an error that has the headers, too.
            app = CORSMiddleware(
                app,
                allow_origins=settings.cors_origin,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # OpenAI's client for browsers sends a dozen
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        # This server does not use the library that uvicorn advises to install.
        logging.getLogger("uvicorn.error").addFilter(
            lambda record: "WebSocket library" not in record.getMessage()
        )
        # The gate logs requests, because it knows what may be disclosed.
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                # By then, every accepted request has been answered or has timed out.
                timeout_graceful_shutdown=math.ceil(settings.timeout) + 1,
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests on the sockets until a signal arrives."""
        try:
            super().run(sockets)
        finally:
            self._batcher.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Reject new requests and finish accepted ones; at a second signal, only the batch."""
        # The base class also records the signal, to raise it again after the shutdown, which would
        # kill the process. This method does not.
        self.gate.closing = True
        self.force_exit = self.should_exit
        self.should_exit = True
