"""A client of servers with OpenAI's chat protocol, based on the ``openai`` package.

The ``openai`` client retries temporary errors (429, 408, 409, 5xx, lost connections, time-outs)
with backoff, or after the time that the server names (``Retry-After``, up to two minutes). All
other errors are reported in one line. The key is only in the environment, and is removed from all
messages and answers.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Any

import httpx2
import openai
from typing_extensions import override

from llmcond.base.errors import LlmcondError, UserError, did_you_mean, format_list, shortened_repr
from llmcond.base.output import log
from llmcond.prompts.questions import (
    API_KEY_VARIABLE,
    Answer,
    ChatSettings,
    QuestionTemplate,
    read_api_key,
)

#: Largest answer in bytes. Chat models write a few kilobytes.
MAX_BYTES = 8 * 2**20
#: Keys of hosted servers, some of which repeat a part of the key in their messages.
_LIKE_A_KEY = re.compile(r"\bsk-[\w*.…-]{4,}")
_RESUMES = "All answers so far are stored, and the same command resumes."
#: Errors of a call: those of the client, and those of JSON that is invalid or nested without end.
_CALL_ERRORS = (openai.OpenAIError, ValueError, RecursionError)


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
                                "bytes, which cannot be the answer of a chat model."
                            )
                finally:
                    await response.aclose()
        except TimeoutError:
            message = f"no complete answer in {seconds:g} s"
            raise httpx2.ReadTimeout(message, request=request) from None
        return httpx2.Response(
            response.status_code, headers=response.headers, content=bytes(content)
        )


class ChatClient:
    """A connection to a server, for concurrent questions in one event loop."""

    def __init__(self, settings: ChatSettings) -> None:
        self._settings, self._key = settings, read_api_key()
        try:
            self._client = openai.AsyncOpenAI(
                base_url=settings.endpoint,
                api_key=self._key or "none",
                timeout=settings.timeout,
                max_retries=settings.retries,
                http_client=openai.DefaultAsyncHttpxClient(
                    # The hook is called before every request, so the limit applies to retries too.
                    event_hooks={"request": [self._wait_for_turn]},
                    transport=BoundedTransport(),
                    follow_redirects=False,
                ),
            )
        except httpx2.InvalidURL as error:
            raise UserError(
                f"--endpoint is {shortened_repr(settings.endpoint)}: {error}. Correct it."
            ) from None
        self._next_turn = 0.0
        #: Whether requests contain a JSON schema of the answer; None: there was no question yet.
        self._structured: bool | None = None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _wait_for_turn(self, _: object) -> None:
        """Wait to limit the number of requests per minute."""
        now = time.monotonic()
        start = max(now, self._next_turn)
        self._next_turn = start + 60 / (self._settings.per_minute or float("inf"))
        await asyncio.sleep(start - now)

    async def check_connection(self) -> None:
        """Check that there is a server, because retries would not help otherwise.

        Raises:
            UserError: the connection is refused.
        """
        try:
            await self._list_models()
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, httpx2.ConnectError):
                raise UserError(
                    f"no server answers at {self._settings.endpoint}: "
                    f"{self._redact(str(error.__cause__))}. Start it, or correct --endpoint."
                ) from None
        except _CALL_ERRORS:
            return  # A server that does not list its models may answer anything.

    async def _list_models(self) -> Any:
        return await self._client.with_options(max_retries=0, timeout=10).models.list()

    async def ask(self, template: QuestionTemplate, values: Mapping[str, str], seed: int) -> Answer:
        """Ask a question, and return the model's answer.

        The first question, which the caller sends alone, decides whether requests contain a JSON
        schema of the answer. If the server rejects the schema, or fails because of it, later
        requests do not contain one.

        Args:
            template: template of the question.
            values: texts for the template's placeholders.
            seed: random seed of the request.

        Raises:
            UserError: the server rejects the key, the model or the request.
            LlmcondError: the server fails, after all retries.
        """
        if self._structured is not None:
            try:
                return await self._request(template, values, seed, self._structured)
            except _RefusedError as error:
                # Only this question is rejected, for example because it is too long.
                return Answer(str(error), None, None, 0.0)
        try:
            answer, self._structured = await self._request(template, values, seed, True), True
        except (_RefusedError, _BrokenError) as error:
            answer, self._structured = await self._request(template, values, seed, False), False
            log.info(
                "the server does not support a schema of answers, so they are read from plain "
                f"text: {shortened_repr(str(error), 200)}"
            )
        return answer

    async def _request(
        self, template: QuestionTemplate, values: Mapping[str, str], seed: int, structured: bool
    ) -> Answer:
        body = dict(self._settings.request)
        if structured:
            form = {"name": template.kind, "strict": True, "schema": template.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        began = time.monotonic()
        try:
            completion: Any = await self._client.chat.completions.create(
                model=self._settings.model,
                messages=template.messages(values),  # type: ignore[arg-type]
                seed=seed,
                extra_body=body,
            )
        except openai.OpenAIError as error:
            # The client's error contains the request.
            raise await self._translate(error) from None
        except (ValueError, RecursionError):
            completion = "a text that is not JSON"
        seconds = time.monotonic() - began
        try:
            text = str(completion.choices[0].message.content or "")
        except (AttributeError, LookupError, TypeError):  # It may be a web page, list or error.
            raise LlmcondError(
                f"{self._settings.endpoint} does not answer in the chat protocol: "
                f"{self._redact(shortened_repr(str(completion), 200))}. {_RESUMES}"
            ) from None
        text = text.replace(self._key or "\0", "***")
        text = text.encode("utf-8", "replace").decode("utf-8")  # Replaces lone surrogates.
        usage = getattr(completion, "usage", None)
        counts = (getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens"))
        tokens_in, tokens_out = (count if isinstance(count, int) else None for count in counts)
        return Answer(text, tokens_in, tokens_out, round(seconds, 3))

    async def _translate(self, error: Any) -> LlmcondError:
        """Convert an error of the ``openai`` client, and remove the key."""
        endpoint = self._settings.endpoint
        message = self._redact(str(getattr(error, "message", None) or error))
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            key = f"the key in {API_KEY_VARIABLE}"
            cause = key if self._key else f"questions without a key; set {API_KEY_VARIABLE}"
            return UserError(f"{endpoint} rejects {cause}: {message}")
        if isinstance(error, openai.NotFoundError):
            return UserError(
                f"{endpoint} has no model {self._settings.model!r}, or no chat protocol at this "
                f"address, which often ends in /v1. {await self._suggest_models()}{message}"
            )
        if isinstance(error, openai.BadRequestError | openai.UnprocessableEntityError):
            return _RefusedError(f"{endpoint} rejects the question: {message}")
        response = getattr(error, "response", None)
        headers = {} if response is None else response.headers
        if response is not None and response.is_redirect:
            target = self._redact(shortened_repr(headers.get("location", ""), 200))
            return UserError(
                f"{endpoint} redirects to {target}. Redirects are not followed, so that texts are "
                "not sent to another address. Name it with --endpoint if you trust it."
            )
        wait = headers.get("retry-after", "")
        waits = f"It asks to wait {self._redact(wait)} s. " if wait.isdigit() else ""
        is_broken = isinstance(error, openai.InternalServerError)
        return (_BrokenError if is_broken else LlmcondError)(
            f"{endpoint} fails (--retries {self._settings.retries}, --timeout "
            f"{self._settings.timeout:g}): {message.rstrip('.')}. {waits}{_RESUMES}"
        )

    async def _suggest_models(self) -> str:
        """Return a sentence about similar or all models; empty if the server lists none."""
        try:
            names = [str(model.id) for model in (await self._list_models()).data or ()]
        except (*_CALL_ERRORS, AttributeError):
            return ""
        suggestion = did_you_mean(self._settings.model, names)
        return f"{suggestion or 'It has ' + format_list(names, 5) + '.'} " if names else ""

    def _redact(self, text: str) -> str:
        """Replace the key, and everything that looks like one, in a text."""
        without_key = text.replace(self._key, "***") if self._key else text
        return _LIKE_A_KEY.sub("***", without_key)


class _RefusedError(UserError):
    """The server rejects the question as invalid."""


class _BrokenError(LlmcondError):
    """The server answers with 5xx, as some do for a schema that they do not support."""
