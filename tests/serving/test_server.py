"""Requests over HTTP: what is answered, and what is refused with which words."""

import asyncio
import base64
import http.client
import json
import logging
import re
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.serving import served
from helpers.waiting import PATIENCE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmcond.conditions import Condition
from llmcond.errors import UserError
from llmcond.features.view import FeatureView
from llmcond.prompts.template import load_prompt
from llmcond.runs.embedder import Embedder
from llmcond.serving.model import ServedModel
from llmcond.serving.server import bind_socket

TEXTS = ["two men play in the park", "three women sit at the beach", "children read a number 7"]
PLACE = "the place"


def vectors(answer):
    assert answer.status == 200
    return np.array([one["embedding"] for one in answer.json["data"]], dtype=np.float32)


# -- what is answered ----------------------------------------------------------------------------


def test_embeddings_are_those_of_the_embedder(client, embedder):
    wanted = embedder.encode(TEXTS, PLACE)
    answer = client.post("/v1/embeddings", {"input": TEXTS, "condition": PLACE})
    np.testing.assert_allclose(vectors(answer), wanted, atol=1e-6)
    told = answer.json
    assert [one["index"] for one in told["data"]] == [0, 1, 2]
    assert (told["object"], told["model"]) == ("list", Path(embedder.encoder.name).name)
    assert told["usage"]["prompt_tokens"] == told["usage"]["total_tokens"] > len(TEXTS)
    assert told["truncated"] == 0
    one = client.post("/v1/embeddings", {"input": TEXTS[1], "condition": [PLACE], "model": "any"})
    np.testing.assert_allclose(vectors(one), wanted[1:2], atol=1e-6)
    each = {"input": TEXTS, "condition": [PLACE, "the mood", PLACE], "encoding_format": "base64"}
    found = client.post("/v1/embeddings", each).json["data"]
    read = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in found]
    np.testing.assert_allclose(read, embedder.encode(TEXTS, each["condition"]), atol=1e-6)


def test_openais_client_gets_them(client, embedder):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as own:
        body = {"condition": PLACE, "values": ["park", "beach"]}
        answer = own.embeddings.create(model="x", input=TEXTS, extra_body=body)
        found = np.array([one.embedding for one in answer.data])
        wanted = embedder.encode(TEXTS, Condition(PLACE, ["park", "beach"]))
        np.testing.assert_allclose(found, wanted, atol=1e-6)
        assert [one.id for one in own.models.list()] == [Path(embedder.encoder.name).name]
        with pytest.raises(openai.UnprocessableEntityError, match="condition is missing"):
            own.embeddings.create(model="x", input=TEXTS)


def test_values_are_those_of_each_condition_or_of_all(client, embedder):
    values, others = ["park", "beach"], ["sad, gay", "calm"]
    place, mood = Condition(PLACE, values), Condition("the mood", others)
    body = {"input": TEXTS, "condition": PLACE, "values": values}
    wanted = embedder.encode(TEXTS, place)
    np.testing.assert_allclose(vectors(client.post("/v1/embeddings", body)), wanted, atol=1e-6)
    assert np.abs(wanted - embedder.encode(TEXTS, PLACE)).max() > 1e-3
    each = [PLACE, "the mood", PLACE]
    body = {"input": TEXTS, "condition": each, "values": [values, others, []]}
    wanted = embedder.encode(TEXTS, [place, mood, PLACE])
    np.testing.assert_allclose(vectors(client.post("/v1/embeddings", body)), wanted, atol=1e-6)
    body["values"] = values
    wanted = embedder.encode(TEXTS, [Condition(one, values) for one in each])
    np.testing.assert_allclose(vectors(client.post("/v1/embeddings", body)), wanted, atol=1e-6)
    pair = {"sentence1": TEXTS[0], "sentence2": TEXTS[1], "condition": PLACE, "values": values}
    (found,) = client.post("/v1/similarity", pair).json["similarities"]
    assert found == pytest.approx(embedder.similarity(TEXTS[0], TEXTS[1], place), abs=1e-6)


