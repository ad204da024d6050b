"""A server with OpenAI's chat protocol, whose answers are a function of the question."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, Self

#: Maps the body of a request, and its number from 0, to the fault that occurs, if any.
FaultFunction = Callable[[dict[str, Any], int], "Fault | None"]


@dataclass(frozen=True)
class Fault:
    """A fault of the server.

    Attributes:
        status: HTTP status; 0 drops the connection.
        seconds: delay before the fault.
        text: with status 200 the answer of the model, otherwise the message of the error.
        body: raw body, which need not follow the protocol; if empty, ``text`` is sent.
        headers: additional HTTP headers.
        without_end: bytes sent every ``pause`` seconds, endlessly, instead of a body.
        pause: interval of ``without_end`` in seconds.
        in_headers: whether ``without_end`` is sent within the headers.
    """

    status: int = 500
    seconds: float = 0
    text: str = "out of order"
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    without_end: bytes = b""
    pause: float = 0
    in_headers: bool = False


def question_texts(body: dict[str, Any]) -> dict[str, str]:
    """Return the sentences and the condition of a question, by their labels."""
    return dict(re.findall(r"^([A-Z]\w+(?: \d)?): (.*)$", body["messages"][-1]["content"], re.M))


def rate_by_overlap(first: str, second: str, condition: str) -> str:
    """Return a rating from the share of common words, or "ill-defined" for some conditions."""
    if "nonsense" in condition:
        return "ill-defined"
    words1, words2 = (set(text.lower().split()) for text in (first, second))
    return str(1 + round(4 * len(words1 & words2) / len(words1 | words2)))


def answer(body: dict[str, Any]) -> str:
    """Return the answer of the model as JSON, with or without a schema in the request."""
    texts = question_texts(body)
    if "Others:" in body["messages"][-1]["content"]:
        alike, different = f"the words of {texts['Sentence'][:9]}", "the length"
        return json.dumps({"partner": 1, "alike": alike, "different": different})
    rating = rate_by_overlap(texts["Sentence 1"], texts["Sentence 2"], texts["Condition"])
    return json.dumps({"rating": rating})


class ChatServer(ThreadingHTTPServer):
    """A server in threads of this process, used as a context manager.

    Attributes:
        url: base URL of the API.
        bodies: bodies of the requests, in the order of arrival.
        keys: their ``Authorization`` headers.
        times: times of arrival in seconds, by a monotonic clock.
    """

    daemon_threads = True

    def __init__(
        self,
        answer: Callable[[dict[str, Any]], str] = answer,
        find_fault: FaultFunction = lambda body, number: None,
        models: Sequence[str] = ("rater",),
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.answer, self.find_fault, self.models = answer, find_fault, models
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.lock, self.ended = threading.Lock(), threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Ignore clients that closed the connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer

    def do_GET(self) -> None:
        self._say(200, {"object": "list", "data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.server
        with chat.lock:
            number = len(chat.bodies)
            chat.bodies.append(body)
            chat.keys.append(self.headers["Authorization"])
            chat.times.append(time.monotonic())
        fault = chat.find_fault(body, number)
        if fault is None and body["model"] not in chat.models:
            fault = Fault(404, text=f"no model {body['model']}")
        if fault is None:
            self._say(200, _completion(body, chat.answer(body)))
            return
        chat.ended.wait(fault.seconds)
        if not fault.status:
            self.close_connection = True
            self.connection.close()
        elif fault.without_end:
            self._send_without_end(fault)
        elif fault.body:
            self._send(fault.status, fault.body.encode(), fault.headers)
        elif fault.status == 200:
            self._say(200, _completion(body, fault.text))
        else:
            self._say(fault.status, {"error": {"message": fault.text}}, fault.headers)

    def _say(self, status: int, value: Any, headers: Mapping[str, str] = MappingProxyType({})):
        json_headers = {"Content-Type": "application/json", **headers}
        self._send(status, json.dumps(value).encode(), json_headers)

    def _send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def _send_without_end(self, fault: Fault) -> None:
        self.close_connection = True
        end = b"" if fault.in_headers else b"no\r\n\r\n"
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Long: " + end)
        while not self.server.ended.wait(fault.pause):
            self.wfile.write(fault.without_end)

    def log_message(self, *_: object) -> None:
        pass


def _completion(body: dict[str, Any], text: str) -> dict[str, Any]:
    read = sum(len(message["content"]) for message in body["messages"]) // 4
    message = {"role": "assistant", "content": text}
    written = len(text) // 4
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    choices = [{"index": 0, "finish_reason": "stop", "message": message}]
    about = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
    return {**about, "choices": choices, "usage": usage}
