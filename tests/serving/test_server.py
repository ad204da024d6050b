"""Requests over HTTP: responses, error messages, keys, limits and shutdown."""

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
from helpers.hub import serve_storing_hub, use_hub
from helpers.serving import serve
from helpers.waiting import PATIENCE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from llmcond.conditions import Condition
from llmcond.errors import UserError
from llmcond.features.view import FeatureView
from llmcond.prompts.template import load_prompt
from llmcond.runs.embedder import Embedder
from llmcond.serving.model import ServedModel
from llmcond.serving.server import bind_socket

TEXTS = ["two men play in the park", "three women sit at the beach", "children read a number 7"]
CONDITION = "the place"


def read_vectors(response):
    assert response.status == 200
    return np.array([item["embedding"] for item in response.json["data"]], dtype=np.float32)


# -- responses -----------------------------------------------------------------------------------


def test_embeddings_match_embedder(client, embedder):
    expected = embedder.encode(TEXTS, CONDITION)
    response = client.post("/v1/embeddings", {"input": TEXTS, "condition": CONDITION})
    np.testing.assert_allclose(read_vectors(response), expected, atol=1e-6)
    body = response.json
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    assert (body["object"], body["model"]) == ("list", Path(embedder.encoder.name).name)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > len(TEXTS)
    assert body["truncated"] == 0
    response = client.post(
        "/v1/embeddings", {"input": TEXTS[1], "condition": [CONDITION], "model": "any"}
    )
    np.testing.assert_allclose(read_vectors(response), expected[1:2], atol=1e-6)
    request = {
        "input": TEXTS,
        "condition": [CONDITION, "the mood", CONDITION],
        "encoding_format": "base64",
    }
    data = client.post("/v1/embeddings", request).json["data"]
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data]
    np.testing.assert_allclose(decoded, embedder.encode(TEXTS, request["condition"]), atol=1e-6)


def test_model_that_a_request_names_is_not_downloaded(client, embedder, monkeypatch, tmp_path):
    with serve_storing_hub() as hub:
        use_hub(monkeypatch, hub, tmp_path)
        for path, texts in (
            ("/v1/embeddings", {"input": TEXTS[0]}),
            ("/v1/similarity", {"sentence1": TEXTS[0], "sentence2": TEXTS[1]}),
        ):
            request = {**texts, "condition": CONDITION, "model": "ada/tuned"}
            response = client.post(path, request)
            assert response.status == 200
            assert response.json["model"] == Path(embedder.encoder.name).name
        assert (hub.tokens, hub.downloaded) == (set(), [])


def test_openai_client_gets_embeddings(client, embedder):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as openai_client:
        body = {"condition": CONDITION, "values": ["park", "beach"]}
        response = openai_client.embeddings.create(model="x", input=TEXTS, extra_body=body)
        actual = np.array([item.embedding for item in response.data])
        expected = embedder.encode(TEXTS, Condition(CONDITION, ["park", "beach"]))
        np.testing.assert_allclose(actual, expected, atol=1e-6)
        (model,) = openai_client.models.list()
        assert model.id == Path(embedder.encoder.name).name
        assert openai_client.models.retrieve(model.id) == model
        with pytest.raises(openai.NotFoundError, match="no model 'gpt/4'; this server has"):
            openai_client.models.retrieve("gpt/4")
        with pytest.raises(openai.UnprocessableEntityError, match="condition is missing"):
            openai_client.embeddings.create(model="x", input=TEXTS)
        for token_ids in ([1, 2, 3], [[1, 2, 3]], [[]]):
            with pytest.raises(openai.UnprocessableEntityError, match="send texts instead"):
                openai_client.embeddings.create(model="x", input=token_ids, extra_body=body)


