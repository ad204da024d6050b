"""LlamaIndex's methods and serialisation give exactly the vectors of an embedder."""

import asyncio
import copy
import pickle

import pytest
from helpers.paths import run_block

import llmcond

pytestmark = pytest.mark.programs
TEXTS = ["Two women cook at night.", "The screen is cracked.", "Dogs play on a beach."]


@pytest.fixture
def create():
    from llmcond.integrations.llama_index import ConditionalEmbedding

    return ConditionalEmbedding


def test_vectors_equal_those_of_embedder(create):
    embedding = create("the place", truncate_dim=64, embed_batch_size=len(TEXTS))
    embedder = llmcond.load_embedder(truncate_dim=64)
    vectors = embedder.encode(TEXTS, "the place").tolist()
    vector = embedder.encode(TEXTS[0], "the place").tolist()

    async def embed():
        queries = [embedding.aget_query_embedding(TEXTS[0]) for _ in range(8)]
        text = embedding.aget_text_embedding(TEXTS[0])
        return await asyncio.gather(embedding.aget_text_embedding_batch(TEXTS), text, *queries)

    assert embedding.get_text_embedding_batch(TEXTS) == vectors
    assert embedding.get_text_embedding_batch([]) == []
    assert embedding.get_text_embedding(TEXTS[0]) == vector
    assert embedding.get_query_embedding(TEXTS[0]) == vector
    assert asyncio.run(embed()) == [vectors, *[vector] * 9]


def test_copies_have_the_same_settings_and_vectors(create):
    condition = llmcond.Condition("the fault | what is wrong", ["no sound", "a broken screen"])
    embedding = create(condition, truncate_dim=64, embed_batch_size=32)
    vector = llmcond.load_embedder(truncate_dim=64).encode(TEXTS[1], condition).tolist()
    settings = embedding.to_dict()
    copies = [
        create.from_dict(settings),
        create.from_json(embedding.to_json()),
        create.model_validate(embedding.model_dump()),
        create.model_validate_json(embedding.model_dump_json()),
        pickle.loads(pickle.dumps(embedding)),
        copy.deepcopy(embedding),
    ]
    for each in copies:
        assert each.to_dict() == settings
        assert each.get_text_embedding(TEXTS[1]) == vector
    with pytest.raises(llmcond.UserError, match="another model"):
        create.from_dict({**settings, "fingerprint": "0" * 32})


def test_index_retrieves_under_condition(create, tmp_path):
    from llama_index.core import (
        Document,
        StorageContext,
        VectorStoreIndex,
        load_index_from_storage,
    )

    documents = [Document(text=text) for text in [*TEXTS, "A girl cooks on a beach."]]
    best = {}
    for condition in ("the place", "the activity"):
        index = VectorStoreIndex.from_documents(documents, embed_model=create(condition))
        index.storage_context.persist(tmp_path / condition)
        storage = StorageContext.from_defaults(persist_dir=str(tmp_path / condition))
        reopened = load_index_from_storage(storage, embed_model=create(condition))
        retriever = reopened.as_retriever(similarity_top_k=2)
        nodes = retriever.retrieve("She cooks by the sea.")
        assert nodes == asyncio.run(retriever.aretrieve("She cooks by the sea."))
        best[condition] = {node.text for node in nodes}
    assert best["the activity"] == {TEXTS[0], documents[-1].text}
    assert best["the place"] == {TEXTS[2], documents[-1].text}


def test_cache_of_pipeline_separates_conditions(create):
    from llama_index.core import Document
    from llama_index.core.ingestion import IngestionCache, IngestionPipeline

    cache, vectors = IngestionCache(), {}
    for condition in ("the place", "the activity", "the place"):
        pipeline = IngestionPipeline(transformations=[create(condition)], cache=cache)
        [node] = pipeline.run(documents=[Document(text=TEXTS[0])])
        assert vectors.setdefault(condition, node.embedding) == node.embedding
    assert vectors["the place"] != vectors["the activity"]


def test_wrong_arguments_are_errors(create):
    for condition in ("", None, llmcond.Condition("the place", ignore=["the colour"])):
        with pytest.raises(llmcond.UserError):
            create(condition)
    with pytest.raises(llmcond.UserError, match="modle"):
        create("the place", modle="minilm-csts")
    with pytest.raises(ValueError, match="frozen"):
        create("the place").condition = "the colour"


def test_example_of_page_runs():
    namespace = run_block("integrations.md", "llmcond.integrations.llama_index")
    assert namespace["hits"][0].text == "A man rides a horse."
