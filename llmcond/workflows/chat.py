"""A client of servers with OpenAI's chat protocol."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import openai

from llmcond.base.errors import shortened_repr
from llmcond.base.output import log
from llmcond.base.server_client import BrokenError, RefusedError, ServerClient
from llmcond.prompts.questions import Answer, ChatSettings, Example, QuestionTemplate

#: Shortest key that is removed from answers. A local server may have a key such as ``none``, which
#: is also an ordinary word.
_LENGTH_OF_SECRETS = 16


class ChatClient(ServerClient):
    """A connection to a server, for concurrent questions in one event loop."""

    def __init__(self, settings: ChatSettings) -> None:
        super().__init__(
            settings.endpoint,
            settings.model,
            timeout=settings.timeout,
            retries=settings.retries,
            per_minute=settings.per_minute,
        )
        self._fields, self.flag = settings.request, settings.flag
        #: Whether requests contain a JSON schema of the answer; None: there was no question yet.
        self._structured: bool | None = None

    async def ask(
        self,
        template: QuestionTemplate,
        values: Mapping[str, str],
        seed: int,
        examples: Sequence[Example] = (),
    ) -> Answer:
        """Ask a question, and return the model's answer.

        The first question that the server accepts decides whether requests contain a JSON schema
        of the answer, so the caller sends one at a time while ``is_open``. If the server rejects
        the schema, or fails because of it, later requests do not contain one.

        Args:
            template: template of the question.
            values: texts for the template's placeholders.
            seed: random seed of the request.
            examples: answered questions that precede it.

        Raises:
            UserError: the server rejects the key or the model.
            LlmcondError: the server fails, after all retries.
        """
        messages, reason = template.messages(values, examples), None
        try:
            if self._structured is not None:
                return await self._request(messages, template, seed, self._structured)
            try:
                answer, self._structured = await self._request(messages, template, seed, True), True
                return answer
            except (RefusedError, BrokenError) as error:
                reason = shortened_repr(str(error), 200)
            answer = await self._request(messages, template, seed, False)
        except RefusedError as error:
            # Only this question is rejected, for example because it is too long. A text that
            # begins with "<" is not parsed as an answer.
            return Answer(f"<{error}>", 0, 0, 0.0)
        self._structured = False
        log.info(
            "the server does not support a schema of answers, so they are read from plain text: "
            f"{reason}"
        )
        return answer

    @property
    def is_open(self) -> bool:
        """Whether no answer has decided yet on the form of requests."""
        return self._structured is None

    async def _request(
        self,
        messages: list[dict[str, str]],
        template: QuestionTemplate,
        seed: int,
        structured: bool,
    ) -> Answer:
        body = dict(self._fields)
        if structured:
            form = {"name": template.kind, "strict": True, "schema": template.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        began = time.monotonic()
        try:
            completion: Any = await self._client.chat.completions.create(
                model=self.model,
                messages=messages,  # type: ignore[arg-type]
                seed=seed,
                extra_body=body,
            )
        except openai.OpenAIError as error:
            # The client's error contains the request.
            raise await self.translate(error) from None
        except (ValueError, RecursionError):
            completion = "a text that is not JSON"
        seconds = time.monotonic() - began
        try:
            text = str(completion.choices[0].message.content or "")
        except (AttributeError, LookupError, TypeError):
            raise self.protocol_error(completion) from None
        if len(self._key or "") >= _LENGTH_OF_SECRETS:
            text = text.replace(str(self._key), "***")
        text = text.encode("utf-8", "replace").decode("utf-8")  # Replaces lone surrogates.
        usage = getattr(completion, "usage", None)
        counts = (getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens"))
        tokens_in, tokens_out = (count if isinstance(count, int) else None for count in counts)
        return Answer(text, tokens_in, tokens_out, round(seconds, 3))