def test_texts_that_are_too_long_are_cut_and_counted(client):
    texts = [TEXTS[0], "two men " * 200]
    answer = client.post("/v1/embeddings", {"input": texts, "condition": PLACE})
    assert answer.json["truncated"] == 1
    assert answer.json["usage"]["total_tokens"] > 400


def test_similarity_of_pairs_and_of_one_with_many(client, embedder):
    first, second = TEXTS[:2], TEXTS[1:]
    pairs = {"sentence1": first, "sentence2": second, "condition": PLACE}
    found = client.post("/v1/similarity", pairs).json["similarities"]
    assert found == pytest.approx(embedder.similarity(first, second, PLACE).tolist(), abs=1e-6)
    conditions = {"sentence1": TEXTS[0], "sentence2": TEXTS[1], "condition": [PLACE, "the mood"]}
    found = client.post("/v1/similarity", conditions).json["similarities"]
    wanted = embedder.similarity([TEXTS[0]] * 2, [TEXTS[1]] * 2, [PLACE, "the mood"])
    assert found == pytest.approx(wanted.tolist(), abs=1e-6)


def test_it_tells_of_itself(client, embedder):
    name = Path(embedder.encoder.name).name
    assert client.get("/healthz").json == {"status": "ok", "model": name}
    assert client.get("/readyz").json["status"] == "ready"
    (model,) = client.get("/v1/models").json["data"]
    assert (model["id"], model["dim"]) == (name, embedder.dim)
    assert (model["encoder"], model["fitted_on"]) == (name, "")
    paths = client.get("/openapi.json").json["paths"]
    fields = paths["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]
    assert "condition" in fields["schema"]["properties"]


def test_metrics_count_requests_texts_and_batches(embedder):
    with served(ServedModel(embedder)) as (client, _):
        client.post("/v1/embeddings", {"input": TEXTS, "condition": PLACE})
        client.post("/v1/embeddings", {"input": TEXTS})
        client.get("/no/such/path")
        figures = client.get("/metrics")
    lines = figures.body.decode().splitlines()
    assert figures.headers["content-type"].startswith("text/plain")
    assert 'llmcond_requests_total{route="/v1/embeddings",status="200"} 1.0' in lines
    assert 'llmcond_requests_total{route="/v1/embeddings",status="422"} 1.0' in lines
    assert 'llmcond_requests_total{route="other",status="404"} 1.0' in lines
    assert "llmcond_texts_total 3.0" in lines
    assert "llmcond_batch_texts_sum 3.0" in lines
    assert "llmcond_waiting_texts 0.0" in lines


def test_a_default_condition_serves_plain_clients(embedder):
    with served(ServedModel(embedder, PLACE)) as (client, _):
        found = vectors(client.post("/v1/embeddings", {"input": TEXTS}))
        other = {"input": TEXTS, "condition": "the mood"}
        np.testing.assert_allclose(found, embedder.encode(TEXTS, PLACE), atol=1e-6)
        found = vectors(client.post("/v1/embeddings", other))
        np.testing.assert_allclose(found, embedder.encode(TEXTS, "the mood"), atol=1e-6)


# -- what is refused -----------------------------------------------------------------------------

GOOD = {"input": TEXTS, "condition": PLACE}
SIDES = {"sentence1": TEXTS, "sentence2": TEXTS, "condition": PLACE}
WRONG = [
    ("/v1/embeddings", {"input": TEXTS}, 422, "condition", "condition is missing"),
    ("/v1/embeddings", {**GOOD, "conditon": 1}, 422, "conditon", "Did you mean 'condition'"),
    (
        "/v1/embeddings",
        {"condition": PLACE},
        422,
        "input",
        "the key 'input' is missing. Legal keys: ",
    ),
    ("/v1/embeddings", {**GOOD, "input": []}, 422, "input", "is empty; give at least one text"),
    ("/v1/embeddings", {**GOOD, "input": ["a", " "]}, 422, "input", "position 1 is empty"),
    ("/v1/embeddings", {**GOOD, "input": [1, 2]}, 422, "input", "check_embedding_ctx_length=False"),
    ("/v1/embeddings", {**GOOD, "input": [[1], [2]]}, 422, "input", "input holds token ids"),
    (
        "/v1/embeddings",
        {**GOOD, "input": [{}]},
        422,
        "input",
        "'input.0' is {}: it should be a valid str",
    ),
    ("/v1/embeddings", {**GOOD, "input": 3.5}, 422, "input", "'input' is 3.5: it should be"),
    ("/v1/embeddings", {**GOOD, "condition": [PLACE]}, 422, "input", "3 sentences and 1 cond"),
    (
        "/v1/embeddings",
        {**GOOD, "dimensions": 8},
        422,
        "dimensions",
        "this model's embeddings have 32",
    ),
    ("/v1/embeddings", {**GOOD, "encoding_format": "hex"}, 422, "encoding_format", "'base64'"),
    (
        "/v1/embeddings",
        {**GOOD, "input": ["a"] * 51},
        413,
        "input",
        "51 texts; a request may have at most 50",
    ),
    ("/v1/embeddings", {**GOOD, "input": "a" * 20_000}, 413, None, "larger than 20,000 bytes"),
    ("/v1/embeddings", [GOOD], 422, None, "must be a JSON object"),
    ("/v1/embeddings", b"{", 400, None, "not valid JSON: EOF"),
    ("/v1/embeddings", b"", 400, None, "not valid JSON"),
    ("/v1/embeddings", b"[" * 9_000, 400, None, "recursion limit"),
    ("/v1/embeddings", b'{"input": "\xff"}', 400, None, "invalid unicode"),
    ("/v1/embeddings", b'{"input": "\\ud800"}', 400, None, "not valid JSON"),
    ("/v1/embeddings", {"input": TEXTS, "values": ["a"]}, 422, "values", "there is no condition"),
    ("/v1/embeddings", {**GOOD, "values": "a, b"}, 422, "values", "should be a valid array"),
    (
        "/v1/embeddings",
        {**GOOD, "values": ["a", 7]},
        422,
        "values",
        "'values.1' is 7: it should be a valid",
    ),
    ("/v1/embeddings", {**GOOD, "values": [["a"], ["b"]]}, 422, "values", "a list of lists; give"),
    ("/v1/embeddings", {**GOOD, "values": ["a"] * 9 + [["b"]]}, 422, "values", "should be a valid"),
    (
        "/v1/embeddings",
        {**GOOD, "values": [f"{i}" for i in range(65)]},
        422,
        "values",
        "at most 64",
    ),
    (
        "/v1/embeddings",
        {**GOOD, "condition": " ", "values": ["a"]},
        422,
        "values",
        "an empty condition",
    ),
    (
        "/v1/embeddings",
        {**GOOD, "condition": ["a", "b", "c"], "values": [["a"], ["b"]]},
        *(422, "values", "values for 2 conditions, but condition has 3"),
    ),
    ("/v1/similarity", {**SIDES, "sentence2": TEXTS[:2]}, 422, "sentence2", "3 in sentence1, 2 in"),
    ("/v1/similarity", {**SIDES, "sentence1": ["a", "", "b"]}, 422, "sentence1", "is empty"),
    ("/v1/search", {"query": "a", "condition": PLACE}, 404, None, "with --index"),
    ("/v1/search", b'{"query": "a", "condition": {"b": NaN}}', 422, "condition", "finite"),
    (
        "/v1/search",
        {"query": "a", "condition": PLACE, "k": 0},
        422,
        "k",
        "'k' is 0: it must be at least 1",
    ),
    ("/v1/serach", GOOD, 404, None, "Did you mean '/v1/search'"),
    ("/healthz", GOOD, 405, None, "not accept POST; use GET"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), WRONG)
def test_wrong_requests_are_refused_in_a_line(client, path, body, status, param, words):
    answer = client.post(path, body)
    assert answer.status == status
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"
    assert re.search(words, answer.error["message"])


def test_other_kinds_of_bodies_are_refused(client):
    body = json.dumps(GOOD).encode()
    form = client.post("/v1/embeddings", body, Content_Type="text/plain")
    assert (form.status, form.error["code"]) == (415, "content_type")
    packed = client.post("/v1/embeddings", body, Content_Encoding="gzip")
    assert (packed.status, packed.error["code"]) == (415, "content_encoding")
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=PATIENCE)
    connection.request(
        "POST",
        "/v1/embeddings",
        iter([b"x" * 15_000] * 2),
        {"Content-Type": "application/json"},
        encode_chunked=True,
    )
    assert connection.getresponse().status == 413  # no length was stated
    connection.close()


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=8,
)
fields = ["input", "condition", "sentence1", "sentence2", "query", "k", "where", "dimensions", "x"]
bodies = st.one_of(
    st.dictionaries(st.sampled_from(fields), anything).map(lambda body: json.dumps(body).encode()),
    anything.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60),
)
paths = st.sampled_from(["/v1/embeddings", "/v1/similarity", "/v1/search"])


