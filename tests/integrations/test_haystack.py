"""Haystack's pipelines run, write and load the components, with exactly an embedder's vectors."""

import asyncio
import copy
import pickle

import pytest
from helpers.paths import run_block

import llmcond

pytestmark = pytest.mark.programs
MODULE = "llmcond.integrations.haystack"
TEXTS = ["Two women cook at night.", "The screen is cracked.", "Dogs play on a beach."]
YAML = f"""
components:
  query:
    type: {MODULE}.ConditionalTextEmbedder
    init_parameters: {{condition: the place}}
connections: []
"""


@pytest.fixture
def components(monkeypatch):
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    from llmcond.integrations import haystack

    return haystack


def test_documents_get_vectors_of_embedder(components):
    from haystack import Document

    condition = llmcond.Condition("the fault | what is wrong", ["no sound", "a broken screen"])
    texts = [TEXTS[0], None, " ", TEXTS[1]]
    documents = [
        Document(content=text, meta={"row": row}, embedding=[0.5]) for row, text in enumerate(texts)
    ]
    embedder = components.ConditionalDocumentEmbedder(condition, truncate_dim=64, progress_bar=True)
    embedder.warm_up()
    assert "embedder" in vars(embedder)
    [first, second] = llmcond.load_embedder(truncate_dim=64).encode(TEXTS[:2], condition).tolist()
    result = embedder.run(documents)["documents"]
    assert [document.embedding for document in result] == [first, None, None, second]
    assert [document.embedding for document in documents] == [[0.5]] * 4
    assert [(each.id, each.meta) for each in result] == [(each.id, each.meta) for each in documents]
    assert asyncio.run(embedder.run_async(documents))["documents"] == result
    assert embedder.run([]) == {"documents": []}


def test_loaded_pipelines_retrieve_under_condition(components):
    from haystack import Document, Pipeline
    from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
    from haystack.components.writers import DocumentWriter
    from haystack.document_stores.in_memory import InMemoryDocumentStore

    documents = [Document(content=text) for text in [*TEXTS, "A girl cooks on a beach."]]
    best, question = {}, {"text": "She cooks by the sea."}
    for condition in ("the place", "the activity"):
        store = InMemoryDocumentStore(embedding_similarity_function="cosine")
        indexing = Pipeline()
        indexing.add_component("texts", components.ConditionalDocumentEmbedder(condition))
        indexing.add_component("writer", DocumentWriter(store))
        indexing.connect("texts.documents", "writer.documents")
        search = Pipeline()
        search.add_component("query", components.ConditionalTextEmbedder(condition))
        search.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=2))
        search.connect("query.embedding", "retriever.query_embedding")
        Pipeline.loads(indexing.dumps(), allowed_modules=[MODULE]).run(
            {"texts": {"documents": documents}}
        )
        loaded = Pipeline.loads(search.dumps(), allowed_modules=[MODULE])
        assert loaded.to_dict() == search.to_dict()
        result = loaded.run({"query": question})
        assert result == asyncio.run(search.run_async({"query": question}))
        best[condition] = {document.content for document in result["retriever"]["documents"]}
    assert best["the activity"] == {TEXTS[0], documents[-1].content}
    assert best["the place"] == {TEXTS[2], documents[-1].content}


def test_pipeline_written_by_hand_runs(components):
    from haystack import Pipeline
    from haystack.core.errors import DeserializationError

    pipeline = Pipeline.loads(YAML, allowed_modules=[MODULE])
    vector = llmcond.load_embedder().encode(TEXTS[0], "the place").tolist()
    assert pipeline.run({"query": {"text": TEXTS[0]}}) == {"query": {"embedding": vector}}
    for old, new, message in [
        ("the place", "''", "the condition is empty"),
        ("condition:", "conditions:", "not those of an llmcond model"),
        ("the place", "the place, fingerprint: abc", "another model"),
    ]:
        with pytest.raises(DeserializationError, match=message):
            Pipeline.loads(YAML.replace(old, new), allowed_modules=[MODULE])


def test_pipeline_tells_equal_and_copied_components_from_each_other(components):
    from haystack import Pipeline

    first = components.ConditionalTextEmbedder("the place", truncate_dim=64)
    copies = [first, copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    pipeline = Pipeline()
    for name, each in zip("abc", copies, strict=True):
        pipeline.add_component(name, each)
    assert [pipeline.get_component_name(each) for each in copies] == ["a", "b", "c"]
    result = pipeline.run({name: {"text": TEXTS[0]} for name in "abc"})
    assert result["a"] == result["b"] == result["c"]


def test_example_of_page_runs(components):
    namespace = run_block("integrations.md", "llmcond.integrations.haystack")
    assert len(namespace["query"]) == len(namespace["documents"][0].embedding) == 384
