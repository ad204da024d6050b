"""A client of servers with OpenAI's chat protocol, based on the ``openai`` package.

The ``openai`` client retries temporary errors (429, 408, 409, 5xx, lost connections, time-outs)
with backoff, or after the time that the server names (``Retry-After``, up to two minutes). All
other errors are reported in one line. The key is only in the environment, and is removed from all
messages and answers.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit

from llmcond.annotation.template import QuestionTemplate
from llmcond.errors import (
    LlmcondError,
    UserError,
    did_you_mean,
    format_list,
    install_command,
    shortened_repr,
)
from llmcond.log import log

API_KEY_VARIABLE = "OPENAI_API_KEY"
#: Keys of hosted servers, some of which repeat a part of the key in their messages.
_LIKE_A_KEY = re.compile(r"\bsk-[\w*.…-]{4,}")
_RESUMES = "All answers so far are stored, and the same command resumes."
_LOCAL = ("localhost", "127.0.0.1", "::1")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a model.

    Attributes:
        text: text of the answer, unchanged; empty if there was none.
        tokens_in, tokens_out: numbers of tokens that the server counted; None if it did not.
        seconds: time from the question to the answer, including retries.
    """

    text: str
    tokens_in: int | None
    tokens_out: int | None
    seconds: float


@dataclass(frozen=True)
class ChatSettings:
    """Settings of the server, the model and the requests.

    Attributes:
        endpoint: address of the server, such as ``http://localhost:8000/v1``.
        model: name of the model on the server.
        request: other fields of every request, such as ``temperature``.
        timeout: seconds after which a request is cancelled and retried.
        retries: number of retries per request.
        per_minute: largest number of requests per minute, including retries; None: no limit.
    """

    endpoint: str
    model: str
    request: Mapping[str, Any]
    timeout: float = 60.0
    retries: int = 6
    per_minute: float | None = None

    def check(self) -> None:
        """Check the settings before any request.

        Raises:
            UserError: a setting is invalid.
        """
        try:
            parts = urlsplit(self.endpoint if _is_printable(self.endpoint) else "")
            secret = parts.username is not None or parts.password is not None or bool(parts.query)
            _ = parts.port  # a number that is no port raises an error
        except ValueError:
            parts, secret = urlsplit(""), False
        if secret:
            raise UserError(
                "--endpoint contains a user name, a password or a query, which messages would "
                f"show. Leave them out; the key is read from {API_KEY_VARIABLE}."
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"--endpoint is {shortened_repr(self.endpoint)}; expected an address such as "
                "http://localhost:8000/v1."
            )
        reserved = {"model", "messages", "seed", "response_format", "stream", "n"}
        conflicts = reserved & set(self.request)
        if conflicts:
            raise UserError(
                f"--request has {sorted(conflicts)[0]!r}, which llmcond sets itself. Leave it out."
            )
        try:
            json.dumps(self.request, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"--request cannot be sent as JSON: {error}. Correct it.") from None
        key = _read_api_key()
        if not (key.isascii() and _is_printable(key)):
            raise UserError(
                f"{API_KEY_VARIABLE} is no key, because an HTTP header cannot contain it: it has a "
                "space, a line break or a character outside of ASCII. Copy the key again."
            )
        if parts.scheme == "http" and parts.hostname not in _LOCAL and key:
            log.warning(
                f"{API_KEY_VARIABLE} is sent to {parts.hostname} unencrypted; use https to "
                "protect it."
            )


