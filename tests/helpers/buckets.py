"""A proxy that can make a server with the S3 protocol fail."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: Credentials that must not appear in any output.
ACCESS_KEY, SECRET_KEY = "AKIATESTTESTTEST", "tests-own-secret-key"


class Proxy:
    """Passes requests on to a server, or answers them with an error.

    Attributes:
        answer: status and code of the error; None passes every request on.
        only: prefix of the method, and part of the path, of requests that get the error.
        most: number of requests that get the error before all are passed on.
        refused: number of requests that got the error.
        loses_answers: whether refused requests are passed on too, so that their answer is lost.
    """

    def __init__(self, behind: int) -> None:
        self.answer: tuple[int, str] | None = None
        self.only, self.refused, self.most = ("", ""), 0, float("inf")
        self.loses_answers = False
        self._server = _Proxying(("127.0.0.1", 0), _Handler)
        self._server.proxy, self._server.behind = self, behind
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.port = self._server.server_address[1]

    def close(self) -> None:
        """Stop the proxy."""
        self._server.shutdown()
        self._server.server_close()

    def refuses(self, method: str, path: str) -> bool:
        """Return whether the proxy answers a request with the error."""
        matches = method.startswith(self.only[0]) and self.only[1] in path
        return self.answer is not None and matches and self.refused < self.most


class _Proxying(ThreadingHTTPServer):
    daemon_threads = True
    proxy: Proxy
    behind: int


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Proxying

    def _handle(self) -> None:
        body = self._body()
        proxy = self.server.proxy
        refuses = proxy.refuses(self.command, self.path)
        proxy.refused += refuses
        if not refuses or proxy.loses_answers:
            connection = HTTPConnection("127.0.0.1", self.server.behind)
            passed = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in ("transfer-encoding", "expect")
            }
            connection.request(self.command, self.path, body, passed)
            response = connection.getresponse()
            content = response.read()
            connection.close()
        if refuses:
            assert proxy.answer is not None
            status, code = proxy.answer
            text = (
                f"<Error><Code>{code}</Code><AWSAccessKeyId>{ACCESS_KEY}</AWSAccessKeyId></Error>"
            )
            self._send(status, {}, text.encode())
            return
        skipped = ("transfer-encoding", "connection", "content-length", "date", "server")
        headers = {k: v for k, v in response.getheaders() if k.lower() not in skipped}
        self._send(response.status, headers, content, response.getheader("Content-Length"))

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":  # Arrow sends chunks
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(
        self, status: int, headers: Mapping[str, str], content: bytes, size: str | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        head = self.command == "HEAD"
        self.send_header("Content-Length", size if head and size else str(len(content)))
        self.end_headers()
        if not head:
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815 - names of the library

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def s3_environment(port: int) -> dict[str, str]:
    """Return the environment variables for a server on this machine."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
