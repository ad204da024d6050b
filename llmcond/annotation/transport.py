"""HTTP requests that end: each has a deadline for all of it, and its answer a limit of bytes.

The time-outs of HTTP clients count from one read to the next, so that a byte a second passes them.
"""

from __future__ import annotations

import asyncio
from threading import Thread

import httpx2

from llmcond.errors import LlmcondError

#: Bytes of an answer. Chat models write some kilobytes.
MAX_BYTES = 8 * 2**20


class BoundedTransport(httpx2.BaseTransport):
    """Sends requests of any thread through an event loop of its own, which can cancel them.

    The deadline is a request's read time-out. Redirects are not followed, and no answer is
    decompressed.
    """

    def __init__(self) -> None:
        self._client = httpx2.AsyncClient(follow_redirects=False)
        self._loop = asyncio.new_event_loop()
        # A daemon thread, so that Ctrl-C does not wait for a slow server.
        Thread(target=self._loop.run_forever, daemon=True).start()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the whole answer to a request.

        Raises:
            TimeoutException: the answer was not complete in time.
            LlmcondError: the answer is larger than any answer of a chat model, or compressed.
        """
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
                raise LlmcondError(f"{request.url.host} answers compressed ({encoding}) unasked.")
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > MAX_BYTES:
                    raise LlmcondError(
                        f"an answer of {request.url.host} has more than {MAX_BYTES:,} bytes, which "
                        "no chat model writes."
                    )
        finally:
            await response.aclose()
        return httpx2.Response(
            response.status_code, headers=response.headers, content=bytes(content)
        )
