"""Requests over HTTP: responses, error messages, keys, limits and shutdown."""

import asyncio
import base64
import json
import logging
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers.hub import serve_storing_hub, use_hub
from helpers.serving import serve
from helpers.waiting import PATIENCE, wait_until

from llmcond.base.errors import UserError
from llmcond.base.text import Condition
from llmcond.encoders.spec import NotFiniteError
from llmcond.runs.embedder import Embedder
from llmcond.search import Index
from llmcond.serving.model import ServedModel
from llmcond.serving.server import bind_socket

TEXTS = ["two men play in the park", "three women sit at the beach", "children read a number 7"]
CONDITION = "the place"
VALID = {"input": TEXTS, "condition": CONDITION}
RANKED = {"query": "two men", "documents": TEXTS, "condition": CONDITION}
PAIRS = {"sentence1": TEXTS, "sentence2": TEXTS, "condition": CONDITION}
SEARCH = {"query": "a", "condition": CONDITION}
BODIES = {"embeddings": VALID, "similarity": PAIRS, "rerank": RANKED, "search": SEARCH}


def read_vectors(response):
    assert response.status == 200, response.body
    return np.array([item["embedding"] for item in response.json["data"]], dtype=np.float32)


# -- responses -----------------------------------------------------------------------------------


def test_embeddings_match_embedder(client, embedder):
    expected = embedder.encode(TEXTS, CONDITION)
    response = client.post("/v1/embeddings", VALID)
    np.testing.assert_allclose(read_vectors(response), expected, atol=1e-6)
    body = response.json
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    assert (body["object"], body["model"]) == ("list", Path(embedder.encoder.name).name)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > len(TEXTS)
    assert body["truncated"] == 0
    request = {**VALID, "condition": [CONDITION, "the mood", CONDITION]}
    data = client.post("/v1/embeddings", {**request, "encoding_format": "base64"}).json["data"]
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data]
    np.testing.assert_allclose(decoded, embedder.encode(TEXTS, request["condition"]), atol=1e-6)
    values = {"condition": [CONDITION, "the mood", "c"], "values": [["park", "beach"], ["sad"], []]}
    conditions = [Condition(CONDITION, ["park", "beach"]), Condition("the mood", ["sad"]), "c"]
    vectors = read_vectors(client.post("/v1/embeddings", {**VALID, **values}))
    np.testing.assert_allclose(vectors, embedder.encode(TEXTS, conditions), atol=1e-6)
    assert np.abs(vectors[0] - expected[0]).max() > 1e-3
    long = client.post("/v1/embeddings", {**VALID, "input": ["a dog", "two men " * 200]}).json
    assert long["truncated"] == 1
    assert long["usage"]["total_tokens"] > 400


def test_model_that_a_request_names_is_not_downloaded(client, embedder, monkeypatch, tmp_path):
    with serve_storing_hub() as hub:
        use_hub(monkeypatch, hub.url, tmp_path)
        for route in ("embeddings", "similarity"):
            response = client.post(f"/v1/{route}", {**BODIES[route], "model": "ada/tuned"})
            assert response.json["model"] == Path(embedder.encoder.name).name
        assert (hub.tokens, hub.downloaded) == (set(), [])


def test_similarity_of_pairs_and_several_conditions(client, embedder):
    pairs = {"sentence1": TEXTS[:2], "sentence2": TEXTS[1:], "condition": CONDITION}
    pair = {"sentence1": TEXTS[0], "sentence2": TEXTS[1], "condition": [CONDITION, "the mood"]}
    for body, expected in (
        (pairs, embedder.similarity(TEXTS[:2], TEXTS[1:], CONDITION)),
        (pair, embedder.similarity([TEXTS[0]] * 2, [TEXTS[1]] * 2, [CONDITION, "the mood"])),
    ):
        similarities = client.post("/v1/similarity", body).json["similarities"]
        assert similarities == pytest.approx(expected.tolist(), abs=1e-6)