@settings(
    max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(path=paths, body=bodies)
def test_whatever_is_sent_is_answered_without_failing(client, path, body):
    answer = client.post(path, body)
    assert answer.status == 200 or (400 <= answer.status < 500 and answer.error["message"])


BOTH = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BOTH += b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("body", [b"0\r\n\r\n", b"no chunk\r\n", b"", b"2\r\n{}\r\n0\r\n\r\n"])
def test_a_body_with_two_lengths_is_refused_and_the_connection_closed(client, body, caplog):
    began = time.monotonic()
    second = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", client.port), timeout=60) as connection:
        connection.sendall(BOTH + body + second)
        connection.settimeout(30)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer.lower()
    assert time.monotonic() - began < 20
    assert "Exception" not in caplog.text


def test_two_lengths_are_refused_where_the_parser_lets_them_through(embedder):
    """As h11 does, which uvicorn takes where httptools is not installed."""
    headers = [(b"host", b"localhost"), (b"content-length", b"2"), (b"transfer-encoding", b"x")]
    scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "headers": headers}
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    with served(ServedModel(embedder)) as (_, running):
        asyncio.run(running.gate(scope, receive, send))
    assert sent[0]["status"] == 400
    assert (b"connection", b"close") in sent[0]["headers"]
    assert b"both Transfer-Encoding and Content-Length" in sent[1]["body"]