def test_values_apply_to_each_condition_or_to_all(client, embedder):
    values, mood_values = ["park", "beach"], ["sad, gay", "calm"]
    condition, mood_condition = Condition(CONDITION, values), Condition("the mood", mood_values)
    body = {"input": TEXTS, "condition": CONDITION, "values": values}
    expected = embedder.encode(TEXTS, condition)
    np.testing.assert_allclose(
        read_vectors(client.post("/v1/embeddings", body)), expected, atol=1e-6
    )
    assert np.abs(expected - embedder.encode(TEXTS, CONDITION)).max() > 1e-3
    conditions = [CONDITION, "the mood", CONDITION]
    body = {"input": TEXTS, "condition": conditions, "values": [values, mood_values, []]}
    expected = embedder.encode(TEXTS, [condition, mood_condition, CONDITION])
    np.testing.assert_allclose(
        read_vectors(client.post("/v1/embeddings", body)), expected, atol=1e-6
    )
    body["values"] = values
    expected = embedder.encode(TEXTS, [Condition(text, values) for text in conditions])
    np.testing.assert_allclose(
        read_vectors(client.post("/v1/embeddings", body)), expected, atol=1e-6
    )
    pair = {
        "sentence1": TEXTS[0],
        "sentence2": TEXTS[1],
        "condition": CONDITION,
        "values": values,
    }
    (similarity,) = client.post("/v1/similarity", pair).json["similarities"]
    assert similarity == pytest.approx(embedder.similarity(TEXTS[0], TEXTS[1], condition), abs=1e-6)


def test_long_texts_are_truncated_and_counted(client):
    texts = [TEXTS[0], "two men " * 200]
    response = client.post("/v1/embeddings", {"input": texts, "condition": CONDITION})
    assert response.json["truncated"] == 1
    assert response.json["usage"]["total_tokens"] > 400


def test_similarity_of_pairs_and_several_conditions(client, embedder):
    first, second = TEXTS[:2], TEXTS[1:]
    pairs = {"sentence1": first, "sentence2": second, "condition": CONDITION}
    similarities = client.post("/v1/similarity", pairs).json["similarities"]
    assert similarities == pytest.approx(
        embedder.similarity(first, second, CONDITION).tolist(), abs=1e-6
    )
    request = {"sentence1": TEXTS[0], "sentence2": TEXTS[1], "condition": [CONDITION, "the mood"]}
    similarities = client.post("/v1/similarity", request).json["similarities"]
    expected = embedder.similarity([TEXTS[0]] * 2, [TEXTS[1]] * 2, [CONDITION, "the mood"])
    assert similarities == pytest.approx(expected.tolist(), abs=1e-6)


def test_documents_are_ordered_by_similarity_to_query(client, embedder):
    condition = Condition(CONDITION, ["park", "beach"])
    request = {"query": "men in a park", "documents": [TEXTS[1], {"text": TEXTS[0]}, TEXTS[2]]}
    request |= {"condition": CONDITION, "values": ["park", "beach"], "return_documents": True}
    documents = [TEXTS[1], TEXTS[0], TEXTS[2]]
    scores = embedder.similarity(["men in a park"] * 3, documents, condition)
    response = client.post("/v1/rerank", request).json
    order = np.argsort(-scores).tolist()
    assert [result["index"] for result in response["results"]] == order
    assert [result["relevance_score"] for result in response["results"]] == pytest.approx(
        scores[order].tolist(), abs=1e-6
    )
    texts = [result["document"]["text"] for result in response["results"]]
    assert texts == [documents[index] for index in order]
    request |= {"top_n": 2, "return_documents": False, "model": "any"}
    best = client.post("/v1/rerank", request).json["results"]
    assert [list(result) for result in best] == [["index", "relevance_score"]] * 2
    assert [result["index"] for result in best] == order[:2]
    request["top_n"] = 9
    assert len(client.post("/v1/rerank", request).json["results"]) == 3


def test_document_of_api_names_key_only_if_server_has_keys(client, embedder):
    document = client.get("/openapi.json").json
    assert "security" not in document
    assert "securitySchemes" not in document["components"]
    assert "401" not in document["paths"]["/v1/search"]["post"]["responses"]
    with serve(ServedModel(embedder), (b"k3y",)) as (client_with_key, _):
        document = client_with_key.get("/openapi.json", Authorization="Bearer k3y").json
    ((scheme, described),) = document["components"]["securitySchemes"].items()
    assert described == {"type": "http", "scheme": "bearer"}
    assert document["security"] == [{scheme: []}]
    assert "401" in document["paths"]["/v1/search"]["post"]["responses"]
    assert document["paths"]["/healthz"]["get"]["security"] == []
    assert "401" not in document["paths"]["/healthz"]["get"]["responses"]