def test_requests_can_ignore_conditions_by_maps_of_an_index(tiny_run, tmp_path):
    parts = ("two men", "children", "dogs", "a woman"), ("play", "sit", "run"), "abcde"
    texts = [" ".join(words) for words in product(*parts)]
    condition = Condition("the place | where", ignore=["the number"])
    index = Index.build(tmp_path / "index", texts, run=tiny_run, conditions=[condition])
    with serve(ServedModel(index.embedder, condition, index)) as (client, _):
        page = client.get("/").body.decode()
        assert 'name="condition" required value="the place | where"' in page
        assert page.count('<textarea name="ignore" rows="2">the number</textarea>') == 3
        hits = [
            client.post("/v1/search", body).json["results"]
            for body in (
                {"query": "dogs run"},
                {"query": "dogs run", "condition": "The place | where", "ignore": ["the number"]},
                {
                    "query": "dogs run",
                    "condition": {"the place | where": 1},
                    "ignore": ["the number"],
                },
            )
        ]
        assert hits[0] == hits[1] == hits[2]
        body = {"input": texts[:3], "condition": "the place | where", "ignore": ["the number"]}
        vectors = read_vectors(client.post("/v1/embeddings", body))
        np.testing.assert_allclose(vectors, index.embedder.encode(texts[:3], condition), atol=1e-5)
        for route, ignore, message in (
            ("embeddings", ["the mood"], "must be found in a collection of texts first"),
            ("embeddings", ["The place | where"], "cannot ignore itself"),
            ("search", ["the mood"], "what to ignore has not been found in the texts of the index"),
            ("search", [""], "is empty"),
        ):
            text = {"input": "a"} if route == "embeddings" else {"query": "a"}
            answer = client.post(
                f"/v1/{route}", {**text, **{"condition": "the place | where"}, "ignore": ignore}
            )
            assert answer.status == 422
            assert message in answer.error["message"]


def test_documents_are_ordered_by_similarity_to_query(client, embedder):
    request = {"query": "men in a park", "documents": [TEXTS[1], {"text": TEXTS[0]}, TEXTS[2]]}
    request |= {"condition": CONDITION, "values": ["park", "beach"], "return_documents": True}
    documents = [TEXTS[1], TEXTS[0], TEXTS[2]]
    condition = Condition(CONDITION, ["park", "beach"])
    scores = embedder.similarity(["men in a park"] * 3, documents, condition)
    order = np.argsort(-scores).tolist()
    results = client.post("/v1/rerank", request).json["results"]
    assert results == [
        {
            "index": index,
            "relevance_score": pytest.approx(scores[index], abs=1e-6),
            "document": {"text": documents[index]},
        }
        for index in order
    ]
    request |= {"top_n": 2, "return_documents": False}
    best = client.post("/v1/rerank", request).json["results"]
    assert [list(result) for result in best] == [["index", "relevance_score"]] * 2
    assert [result["index"] for result in best] == order[:2]


# -- description of the server -------------------------------------------------------------------


def test_document_of_api_is_valid_and_names_the_key(embedder):
    with serve(ServedModel(embedder), (b"k3y",)) as (client_with_key, _):
        document = client_with_key.get("/openapi.json", Authorization="Bearer k3y").json
    pytest.importorskip("openapi_spec_validator").validate(document)
    ((scheme, described),) = document["components"]["securitySchemes"].items()
    assert described == {"type": "http", "scheme": "bearer"}
    assert document["security"] == [{scheme: []}]
    assert document["paths"]["/healthz"]["get"]["security"] == []


def test_every_route_and_common_status_follows_its_schema(client):
    """``client`` checks each response; this makes one request for every route and status."""
    name = client.get("/v1/models").json["data"][0]["id"]
    for path in ("/", "/healthz", "/readyz", "/metrics", "/openapi.json", f"/v1/models/{name}"):
        assert client.get(path).status == client.send("HEAD", path).status == 200
        assert client.get(path, Host="example.org").status == 403
        assert client.send("OPTIONS", path).headers["allow"] == "GET, HEAD, OPTIONS"
    assert client.get("/v1/models/other").error["code"] == "model_not_found"
    client.get("/v1/models", Host="example.org")
    for route, body in BODIES.items():
        path = f"/v1/{route}"
        assert client.post(path, body).status == (404 if route == "search" else 200)
        assert client.post(path, b"{").status == 400
        assert client.post(path, body, Host="example.org").status == 403
        assert client.post(path, {**body, "condition": "c" * 20_000}).status == 413
        assert client.post(path, body, Content_Encoding="gzip").status == 415
        assert client.get(path).headers["allow"] == "POST, OPTIONS"
        assert client.post(path, {**body, "unknown": 1}).status == 422
    paths = client.schemas.document["paths"].items()
    published = {(method, path) for path, operations in paths for method in operations}
    assert published - client.schemas.used == {("post", "/v1/search")}


