"""A client of servers with OpenAI's protocol, based on the ``openai`` package.

The ``openai`` client retries temporary errors (429, 408, 409, 5xx, lost connections, time-outs)
with backoff, or after the time that the server names (``Retry-After``, up to two minutes). All
other errors are reported in one line. The key is only in the environment, and is removed from all
messages and answers.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx2
import numpy as np
import openai
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.errors import (
    LlmcondError,
    UserError,
    did_you_mean,
    format_list,
    shortened_repr,
)
from llmcond.base.system import API_KEY_VARIABLE, read_api_key

#: Largest answer in bytes. Chat models write a few kilobytes, and 32 vectors of 8,192 numbers have
#: about 5 MiB.
MAX_BYTES = 16 * 2**20
#: Keys of hosted servers, some of which repeat a part of the key in their messages.
_LIKE_A_KEY = re.compile(r"\bsk-[\w*.…-]{4,}")
#: Errors of a call: those of the client, and those of JSON that is invalid or nested without end.
CALL_ERRORS = (openai.OpenAIError, ValueError, RecursionError)
#: Reasons of a status 5xx that a retry would not change: llama.cpp answers so to a long text.
_PERMANENT = re.compile(rb"too large to process|larger than the max context|input is too l")
_CONTENT_TOO_LARGE = 413
#: Seconds for the first connection to a server.
_CONNECT = 5.0


class BoundedTransport(httpx2.AsyncBaseTransport):
    """A transport with a deadline for the whole request, and a limit on the size of the answer.

    The time-outs of HTTP clients apply to each read, so that a server that sends one byte per
    second would never exceed them. Redirects are not followed, and answers are not decompressed.
    """

    def __init__(self) -> None:
        self._client = httpx2.AsyncClient(follow_redirects=False)

    @override
    async def aclose(self) -> None:
        await self._client.aclose()

    @override
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        # Raises a TimeoutException if the answer is incomplete at the deadline, and an LlmcondError
        # if it is too large or compressed.
        seconds = request.extensions["timeout"]["read"]
        request.headers["Accept-Encoding"] = "identity"
        content = bytearray()
        try:
            async with asyncio.timeout(seconds):
                response = await self._client.send(request, stream=True)
                try:
                    encoding = response.headers.get("Content-Encoding", "identity")
                    if encoding != "identity":
                        raise LlmcondError(
                            f"{request.url.host} compresses its answer ({encoding}), although the "
                            "request does not allow that."
                        )
                    async for part in response.aiter_raw():
                        content += part
                        if len(content) > MAX_BYTES:
                            raise LlmcondError(
                                f"an answer of {request.url.host} has more than {MAX_BYTES:,} "
                                "bytes, more than llmcond reads."
                            )
                finally:
                    await response.aclose()
        except TimeoutError:
            message = f"no complete answer in {seconds:g} s"
            raise httpx2.ReadTimeout(message, request=request) from None
        failed = response.status_code
        if response.is_server_error and _PERMANENT.search(content):
            failed = _CONTENT_TOO_LARGE
        return httpx2.Response(failed, headers=response.headers, content=bytes(content))


class ServerClient:
    """A connection to a server, for concurrent requests in one event loop.

    Attributes:
        flag: flag of the command that names the address.
        question: what a request is, in messages.
        protocol: which of OpenAI's protocols is used.
        resumes: what becomes of the work done so far, as a sentence.
    """

    flag = "--endpoint"
    question = "question"
    protocol = "chat"
    resumes = "All answers so far are stored, and the same command resumes."

    def __init__(
        self,
        endpoint: str,
        model: str,
        *,
        timeout: float,
        retries: int,
        per_minute: float | None = None,
    ) -> None:
        """Create a client; nothing is sent.

        Args:
            endpoint: address of the server, such as ``http://localhost:8000/v1``.
            model: name of the model on the server.
            timeout: seconds after which a request is cancelled and retried.
            retries: number of retries per request.
            per_minute: largest number of requests per minute, including retries; None: no limit.

        Raises:
            UserError: the address is invalid.
        """
        self.endpoint, self.model, self._key = endpoint, model, read_api_key()
        self._timeout, self._retries = timeout, retries
        self._per_minute, self._next_turn = per_minute, 0.0
        try:
            self._client = openai.AsyncOpenAI(
                base_url=endpoint,
                api_key=self._key or "none",
                timeout=timeout,
                max_retries=retries,
                http_client=openai.DefaultAsyncHttpxClient(
                    # The hook is called before every request, so the limit applies to retries too.
                    event_hooks={"request": [self._wait_for_turn]},
                    transport=BoundedTransport(),
                    follow_redirects=False,
                ),
            )
        except httpx2.InvalidURL as error:
            raise UserError(
                f"{self.flag} is {shortened_repr(endpoint)}: {error}. Correct it."
            ) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _wait_for_turn(self, _: object) -> None:
        """Wait to limit the number of requests per minute."""
        now = time.monotonic()
        start = max(now, self._next_turn)
        self._next_turn = start + 60 / (self._per_minute or float("inf"))
        await asyncio.sleep(start - now)

    async def check_connection(self) -> None:
        """Check that there is a server, because retries would not help otherwise.

        Raises:
            UserError: the connection is refused.
        """
        try:
            await self._list_models()
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, httpx2.ConnectError | httpx2.ConnectTimeout):
                reason = self.redact(str(error.__cause__)) or f"no connection in {_CONNECT:g} s"
                raise UserError(
                    f"no server answers at {self.endpoint}: {reason.rstrip('.')}. Start it, or "
                    f"correct {self.flag}."
                ) from None
        except CALL_ERRORS:
            return  # A server that does not list its models may answer anything.

    async def _list_models(self) -> Any:
        timeout = httpx2.Timeout(10, connect=_CONNECT)
        return await self._client.with_options(max_retries=0, timeout=timeout).models.list()

    async def model_names(self) -> list[str]:
        """Return the names of the server's models; empty if it lists none."""
        try:
            return [str(model.id) for model in (await self._list_models()).data or ()]
        except (*CALL_ERRORS, AttributeError):
            return []

    async def translate(self, error: Any) -> LlmcondError:
        """Convert an error of the ``openai`` client, and remove the key."""
        message = self.redact(str(getattr(error, "message", None) or error))
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            key = f"the key in {API_KEY_VARIABLE}"
            cause = key if self._key else f"{self.question}s without a key; set {API_KEY_VARIABLE}"
            return UserError(f"{self.endpoint} rejects {cause}: {message}")
        if isinstance(error, openai.NotFoundError):
            return UserError(
                f"{self.endpoint} has no model {self.model!r}, or no {self.protocol} protocol at "
                f"this address, which often ends in /v1. {await self._suggest_models()}{message}"
            )
        response = getattr(error, "response", None)
        if isinstance(error, openai.BadRequestError | openai.UnprocessableEntityError) or (
            response is not None and response.status_code == _CONTENT_TOO_LARGE
        ):
            return RefusedError(f"{self.endpoint} rejects the {self.question}: {message}")
        headers = {} if response is None else response.headers
        if response is not None and response.is_redirect:
            target = self.redact(shortened_repr(headers.get("location", ""), 200))
            return UserError(
                f"{self.endpoint} redirects to {target}. Redirects are not followed, so that texts "
                f"are not sent to another address. Name it with {self.flag} if you trust it."
            )
        wait = headers.get("retry-after", "")
        waits = f"It asks to wait {self.redact(wait)} s. " if wait.isdigit() else ""
        is_broken = isinstance(error, openai.InternalServerError)
        return (BrokenError if is_broken else LlmcondError)(
            f"{self.endpoint} fails ({self._effort}): {message.rstrip('.')}. {waits}{self.resumes}"
        )

    @property
    def _effort(self) -> str:
        return f"--retries {self._retries}, --timeout {self._timeout:g}"

    async def _suggest_models(self) -> str:
        """Return a sentence about similar or all models; empty if the server lists none."""
        names = await self.model_names()
        suggestion = did_you_mean(self.model, names)
        return f"{suggestion or 'It has ' + format_list(names, 5) + '.'} " if names else ""

    def protocol_error(self, answer: object) -> LlmcondError:
        """Return the error for an answer that may be a web page, a list or an error."""
        hint = "" if self.endpoint.endswith("/v1") else "Its address may have to end in /v1. "
        return LlmcondError(
            f"{self.endpoint} does not answer in the {self.protocol} protocol: "
            f"{self.redact(shortened_repr(str(answer), 200))}. {hint}{self.resumes}"
        )

    def redact(self, text: str) -> str:
        """Replace the key, and everything that looks like one, in a text."""
        without_key = text.replace(self._key, "***") if self._key else text
        return _LIKE_A_KEY.sub("***", without_key)


