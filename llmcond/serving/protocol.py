"""HTTP/1.1 with limits on what a client can make the server wait for, before any request is read.

uvicorn limits neither the size of the headers nor the time in which they arrive.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llmcond.serving.errors import RequestError

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
