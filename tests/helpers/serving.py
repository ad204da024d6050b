"""A server in a thread of this process, and requests to it over loopback."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

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


class PublishedSchemas:
    """The OpenAPI document of a server, to check its responses with.

    Attributes:
        document: the document.
        used: method and path of the successful responses that were checked.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document, self.used = document, set[tuple[str, str]]()
        schemas = json.loads(json.dumps(document["components"]["schemas"]))
        for name, schema in schemas.items():
            # Clients must accept further fields, but the document names all that there are.
            if name != "SearchHit":
                schema.setdefault("additionalProperties", False)
        self._validators = {
            f"#/components/schemas/{name}": Draft202012Validator(
                {**schema, "components": {"schemas": schemas}}
            )
            for name, schema in schemas.items()
        }

    def check(self, method: str, path: str, response: Response) -> None:
        """Assert that a response has the status, content type and fields that are published."""
        if path.startswith("/v1/models/"):
            path = "/v1/models/{id}"
        operation = self.document["paths"].get(path, {}).get(method.lower())
        if operation is None:
            return
        if response.status == 200:
            self.used.add((method.lower(), path))
        responses = operation["responses"]
        described = responses.get(f"{response.status}", responses["default"])
        ((media_type, content),) = described["content"].items()
        assert response.headers["content-type"].partition(";")[0] == media_type
        if "$ref" in content["schema"]:
            self._validators[content["schema"]["$ref"]].validate(response.json)
        else:
            assert content["schema"]["type"] in ("string", "object")


class Client:
    """A client of a server at a port of this machine; with schemas, it checks all responses."""

    def __init__(self, port: int, schemas: PublishedSchemas | None = None) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.schemas = schemas

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
            answer = Response(response.status, answer_headers, response.read())
        finally:
            connection.close()
        if self.schemas is not None:
            self.schemas.check(method, path, answer)
        return answer

    def connect(self) -> socket.socket:
        """Open a connection, for requests of raw bytes."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

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
            schemas = PublishedSchemas(server.gate.app.document)
            yield Client(listening.getsockname()[1], schemas), server
        finally:
            server.handle_exit(15, None)
            thread.join()
