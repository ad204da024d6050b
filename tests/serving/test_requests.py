"""Every field of every request, with values of kinds that clients send by mistake."""

import unicodedata

import numpy as np
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
INVALID = ["a\0b", "\ud800", "a\udc80"]
ODD_VALUES = [
    *(True, False, 0, -1, 1, 3.5, 10**30, -(10**30), 1e300, float("nan"), float("inf")),
    *("", " ", "\u00a0\u2003", "\n", "7", "true", "null", "x" * 3_000, "cafe\u0301", "\u200b"),
    *([], [[]], [None], [""], [" "], [0], [1, 2], [[1, 2]], ["a", 5], [5, "a"], [True], [["a"]]),
    *([["a"], ["b"], ["c"]], [["a"], None], ["a"] * 51, [[["a"]]], [{}], [{"text": "a"}]),
    *({}, {"a": None}, {"a": 1}, {"a": "b"}, {"a": ["b"]}, {"": 1}, {" ": 1}, {"text": "a"}),
    *({"the place": 0}, {"the place": 1e300}, {"The a": 1, "the a ": 1}, {"a": {"b": 1}}),
    *({"text": None}, {"text": "a", "title": None}),
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


def check_answer(client, route, body):
    """Send a body, and check that an error is one line about a field; return the answer."""
    answer = client.post(f"/v1/{route}", body)
    if answer.status != 200:
        assert 400 <= answer.status < 500, body
        error = answer.error
        assert len(error["message"]) < 700
        assert "function-" not in error["message"]
    return answer


@pytest.mark.parametrize(("route", "field"), FIELDS)
def test_odd_value_gives_answer_or_error_in_one_line(client, validators, route, field):
    for value in ODD_VALUES:
        body = {**BODIES[route], field: value}
        answer = check_answer(client, route, body)
        if answer.status == 200:
            # The published schema promises no less than the server accepts.
            validators[route].validate(body)
        else:
            assert answer.error["param"] in (field, "condition", "values", "sentence2")


@pytest.mark.parametrize(("route", "field"), FIELDS)
def test_invalid_characters_are_rejected_anywhere_in_a_body(client, route, field):
    for text in INVALID:
        nested = ([text], ["a", "b", text], [["a"], [text]], {text: 1}, {text: ["a"]})
        for value in (text, *nested, {"a": [text]}, [{"text": text}]):
            answer = check_answer(client, route, {**BODIES[route], field: value})
            assert answer.status != 200
            # JSON with half of a surrogate pair is not valid Unicode.
            assert answer.status == 422 or text in INVALID[1:]


@pytest.mark.parametrize(("route", "field"), FIELDS)
def test_null_stands_for_default(client, validators, route, field):
    body = {**BODIES[route], field: None}
    answer = check_answer(client, route, body)
    is_required = field in BODIES[route]
    assert answer.status == (422 if is_required else 200)
    assert validators[route].is_valid(body) != is_required
    if is_required:
        assert answer.error["param"] == field
    else:
        assert answer.json == client.post(f"/v1/{route}", BODIES[route]).json


def test_schema_says_what_bodies_need(client, embedder, validators):
    for route, body in BODIES.items():
        validators[route].validate(body)
        for field in body:
            missing = {key: value for key, value in body.items() if key != field}
            empty = [{**body, field: value} for value in ("", " ", [], [""], {})]
            for invalid in (missing, *empty):
                assert not validators[route].is_valid(invalid)
                assert client.post(f"/v1/{route}", invalid).status == 422
    with serve(ServedModel(embedder, CONDITION)) as (with_default, _):
        schemas = with_default.schemas.document["components"]["schemas"]
        for model in MODELS.values():
            assert "condition" not in schemas[model.__name__]["required"]
        body = {"input": TEXTS, "condition": None}
        assert with_default.post("/v1/embeddings", body).status == 200


#: What clients of other servers send, besides the fields of ``BODIES``.
FOREIGN_FIELDS = [
    ("embeddings", {"model": "m", "encoding_format": "base64"}),  # openai, LangChain
    ("embeddings", {"model": "m", "user": None, "dimensions": None, "encoding_format": None}),
    ("embeddings", {"model": "m", "input_type": "query", "truncate": "END"}),  # NVIDIA NIM
    ("embeddings", {"input_type": None, "truncation": True, "output_dimension": None}),  # Voyage
    ("embeddings", {"output_dtype": None, "encoding_format": None, "precision": None}),
    (
        "embeddings",
        {"task": "text-matching", "normalized": True, "embedding_type": "float"},
    ),  # Jina
    ("embeddings", {"truncate": True, "late_chunking": None}),
    ("rerank", {"model": "m", "top_n": 2, "return_documents": None, "max_chunks_per_doc": None}),
    ("rerank", {"top_n": None, "max_tokens_per_doc": 4_096, "rank_fields": None}),  # Cohere
    ("rerank", {"documents": [{"text": text} for text in TEXTS], "truncation": True}),
    ("similarity", {"model": None, "values": None}),
    ("search", {"k": None, "explain": None, "where": None, "values": None, "model": None}),
]


@pytest.mark.parametrize(("route", "fields"), FOREIGN_FIELDS)
def test_fields_of_other_clients_change_nothing(client, route, fields):
    answer = client.post(f"/v1/{route}", {**BODIES[route], **fields})
    assert answer.status == 200
    plain = {key: fields[key] for key in ("encoding_format", "top_n") if fields.get(key)}
    assert answer.json == client.post(f"/v1/{route}", {**BODIES[route], **plain}).json


@pytest.mark.parametrize(
    "fields",
    [
        {"truncate": "NONE"},
        {"truncate": "START"},
        {"truncation": False},
        {"normalized": False},
        {"embedding_type": "binary"},
        {"encoding_format": "int8"},
        {"output_dimension": 8},
        {"extra_body": {"condition": CONDITION}},
    ],
)
def test_fields_that_would_change_something_are_rejected(client, fields):
    answer = client.post("/v1/embeddings", {**BODIES["embeddings"], **fields})
    assert answer.status == 422
    assert answer.error["param"] in fields


SPELLINGS = [
    unicodedata.normalize("NFD", CONDITION),
    f" {CONDITION}\n",
    CONDITION.replace(" ", "  "),
    CONDITION.replace(" ", "\u00a0"),
    CONDITION.replace(" ", "\u3000\t"),
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling_of_condition_does_not_matter(client, spelling):
    for route, body in BODIES.items():
        expected = client.post(f"/v1/{route}", body).json
        assert client.post(f"/v1/{route}", {**body, "condition": spelling}).json == expected
        with_values = {**body, "condition": spelling, "values": ["a", "cafe\u0301 "]}
        answer = client.post(f"/v1/{route}", with_values)
        composed = {**body, "condition": CONDITION, "values": ["a", "caf\u00e9"]}
        # The index has no vectors under a condition with values.
        assert answer.status == client.post(f"/v1/{route}", composed).status
    guided = client.post("/v1/embeddings", {**BODIES["embeddings"], "condition": [spelling] * 3})
    unguided = client.post("/v1/embeddings", {**BODIES["embeddings"], "condition": "the cafe"})
    vectors = [
        np.array([item["embedding"] for item in answer.json["data"]])
        for answer in (guided, unguided)
    ]
    assert np.abs(vectors[0] - vectors[1]).max() > 0.1
    weighted = {"query": "two men", "condition": {spelling: 2}}
    expected = client.post("/v1/search", {**weighted, "condition": {CONDITION: 2}})
    assert client.post("/v1/search", weighted).json == expected.json