def test_schemas_of_api_accept_what_server_accepts(client):
    document = client.get("/openapi.json").json
    for name, schema in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        if name.endswith("Request"):
            assert schema["additionalProperties"] is False
    body = document["paths"]["/v1/rerank"]["post"]["requestBody"]["content"]["application/json"]
    validator = Draft202012Validator({**body["schema"], "components": document["components"]})
    for documents in (["a", {"text": "b"}], [7], [{"title": "b"}], "a"):
        request = {**RANKED, "documents": documents}
        is_accepted = client.post("/v1/rerank", request).status == 200
        assert validator.is_valid(request) == is_accepted


def test_document_of_api_follows_its_specification(client):
    openapi = pytest.importorskip("openapi_spec_validator")
    openapi.validate(client.get("/openapi.json").json)


def test_every_route_and_common_status_has_been_checked_against_its_schema(client):
    """``client`` checks each response; this makes one request for every route and status."""
    name = client.get("/v1/models").json["data"][0]["id"]
    for path in ("/", "/healthz", "/readyz", "/metrics", "/openapi.json", f"/v1/models/{name}"):
        assert client.get(path).status == 200
        assert client.get(path, Host="example.org").status == 403
    assert client.get("/v1/models/other").error["code"] == "model_not_found"
    client.get("/v1/models", Host="example.org")
    bodies = {"embeddings": VALID, "similarity": PAIRS, "rerank": RANKED}
    bodies["search"] = {"query": "a", "condition": CONDITION}
    for route, body in bodies.items():
        path = f"/v1/{route}"
        assert client.post(path, body).status == (404 if route == "search" else 200)
        assert client.post(path, b"{").status == 400
        assert client.post(path, body, Host="example.org").status == 403
        assert client.post(path, {**body, "condition": "c" * 20_000}).status == 413
        assert client.post(path, body, Content_Encoding="gzip").status == 415
        assert client.post(path, {**body, "unknown": 1}).status == 422
    published = {
        (method.upper(), path, int(status))
        for path, operations in client.schemas.document["paths"].items()
        for method, operation in operations.items()
        for status in operation["responses"]
    }
    # Other tests check these on one route each: they depend on the server and not on the route.
    rare = {400, 408, 429, 431, 500, 503, 504}
    left = {response for response in published - client.schemas.used if response[2] not in rare}
    assert left == {("POST", "/v1/search", 200), ("POST", "/v1/embeddings", 404)}


def test_server_describes_itself(client, embedder):
    name = Path(embedder.encoder.name).name
    assert client.get("/healthz").json == {"status": "ok", "model": name}
    assert client.get("/readyz").json["status"] == "ready"
    (model,) = client.get("/v1/models").json["data"]
    assert (model["id"], model["dim"]) == (name, embedder.dim)
    assert (model["encoder"], model["fitted_on"]) == (name, "")
    assert model["max_length"] == embedder.encoder.identity.max_length


