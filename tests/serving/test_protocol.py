"""Limits of size and time on the bytes of a connection, with raw sockets."""

import json
import time

import pytest
from helpers.serving import serve
from helpers.waiting import wait_until

from llmcond.serving import model_server
from llmcond.serving.model import ServedModel

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = json.dumps({"input": ["two men", "children"], "condition": "the place"}).encode()
#: More than the limit, and few enough to be in the buffers of the sockets.
MUCH = model_server.MAX_HEAD_BYTES + 20_000


def exchange(client, *parts):
    """Send bytes, and return everything that the server sends until it closes the connection."""
    with client.connect() as connection:
        for part in parts:
            connection.sendall(part)
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def check_error(answer, status, code):
    """Check that an answer is one error in the format of OpenAI's protocol."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head.lower().splitlines()
    error = json.loads(body)["error"]
    assert error["code"] == code
    assert "\n" not in error["message"]


def test_bytes_outside_of_bodies_are_limited(client):
    for sent in (
        GET + b"X: " + b"a" * MUCH,
        GET + b"a:\r\n" * (MUCH // 4),
        b"GET /" + b"a" * MUCH,
        b"\r\n" * (MUCH // 2),
        CHUNKED + b"2;" + b"a" * (2 * MUCH),  # the extension of a chunk
        CHUNKED + b"2\r\n{}\r\n0\r\nX: " + b"a" * (2 * MUCH),  # a trailer
    ):
        check_error(exchange(client, sent), 431, "headers_too_large")
    assert client.get("/healthz").status == 200


def test_bodies_may_be_larger_than_headers_but_not_than_the_limit(client):
    last = GET + b"X: " + b"a" * 60_000 + b"\r\nConnection: close\r\n\r\n"
    chunks = [b"%x\r\n%b\r\n" % (15_000, b"x" * 15_000)] * 2
    answer = exchange(client, CHUNKED, *chunks, b"0\r\n\r\n", last)
    assert answer.startswith(b"HTTP/1.1 413")
    answer = exchange(client, *[GET + b"\r\n"] * 50, last)
    assert answer.count(b"HTTP/1.1 200") == 51


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        pytest.param([GET], b"HTTP/1.1 408", id="part of the headers"),
        pytest.param([GET + b"\r\n", GET], b"HTTP/1.1 200", id="part of a second request"),
        pytest.param([POST + b"Content-Length: 999999\r\n\r\n"], b"HTTP/1.1 413", id="unread body"),
    ],
)
def test_slow_clients_are_disconnected(embedder, monkeypatch, parts, status):
    monkeypatch.setattr(model_server, "HEAD_SECONDS", 0.3)
    with serve(ServedModel(embedder), payload_limit=99) as (client, _), client.connect() as slow:
        slow.settimeout(0.1)
        answer, is_open = b"", True
        for part in parts:
            slow.sendall(part)
        while is_open:
            try:
                slow.sendall(b"a")  # a byte now and then does not give the client more time
                received = slow.recv(65_536)
            except TimeoutError:
                continue
            except OSError:
                break
            answer += received
            is_open = bool(received)
        assert answer.startswith(status)
        if status == b"HTTP/1.1 408":
            check_error(answer, 408, "headers_too_slow")


def test_slow_model_and_pauses_between_requests_are_no_reason_to_disconnect(embedder, monkeypatch):
    monkeypatch.setattr(model_server, "HEAD_SECONDS", 0.2)
    original = type(embedder).encode_with_counts

    def encode_with_counts(embedder, rows):
        time.sleep(0.5)
        return original(embedder, rows)

    with serve(ServedModel(embedder)) as (client, _), client.connect() as connection:
        monkeypatch.setattr(type(embedder), "encode_with_counts", encode_with_counts)
        request = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        for _ in range(2):
            # A second request is sent in two parts while the first one is answered.
            connection.sendall(request + GET[:20])
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
            connection.sendall(GET[20:] + b"\r\n")
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
            time.sleep(0.3)


def test_client_that_does_not_read_its_answer_is_disconnected(embedder, monkeypatch):
    monkeypatch.setattr(model_server, "STALL_SECONDS", 0.3)
    body = json.dumps({"input": ["two men"] * 2_000, "condition": "the place"}).encode()
    request = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with serve(ServedModel(embedder)) as (client, server), client.connect() as connection:
        for _ in range(20):  # more than the buffers of the sockets
            connection.sendall(request)
        wait_until(lambda: not server.server_state.connections)
        assert client.get("/healthz").status == 200


def test_invalid_http_gets_error_in_json(client):
    for sent in (
        b"\x16\x03\x01\x02\x00\x01",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        GET + b"a: b\0c\r\n\r\n",
        GET + b"a: b\r\n folded\r\n\r\n",
        CHUNKED + b"no size\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ):
        check_error(exchange(client, sent), 400, "invalid_http")