def test_server_describes_itself_without_local_paths(embedder, tmp_path):
    fitted = replace(embedder, fitted_on=str(tmp_path / "secret" / "rows.csv"))
    name, folder = Path(embedder.encoder.name).name, str(Path(embedder.encoder.name).parent)
    with serve(ServedModel(fitted, CONDITION)) as (client, _):
        assert client.get("/healthz").json == {"status": "ok", "model": name}
        assert client.get("/readyz").json["status"] == "ready"
        (model,) = client.get("/v1/models").json["data"]
        assert (model["id"], model["encoder"], model["dim"]) == (name, name, embedder.dim)
        assert model["max_length"] == embedder.encoder.identity.max_length
        assert model["fitted_on"] == "rows.csv"
        by_default = client.post("/v1/embeddings", {"input": TEXTS})
        expected = embedder.encode(TEXTS, CONDITION)
        np.testing.assert_allclose(read_vectors(by_default), expected, atol=1e-6)
        metrics = client.get("/metrics").body.decode().splitlines()
        assert 'llmcond_requests_total{route="/v1/embeddings",status="200"} 1.0' in metrics
        assert "llmcond_texts_total 4.0" in metrics  # one of them for /readyz
        texts = [by_default.body.decode()]
        for path in ("/", "/healthz", "/readyz", "/v1/models", "/metrics", "/openapi.json"):
            texts.append(client.get(path).body.decode())
    assert not [text for text in texts if folder in text or str(tmp_path) in text]


# -- invalid requests ----------------------------------------------------------------------------

#: Fields that replace those of a valid body: the field that the error names, and its message.
INVALID_FIELDS = [
    ("similarity", {"sentence1": "a", "sentence2": []}, "sentence2", "sentence2 is empty"),
    ("similarity", {"sentence1": "a", "condition": []}, "condition", "condition is empty"),
    ("embeddings", {"conditon": 1}, "conditon", "Did you mean 'condition'"),
    ("embeddings", {"input": None}, "input", "'input' is null: it should be a text or a list"),
    ("embeddings", {"input": [[1], [2]]}, "input", "input holds token ids"),
    ("embeddings", {"dimensions": 8}, "dimensions", "this model's embeddings have 32"),
    ("embeddings", {"dimensions": 0}, "dimensions", "'dimensions' is 0: it should be at least 1."),
    ("embeddings", {"values": [["a"], ["b"]]}, "values", "a list of lists; give"),
    (
        "embeddings",
        {"condition": ["a", "b", "c"], "values": [["a"], ["b"]]},
        *("values", "values for 2 conditions, but condition has 3"),
    ),
    ("rerank", {"condition": None, "values": ["a"]}, "values", "there is no condition"),
    ("similarity", {"condition": "two men " * 200}, "condition", "with its values, is too long"),
    ("similarity", {"sentence2": TEXTS[:2]}, "sentence2", "3 in sentence1, 2 in"),
    ("search", {"condition": {"b": "x"}}, "condition", "'condition.b' is 'x': it should be a num"),
    ("search", {"condition": {str(i): 1 for i in range(65)}}, "condition", "at most 64"),
    ("embeddings", {"condition": "|"}, "condition", "names no condition"),
    ("embeddings", {"condition": "a" + "|b" * 64}, "condition", "65 wordings; give at most 64"),
]
#: Other requests, with their status.
INVALID_REQUESTS = [
    ("/v1/embeddings", {**VALID, "input": ["a"] * 51}, 413, "51 texts; a request may have at mos"),
    ("/v1/embeddings", [VALID], 422, "must be a JSON object"),
    ("/v1/embeddings", b"[" * 9_000, 400, "recursion limit"),
    ("/v1/serach", VALID, 404, "Did you mean '/v1/search'"),
    ("/healthz", VALID, 405, "not accept POST; use GET"),
]


def test_invalid_requests_are_rejected_in_one_line(client):
    for route, fields, param, message in INVALID_FIELDS:
        response = client.post(f"/v1/{route}", {**BODIES[route], **fields})
        assert (response.status, response.error["param"]) == (422, param), fields
        assert response.error["type"] == "invalid_request_error"
        assert message in response.error["message"]
    for path, body, status, message in INVALID_REQUESTS:
        response = client.post(path, body)
        assert (response.status, response.error["type"]) == (status, "invalid_request_error")
        assert message in response.error["message"]


HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
TWO_LENGTHS = HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("body", [b"0\r\n\r\n", b"no chunk\r\n"])
def test_body_with_two_lengths_is_rejected_and_connection_closed(client, body):
    second_request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with client.connect() as connection:
        connection.sendall(TWO_LENGTHS + body + second_request)
        response = b"".join(iter(lambda: connection.recv(4096), b""))
    assert response.startswith(b"HTTP/1.1 400")
    assert response.count(b"HTTP/1.1") == 1
    assert b"connection: close" in response.lower()