def test_paths_with_get_accept_head_and_all_accept_options(client):
    name = client.get("/v1/models").json["data"][0]["id"]
    paths = ("/", "/healthz", "/readyz", "/metrics", "/openapi.json", f"/v1/models/{name}")
    for path in (*paths, "/v1/models"):
        get, head = client.get(path), client.send("HEAD", path)
        varying = {"content-length", "date", "x-request-id"}  # the metrics grow
        assert (head.status, head.body) == (200, b"")
        assert int(head.headers["content-length"]) > 0
        assert head.headers.keys() == get.headers.keys()
        assert all(head.headers[key] == get.headers[key] for key in head.headers.keys() - varying)
        options = client.send("OPTIONS", path)
        assert (options.status, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
        assert client.send("DELETE", path).headers["allow"] == "GET, HEAD, OPTIONS"
    for path in ("/v1/embeddings", "/v1/similarity", "/v1/rerank", "/v1/search"):
        assert client.send("OPTIONS", path).headers["allow"] == "POST, OPTIONS"
        for method in ("HEAD", "GET", "PUT"):
            response = client.send(method, path)
            assert (response.status, response.headers["allow"]) == (405, "POST, OPTIONS")
    assert client.send("HEAD", "/no/such/path").status == 404


def test_metrics_count_requests_texts_and_batches(embedder):
    with serve(ServedModel(embedder)) as (client, _):
        client.post("/v1/embeddings", {"input": TEXTS, "condition": CONDITION})
        client.post("/v1/embeddings", {"input": TEXTS})
        client.get("/no/such/path")
        metrics = client.get("/metrics")
    lines = metrics.body.decode().splitlines()
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'llmcond_requests_total{route="/v1/embeddings",status="200"} 1.0' in lines
    assert 'llmcond_requests_total{route="/v1/embeddings",status="422"} 1.0' in lines
    assert 'llmcond_requests_total{route="other",status="404"} 1.0' in lines
    assert "llmcond_texts_total 3.0" in lines
    assert "llmcond_batch_texts_sum 3.0" in lines
    assert "llmcond_waiting_texts 0.0" in lines


def test_default_condition_applies_to_requests_without_condition(embedder):
    with serve(ServedModel(embedder, CONDITION)) as (client, _):
        actual = read_vectors(client.post("/v1/embeddings", {"input": TEXTS}))
        request = {"input": TEXTS, "condition": "the mood"}
        np.testing.assert_allclose(actual, embedder.encode(TEXTS, CONDITION), atol=1e-6)
        actual = read_vectors(client.post("/v1/embeddings", request))
        np.testing.assert_allclose(actual, embedder.encode(TEXTS, "the mood"), atol=1e-6)


# -- invalid requests ----------------------------------------------------------------------------

VALID = {"input": TEXTS, "condition": CONDITION}
RANKED = {"query": "two men", "documents": TEXTS, "condition": CONDITION}
PAIRS = {"sentence1": TEXTS, "sentence2": TEXTS, "condition": CONDITION}
INVALID_REQUESTS = [
    ("/v1/embeddings", {"input": TEXTS}, 422, "condition", "condition is missing"),
    ("/v1/embeddings", {**VALID, "conditon": 1}, 422, "conditon", "Did you mean 'condition'"),
    (
        "/v1/embeddings",
        {"condition": CONDITION},
        422,
        "input",
        "the key 'input' is missing. Legal keys: ",
    ),
    ("/v1/embeddings", {**VALID, "input": []}, 422, "input", "is empty; give at least one text"),
    ("/v1/embeddings", {**VALID, "input": ["a", " "]}, 422, "input", "sentence 2 of 2 is empty"),
    (
        "/v1/embeddings",
        {**VALID, "input": [1, 2]},
        422,
        "input",
        "check_embedding_ctx_length=False",
    ),
    ("/v1/embeddings", {**VALID, "input": [[1], [2]]}, 422, "input", "input holds token ids"),
    ("/v1/embeddings", {**VALID, "input": ["a", 5]}, 422, "input", "'input.1' is 5: it should be"),
    ("/v1/embeddings", {**VALID, "input": [["a"]]}, 422, "input", r"'input.0' is \['a'\]: it"),
    ("/v1/embeddings", {**VALID, "input": [True]}, 422, "input", "'input.0' is True: it should"),
    ("/v1/embeddings", {**VALID, "input": 5}, 422, "input", "'input' is 5: it should be a text or"),
    (
        "/v1/embeddings",
        {**VALID, "truncate": "NONE"},
        *(422, "truncate", "'truncate' is 'NONE': it must be one of 'END'"),
    ),
    (
        "/v1/embeddings",
        {**VALID, "input": [{}]},
        422,
        "input",
        "'input.0' is {}: it should be a text.",
    ),
    ("/v1/embeddings", {**VALID, "input": 3.5}, 422, "input", "'input' is 3.5: it should be"),
    (
        "/v1/embeddings",
        {**VALID, "input": None},
        422,
        "input",
        "'input' is null: it should be a text or a list of texts.",
    ),
    ("/v1/embeddings", {**VALID, "condition": [CONDITION]}, 422, "condition", "condition has 1"),
    ("/v1/embeddings", {**VALID, "condition": ""}, 422, "condition", "the condition is empty"),
    (
        "/v1/similarity",
        {**PAIRS, "condition": ["a", "b", " "]},
        *(422, "condition", "condition 3 of 3 is empty"),
    ),
    (
        "/v1/similarity",
        {**PAIRS, "condition": "two men " * 200},
        *(422, "condition", "condition, with its values, is too long"),
    ),
    (
        "/v1/embeddings",
        {**VALID, "dimensions": 8},
        422,
        "dimensions",
        "this model's embeddings have 32",
    ),
    ("/v1/embeddings", {**VALID, "encoding_format": "hex"}, 422, "encoding_format", "'base64'"),
    (
        "/v1/embeddings",
        {**VALID, "input": ["a"] * 51},
        413,
        "input",
        "51 texts; a request may have at most 50",
    ),
    ("/v1/embeddings", {**VALID, "input": "a" * 20_000}, 413, None, "larger than 20,000 bytes"),
    ("/v1/embeddings", [VALID], 422, None, "must be a JSON object"),
    ("/v1/embeddings", b"{", 400, None, "not valid JSON: EOF"),
    ("/v1/embeddings", b"", 400, None, "not valid JSON"),
    ("/v1/embeddings", b"[" * 9_000, 400, None, "recursion limit"),
    ("/v1/embeddings", b'{"input": "\xff"}', 400, None, "invalid unicode"),
    ("/v1/embeddings", b'{"input": "\\ud800"}', 400, None, "not valid JSON"),
    ("/v1/embeddings", {"input": TEXTS, "values": ["a"]}, 422, "values", "there is no condition"),
    ("/v1/embeddings", {**VALID, "values": "a, b"}, 422, "values", "should be a list of texts"),
    (
        "/v1/embeddings",
        {**VALID, "values": ["a", 7]},
        422,
        "values",
        "'values.1' is 7: it should be a text",
    ),
    ("/v1/embeddings", {**VALID, "values": [["a"], ["b"]]}, 422, "values", "a list of lists; give"),
    (
        "/v1/embeddings",
        {**VALID, "values": ["a"] * 9 + [["b"]]},
        422,
        "values",
        "'values.9' is .*: it should be a text",
    ),
    (
        "/v1/embeddings",
        {**VALID, "values": [f"{i}" for i in range(65)]},
        422,
        "values",
        "at most 64",
    ),
    (
        "/v1/embeddings",
        {**VALID, "condition": " ", "values": ["a"]},
        422,
        "condition",
        "the condition is empty",
    ),
    (
        "/v1/embeddings",
        {**VALID, "condition": ["a", "b", "c"], "values": [["a"], ["b"]]},
        *(422, "values", "values for 2 conditions, but condition has 3"),
    ),
    ("/v1/similarity", {**PAIRS, "sentence2": TEXTS[:2]}, 422, "sentence2", "3 in sentence1, 2 in"),
    ("/v1/similarity", {**PAIRS, "sentence1": ["a", "", "b"]}, 422, "sentence1", "is empty"),
    ("/v1/rerank", {**RANKED, "documents": []}, 422, "documents", "is empty; give at least one"),
    ("/v1/rerank", {**RANKED, "documents": ["a", ""]}, 422, "documents", "2 of 2 is empty"),
    ("/v1/rerank", {**RANKED, "documents": ["a", 7]}, 422, "documents", "'documents.1' is 7: it"),
    (
        "/v1/rerank",
        {**RANKED, "documents": [{"text": 7}]},
        *(422, "documents", 'it should be a text or {"text": ...}'),
    ),
    ("/v1/rerank", {**RANKED, "documents": [{"title": "a"}]}, 422, "documents", "it should be"),
    ("/v1/rerank", {**RANKED, "documents": "a"}, 422, "documents", "should be a list of texts"),
    ("/v1/rerank", {**RANKED, "documents": ["a"] * 51}, 413, "documents", "51 texts; a request"),
    ("/v1/rerank", {**RANKED, "query": " "}, 422, "query", "query: the first sentence is empty"),
    ("/v1/rerank", {**RANKED, "top_n": 0}, 422, "top_n", "'top_n' is 0: it must be at least 1"),
    ("/v1/rerank", {**RANKED, "condition": ["a"]}, 422, "condition", "should be a text"),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, 422, "condition", "condition is missing"),
    ("/v1/search", {"query": "a", "condition": CONDITION}, 404, None, "with --index"),
    ("/v1/search", b'{"query": "a", "condition": {"b": NaN}}', 422, "condition", "finite"),
    (
        "/v1/search",
        {"query": "a", "condition": {"b": "x"}},
        *(422, "condition", "'condition.b' is 'x': it should be a number"),
    ),
    (
        "/v1/search",
        {"query": "a", "condition": {"The b": 1, "the  b ": 2}},
        *(422, "condition", "it has 'the b' twice, in different spellings"),
    ),
    (
        "/v1/search",
        {"query": "a", "condition": CONDITION, "k": 0},
        422,
        "k",
        "'k' is 0: it must be at least 1",
    ),
    ("/v1/serach", VALID, 404, None, "Did you mean '/v1/search'"),
    ("/healthz", VALID, 405, None, "not accept POST; use GET"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "message"), INVALID_REQUESTS)