class EmbeddingAnswer(NamedTuple):
    """The answer to a request for embeddings.

    Attributes:
        vectors: (n, dim) vectors, in the order of the texts.
        n_tokens: number of tokens of all texts; 0 if the server does not count them.
        n_truncated: number of texts that the server cut, which ``llmcond serve`` counts.
    """

    vectors: NDArray[np.float32]
    n_tokens: int
    n_truncated: int


class EmbeddingClient(ServerClient):
    """A connection to a server that embeds texts."""

    flag = "--model"
    question = "text"
    protocol = "embeddings"
    resumes = "Vectors that are stored already are not computed again."

    @property
    @override
    def _effort(self) -> str:
        return f"after {self._retries} retries"

    async def embed(self, texts: Sequence[str]) -> EmbeddingAnswer:
        """Embed texts in one request.

        Raises:
            RefusedError: the server rejects the request, for example because it is too large.
            UserError: the server rejects the key or the model.
            LlmcondError: the server fails, or its answer is not one finite vector for each text.
        """
        try:
            # The client would create an object for each number, so the answer is parsed by json.
            response = await self._client.embeddings.with_raw_response.create(
                model=self.model, input=list(texts), encoding_format="float"
            )
        except openai.OpenAIError as error:
            # The client's error contains the request.
            raise await self.translate(error) from None
        try:
            answer = json.loads(response.content)
            order = [int(entry["index"]) for entry in answer["data"]]
            rows = [entry["embedding"] for entry in answer["data"]]
            counts = (answer.get("usage") or {}).get("prompt_tokens"), answer.get("truncated")
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
            raise self.protocol_error(response.text) from None
        if sorted(order) != list(range(len(texts))):
            raise LlmcondError(
                f"{self.endpoint} returned {len(order)} vectors for {len(texts)} texts. "
                f"{self.resumes}"
            )
        try:
            vectors = np.array(rows, dtype=np.float32)  # null becomes NaN
        except (TypeError, ValueError):
            vectors = np.empty(0, dtype=np.float32)
        if vectors.ndim != 2 or not vectors.shape[1]:
            raise UserError(
                f"{self.endpoint} did not return one vector for each text, but for example the "
                "vectors of tokens. Start it with a pooling (llama-server --pooling mean)."
            )
        vectors = vectors[np.argsort(order)]
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise LlmcondError(
                f"{self.endpoint} returned NaN or infinity for {shortened_repr(texts[bad[0]])}. "
                "Start the server with a number type of a larger range (bfloat16 or float32)."
            )
        n_tokens, n_truncated = (count if isinstance(count, int) else 0 for count in counts)
        return EmbeddingAnswer(vectors, n_tokens, n_truncated)


class RefusedError(UserError):
    """The server rejects the request as invalid."""


class BrokenError(LlmcondError):
    """The server answers with 5xx, as some do for a schema that they do not support."""
