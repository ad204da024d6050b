"""HTTP requests with a deadline for the whole request, and a limit on the size of the answer.

The time-outs of HTTP clients apply to each read, so that a server that sends one byte per second
would never exceed them.
"""

from __future__ import annotations

import asyncio
from threading import Thread

import httpx2
from typing_extensions import override

from llmcond.errors import LlmcondError

#: Largest answer in bytes. Chat models write a few kilobytes.
MAX_BYTES = 8 * 2**20


class BoundedTransport(httpx2.BaseTransport):
    """A transport that sends the requests of all threads through an event loop.

    Unlike blocking requests, those of an event loop can be cancelled at a deadline, which is the
    read time-out of the request. Redirects are not followed, and answers are not decompressed.
    """

    def __init__(self) -> None:
        self._client = httpx2.AsyncClient(follow_redirects=False)
        self._loop, self._closed = asyncio.new_event_loop(), asyncio.Event()
        # A daemon thread, so that Ctrl-C does not wait for a slow server.
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        # Afterwards, unfinished requests are cancelled.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._wait())

    async def _wait(self) -> None:
        async with self._client:
            await self._closed.wait()

    @override
    def close(self) -> None:
        """Close the connections, and end the thread."""
        self._loop.call_soon_threadsafe(self._closed.set)

    @override
    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        # Raises a TimeoutException if the answer is incomplete at the deadline, and an LlmcondError
        # if it is too large or compressed.
        return asyncio.run_coroutine_threadsafe(self._answer(request), self._loop).result()

    async def _answer(self, request: httpx2.Request) -> httpx2.Response:
        seconds = request.extensions["timeout"]["read"]
        try:
            async with asyncio.timeout(seconds):
                return await self._read(request)
        except TimeoutError:
            message = f"no complete answer in {seconds:g} s"
            raise httpx2.ReadTimeout(message, request=request) from None

    async def _read(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["Accept-Encoding"] = "identity"
        response = await self._client.send(request, stream=True)
        try:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                raise LlmcondError(
                    f"{request.url.host} compresses its answer ({encoding}), although the request "
                    "does not allow that."
                )
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > MAX_BYTES:
                    raise LlmcondError(
                        f"an answer of {request.url.host} has more than {MAX_BYTES:,} bytes, which "
                        "cannot be the answer of a chat model."
                    )
        finally:
            await response.aclose()
        return httpx2.Response(
            response.status_code, headers=response.headers, content=bytes(content)
        )