def test_invalid_requests_are_rejected_in_one_line(client, path, body, status, param, message):
    response = client.post(path, body)
    assert response.status == status
    assert response.error["param"] == param
    assert response.error["type"] == "invalid_request_error"
    assert re.search(message, response.error["message"])


def test_unsupported_and_oversized_bodies_are_rejected(client):
    body = json.dumps(VALID).encode()
    form = client.post("/v1/embeddings", body, Content_Type="text/plain")
    assert (form.status, form.error["code"]) == (415, "content_type")
    compressed = client.post("/v1/embeddings", body, Content_Encoding="gzip")
    assert (compressed.status, compressed.error["code"]) == (415, "content_encoding")
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=PATIENCE)
    connection.request(
        "POST",
        "/v1/embeddings",
        iter([b"x" * 15_000] * 2),
        {"Content-Type": "application/json"},
        encode_chunked=True,
    )
    assert connection.getresponse().status == 413  # even without a Content-Length
    connection.close()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=8,
)
fields = ["input", "condition", "sentence1", "sentence2", "query", "k", "where", "dimensions", "x"]
fields += ["documents", "top_n"]
bodies = st.one_of(
    st.dictionaries(st.sampled_from(fields), json_values).map(
        lambda body: json.dumps(body).encode()
    ),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60),
)
paths = st.sampled_from(["/v1/embeddings", "/v1/similarity", "/v1/rerank", "/v1/search"])


