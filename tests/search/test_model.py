"""Search over HTTP, and which model serves an index."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.serving import served

from llmcond.conditions import Condition
from llmcond.errors import UserError
from llmcond.search import Index
from llmcond.search.table import TextTable
from llmcond.serving.model_server import load_model
from llmcond.serving.settings import ServedSource

PLACE = "the place"
TEXTS = [f"{who} play {where}" for who in ("two men", "children") for where in ("at night", "now")]


@pytest.fixture(scope="module")
def folder(tiny_run, tmp_path_factory):
    found = tmp_path_factory.mktemp("index") / "texts"
    columns = {"year": [2020, 2021, 2022, 2023]}
    Index.build(found, TEXTS, columns=columns, conditions=[PLACE], run=tiny_run, device="cpu")
    return found


@pytest.fixture(scope="module")
def searched(folder):
    model = load_model(ServedSource(device="cpu", index=folder))
    with served(model) as (client, _):
        yield client, model.index


def test_hits_are_those_of_the_index(searched):
    client, index = searched
    asked = {"query": "two men", "condition": PLACE}
    found = client.post("/v1/search", {**asked, "k": 2}).json
    assert found["results"] == index.search("two men", PLACE, 2).to_json()["results"]
    assert found["results"][0].keys() >= {"rank", "score", "text", "id", "year"}
    some = client.post("/v1/search", {**asked, "where": "year > 2021", "explain": True}).json
    assert [one["year"] for one in some["results"]] in ([2022, 2023], [2023, 2022])
    assert some["results"][0]["explain"]["under"].keys() == {PLACE}
    weighted = client.post("/v1/search", {**asked, "condition": {PLACE: 2}}).json
    assert weighted["results"][0]["score"] == pytest.approx(2 * found["results"][0]["score"], 1e-4)
    embedded = client.post("/v1/embeddings", {"input": "two men", "condition": PLACE})
    assert embedded.status == 200


def test_values_are_those_of_the_index_or_of_the_request(tiny_run, tmp_path):
    place = Condition(PLACE, ["night", "morning"])
    index = Index.build(tmp_path / "i", TEXTS, conditions=[place], run=tiny_run, device="cpu")
    index.search("two men", "the mood")  # which encodes the texts under it
    index.search("two men", Condition(PLACE))
    asked = {"query": "two men", "condition": PLACE}
    with served(load_model(ServedSource(device="cpu", index=index.folder))) as (client, _):
        found = client.post("/v1/search", asked).json
        assert found["conditions"] == {place: 1.0}
        assert found["results"] == index.search("two men", place).to_json()["results"]
        same = {**asked, "values": ["night", "morning"]}
        assert client.post("/v1/search", same).json["results"] == found["results"]
        none = client.post("/v1/search", {**asked, "values": []}).json
        assert none["conditions"] == {PLACE: 1.0}
        assert none["results"] != found["results"]
        several = {PLACE: 1, "the mood": 0.5}
        each = {**asked, "condition": several, "values": {PLACE: []}}
        found = client.post("/v1/search", each).json
        assert found["conditions"] == several


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": " "}, "query is empty"),
        ({"condition": "the mood"}, "the mood"),
        ({"condition": {}}, "no condition"),
        ({"condition": {PLACE: 0}}, "weights are 0"),
        ({"where": "yaer > 3"}, "yaer"),
        ({"where": "DROP TABLE"}, "DROP TABLE"),
        ({"where": "repeat('a', 2000000000) = text"}, "functions are not allowed"),
        ({"where": "lpad('a', 2147483647, 'b') = text"}, "functions are not allowed"),
        ({"where": "array_repeat(1, 1000000000) = [1]"}, "functions are not allowed"),
        ({"condition": {PLACE: 1e308}}, "must be between -1,000,000 and 1,000,000"),
        (
            {"values": ["Rome", "Paris, Texas"]},
            "--condition 'the place' --values 'Rome,\"Paris, Texas\"'",
        ),
        ({"condition": {PLACE: 1, "b": 1}, "values": ["a"]}, "values is a list, but there are 2"),
        ({"values": {"the mood": ["sad"]}}, "'the mood', which is not in condition"),
        ({"condition": None, "values": ["a"]}, "no condition that the values belong to"),
    ],
)
def test_what_the_index_refuses_is_told(searched, changes, words):
    client, _ = searched
    answer = client.post("/v1/search", {"query": "two men", "condition": PLACE, **changes})
    assert answer.status == 422
    assert words in answer.error["message"]


def test_a_filter_delays_neither_the_model_nor_others(searched, monkeypatch):
    client, _ = searched
    begun, go = threading.Event(), threading.Event()
    matching = TextTable.match_filter

    def held(table, where, seconds):
        assert 0 < seconds < 60
        begun.set()
        assert go.wait(60)
        return matching(table, where, seconds)

    asked = {"query": "two men", "condition": PLACE}
    monkeypatch.setattr(TextTable, "match_filter", held)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(client.post, "/v1/search", {**asked, "where": "year > 2021"})
        assert begun.wait(60)
        assert client.post("/v1/embeddings", {"input": "a", "condition": PLACE}).status == 200
        assert client.post("/v1/search", asked).status == 200
        go.set()
        assert slow.result().json["searched"] == 2


def test_a_filter_has_a_time_limit(searched, monkeypatch):
    client, _ = searched
    monkeypatch.setattr("llmcond.serving.app._FILTER_SECONDS", 0)
    asked = {"query": "two men", "condition": PLACE, "where": "year > 2021"}
    answer = client.post("/v1/search", asked)
    assert answer.status == 422
    assert "takes longer than 0 s" in answer.error["message"]


def test_the_folder_of_the_index_is_named_without_its_path(folder, searched):
    client, _ = searched
    answer = client.post("/v1/search", {"query": "two men", "condition": "the mood"})
    assert f"llmcond index --out {folder.name} --condition 'the mood'" in answer.error["message"]
    assert str(folder.parent) not in answer.error["message"]


def test_a_damaged_index_is_told_without_its_path(tiny_run, tmp_path):
    Index.build(tmp_path / "texts", TEXTS, conditions=[PLACE], run=tiny_run, device="cpu")
    with served(load_model(ServedSource(device="cpu", index=tmp_path / "texts"))) as (client, _):
        for path in (tmp_path / "texts" / "texts.lance").glob("*/*"):
            path.unlink()
        answer = client.post("/v1/search", {"query": "two men", "condition": PLACE})
    assert answer.status == 500
    assert "texts" in answer.error["message"]
    assert str(tmp_path).lstrip("/") not in answer.error["message"]


def test_texts_that_are_added_meanwhile_are_found(folder, searched, tiny_run):
    client, _ = searched
    text = "an old man sleeps"
    columns = {"year": [2024]}
    writer = Index.build(folder, [text], ids=["new"], columns=columns, run=tiny_run, device="cpu")
    asked = {"query": text, "condition": PLACE, "k": 9}
    assert "new" in [hit["id"] for hit in client.post("/v1/search", asked).json["results"]]
    writer.delete(["new"])
    assert "new" not in [hit["id"] for hit in client.post("/v1/search", asked).json["results"]]


def test_an_index_is_served_by_its_own_model_only(folder, tiny_run, tmp_path):
    found = load_model(
        ServedSource(run=tiny_run, head="none", device="cpu", index=folder, condition=PLACE)
    )
    assert found.index is not None
    assert found.model.encoder is found.index.embedder.encoder
    with pytest.raises(UserError, match="was built with"):
        load_model(ServedSource(model="minilm-csts", device="cpu", index=folder))
    with pytest.raises(UserError, match="does not exist"):
        load_model(ServedSource(run=tiny_run, device="cpu", index=tmp_path / "none"))
