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
class Answer:
    """What a server answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """What was wrong, in one line and in OpenAI's shape."""
        found = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        assert "\n" not in found["message"]
        return found


class Client:
    """Sends requests to a server at a port of this machine."""

    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send a request, whose body is written as JSON unless it is bytes."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {} if data is None else {"Content-Type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, data, given)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        """Get something."""
        return self.send("GET", path, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """Ask the model."""
        return self.send("POST", path, body, **headers)


@contextmanager
def served(
    model: ServedModel, keys: tuple[bytes, ...] = (), **settings: Any
) -> Iterator[tuple[Client, ModelServer]]:
    """Serve a model at a free port; at the end, everything that was accepted is answered."""
    with bind_socket("127.0.0.1", 0) as listening:
        listening.listen()  # requests wait until it serves
        running = ModelServer(model, ServerSettings(**settings), keys)
        thread = threading.Thread(target=running.run, args=([listening],))
        thread.start()
        try:
            yield Client(listening.getsockname()[1]), running
        finally:
            running.handle_exit(15, None)
            thread.join()