class ChatClient:
    """A connection to a server, which several threads may use concurrently.

    Raises:
        UserError: the ``openai`` client is not installed.
    """

    def __init__(self, settings: ChatSettings) -> None:
        try:
            import httpx2
            import openai

            from llmcond.annotation.transport import BoundedTransport
        except ImportError as error:
            raise UserError(
                "rating with a language model needs the openai client: "
                f"{install_command('annotate')}."
            ) from error
        self._errors, self._settings = openai, settings
        self._key = _read_api_key()
        # The hook is called before every request, so that the limit applies to retries too.
        hooks: dict[str, list[Callable[..., Any]]] = {
            "request": [_RateLimiter(settings.per_minute)]
        }
        try:
            self._client = openai.OpenAI(
                base_url=settings.endpoint,
                api_key=self._key or "none",
                timeout=settings.timeout,
                max_retries=settings.retries,
                http_client=openai.DefaultHttpxClient(
                    event_hooks=hooks, transport=BoundedTransport(), follow_redirects=False
                ),
            )
        except httpx2.InvalidURL as error:
            raise UserError(
                f"--endpoint is {shortened_repr(settings.endpoint)}: {error}. Correct it."
            ) from None
        self._structured: bool | None = None
        self._failure: LlmcondError | None = None
        self._first_question = Lock()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def check_connection(self) -> None:
        """Check that there is a server, because retries would not help otherwise.

        Raises:
            UserError: the connection is refused.
        """
        try:
            self._list_models()
        except self._errors.APIConnectionError as error:
            # The class is compared by name, because the client chooses the HTTP library.
            if type(error.__cause__).__name__ == "ConnectError":
                raise UserError(
                    f"no server answers at {self._settings.endpoint}: "
                    f"{self._redact(str(error.__cause__))}. Start it, or correct --endpoint."
                ) from None
        except (self._errors.OpenAIError, ValueError, RecursionError):
            return  # A server that does not list its models may answer anything.

    def _list_models(self) -> Any:
        return self._client.with_options(max_retries=0, timeout=10).models.list()

    def ask(self, template: QuestionTemplate, values: Mapping[str, str], seed: int) -> Answer:
        """Ask a question, and return the model's answer.

        The first question decides whether requests contain a JSON schema of the answer. If the
        server rejects the schema, or fails because of it, later requests do not contain one.

        Args:
            template: template of the question.
            values: texts for the template's placeholders.
            seed: random seed of the request.

        Raises:
            UserError: the server rejects the key, the model or the request.
            LlmcondError: the server fails, after all retries.
        """
        with self._first_question:
            if self._failure is not None:  # The first question failed while others were waiting.
                raise self._failure
            if self._structured is None:
                return self._ask_first(template, values, seed)
        try:
            return self._request(template, values, seed, self._structured)
        except _RefusedError as error:
            # Only this question is rejected, for example because it is too long.
            return Answer(str(error), None, None, 0.0)

    def _ask_first(
        self, template: QuestionTemplate, values: Mapping[str, str], seed: int
    ) -> Answer:
        try:
            try:
                answer, structured = self._request(template, values, seed, True), True
            except (_RefusedError, _BrokenError) as schema_error:
                answer, structured = self._request(template, values, seed, False), False
                log.info(
                    "the server does not support a schema of answers, so they are read from plain "
                    f"text: {shortened_repr(str(schema_error), 200)}"
                )
        except LlmcondError as error:
            self._failure = error
            raise
        self._structured = structured
        return answer

    def _request(
        self, template: QuestionTemplate, values: Mapping[str, str], seed: int, structured: bool
    ) -> Answer:
        form = {"name": template.kind, "strict": True, "schema": template.schema}
        body = dict(self._settings.request)
        if structured:
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        began = time.monotonic()
        try:
            completion: Any = self._client.chat.completions.create(
                model=self._settings.model,
                messages=template.messages(values),  # type: ignore[arg-type]
                seed=seed,
                extra_body=body,
            )
        except self._errors.OpenAIError as error:
            raise self._translate(error) from None  # The client's error contains the request.
        except (ValueError, RecursionError):  # The JSON is invalid, or nested without end.
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
        return Answer(text, *_count_tokens(completion), round(seconds, 3))

    def _translate(self, error: Any) -> LlmcondError:
        """Convert an error of the ``openai`` client, and remove the key."""
        endpoint, errors = self._settings.endpoint, self._errors
        message = self._redact(str(getattr(error, "message", None) or error))
        if isinstance(error, errors.AuthenticationError | errors.PermissionDeniedError):
            cause = (
                f"the key in {API_KEY_VARIABLE}"
                if self._key
                else f"questions without a key; set {API_KEY_VARIABLE}"
            )
            return UserError(f"{endpoint} rejects {cause}: {message}")
        if isinstance(error, errors.NotFoundError):
            return UserError(
                f"{endpoint} has no model {self._settings.model!r}, or no chat protocol at this "
                f"address, which often ends in /v1. {self._suggest_models()}{message}"
            )
        if isinstance(error, errors.BadRequestError | errors.UnprocessableEntityError):
            return _RefusedError(f"{endpoint} rejects the question: {message}")
        response = getattr(error, "response", None)
        if response is not None and response.is_redirect:
            target = self._redact(shortened_repr(response.headers.get("location", ""), 200))
            return UserError(
                f"{endpoint} redirects to {target}. Redirects are not followed, so that texts are "
                "not sent to another address. Name it with --endpoint if you trust it."
            )
        wait = None if response is None else response.headers.get("retry-after")
        waits = f"It asks to wait {self._redact(wait)} s. " if wait and wait.isdigit() else ""
        error_class = (
            _BrokenError if isinstance(error, errors.InternalServerError) else LlmcondError
        )
        return error_class(
            f"{endpoint} fails (--retries {self._settings.retries}, --timeout "
            f"{self._settings.timeout:g}): {message.rstrip('.')}. {waits}{_RESUMES}"
        )

    def _suggest_models(self) -> str:
        """Return a sentence about similar or all models; empty if the server lists none."""
        try:
            names = [str(model.id) for model in self._list_models().data or ()]
        except (self._errors.OpenAIError, ValueError, RecursionError, AttributeError):
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