@settings(
    max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(path=paths, body=bodies)
def test_any_body_gets_response_without_server_error(client, path, body):
    response = client.post(path, body)
    assert response.status == 200 or (400 <= response.status < 500 and response.error["message"])


HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD += b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("body", [b"0\r\n\r\n", b"no chunk\r\n", b"", b"2\r\n{}\r\n0\r\n\r\n"])
def test_body_with_two_lengths_is_rejected_and_connection_closed(client, body, caplog):
    start = time.monotonic()
    second_request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", client.port), timeout=60) as connection:
        connection.sendall(HEAD + body + second_request)
        connection.settimeout(30)
        response = b"".join(iter(lambda: connection.recv(4096), b""))
    assert response.startswith(b"HTTP/1.1 400")
    assert response.count(b"HTTP/1.1") == 1
    assert b"connection: close" in response.lower()
    assert time.monotonic() - start < 20
    assert "Exception" not in caplog.text


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


def test_local_paths_are_not_disclosed(embedder, tmp_path):
    fitted = replace(embedder, fitted_on=str(tmp_path / "secret" / "rows.csv"))
    with serve(ServedModel(fitted)) as (client, _):
        folder = str(Path(embedder.encoder.name).parent)
        for path in ("/", "/healthz", "/readyz", "/v1/models", "/metrics", "/openapi.json"):
            text = client.get(path).body.decode()
            assert folder not in text
            assert str(tmp_path) not in text
        assert client.get("/v1/models").json["data"][0]["fitted_on"] == "rows.csv"
        response = client.post("/v1/embeddings", VALID)
        assert folder not in response.body.decode()


def test_texts_without_tokens_are_counted_as_zero_vectors(minilm):
    texts = ["\ufeff", TEXTS[0], "\u200d"]
    embedder = Embedder(minilm, FeatureView((load_prompt("concat-sent-cond"),), subtract=True))
    pairs = {"sentence1": texts, "sentence2": texts, "condition": CONDITION}
    with serve(ServedModel(embedder)) as (client, _):
        response = client.post("/v1/embeddings", {"input": texts, "condition": CONDITION})
        norms = np.linalg.norm(read_vectors(response), axis=1)
        assert norms.tolist() == pytest.approx([0, 1, 0], abs=1e-6)
        assert response.json["zero_vectors"] == 2
        response = client.post("/v1/similarity", pairs).json
    assert response["similarities"] == pytest.approx([0, 1, 0], abs=1e-6)
    assert response["zero_vectors"] == 4


def test_control_characters_are_accepted(client):
    texts = ["\x1b[31m\x07", "\u202e play \ufeff", "\U0001f600" * 30]
    response = client.post("/v1/embeddings", {"input": texts, "condition": "\x01"})
    assert np.isfinite(read_vectors(response)).all()


@pytest.fixture
def request_log(caplog):
    logger = logging.getLogger("llmcond.requests")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    yield caplog
    logger.removeHandler(caplog.handler)


# -- keys ----------------------------------------------------------------------------------------


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
    with socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE) as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
    for host in ("example.org", "localhost.example.org:8000", "127.0.0.1.example.org", ""):
        response = client.get("/healthz", Host=host)
        assert (response.status, response.error["code"]) == (403, "host")
    with serve(ServedModel(embedder), (b"k3y",)) as (client_with_key, _):
        assert client_with_key.get("/healthz", Host="example.org").status == 200