def test_paths_of_this_machine_are_not_told(embedder, tmp_path):
    fitted = replace(embedder, fitted_on=str(tmp_path / "secret" / "rows.csv"))
    with served(ServedModel(fitted)) as (client, _):
        folder = str(Path(embedder.encoder.name).parent)
        for path in ("/", "/healthz", "/readyz", "/v1/models", "/metrics", "/openapi.json"):
            told = client.get(path).body.decode()
            assert folder not in told
            assert str(tmp_path) not in told
        assert client.get("/v1/models").json["data"][0]["fitted_on"] == "rows.csv"
        answer = client.post("/v1/embeddings", GOOD)
        assert folder not in answer.body.decode()


def test_texts_without_a_token_of_their_own_are_counted(minilm):
    texts = ["\ufeff", TEXTS[0], "\u200d"]
    subtracting = Embedder(minilm, FeatureView((load_prompt("concat-sent-cond"),), subtract=True))
    pairs = {"sentence1": texts, "sentence2": texts, "condition": PLACE}
    with served(ServedModel(subtracting)) as (client, _):
        answer = client.post("/v1/embeddings", {"input": texts, "condition": PLACE})
        norms = np.linalg.norm(vectors(answer), axis=1)
        assert norms.tolist() == pytest.approx([0, 1, 0], abs=1e-6)
        assert answer.json["zero_vectors"] == 2
        answer = client.post("/v1/similarity", pairs).json
    assert answer["similarities"] == pytest.approx([0, 1, 0], abs=1e-6)
    assert answer["zero_vectors"] == 4


