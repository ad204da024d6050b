"""Limits of size and time on the bytes of a connection, with raw sockets."""

import json
import socket
import time
from contextlib import suppress

import pytest
from helpers.serving import serve
from helpers.waiting import PATIENCE

from llmcond.serving import model_server
from llmcond.serving.model import ServedModel

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = json.dumps({"input": ["two men", "children"], "condition": "the place"}).encode()
#: More than the limit, and few enough to be in the buffers of the sockets.
MUCH = model_server.MAX_HEAD_BYTES + 20_000


def connect(client):
    return socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE)


def exchange(client, *parts):
    """Send bytes, and return everything that the server sends until it closes the connection."""
    with connect(client) as connection:
        for part in parts:
            connection.sendall(part)
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def read_error(answer, status, code):
    """Check that an answer is one error in the format of OpenAI's protocol."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head.lower().splitlines()
    error = json.loads(body)["error"]
    assert error["code"] == code
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(GET + b"X: " + b"a" * MUCH, id="long header"),
        pytest.param(GET + b"a" * MUCH, id="long name of a header"),
        pytest.param(GET + b"a:\r\n" * (MUCH // 4), id="many headers"),
        pytest.param(GET + b"a: b\r\n " + b" \r\n" * (MUCH // 3), id="folded header"),
        pytest.param(b"GET /" + b"a" * MUCH, id="long path"),
        pytest.param(b"\r\n" * (MUCH // 2), id="empty lines"),
        pytest.param(CHUNKED + b"2;" + b"a" * (2 * MUCH), id="long extension of a chunk"),
        pytest.param(CHUNKED + b"2\r\n{}\r\n0\r\nX: " + b"a" * (2 * MUCH), id="long trailer"),
        pytest.param(CHUNKED + b"2\r\n{}\r\n0\r\n" + b"a:\r\n" * (MUCH // 2), id="many trailers"),
    ],
)
def test_bytes_outside_of_bodies_are_limited(client, sent):
    answer = exchange(client, sent)
    if answer.startswith(b"HTTP/1.1 400"):
        read_error(answer, 400, "invalid_http")  # folded headers are not valid at all
    else:
        read_error(answer, 431, "headers_too_large")
    assert client.get("/healthz").status == 200


def test_flood_of_header_bytes_is_cut_off_early(client):
    began, sent = time.process_time(), 0
    with connect(client) as connection:
        connection.sendall(GET + b"X: ")
        with suppress(ConnectionError):
            while sent < 2**28:
                sent += connection.send(b"a" * 65_536)
    assert sent < 2**24  # what the kernel buffers
    assert time.process_time() - began < 2
    assert client.get("/healthz").status == 200


def test_large_bodies_and_many_requests_are_within_limits(embedder):
    large = json.dumps({"input": ["two men " * 50] * 1_000, "condition": "the place"}).encode()
    assert len(large) > 3 * model_server.MAX_HEAD_BYTES
    with serve(ServedModel(embedder), max_client_batch_size=1) as (client, _):
        head = POST + b"Content-Length: %d\r\n\r\n" % len(large)
        whole = head + large
        chunks = [b"%x\r\n%b\r\n" % (len(large), large), b"0\r\nX: trailer\r\n\r\n"]
        last = GET + b"X: " + b"a" * 60_000 + b"\r\nConnection: close\r\n\r\n"
        for request in (whole, CHUNKED + b"".join(chunks)):
            answer = exchange(client, request, request, *[GET + b"\r\n"] * 50, last)
            assert answer.count(b"HTTP/1.1 413") == 2
            assert answer.count(b"HTTP/1.1 200") == 51


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        pytest.param([], b"", id="nothing"),
        pytest.param([b"\r\n"], b"HTTP/1.1 408", id="empty line"),
        pytest.param([b"GET /"], b"HTTP/1.1 408", id="part of a request line"),
        pytest.param([GET], b"HTTP/1.1 408", id="part of the headers"),
        pytest.param([GET + b"\r\n", GET], b"HTTP/1.1 200", id="part of a second request"),
        pytest.param(
            [POST + b"Content-Length: 9999999\r\n\r\n{", b"{"], b"HTTP/1.1 413", id="unread body"
        ),
    ],
)
def test_slow_clients_are_disconnected(embedder, monkeypatch, parts, status):
    monkeypatch.setattr(model_server, "HEAD_SECONDS", 0.3)
    with serve(ServedModel(embedder)) as (client, _), connect(client) as connection:
        began = time.monotonic()
        connection.settimeout(0.1)
        answer, is_open = b"", True
        for part in parts:
            connection.sendall(part)
        while is_open:
            try:
                # A byte now and then does not give the client more time.
                if parts:
                    connection.sendall(b"\r\n" if parts == [b"\r\n"] else b"a")
                received = connection.recv(65_536)
            except TimeoutError:
                continue
            except OSError:
                break
            answer += received
            is_open = bool(received)
        assert 0.2 < time.monotonic() - began < PATIENCE
        assert answer.startswith(status)
        if status == b"HTTP/1.1 408":
            read_error(answer, 408, "headers_too_slow")


def test_slow_model_and_pauses_between_requests_are_no_reason_to_disconnect(embedder, monkeypatch):
    monkeypatch.setattr(model_server, "HEAD_SECONDS", 0.2)
    original = type(embedder).encode_with_counts

    def encode_with_counts(embedder, rows):
        time.sleep(0.5)
        return original(embedder, rows)

    with serve(ServedModel(embedder)) as (client, _), connect(client) as connection:
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
    with serve(ServedModel(embedder)) as (client, server), connect(client) as connection:
        for _ in range(20):  # more than the buffers of the sockets
            connection.sendall(request)
        began = time.monotonic()
        while server.server_state.connections:
            assert time.monotonic() - began < PATIENCE
            time.sleep(0.05)
        assert client.get("/healthz").status == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        GET + b"a\0b: c\r\n\r\n",
        GET + b"a: b\0c\r\n\r\n",
        CHUNKED + b"no size\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_invalid_http_gets_error_in_json(client, sent):
    read_error(exchange(client, sent), 400, "invalid_http")


def test_body_is_requested_only_if_it_will_be_read(embedder):
    expect = POST + b"Expect: 100-continue\r\n"
    with serve(ServedModel(embedder), (b"k3y",), payload_limit=1_000) as (client, _):
        allowed = b"Authorization: Bearer k3y\r\nConnection: close\r\n"
        for headers, status in (
            (b"Content-Length: %d\r\n" % len(BODY), b"401"),
            (b"Content-Length: 1001\r\n" + allowed, b"413"),
            (b"Content-Length: %d\r\n" % len(BODY) + allowed, b"100"),
        ):
            with connect(client) as connection:
                connection.sendall(expect + headers + b"\r\n")
                assert connection.recv(65_536).startswith(b"HTTP/1.1 " + status)
                if status == b"100":
                    connection.sendall(BODY)
                    assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
