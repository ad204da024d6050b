"""A server that speaks OpenAI's chat protocol, asked through the ``openai`` client.

The client retries what may pass (429, 408, 409, 5xx, lost connections, time-outs), with backoff, or
after the time that the server names (``Retry-After``, up to two minutes). What is left is told here
in a line. The key is in the environment, and nowhere else: it is taken out of whatever is said.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit

from llmcond.annotation.template import Template
from llmcond.errors import LlmcondError, UserError, brief, did_you_mean, install_command, listed
from llmcond.log import log

KEY = "OPENAI_API_KEY"
#: Keys as hosted servers make them, of which some repeat a part in their messages.
_LIKE_A_KEY = re.compile(r"\bsk-[\w*.…-]{4,}")
_KEPT = "What was answered is stored, and the same command goes on."
_LOCAL = ("localhost", "127.0.0.1", "::1")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said.

    Attributes:
        text: as it came; empty where there was none.
        tokens_in, tokens_out: as the server counts them; None: it does not.
        seconds: from asking to answer, with retries.
    """

    text: str
    tokens_in: int | None
    tokens_out: int | None
    seconds: float


@dataclass(frozen=True)
class ServerSettings:
    """Which model is asked, and how.

    Attributes:
        endpoint: the address of the protocol, such as ``http://localhost:8000/v1``.
        model: as the server calls it.
        request: further fields of every request, such as ``temperature``.
        timeout: seconds until a request is given up, and tried again.
        retries: how often a request is tried again.
        per_minute: requests a minute at most, retries counted; None: no limit.
    """

    endpoint: str
    model: str
    request: Mapping[str, Any]
    timeout: float = 60.0
    retries: int = 6
    per_minute: float | None = None

    def check(self) -> None:
        """Raise a UserError for values that cannot be, before anything is asked."""
        try:
            parts = urlsplit(self.endpoint)
            secret = parts.username is not None or parts.password is not None or bool(parts.query)
        except ValueError:
            parts, secret = urlsplit(""), False
        if secret:
            raise UserError(
                "--endpoint holds a name, a password or a query, and would be told in messages. "
                f"Leave them out; a key is taken from {KEY}."
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"--endpoint is {brief(self.endpoint)}; expected an address such as "
                "http://localhost:8000/v1."
            )
        taken = {"model", "messages", "seed", "response_format", "stream", "n"} & set(self.request)
        if taken:
            raise UserError(f"--request has {sorted(taken)[0]!r}, which is set already.")
        if parts.scheme == "http" and parts.hostname not in _LOCAL and os.environ.get(KEY):
            log.warning(f"{KEY} goes to {parts.hostname} unencrypted; https would hide it.")


