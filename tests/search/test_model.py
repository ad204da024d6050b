"""Search over HTTP, and the choice of the model that serves an index."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.serving import serve

from llmcond.base.text import Condition
from llmcond.search import Index
from llmcond.search.table import TextTable
from llmcond.serving.model_server import load_model
from llmcond.serving.settings import ServedSource

LOCATION = "the place"
TEXTS = [f"{who} play {where}" for who in ("two men", "children") for where in ("at night", "now")]
REQUEST = {"query": "two men", "condition": LOCATION}


@pytest.fixture(scope="module")
def folder(tiny_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("index") / "texts"
    columns = {"year": [2020, 2021, 2022, 2023]}
    Index.build(path, TEXTS, columns=columns, conditions=[LOCATION], run=tiny_run, device="cpu")
    return path


@pytest.fixture(scope="module")
def service(folder):
    model = load_model(ServedSource(device="cpu", index=folder))
    with serve(model) as (client, _):
        yield client, model.index


def test_hits_match_index(service, folder, tiny_run):
    client, index = service
    response = client.post("/v1/search", {**REQUEST, "k": 2}).json
    assert response["results"] == index.search("two men", LOCATION, 2).to_json()["results"]
    assert response["results"][0].keys() >= {"rank", "score", "text", "id", "year"}
    filtered = client.post("/v1/search", {**REQUEST, "where": "year > 2021", "explain": True}).json
    assert {hit["year"] for hit in filtered["results"]} == {2022, 2023}
    assert filtered["results"][0]["explain"]["under"].keys() == {LOCATION}
    weighted = client.post("/v1/search", {**REQUEST, "condition": {LOCATION: 2}}).json
    expected = 2 * response["results"][0]["score"]
    assert weighted["results"][0]["score"] == pytest.approx(expected, 1e-4)
    assert client.post("/v1/embeddings", {"input": "two men", "condition": LOCATION}).status == 200
    assert client.get("/v1/models").json["data"][0]["conditions"] == index.conditions

    def search_ids():
        return [hit["id"] for hit in client.post("/v1/search", {**REQUEST, "k": 9}).json["results"]]

    # Texts that are added while serving are searched.
    options = {"ids": ["new"], "columns": {"year": [2024]}, "run": tiny_run, "device": "cpu"}
    writer = Index.build(folder, ["an old man sleeps"], **options)
    assert "new" in search_ids()
    writer.delete(["new"])
    assert "new" not in search_ids()


def test_values_come_from_index_or_request(tiny_run, tmp_path):
    location = Condition(LOCATION, ["night", "morning"])
    index = Index.build(tmp_path / "i", TEXTS, conditions=[location], run=tiny_run, device="cpu")
    index.search("two men", "the mood")  # encodes the texts under this condition
    index.search("two men", Condition(LOCATION))
    with serve(load_model(ServedSource(device="cpu", index=index.folder))) as (client, _):
        response = client.post("/v1/search", REQUEST).json
        assert response["conditions"] == {location: 1.0}
        assert response["results"] == index.search("two men", location).to_json()["results"]
        same_values = {**REQUEST, "values": ["night", "morning"]}
        assert client.post("/v1/search", same_values).json["results"] == response["results"]
        without_values = client.post("/v1/search", {**REQUEST, "values": []}).json
        assert without_values["conditions"] == {LOCATION: 1.0}
        assert without_values["results"] != response["results"]
        several = {LOCATION: 1, "the mood": 0.5}
        values_of_one = {**REQUEST, "condition": several, "values": {LOCATION: []}}
        response = client.post("/v1/search", values_of_one).json
        assert response["conditions"] == several


def test_invalid_request_is_rejected(service, folder):
    client, _ = service
    values_of_flag = "--condition 'the place' --values 'Rome, \"Paris, Texas\"'"
    for changes, param, message in (
        ({"query": " "}, "query", "query is empty"),
        ({"condition": "the mood"}, "condition", "texts --condition 'the mood'"),
        ({"where": "repeat('a', 2000000000) = text"}, "where", "functions are not allowed"),
        ({"values": ["Rome", "Paris, Texas"]}, "condition", values_of_flag),
        ({"condition": {LOCATION: 1, "b": 1}, "values": ["a"]}, "values", "values is a list"),
        ({"values": {"the mood": ["sad"]}}, "values", "'the mood', which is not in condition"),
    ):
        answer = client.post("/v1/search", {**REQUEST, **changes})
        assert answer.status == 422
        assert message in answer.error["message"]
        assert answer.error["param"] == param
        assert str(folder.parent) not in answer.error["message"]


def test_slow_filter_blocks_neither_model_nor_searches(service, monkeypatch):
    client, _ = service
    started, release = threading.Event(), threading.Event()
    match_filter = TextTable.match_filter

    def match_after_release(table, where, seconds):
        assert 0 < seconds < 60
        started.set()
        assert release.wait(60)
        return match_filter(table, where, seconds)

    filtered = {**REQUEST, "where": "year > 2021"}
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(TextTable, "match_filter", match_after_release)
        slow_search = pool.submit(client.post, "/v1/search", filtered)
        assert started.wait(60)
        assert client.post("/v1/embeddings", {"input": "a", "condition": LOCATION}).status == 200
        assert client.post("/v1/search", REQUEST).status == 200
        release.set()
        assert slow_search.result().json["searched"] == 2
    monkeypatch.setattr("llmcond.serving.app._FILTER_SECONDS", 0)
    answer = client.post("/v1/search", filtered)
    assert answer.status == 422
    assert "takes longer than 0 s" in answer.error["message"]