# -- requests of web pages -----------------------------------------------------------------------

PREFLIGHT = {
    "Access_Control_Request_Method": "POST",
    "Access_Control_Request_Headers": "authorization,content-type,x-stainless-lang",
}


def test_pages_of_named_origins_may_send_requests(embedder):
    page, key = "https://example.org", "Bearer k3y"
    origins = [page, "http://localhost:3000"]
    with serve(ServedModel(embedder), (b"k3y",), cors_origin=origins) as (client, _):
        # A browser sends no key with a preflight request.
        preflight = client.send("OPTIONS", "/v1/embeddings", Origin=page, **PREFLIGHT)
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == page
        assert "POST" in preflight.headers["access-control-allow-methods"]
        allowed = preflight.headers["access-control-allow-headers"].lower()
        assert {"authorization", "content-type", "x-stainless-lang"} <= {
            name.strip() for name in allowed.split(",")
        }
        assert "access-control-allow-credentials" not in preflight.headers
        response = client.post("/v1/embeddings", VALID, Origin=page, Authorization=key)
        assert response.status == 200
        assert response.headers["access-control-allow-origin"] == page
        assert "X-Request-Id" in response.headers["access-control-expose-headers"]
        rejected = client.post("/v1/embeddings", VALID, Origin=page)
        assert rejected.status == 401
        assert rejected.headers["access-control-allow-origin"] == page
        for other in ("https://evil.example", "https://example.org.evil.example", "null"):
            preflight = client.send("OPTIONS", "/v1/embeddings", Origin=other, **PREFLIGHT)
            assert preflight.status == 400
            assert "access-control-allow-origin" not in preflight.headers
            response = client.post("/v1/embeddings", VALID, Origin=other, Authorization=key)
            assert "access-control-allow-origin" not in response.headers