def test_control_characters_are_characters(client):
    texts = ["two\x00men", "\x1b[31m\x07", "\u202e play \ufeff", "\U0001f600" * 30]
    answer = client.post("/v1/embeddings", {"input": texts, "condition": "\x01"})
    assert np.isfinite(vectors(answer)).all()


@pytest.fixture
def logged(caplog):
    log = logging.getLogger("llmcond.requests")
    log.addHandler(caplog.handler)
    log.setLevel(logging.INFO)
    yield caplog
    log.removeHandler(caplog.handler)


# -- keys ----------------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_never_logged(embedder, logged):
    with served(ServedModel(embedder), (b"s3cret", b"0ther")) as (client, _):
        for key in ("s3cret", "0ther"):
            own = f"Bearer {key}"
            assert client.post("/v1/embeddings", GOOD, Authorization=own).status == 200
        for wrong in ("Bearer s3cre", "s3cret", "Basic s3cret", "Bearer", "Bearer \xe9"):
            answer = client.post("/v1/embeddings", GOOD, Authorization=wrong)
            assert (answer.status, answer.error["type"]) == (401, "authentication_error")
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/metrics", "/openapi.json", "/no/such"):
            assert client.get(path).status == 401
        for path in ("/", "/healthz", "/readyz"):
            assert client.get(path).status == 200
        given = client.get("/healthz", X_Request_Id="from-a-proxy.7")
        assert given.headers["x-request-id"] == "from-a-proxy.7"
        odd = client.get("/healthz", X_Request_Id="not an id; s3cret")
        assert len(odd.headers["x-request-id"]) == 16
    told = logged.text
    assert "POST /v1/embeddings 200 texts=3 tokens=" in told
    assert "POST /v1/embeddings 401" in told
    assert not any(text in told for text in ("s3cret", "0ther", TEXTS[0], PLACE))


def test_without_keys_it_answers_as_this_machine_only(client, embedder):
    for host in ("localhost", "LocalHost:8000", "127.0.0.1:1", "[::1]:8000", "10.0.0.1"):
        assert client.get("/healthz", Host=host).status == 200
    for host in ("example.org", "localhost.example.org:8000", "127.0.0.1.example.org", ""):
        answer = client.get("/healthz", Host=host)
        assert (answer.status, answer.error["code"]) == (403, "host")
    with served(ServedModel(embedder), (b"k3y",)) as (other, _):
        assert other.get("/healthz", Host="example.org").status == 200


# -- too much, too late, and hanging up ----------------------------------------------------------


class Held:
    """An embedder's work that waits until it is let go on."""

    def __init__(self, monkeypatch, embedder):
        self.begun, self.go = threading.Semaphore(0), threading.Event()
        self.rows = 0
        own = Embedder.encode_counted

        def encode_counted(embedder, rows):
            self.begun.release()
            assert self.go.wait(PATIENCE)
            self.rows += len(rows)
            return own(embedder, rows)

        self.start = lambda: monkeypatch.setattr(Embedder, "encode_counted", encode_counted)


@pytest.fixture
def held(monkeypatch, embedder):
    found = Held(monkeypatch, embedder)
    yield found
    found.go.set()


def until(client, figure):
    """Wait until the metrics show a figure."""
    for _ in range(5_000):
        if f"{figure}\n" in client.get("/metrics").body.decode():
            return
    raise AssertionError(f"the metrics never showed {figure}")


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    return lambda: (thread.join(PATIENCE), found[0])[1]