class _RateLimiter:
    """A callable that waits to limit the number of calls per minute, over all threads."""

    def __init__(self, per_minute: float | None) -> None:
        self._interval = 60 / per_minute if per_minute else 0.0
        self._next, self._lock = 0.0, Lock()

    def __call__(self, _: object) -> None:
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next)
            self._next = start + self._interval
        if start > now:
            time.sleep(start - now)


def _read_api_key() -> str:
    return os.environ.get(API_KEY_VARIABLE, "").strip()


def _is_printable(text: str) -> bool:
    return text.isprintable() and " " not in text


def _count_tokens(completion: Any) -> tuple[int | None, int | None]:
    usage = getattr(completion, "usage", None)
    counts = (getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens"))
    tokens_in, tokens_out = (count if isinstance(count, int) else None for count in counts)
    return tokens_in, tokens_out


def ask_all(
    ask: Callable[[T], Answer], questions: Iterable[T], concurrency: int
) -> Iterator[tuple[T, Answer]]:
    """Ask questions concurrently, and yield each with its answer when that arrives.

    After an error, no further question is asked. Answers that are still under way are yielded
    before the error is raised, because they have been paid for.

    Args:
        ask: function that asks a question, and returns its answer.
        questions: the questions.
        concurrency: number of threads.
    """
    todo: SimpleQueue[T | None] = SimpleQueue()
    done: SimpleQueue[tuple[T, Answer] | None] = SimpleQueue()
    failed: list[Exception] = []

    def work() -> None:
        while (question := todo.get()) is not None and not failed:
            try:
                done.put((question, ask(question)))
            except Exception as error:
                failed.append(error)
        done.put(None)

    for question in questions:
        todo.put(question)
    # Daemon threads, so that Ctrl-C does not wait for a slow server.
    threads = [Thread(target=work, daemon=True) for _ in range(concurrency)]
    for thread in threads:
        todo.put(None)
        thread.start()
    try:
        n_active = len(threads)
        while n_active:
            answered = done.get()
            if answered is None:
                n_active -= 1
            else:
                yield answered
    except BaseException as error:
        failed.append(error if isinstance(error, Exception) else RuntimeError("interrupted"))
        raise
    if failed:
        raise failed[0]