def test_pages_may_send_no_requests_by_default(client):
    preflight = client.send("OPTIONS", "/v1/embeddings", Origin="null", **PREFLIGHT)
    assert not [name for name in preflight.headers if name.startswith("access-control")]
    response = client.post("/v1/embeddings", VALID, Origin="https://example.org")
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_every_page_may_send_requests_if_user_says_so(embedder):
    with serve(ServedModel(embedder), cors_origin=["*"]) as (client, _):
        response = client.get("/v1/models", Origin="https://example.org")
        assert response.headers["access-control-allow-origin"] == "*"


# -- limits, timeouts and disconnects ------------------------------------------------------------


class BlockedEncoding:
    """Makes ``Embedder.encode_with_counts`` wait until ``go`` is set."""

    def __init__(self, monkeypatch, embedder):
        self.started, self.go = threading.Semaphore(0), threading.Event()
        self.rows = 0
        original = Embedder.encode_with_counts

        def encode_with_counts(embedder, rows):
            self.started.release()
            assert self.go.wait(PATIENCE)
            self.rows += len(rows)
            return original(embedder, rows)

        self.block = lambda: monkeypatch.setattr(Embedder, "encode_with_counts", encode_with_counts)


@pytest.fixture
def blocked_encoding(monkeypatch, embedder):
    encoding = BlockedEncoding(monkeypatch, embedder)
    yield encoding
    encoding.go.set()


def wait_for_metric(client, line):
    """Wait until a line is among the metrics."""
    for _ in range(5_000):
        if f"{line}\n" in client.get("/metrics").body.decode():
            return
    raise AssertionError(f"the metrics never showed {line}")


def start_thread(function):
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
        with socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE) as connection:
            head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n"
            connection.sendall(head + b"Content-Type: application/json\r\n\r\n{")
            assert connection.recv(12) == b"HTTP/1.1 408"
        blocked_encoding.go.set()
    assert blocked_encoding.rows == 3  # only the first request had started


def test_work_of_disconnected_client_is_dropped(embedder, blocked_encoding):
    with serve(ServedModel(embedder)) as (client, server):
        blocked_encoding.block()
        first = start_thread(lambda: client.post("/v1/embeddings", VALID))
        blocked_encoding.started.acquire()
        body = json.dumps(VALID).encode()
        with socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE) as connection:
            head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
            content_type = b"Content-Type: application/json\r\n\r\n"
            connection.sendall(head % len(body) + content_type + body)
            wait_for_metric(client, "llmcond_waiting_texts 3.0")
            assert server.gate._batcher.awaited == 2
        wait_for_metric(client, 'llmcond_requests_total{route="/v1/embeddings",status="499"} 1.0')
        assert server.gate._batcher.awaited == 1
        blocked_encoding.go.set()
        assert first().status == 200
        assert server.gate._batcher.awaited == 0
    assert blocked_encoding.rows == 3


def test_model_error_fails_one_request_and_discloses_nothing(embedder, monkeypatch, request_log):
    original = Embedder.encode_with_counts

    def encode_with_counts(embedder, rows):
        if any(text == "secret text" for text, _ in rows):
            raise ZeroDivisionError("secret text")
        return original(embedder, rows)

    monkeypatch.setattr(Embedder, "encode_with_counts", encode_with_counts)
    with serve(ServedModel(embedder)) as (client, _):
        response = client.post("/v1/embeddings", {"input": "secret text", "condition": CONDITION})
        assert (response.status, response.error["type"]) == (500, "server_error")
        assert "secret" not in response.error["message"]
        assert client.post("/v1/embeddings", VALID).status == 200
    assert "ZeroDivisionError in " in request_log.text
    assert "secret" not in request_log.text


# -- shutdown ------------------------------------------------------------------------------------


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
    with pytest.raises(UserError, match="cannot listen on no such host"):
        bind_socket("no such host", 0)
