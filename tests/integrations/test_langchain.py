"""LangChain's standard tests accept the class, and its vector store searches under a condition."""

import asyncio
import pickle
import subprocess
import sys

import numpy as np
import pytest
from helpers.paths import run_block

import llmcond

pytestmark = pytest.mark.programs
TEXTS = ["Two women cook at night.", "A man swims in the sea.", "Dogs play on a beach."]
# The tests run in another process, because a collection of tests would import LangChain otherwise.
STANDARD_TESTS = """
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests
from llmcond.integrations.langchain import ConditionalEmbeddings

class TestUnit(EmbeddingsUnitTests):
    embeddings_class = ConditionalEmbeddings
    embedding_model_params = {"condition": "the activity"}

class TestIntegration(EmbeddingsIntegrationTests):
    embeddings_class = ConditionalEmbeddings
    embedding_model_params = {"condition": "the activity"}
"""


@pytest.fixture
def create():
    from llmcond.integrations.langchain import ConditionalEmbeddings

    return ConditionalEmbeddings


def test_standard_tests_pass(tmp_path):
    (tmp_path / "test_standard.py").write_text(STANDARD_TESTS)
    flags = ["-q", "--asyncio-mode=auto", "--disable-socket", "--allow-unix-socket"]
    command = [sys.executable, "-m", "pytest", *flags, "test_standard.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "8 passed" in result.stdout, result.stdout


@pytest.mark.parametrize("condition", ["the place", llmcond.Condition("who | the agent", ["dogs"])])
def test_vectors_equal_those_of_embedder(create, condition):
    embeddings = create(condition, truncate_dim=64)
    vectors = llmcond.load_embedder(truncate_dim=64).encode(TEXTS, condition).tolist()

    async def embed():
        queries = [embeddings.aembed_query(TEXTS[0]) for _ in range(8)]
        return await asyncio.gather(embeddings.aembed_documents(TEXTS), *queries)

    assert embeddings.embed_documents(TEXTS) == vectors
    assert pickle.loads(pickle.dumps(embeddings)).embed_documents(TEXTS) == vectors
    documents, *queries = asyncio.run(embed())
    assert documents == vectors
    assert queries == [embeddings.embed_query(TEXTS[0])] * 8
    np.testing.assert_allclose(queries[0], vectors[0], atol=1e-6)


def test_store_searches_under_condition(create):
    from langchain_core.vectorstores import InMemoryVectorStore

    best = {}
    for condition in ("the place", "the activity"):
        store = InMemoryVectorStore(create(condition))
        store.add_texts([*TEXTS, "A girl cooks on a beach."])
        best[condition] = store.similarity_search("She cooks by the sea.", k=2)
    assert {hit.page_content for hit in best["the activity"]} == {
        TEXTS[0],
        "A girl cooks on a beach.",
    }
    assert TEXTS[0] not in {hit.page_content for hit in best["the place"]}


def test_wrong_conditions_and_texts_are_errors(create):
    for condition in ("", None, llmcond.Condition("the place", ignore=["the colour"])):
        with pytest.raises(llmcond.UserError):
            create(condition)
    with pytest.raises(llmcond.UserError, match="sentence 2 of 2 is empty"):
        create("the place").embed_documents(["A dog runs.", ""])
    assert create("the place").embed_documents([]) == []


def test_example_of_page_runs():
    namespace = run_block("integrations.md", "llmcond.integrations.langchain")
    assert namespace["hits"][0].page_content == "A man rides a horse."