def test_more_requests_than_are_taken_are_told_when_to_come_again(embedder, held):
    with served(ServedModel(embedder), max_concurrent_requests=1) as (client, _):
        held.start()
        first = in_thread(lambda: client.post("/v1/embeddings", GOOD))
        held.begun.acquire()
        refused = client.post("/v1/embeddings", GOOD)
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert client.get("/healthz").status == 200
        held.go.set()
        assert first().status == 200
        assert client.post("/v1/embeddings", GOOD).status == 200


def test_what_takes_too_long_is_given_up(embedder, held):
    with served(ServedModel(embedder), timeout=0.2) as (client, _):
        held.start()
        first = in_thread(lambda: client.post("/v1/embeddings", GOOD))
        held.begun.acquire()
        late = client.post("/v1/embeddings", GOOD)
        assert (late.status, late.error["code"]) == (504, "timeout")
        assert first().status == 504
        with socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE) as slow:
            head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n"
            slow.sendall(head + b"Content-Type: application/json\r\n\r\n{")
            assert slow.recv(12) == b"HTTP/1.1 408"
        held.go.set()
    assert held.rows == 3  # of the first, which had begun


def test_the_work_of_a_client_that_hangs_up_is_dropped(embedder, held):
    with served(ServedModel(embedder)) as (client, running):
        held.start()
        first = in_thread(lambda: client.post("/v1/embeddings", GOOD))
        held.begun.acquire()
        body = json.dumps(GOOD).encode()
        with socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE) as gone:
            head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
            kind = b"Content-Type: application/json\r\n\r\n"
            gone.sendall(head % len(body) + kind + body)
            until(client, "llmcond_waiting_texts 3.0")
            assert running.gate._batcher.awaited == 2
        until(client, 'llmcond_requests_total{route="/v1/embeddings",status="499"} 1.0')
        assert running.gate._batcher.awaited == 1
        held.go.set()
        assert first().status == 200
        assert running.gate._batcher.awaited == 0
    assert held.rows == 3


def test_an_error_of_the_model_fails_one_request_and_tells_nothing(embedder, monkeypatch, logged):
    own = Embedder.encode_counted

    def encode_counted(embedder, rows):
        if any(text == "secret text" for text, _ in rows):
            raise ZeroDivisionError("secret text")
        return own(embedder, rows)

    monkeypatch.setattr(Embedder, "encode_counted", encode_counted)
    with served(ServedModel(embedder)) as (client, _):
        answer = client.post("/v1/embeddings", {"input": "secret text", "condition": PLACE})
        assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert "secret" not in answer.error["message"]
        assert client.post("/v1/embeddings", GOOD).status == 200
    assert "ZeroDivisionError in " in logged.text
    assert "secret" not in logged.text


# -- stopping ------------------------------------------------------------------------------------


def test_what_was_accepted_is_answered_and_nothing_more(embedder, held):
    with served(ServedModel(embedder)) as (client, running):
        held.start()
        accepted = [in_thread(lambda: client.post("/v1/embeddings", GOOD)) for _ in range(5)]
        held.begun.acquire()
        until(client, "llmcond_requests_in_progress 5.0")
        running.gate.closing = True
        refused = client.post("/v1/embeddings", GOOD)
        assert (refused.status, refused.error["code"]) == (503, "closing")
        running.handle_exit(15, None)
        held.go.set()
        assert [one().status for one in accepted] == [200] * 5
    with pytest.raises(ConnectionRefusedError):
        client.get("/healthz")


def test_an_address_that_is_taken_is_refused():
    with bind_socket("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}: Address already in use"):
            bind_socket("127.0.0.1", port)
    with pytest.raises(UserError, match="cannot listen on no such host"):
        bind_socket("no such host", 0)
