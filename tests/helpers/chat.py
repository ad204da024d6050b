"""A server that speaks OpenAI's chat protocol, whose answers are a function of the question."""

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

#: From the body of a request, and its number from 0, to what goes wrong; None: nothing.
Trouble = Callable[[dict[str, Any], int], "Fault | None"]


@dataclass(frozen=True)
class Fault:
    """What a server does instead of answering.

    Attributes:
        status: of HTTP; 0: the connection is dropped.
        seconds: to wait before.
        text: said as the model's answer with status 200, else as the error's message.
        body: sent as it is, whatever the protocol says; empty: the answer or the error.
        without_end: what is sent again and again, every ``pause`` seconds, instead of a body; and
            within the headers if ``in_headers``.
    """

    status: int = 500
    seconds: float = 0
    text: str = "out of order"
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    without_end: bytes = b""
    pause: float = 0
    in_headers: bool = False


def texts_of(body: dict[str, Any]) -> dict[str, str]:
    """Return the sentences and the condition that a question shows."""
    return dict(re.findall(r"^([A-Z]\w+(?: \d)?): (.*)$", body["messages"][-1]["content"], re.M))


def rating_of(first: str, second: str, condition: str) -> str:
    """Return a rating by how many words two sentences share; some conditions are ill-defined."""
    if "nonsense" in condition:
        return "ill-defined"
    one, other = (set(text.lower().split()) for text in (first, second))
    return str(1 + round(4 * len(one & other) / len(one | other)))


def answer(body: dict[str, Any]) -> str:
    """Return what the model says, as JSON, whether its schema was sent or not."""
    texts = texts_of(body)
    if "Others:" in body["messages"][-1]["content"]:
        alike, different = f"the words of {texts['Sentence'][:9]}", "the length"
        return json.dumps({"partner": 1, "alike": alike, "different": different})
    rating = rating_of(texts["Sentence 1"], texts["Sentence 2"], texts["Condition"])
    return json.dumps({"rating": rating})


class ChatServer(ThreadingHTTPServer):
    """The server, in threads of this process, as a context.

    Attributes:
        url: of the protocol.
        bodies: of the questions, in the order they came.
        keys: what they had as ``Authorization``.
        times: when they came, by a monotonic clock.
    """

    daemon_threads = True

    def __init__(
        self,
        answer: Callable[[dict[str, Any]], str] = answer,
        trouble: Trouble = lambda body, number: None,
        models: Sequence[str] = ("rater",),
        port: int = 0,
    ) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.answer, self.trouble, self.models = answer, trouble, models
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
        """Say nothing of clients that left."""


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
        fault = chat.trouble(body, number)
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
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Long: ")
        if not fault.in_headers:
            self.wfile.write(b"no\r\n\r\n")
        while not self.server.ended.wait(fault.pause):
            self.wfile.write(fault.without_end)

    def log_message(self, *_: object) -> None:
        pass


def _completion(body: dict[str, Any], text: str) -> dict[str, Any]:
    read = sum(len(message["content"]) for message in body["messages"]) // 4
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": text},
            }
        ],
        "usage": {
            "prompt_tokens": read,
            "completion_tokens": len(text) // 4,
            "total_tokens": read + len(text) // 4,
        },
    }
