"""Every field of every request, with values of kinds that clients send by mistake."""

import pytest
from helpers.serving import serve
from jsonschema import Draft202012Validator

from llmcond.search import Index
from llmcond.serving import requests
from llmcond.serving.model import ServedModel

CONDITION = "the caf\u00e9"
TEXTS = ["two men play in the park", "three women sit at the beach", "children read"]
LABELS = ["sport", "rest", "rest"]
BODIES = {
    "embeddings": {"input": TEXTS, "condition": CONDITION},
    "similarity": {"sentence1": TEXTS, "sentence2": TEXTS, "condition": CONDITION},
    "rerank": {"query": "two men", "documents": TEXTS, "condition": CONDITION},
    "search": {"query": "two men", "condition": CONDITION},
}
MODELS = {
    "embeddings": requests.EmbeddingsRequest,
    "similarity": requests.SimilarityRequest,
    "rerank": requests.RerankRequest,
    "search": requests.SearchRequest,
}
FIELDS = [(route, field) for route, model in MODELS.items() for field in model.model_fields]

#: Characters that cannot be written to files, or that the encoder cannot read.
INVALID = ["a\0b", "\ud800"]
ODD_VALUES = [
    *(True, 0, -1, 3.5, 10**30, float("nan"), "", "\u00a0", "7", "x" * 3_000, "\u200b", "\x1b[31m"),
    *([], [[]], [None], [" "], [1, 2], ["a", 5], [["a"], None], ["a"] * 51, [[["a"]]]),
    *({}, {"a": None}, {"a": 1}, {"a": "b"}, {" ": 1}, {"The a": 1, "the a ": 1}, {"a": {"b": 1}}),
]


@pytest.fixture(scope="module")
def client(embedder, tiny_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "index"
    index = Index.build(
        folder, TEXTS, columns={"year": [1, 2, 3]}, conditions=[CONDITION], run=tiny_run,
        device="cpu",
    )  # fmt: skip
    model = ServedModel(embedder.guided(TEXTS, LABELS, CONDITION), None, index)
    with serve(model, max_client_batch_size=50, payload_limit=20_000) as (client, _):
        yield client


@pytest.fixture(scope="module")
def validators(client):
    components = client.schemas.document["components"]
    return {
        route: Draft202012Validator(
            {"$ref": f"#/components/schemas/{model.__name__}", "components": components}
        )
        for route, model in MODELS.items()
    }


@pytest.mark.parametrize("route", BODIES)
def test_odd_value_gives_answer_or_error_in_one_line(client, validators, route):
    for field in MODELS[route].model_fields:
        for value in ODD_VALUES:
            body = {**BODIES[route], field: value}
            answer = client.post(f"/v1/{route}", body)
            if answer.status == 200:
                # The published schema promises no less than the server accepts.
                validators[route].validate(body)
            else:
                assert 400 <= answer.status < 500, body
                assert answer.error["param"] in (field, "condition", "values", "sentence2")
                assert len(answer.error["message"]) < 700
                assert "function-" not in answer.error["message"]
        for text in INVALID:
            for value in (text, ["a", text], [["a"], [text]], {text: 1}, [{"text": text}]):
                answer = client.post(f"/v1/{route}", {**BODIES[route], field: value})
                # JSON with half of a surrogate pair is not valid Unicode.
                assert answer.status == (422 if text == INVALID[0] else 400)


@pytest.mark.parametrize(("route", "field"), FIELDS)
def test_null_stands_for_default(client, validators, route, field):
    body = {**BODIES[route], field: None}
    answer = client.post(f"/v1/{route}", body)
    is_required = field in BODIES[route]
    assert answer.status == (422 if is_required else 200)
    assert validators[route].is_valid(body) != is_required
    if is_required:
        assert answer.error["param"] == field
        missing = {key: value for key, value in body.items() if key != field}
        for invalid in (missing, {**body, field: " "}, {**body, field: []}):
            assert not validators[route].is_valid(invalid)
            assert client.post(f"/v1/{route}", invalid).status == 422
    else:
        assert answer.json == client.post(f"/v1/{route}", BODIES[route]).json


def test_fields_of_other_clients_are_accepted_unless_they_would_change_something(client):
    for route, fields in (
        ("embeddings", {"model": "m", "user": None, "input_type": "query", "truncate": "END"}),
        ("embeddings", {"task": "text-matching", "normalized": True, "embedding_type": "float"}),
        ("embeddings", {"truncation": True, "output_dimension": None}),
        ("rerank", {"max_tokens_per_doc": 4_096, "rank_fields": None, "return_documents": None}),
    ):
        answer = client.post(f"/v1/{route}", {**BODIES[route], **fields})
        assert answer.json == client.post(f"/v1/{route}", BODIES[route]).json
    for name, value in (("truncation", False), ("normalized", False), ("output_dimension", 8)):
        answer = client.post("/v1/embeddings", {**BODIES["embeddings"], name: value})
        assert (answer.status, answer.error["param"]) == (422, name)


def test_number_of_conditions_and_values_is_limited(client):
    embeddings, search = BODIES["embeddings"], BODIES["search"]
    for route, body, status, param in (
        ("embeddings", {**embeddings, "condition": ["a"] * 51}, 413, "condition"),
        ("embeddings", {**embeddings, "values": ["a"] * 65}, 422, "values"),
        ("embeddings", {**embeddings, "ignore": ["a"] * 65}, 422, "ignore"),
        ("search", {**search, "ignore": ["a"] * 65}, 422, "ignore"),
        ("search", {**search, "k": 51, "explain": True}, 413, "k"),
    ):
        answer = client.post(f"/v1/{route}", body)
        assert (answer.status, answer.error["param"]) == (status, param)
    assert client.post("/v1/search", {**search, "k": 51}).status == 200
