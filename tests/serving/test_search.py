"""Search over HTTP, and which model serves an index."""

import pytest
from helpers.serving import served

from llmcond.errors import UserError
from llmcond.search import Index
from llmcond.serving.running import load_model

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
    model = load_model(None, None, None, None, "cpu", folder, None)
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": " "}, "query is empty"),
        ({"condition": "the mood"}, "the mood"),
        ({"condition": {}}, "no condition"),
        ({"condition": {PLACE: 0}}, "weights are 0"),
        ({"where": "yaer > 3"}, "yaer"),
        ({"where": "DROP TABLE"}, "DROP TABLE"),
    ],
)
def test_what_the_index_refuses_is_told(searched, changes, words):
    client, _ = searched
    answer = client.post("/v1/search", {"query": "two men", "condition": PLACE, **changes})
    assert answer.status == 422
    assert words in answer.error["message"]


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
    found = load_model(tiny_run, None, "none", None, "cpu", folder, PLACE)
    assert found.index is not None
    assert found.model is found.index.embedder
    with pytest.raises(UserError, match="was made with"):
        load_model(None, "minilm-csts", None, None, "cpu", folder, None)
    with pytest.raises(UserError, match="does not exist"):
        load_model(tiny_run, None, None, None, "cpu", tmp_path / "none", None)