def test_two_lengths_are_rejected_if_parser_accepts_them(embedder):
    headers = [(b"host", b"localhost"), (b"content-length", b"2"), (b"transfer-encoding", b"x")]
    scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "headers": headers}
    messages = []

    async def send(message):
        messages.append(message)

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    with serve(ServedModel(embedder)) as (_, server):
        asyncio.run(server.gate(scope, receive, send))
    assert messages[0]["status"] == 400
    assert (b"connection", b"close") in messages[0]["headers"]
    assert b"both Transfer-Encoding and Content-Length" in messages[1]["body"]


# -- keys, hosts and origins ---------------------------------------------------------------------


@pytest.fixture
def request_log(caplog):
    logger = logging.getLogger("llmcond.requests")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_key_is_required_and_never_logged(embedder, request_log):
    with serve(ServedModel(embedder), (b"s3cret", b"0ther")) as (client, _):
        for key in ("s3cret", "0ther"):
            authorization = f"Bearer {key}"
            assert client.post("/v1/embeddings", VALID, Authorization=authorization).status == 200
        for authorization in ("Bearer s3cre", "s3cret", "Basic s3cret", "Bearer", "Bearer \xe9"):
            response = client.post("/v1/embeddings", VALID, Authorization=authorization)
            assert (response.status, response.error["type"]) == (401, "authentication_error")
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/metrics", "/openapi.json", "/no/such"):
            assert client.get(path).status == 401
        for path in ("/", "/healthz", "/readyz"):
            assert client.get(path).status == 200
        response = client.get("/healthz", X_Request_Id="from-a-proxy.7")
        assert response.headers["x-request-id"] == "from-a-proxy.7"
        response = client.get("/healthz", X_Request_Id="not an id; s3cret")
        assert len(response.headers["x-request-id"]) == 16
    log_text = request_log.text
    assert "POST /v1/embeddings 200 texts=3 tokens=" in log_text
    assert "POST /v1/embeddings 401" in log_text
    assert not any(text in log_text for text in ("s3cret", "0ther", TEXTS[0], CONDITION))


def test_server_without_keys_accepts_only_local_hosts(client, embedder):
    for host in ("localhost", "LocalHost:8000", "127.0.0.1:1", "[::1]:8000", "10.0.0.1"):
        assert client.get("/healthz", Host=host).status == 200
    # http.client always sends a host, as browsers do.
    with client.connect() as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
    for host in ("example.org", "localhost.example.org:8000", "127.0.0.1.example.org", ""):
        response = client.get("/healthz", Host=host)
        assert (response.status, response.error["code"]) == (403, "host")
    with serve(ServedModel(embedder), (b"k3y",)) as (client_with_key, _):
        assert client_with_key.get("/healthz", Host="example.org").status == 200


def test_every_loopback_address_accepts_only_local_hosts(embedder):
    for address, status in (("127.0.0.2", 403), ("::1", 403), ("0.0.0.0", 200)):
        with serve(ServedModel(embedder), host=address) as (client, _):
            assert client.get("/healthz", Host="example.org").status == status


def test_only_pages_of_named_origins_may_send_requests(client, embedder):
    page, key = "https://example.org", "Bearer k3y"
    preflight = {"Access_Control_Request_Method": "POST"}
    response = client.send("OPTIONS", "/v1/embeddings", Origin="null", **preflight)
    assert not [name for name in response.headers if name.startswith("access-control")]
    with serve(ServedModel(embedder), (b"k3y",), cors_origin=[page]) as (client_with_key, _):
        # A browser sends no key with a preflight request.
        answer = client_with_key.send("OPTIONS", "/v1/embeddings", Origin=page, **preflight)
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == page
        assert "access-control-allow-credentials" not in answer.headers
        for other in ("https://example.org.evil.example", "null"):
            answer = client_with_key.send("OPTIONS", "/v1/embeddings", Origin=other, **preflight)
            assert answer.status == 400
            response = client_with_key.get("/v1/models", Origin=other, Authorization=key)
            for refused in (answer, response):
                assert "access-control-allow-origin" not in refused.headers


# -- limits, timeouts and disconnects ------------------------------------------------------------


class BlockedEncoding:
    """Makes ``Embedder.encode_with_counts`` wait until ``go`` is set, once ``block`` is called."""

    def __init__(self, monkeypatch):
        self.started, self.go, self.rows = threading.Semaphore(0), threading.Event(), 0
        original = Embedder.encode_with_counts

        def encode_with_counts(embedder, rows):
            self.started.release()
            assert self.go.wait(PATIENCE)
            self.rows += len(rows)
            return original(embedder, rows)

        self.block = lambda: monkeypatch.setattr(Embedder, "encode_with_counts", encode_with_counts)