class Server:
    """A connection to a server; it may be asked from several threads at once.

    Raises:
        UserError: the client is not installed.
    """

    def __init__(self, settings: ServerSettings) -> None:
        try:
            import openai

            from llmcond.annotation.transport import BoundedTransport
        except ImportError as error:
            raise UserError(
                f"asking a model needs the openai client: {install_command('annotate')}."
            ) from error
        self._errors, self._settings = openai, settings
        self._key = os.environ.get(KEY, "").strip()
        # Called before every request, so that retries keep to the limit as well.
        hooks: dict[str, list[Callable[..., Any]]] = {"request": [_Pace(settings.per_minute)]}
        self._client = openai.OpenAI(
            base_url=settings.endpoint,
            api_key=self._key or "none",
            timeout=settings.timeout,
            max_retries=settings.retries,
            http_client=openai.DefaultHttpxClient(
                event_hooks=hooks, transport=BoundedTransport(), follow_redirects=False
            ),
        )
        self._structured: bool | None = None
        self._failure: LlmcondError | None = None
        self._deciding = Lock()

    def reach(self) -> None:
        """Raise a UserError if there is no server at all, which no retry would change."""
        try:
            self._list()
        except self._errors.APIConnectionError as error:
            # By its name: the HTTP library is the client's choice.
            if type(error.__cause__).__name__ == "ConnectError":
                raise UserError(
                    f"no server answers at {self._settings.endpoint}: "
                    f"{self._safe(str(error.__cause__))}. Start it, or mend --endpoint."
                ) from None
        except (self._errors.OpenAIError, ValueError, RecursionError):
            return  # whatever a server without a list says

    def _list(self) -> Any:
        return self._client.with_options(max_retries=0, timeout=10).models.list()

    def ask(self, template: Template, values: Mapping[str, str], seed: int) -> Answer:
        """Return what the model says to a question.

        The first question of all decides whether answers are asked for by their schema: a server
        that refuses it, or breaks down at it, is asked without.

        Raises:
            UserError: it refuses the key, the model or the request.
            LlmcondError: it fails, after all retries.
        """
        with self._deciding:
            if self._failure is not None:  # of the first question, for which others waited
                raise self._failure
            if self._structured is None:
                return self._decide(template, values, seed)
        try:
            return self._answer(template, values, seed, self._structured)
        except _RefusedError as refused:  # this one alone, such as for its length: others were not
            return Answer(str(refused), None, None, 0.0)

    def _decide(self, template: Template, values: Mapping[str, str], seed: int) -> Answer:
        try:
            try:
                answer, structured = self._answer(template, values, seed, True), True
            except (_RefusedError, _BrokenError) as refused:
                answer, structured = self._answer(template, values, seed, False), False
                log.info(
                    "the server takes no schema of answers, which are read from plain text: "
                    f"{brief(str(refused), 200)}"
                )
        except LlmcondError as error:
            self._failure = error
            raise
        self._structured = structured
        return answer

    def _answer(
        self, template: Template, values: Mapping[str, str], seed: int, structured: bool
    ) -> Answer:
        form = {"name": template.kind, "strict": True, "schema": template.schema}
        body = dict(self._settings.request)
        if structured:
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        began = time.monotonic()
        try:
            said: Any = self._client.chat.completions.create(
                model=self._settings.model,
                messages=template.messages(values),  # type: ignore[arg-type]
                seed=seed,
                extra_body=body,
            )
        except self._errors.OpenAIError as error:
            raise self._told(error) from None  # the client's own error holds the request
        except (ValueError, RecursionError):  # brackets without end
            said = "what is no JSON"
        seconds = time.monotonic() - began
        try:
            text = str(said.choices[0].message.content or "")
        except (AttributeError, IndexError, TypeError):  # a page, a list, or an error as an answer
            raise LlmcondError(
                f"{self._settings.endpoint} answers, but not as the chat protocol has it: "
                f"{self._safe(brief(str(said), 200))}. {_KEPT}"
            ) from None
        text = text.replace(self._key or "\0", "***")
        whole = text.encode("utf-8", "replace").decode("utf-8")  # no halves of surrogate pairs
        return Answer(whole, *_tokens(said), round(seconds, 3))

    def _told(self, error: Any) -> LlmcondError:
        """Return an error of the client's as ours, without the key."""
        where, errors = self._settings.endpoint, self._errors
        message = self._safe(str(getattr(error, "message", None) or error))
        if isinstance(error, errors.AuthenticationError | errors.PermissionDeniedError):
            own = f"the key in {KEY}" if self._key else f"questions without a key; set {KEY}"
            return UserError(f"{where} refuses {own}: {message}")
        if isinstance(error, errors.NotFoundError):
            return UserError(
                f"{where} has no model {self._settings.model!r}, or no chat at this address, which "
                f"often ends in /v1. {self._models()}{message}"
            )
        if isinstance(error, errors.BadRequestError | errors.UnprocessableEntityError):
            return _RefusedError(f"{where} refuses the question: {message}")
        response = getattr(error, "response", None)
        if response is not None and response.is_redirect:
            target = self._safe(brief(response.headers.get("location", ""), 200))
            return UserError(
                f"{where} redirects to {target}, which is not followed, as texts would go there. "
                "Name that address with --endpoint if you trust it."
            )
        wait = None if response is None else response.headers.get("retry-after")
        waits = f"It asks to wait {self._safe(wait)} s. " if wait and wait.isdigit() else ""
        broken = _BrokenError if isinstance(error, errors.InternalServerError) else LlmcondError
        return broken(
            f"{where} fails (--retries {self._settings.retries}, --timeout "
            f"{self._settings.timeout:g}): {message.rstrip('.')}. {waits}{_KEPT}"
        )

    def _models(self) -> str:
        """Return what models there are, as far as the server tells."""
        try:
            names = [str(one.id) for one in self._list().data or ()]
        except (self._errors.OpenAIError, ValueError, RecursionError, AttributeError):
            return ""
        near = did_you_mean(self._settings.model, names)
        return f"{near or 'It has ' + listed(names, 5) + '.'} " if names else ""

    def _safe(self, text: str) -> str:
        """Return a text without the key, or what looks like one."""
        hidden = text.replace(self._key, "***") if self._key else text
        return _LIKE_A_KEY.sub("***", hidden)


class _RefusedError(UserError):
    """The server takes this question for a wrong one."""


class _BrokenError(LlmcondError):
    """The server answers 5xx, which some do to a schema that they cannot take."""


class _Pace:
    """Waits so that calls are no more than so many a minute; from several threads at once."""

    def __init__(self, per_minute: float | None) -> None:
        self._apart = 60 / per_minute if per_minute else 0.0
        self._next, self._lock = 0.0, Lock()

    def __call__(self, _: object) -> None:
        with self._lock:
            now = time.monotonic()
            at = max(now, self._next)
            self._next = at + self._apart
        if at > now:
            time.sleep(at - now)


def _tokens(said: Any) -> tuple[int | None, int | None]:
    usage = getattr(said, "usage", None)
    counts = (getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens"))
    one, other = (count if isinstance(count, int) else None for count in counts)
    return one, other


def ask_all(
    ask: Callable[[T], Answer], questions: Iterable[T], concurrency: int
) -> Iterator[tuple[T, Answer]]:
    """Yield questions with their answers as these come, so many questions at once.

    Where one fails, no further ones are asked; those under way are waited for and yielded, since
    they cost as much as others, and then the error is raised.
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
    # Of the kind that ends with the process: who interrupts it does not wait for a slow server.
    threads = [Thread(target=work, daemon=True) for _ in range(concurrency)]
    for thread in threads:
        todo.put(None)
        thread.start()
    try:
        left = len(threads)
        while left:
            answered = done.get()
            if answered is None:
                left -= 1
            else:
                yield answered
    except BaseException as error:
        failed.append(error if isinstance(error, Exception) else RuntimeError("interrupted"))
        raise
    if failed:
        raise failed[0]
