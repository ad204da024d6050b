"""Real servers that speak protocols of OpenAI, in threads of this process, and their faults."""

import json
import socket
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType

import numpy as np

#: Headers of an error that let the client retry at once.
RETRY_AT_ONCE = {"Retry-After": "0.01"}
JSON_HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Fault:
    """A fault of the server, with a message (``text``) or a body that breaks the protocol.

    Status 0 drops the connection. ``without_end`` is sent every ``pause`` seconds instead of a
    body.
    """

    status: int = 500
    seconds: float = 0
    text: str = "out of order"
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    without_end: bytes = b""
    pause: float = 0


class ModelServer(ThreadingHTTPServer):
    """A server in threads of this process, used as a context manager; it records requests."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, models, find_fault=lambda body, number: None, port=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.find_fault, self.models = find_fault, models
        self.bodies, self.keys, self.times = [], [], []
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.connections = []

    def respond(self, body):
        """Return the answer to a request."""
        raise NotImplementedError

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.shutdown()
        self.server_close()
        for connection in self.connections:  # clients keep them open
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def get_request(self):
        """Accept a connection."""
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def handle_error(self, *_):
        """Ignore clients that closed the connection."""


class ChatServer(ModelServer):
    """A server of a chat model; ``answer`` returns the answer to the body of a request."""

    def __init__(self, answer, find_fault=lambda body, number: None, models=("rater",)):
        super().__init__(models, find_fault)
        self.answer = answer

    def respond(self, body):
        return complete(body, self.answer(body))


def complete(body, text):
    """Return a response of the chat protocol with an answer."""
    read = sum(len(message["content"]) for message in body["messages"]) // 4
    written = len(text) // 4
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    message = {"role": "assistant", "content": text}
    choices = [{"index": 0, "finish_reason": "stop", "message": message}]
    about = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
    return {**about, "choices": choices, "usage": usage}


@cache
def _embed_word(word, seed, dim):
    return np.random.default_rng(zlib.crc32(f"{seed} {word}".encode())).standard_normal(dim)


class EmbeddingServer(ModelServer):
    """A server that embeds texts as the sum of vectors of their words.

    Args:
        find_fault: returns the fault of a request, if it has one.
        seed: seed of the words' vectors; another seed is another model.
        dim: size of the vectors.
        change: changes the answer before it is sent.
    """

    def __init__(
        self,
        find_fault=lambda body, number: None,
        *,
        seed=0,
        dim=16,
        change=lambda answer: answer,
        models=("embedder",),
        port=0,
    ):
        super().__init__(models, find_fault, port)
        self.seed, self.dim, self.change = seed, dim, change

    @property
    def name(self):
        """The name of its model as an encoder."""
        return f"{self.url}#{self.models[0]}"

    @property
    def texts(self):
        """The texts of all requests."""
        return [text for body in self.bodies for text in body["input"]]

    def embed(self, text):
        """Return the vector of a text, of unit norm."""
        vector = sum(_embed_word(word, self.seed, self.dim) for word in text.lower().split())
        return vector / np.linalg.norm(vector)

    def respond(self, body):
        data = [
            {"object": "embedding", "index": index, "embedding": self.embed(text).tolist()}
            for index, text in enumerate(body["input"])
        ]
        n_tokens = sum(len(text.split()) for text in body["input"])
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return self.change({"object": "list", "model": body["model"], "data": data, "usage": usage})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it would wait for 40 ms between headers and body

    def do_GET(self):
        self._say(200, {"object": "list", "data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        body, server = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server
        with server.lock:
            number = len(server.bodies)
            server.bodies.append(body)
            server.keys.append(self.headers["Authorization"])
            server.times.append(time.monotonic())
        fault = server.find_fault(body, number)
        if fault is None and body["model"] not in server.models:
            fault = Fault(404, text=f"no model {body['model']}")
        if fault is None:
            self._say(200, server.respond(body))
            return
        server.ended.wait(fault.seconds)
        if not fault.status:
            self.close_connection = True
            self.connection.close()
        elif fault.without_end:
            self._send_without_end(fault)
        elif fault.body:
            self._send(fault.status, fault.body.encode(), fault.headers)
        else:
            self._say(fault.status, {"error": {"message": fault.text}}, fault.headers)

    def _say(self, status, value, headers=MappingProxyType({})):
        self._send(status, json.dumps(value).encode(), {**JSON_HEADERS, **headers})

    def _send(self, status, data, headers):
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def _send_without_end(self, fault):
        self.close_connection = True
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        while not self.server.ended.wait(fault.pause):
            self.wfile.write(fault.without_end)

    def log_message(self, *_):
        pass