@pytest.fixture
def blocked_encoding(monkeypatch):
    encoding = BlockedEncoding(monkeypatch)
    yield encoding
    encoding.go.set()


def wait_for_metric(client, line):
    wait_until(lambda: f"{line}\n" in client.get("/metrics").body.decode())


def start_thread(function):
    """Call a function in a thread, and return a function that waits for its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return lambda: (thread.join(PATIENCE), results[0])[1]


def test_excess_requests_get_retry_after(embedder, blocked_encoding):
    with serve(ServedModel(embedder), max_concurrent_requests=1) as (client, _):
        blocked_encoding.block()
        first = start_thread(lambda: client.post("/v1/embeddings", VALID))
        blocked_encoding.started.acquire()
        rejected = client.post("/v1/embeddings", VALID)
        assert (rejected.status, rejected.error["type"]) == (429, "rate_limit_error")
        assert int(rejected.headers["retry-after"]) >= 1
        assert client.get("/healthz").status == 200
        blocked_encoding.go.set()
        assert first().status == 200
        assert client.post("/v1/embeddings", VALID).status == 200


def test_slow_requests_time_out(embedder, blocked_encoding):
    with serve(ServedModel(embedder), timeout=0.2) as (client, _):
        blocked_encoding.block()
        first = start_thread(lambda: client.post("/v1/embeddings", VALID))
        blocked_encoding.started.acquire()
        second = client.post("/v1/embeddings", VALID)
        assert (second.status, second.error["code"]) == (504, "timeout")
        assert "Send fewer texts at a time" in second.error["message"]
        assert first().status == 504
        with client.connect() as connection:
            connection.sendall(HEAD + b"Content-Length: 90\r\n\r\n{")
            assert connection.recv(12) == b"HTTP/1.1 408"
        blocked_encoding.go.set()
    assert blocked_encoding.rows == 3  # only the first request had started


def test_work_of_disconnected_client_is_dropped(embedder, blocked_encoding):
    with serve(ServedModel(embedder)) as (client, server):
        blocked_encoding.block()
        first = start_thread(lambda: client.post("/v1/embeddings", VALID))
        blocked_encoding.started.acquire()
        body = json.dumps(VALID).encode()
        with client.connect() as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_for_metric(client, "llmcond_waiting_texts 3.0")
            assert server.gate._batcher.awaited == 2
        wait_for_metric(client, 'llmcond_requests_total{route="/v1/embeddings",status="499"} 1.0')
        assert server.gate._batcher.awaited == 1
        blocked_encoding.go.set()
        assert first().status == 200
    assert blocked_encoding.rows == 3


def test_model_error_fails_one_request_and_discloses_nothing(embedder, monkeypatch, request_log):
    original = Embedder.encode_with_counts

    def encode_with_counts(embedder, rows):
        if any(text == "secret text" for text, _ in rows):
            raise ZeroDivisionError("secret text")
        if any(text == "overflow" for text, _ in rows):
            raise NotFiniteError(rows[0], "the encoder returned NaN")
        return original(embedder, rows)

    monkeypatch.setattr(Embedder, "encode_with_counts", encode_with_counts)
    with serve(ServedModel(embedder)) as (client, _):
        response = client.post("/v1/embeddings", {"input": "secret text", "condition": CONDITION})
        assert (response.status, response.error["type"]) == (500, "server_error")
        assert "secret" not in response.error["message"]
        response = client.post("/v1/embeddings", {"input": "overflow", "condition": CONDITION})
        assert (response.status, response.error["code"]) == (500, "model_failed")
        assert client.post("/v1/embeddings", VALID).status == 200
    assert "ZeroDivisionError in " in request_log.text
    assert "secret" not in request_log.text


# -- start and shutdown --------------------------------------------------------------------------


def test_shutdown_finishes_accepted_requests_and_rejects_new_ones(embedder, blocked_encoding):
    with serve(ServedModel(embedder)) as (client, server):
        blocked_encoding.block()
        accepted = [start_thread(lambda: client.post("/v1/embeddings", VALID)) for _ in range(5)]
        blocked_encoding.started.acquire()
        wait_for_metric(client, "llmcond_requests_in_progress 5.0")
        server.gate.closing = True
        rejected = client.post("/v1/embeddings", VALID)
        assert (rejected.status, rejected.error["code"]) == (503, "closing")
        server.handle_exit(15, None)
        blocked_encoding.go.set()
        assert [get_response().status for get_response in accepted] == [200] * 5
    with pytest.raises(ConnectionRefusedError):
        client.get("/healthz")


def test_occupied_address_is_rejected():
    with bind_socket("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}: Address already in use"):
            bind_socket("127.0.0.1", port)
