"""A server in a thread of this process, and requests to it over loopback."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from helpers.waiting import PATIENCE
from llmcond.serving.model import ServedModel
from llmcond.serving.model_server import ModelServer
from llmcond.serving.server import bind_socket
from llmcond.serving.settings import ServerSettings


@dataclass(frozen=True)
class Response:
    """The answer of a server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The parsed body."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, after checking that it has one line and the form of OpenAI's errors."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
        return error


class Client:
    """A client of a server at a port of this machine."""

    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Response:
        """Send a request; a body that is not bytes is written as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent_headers = {} if data is None else {"Content-Type": "application/json"}
        sent_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, data, sent_headers)
            response = connection.getresponse()
            answer_headers = {name.lower(): value for name, value in response.getheaders()}
            return Response(response.status, answer_headers, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Response:
        """Send a GET request."""
        return self.send("GET", path, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Response:
        """Send a POST request."""
        return self.send("POST", path, body, **headers)


@contextmanager
def serve(
    model: ServedModel, keys: tuple[bytes, ...] = (), **settings: Any
) -> Iterator[tuple[Client, ModelServer]]:
    """Serve a model at a free port; at the end, all accepted requests are answered."""
    with bind_socket("127.0.0.1", 0) as listening:
        listening.listen()  # requests wait until the server has started
        server = ModelServer(model, ServerSettings(**settings), keys)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield Client(listening.getsockname()[1]), server
        finally:
            server.handle_exit(15, None)
            thread.join()
